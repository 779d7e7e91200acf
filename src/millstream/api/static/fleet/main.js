// The fleet page: looks once a second, and draws what it sees.

import { ApiError, json, key } from "../client.js";
import { $, h } from "../dom.js";
import { askForKey } from "../key.js";
import { pause } from "../pause.js";
import { changes } from "./changes.js";
import { Chart } from "./charts.js";
import { confirmed } from "./confirm.js";
import { fill } from "./table.js";
import { showTasks } from "./tasks.js";

const LOOK_MS = 1_000;
const MOST_EVENTS = 200;

const tokens = new Chart($("chart-tokens"), "tokens/s");
const tasks = new Chart($("chart-tasks"), "tasks");
const waits = new Chart($("chart-wait"), "seconds");

function draw(fleet) {
  const sum = (rows, field) => rows.reduce((total, row) => total + row[field], 0);
  $("totals").replaceChildren(
    ...total("tokens/s", figure(sum(fleet.models, "tokens_per_s"))),
    ...total("running", sum(fleet.models, "running")),
    ...total("waiting", sum(fleet.models, "waiting")),
    ...total("open streams", sum(fleet.apis, "streams")),
    ...total("workers ready", `${fleet.workers.filter((item) => item.state === "ready").length} of ${fleet.workers.length}`),
    ...total(`${fleet.redis.name ?? "Redis"} ${fleet.redis.version}`, megabytes(fleet.redis.used_memory)));
  fill($("workers"), fleet.workers, { name: (worker) => worker.id, none: "No worker is there.", columns: 9, cells: (worker) => [
    h("span", { title: `process ${worker.pid} on ${worker.host}` }, worker.id),
    worker.model,
    h("span", { class: `state ${worker.state}`, title: worker.note || worker.numerics || null }, worker.state),
    h("span", {}, h("meter", { min: 0, max: worker.slots, value: worker.running, "aria-label": "slots in use" }),
      `${worker.running}/${worker.slots}`),
    figure(worker.tokens_per_s), worker.attempts_reclaimed, worker.stale_refused,
    worker.started_at ? duration(Date.now() / 1000 - worker.started_at) : "",
    h("button", {
      "aria-label": `Drain worker ${worker.id}`, disabled: worker.state === "draining", onclick: () => drain(worker.id),
    }, "Drain"),
  ] });
  fill($("models"), fleet.models, { name: (model) => model.name, none: "No model is served.", columns: 6, cells: (model) => [
    model.name, model.waiting, model.running, `${figure(model.oldest_wait_s)} s`, figure(model.tokens_per_s),
    h("button", { "aria-label": `Tasks of ${model.name}`, onclick: () => showTasks(model.name) }, "Tasks"),
  ] });
  fill($("apis"), fleet.apis, { name: (api) => api.id, none: "No pod is there.", columns: 3, cells: (api) => [api.id, api.url, api.streams] });
}

const total = (name, value) => [h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))];

const drained = new Set();

async function drain(id) {
  const text = `${id} takes no new task, hands over those it runs, and ends. No token is lost. What started it (millstream up, Compose, Kubernetes) starts another in its place; to have fewer workers, scale down there.`;
  if (!await confirmed("Drain this worker?", text, "Drain it")) return;
  try {
    await json(`fleet/workers/${encodeURIComponent(id)}/drain`, { method: "POST" });
    drained.add(id);
    tell([`Worker ${id} was told to drain.`]);
  } catch (error) {
    tell([`Worker ${id} was not told to drain: ${error.message}`]);
  }
}

function figure(value) {
  return value >= 100 ? String(Math.round(value)) : String(Math.round(value * 10) / 10);
}

const megabytes = (bytes) => `${figure(bytes / 2 ** 20)} MB`;

function duration(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} d`;
}

function plot(fleet) {
  const now = Date.now() / 1000;
  const values = (field) => new Map(fleet.models.map((model) => [model.name, model[field]]));
  tokens.add(now, values("tokens_per_s"));
  waits.add(now, values("oldest_wait_s"));
  const sum = (field) => fleet.models.reduce((total, model) => total + model[field], 0);
  tasks.add(now, new Map([["waiting", sum("waiting")], ["running", sum("running")]]));
}

function tell(lines) {
  if (lines.length) $("nothing").hidden = true;
  const time = new Date().toLocaleTimeString();
  for (const line of lines) $("events").prepend(h("li", {}, h("time", {}, time), line));
  while ($("events").children.length > MOST_EVENTS) $("events").lastChild.remove();
}

$("key").hidden = key.get() === null;
let goOn = () => {}; // once there is a key, where the reader would rather not give one at first
$("key").onclick = async () => {
  if (await askForKey("This page uses a key. A new one takes its place.")) goOn();
};

let before = null;
for (;;) {
  const began = performance.now();
  try {
    const fleet = await json("fleet.json");
    $("link").textContent = "";
    draw(fleet);
    plot(fleet);
    if (before) tell(changes(before, fleet, drained));
    before = fleet;
  } catch (error) {
    if (error instanceof ApiError && [401, 403].includes(error.status)) {
      $("link").textContent = error.message;
      if (!(await askForKey(error.message))) await new Promise((resolve) => { goOn = resolve; });
    } else {
      $("link").textContent = error instanceof ApiError ? error.message : "The server cannot be reached. Trying again.";
    }
  }
  await pause(Math.max(100, LOOK_MS - (performance.now() - began)));
}
