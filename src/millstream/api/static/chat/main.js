// The chat page: conversations, the one that is open, and the runs that go on meanwhile.

import { ApiError, json, key } from "../client.js";
import { $, h } from "../dom.js";
import { askForKey } from "../key.js";
import { pause } from "../pause.js";
import { Run } from "./run.js";
import * as store from "./store.js";
import { AnswerView, copy, questionView } from "./turns.js";

const STARTERS = ["What is the capital of France?", "Write a haiku about rivers.", "List five uses of a water wheel."];
const MODELS_RETRY_MS = 2_000;
const NEAR_PX = 60;

let conversations = [];
let open; // the conversation in sight
let views = []; // of its answers
let editing = null; // the turn a new question takes the place of
const runs = new Map(); // turn → Run

// --- the list at the left ---------------------------------------------------------------------

function drawList() {
  $("conversations").replaceChildren(...conversations.map((item) =>
    h("li", {
      "aria-current": item === open ? "true" : null,
      class: item.turns.some((turn) => runs.has(turn)) ? "busy" : null,
    },
      h("button", { class: "title", onclick: () => show(item) }, item.title || "New conversation"),
      h("button", { class: "remove", "aria-label": `Delete ${item.title || "New conversation"}`,
        onclick: () => discard(item) }, "×"))));
}

async function discard(item) {
  if (item.turns.length && !confirm(`Delete “${item.title}”? This cannot be undone.`)) return;
  for (const turn of item.turns) {
    const run = runs.get(turn);
    if (run) { run.stop(); run.away.abort(); runs.delete(turn); }
  }
  conversations = conversations.filter((other) => other !== item);
  await store.remove(item);
  if (item === open) show(conversations[0] ?? store.create($("model").value));
  else drawList();
}

// --- the conversation in sight -----------------------------------------------------------------

function show(conversation) {
  open = conversation;
  document.body.classList.remove("menu");
  history.replaceState(null, "", conversation.turns.length ? `#${conversation.id}` : location.pathname + location.search);
  endEdit();
  drawModels();
  drawTurns();
  drawList();
}

function drawTurns() {
  for (const view of views) view.leave();
  views = [];
  const elements = open.turns.map((turn, at) => {
    if (turn.role === "user") return questionView(turn, { onEdit: () => edit(turn) });
    const view = new AnswerView(turn, {
      run: runs.get(turn) ?? null, model: open.model, onGrow: stick, onEnd: () => answered(turn),
      onRetry: () => ask(open.turns[at - 1].content, at - 1),
    });
    views.push(view);
    return view.element;
  });
  $("log").replaceChildren(...(elements.length ? elements : [welcome()]));
  $("log").scrollTop = $("log").scrollHeight;
  drawControls();
}

function welcome() {
  return h("div", { class: "welcome" },
    h("h2", {}, "What would you like to know?"),
    h("div", {}, "Answers go on when the network, a server or a worker does not."),
    h("div", { class: "starters" },
      ...STARTERS.map((text) => h("button", { type: "button", onclick: () => ask(text) }, text))));
}

function current() {
  const turn = open.turns.at(-1);
  return turn ? runs.get(turn) : undefined;
}

function drawControls() {
  const busy = current() !== undefined;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("stop").disabled = false;
}

function answered(turn) {
  $("announcer").textContent = { completed: "Answer finished.", cancelled: "Answer stopped." }[turn.state] ?? "The answer failed.";
  stick();
}

let atEnd = true;
$("log").addEventListener("scroll", () => {
  const log = $("log");
  atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
  $("latest").hidden = atEnd;
}, { passive: true });

/** Stay at the end while the reader is there. */
function stick() {
  if (atEnd) $("log").scrollTop = $("log").scrollHeight;
}

$("latest").onclick = () => { atEnd = true; stick(); };

$("log").addEventListener("click", (event) => {
  const button = event.target.closest("button.copy");
  if (button) copy(button.closest(".fence").querySelector("code").textContent, button);
});

// --- asking --------------------------------------------------------------------------------------

/** Put a question, at the end or in place of what begins at turn number `at`. */
function ask(text, at = open.turns.length) {
  if (!text.trim() || current()) return;
  choose($("model").value);
  open.turns.length = at;
  open.title ||= text.trim().slice(0, 60);
  const { system, ...sampling } = { ...open.suggested, ...open.settings };
  const before = open.turns.filter((turn) => turn.content !== "");
  const messages = [
    ...(system ? [{ role: "system", content: system }] : []),
    ...before.map(({ role, content }) => ({ role, content })),
    { role: "user", content: text },
  ];
  const turn = {
    role: "assistant", content: "", state: "sending", key: store.randomId(),
    // None is chosen where none was ever seen: the fleet then takes the one that it knows.
    body: JSON.stringify({ model: open.model || undefined, messages, ...sampling }),
  };
  open.turns.push({ role: "user", content: text }, turn);
  if (!conversations.includes(open)) conversations.unshift(open);
  history.replaceState(null, "", `#${open.id}`);
  start(open, turn);
  atEnd = true;
  drawTurns();
  drawList();
}

async function start(conversation, turn) {
  const run = new Run(conversation, turn);
  runs.set(turn, run);
  run.save();
  for (;;) {
    try {
      await run.drive();
      break;
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) {
        run.say("A key is needed.");
        if (await askForKey(error.message)) continue;
        run.end("failed", { error: error.message });
        break;
      } else {
        console.error(error);
        run.end("failed", { error: "Something went wrong in this page." });
        break;
      }
    }
  }
  runs.delete(turn);
  drawList();
  if (conversation === open) drawControls();
}

function edit(turn) {
  if (current()) return;
  editing = open.turns.indexOf(turn);
  $("question").value = turn.content;
  $("note").textContent = "Sending replaces that question and what follows it. Escape: leave it.";
  $("question").focus();
}

function endEdit() {
  if (editing !== null) $("question").value = "";
  editing = null;
  $("note").textContent = "";
}

$("ask").onsubmit = (event) => {
  event.preventDefault();
  const text = $("question").value;
  if (!text.trim() || current()) return;
  const at = editing ?? open.turns.length;
  editing = null;
  $("question").value = "";
  $("note").textContent = "";
  ask(text, at);
};

$("question").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
};

$("stop").onclick = () => {
  $("stop").disabled = true;
  current()?.stop();
  $("question").focus();
};

addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (document.body.classList.contains("menu")) document.body.classList.remove("menu");
  else if (editing !== null) endEdit();
  else if (current()) $("stop").click();
});

// --- models, settings, key, export --------------------------------------------------------------

let models = []; // as /v1/models has them; while no worker is there, as it had them last

/** What the makers of a model suggest to sample with: `{temperature, …}`. */
function suggested(name) {
  return models.find((model) => model.id === name)?.suggested_sampling
    ?? conversations.find((item) => item.model === name && item.suggested)?.suggested ?? {};
}

/** The model asked last, if any: what is asked of it now waits for its next worker. */
function lastAsked() {
  const last = conversations.filter((item) => item.model).sort((a, b) => b.updated - a.updated)[0];
  return last ? [{ id: last.model }] : [];
}

async function loadModels() {
  for (;;) {
    try {
      const { data } = await json("v1/models");
      if (data.length) models = data;
      else if (!models.length) models = lastAsked();
      drawModels();
      if (data.length) {
        if ($("note").dataset.waits) $("note").textContent = "";
        delete $("note").dataset.waits;
        return;
      }
      wait("Waiting for a worker.");
    } catch (error) {
      if (!(error instanceof ApiError) || error.passing) wait("The server cannot be reached. Trying again.");
      else if (error.status !== 401 || !(await askForKey(error.message))) return wait(error.message);
    }
    await pause(MODELS_RETRY_MS);
  }
}

function wait(words) {
  $("note").textContent = words;
  $("note").dataset.waits = "yes";
}

function drawModels() {
  const names = new Set(models.map((model) => model.id));
  if (open?.model) names.add(open.model);
  $("model").replaceChildren(...[...names].map((name) => h("option", { value: name }, name)));
  if (open?.model) $("model").value = open.model;
}

$("model").onfocus = () => { loadModels(); };
$("model").onchange = () => choose($("model").value);

function choose(model) {
  open.model = model;
  open.suggested = suggested(model);
}

$("settings").onclick = () => {
  const form = $("settings-dialog").querySelector("form");
  const suggestion = suggested($("model").value);
  for (const field of form.querySelectorAll("[name]")) {
    field.dataset.placeholder ??= field.placeholder;
    field.placeholder = suggestion[field.name] ?? field.dataset.placeholder;
    const value = open.settings[field.name];
    field.value = Array.isArray(value) ? value.join("\n") : (value ?? "");
  }
  $("settings-dialog").returnValue = "";
  $("settings-dialog").showModal();
};

$("settings-dialog").onclose = () => {
  if ($("settings-dialog").returnValue !== "save") return;
  const settings = {};
  for (const field of $("settings-dialog").querySelectorAll("[name]")) {
    const value = field.value.trim();
    if (value === "") continue;
    if (field.name === "stop") settings.stop = field.value.split("\n").filter(Boolean);
    else settings[field.name] = field.type === "number" ? Number(value) : field.value;
  }
  open.settings = settings;
  if (conversations.includes(open)) store.save(open);
};

$("key").onclick = () => askForKey("This page uses a key. A new one takes its place.").then(loadModels);
$("key").hidden = key.get() === null;

$("new").onclick = () => {
  show(store.create($("model").value, { ...open.settings }));
  $("question").focus();
};

$("menu").onclick = () => {
  const shown = document.body.classList.toggle("menu");
  $("menu").setAttribute("aria-expanded", String(shown));
  if (shown) $("new").focus();
};
document.querySelector("main").addEventListener("pointerdown", (event) => {
  if (event.target !== $("menu")) document.body.classList.remove("menu");
});

$("export").onclick = () => { $("export-dialog").returnValue = ""; $("export-dialog").showModal(); };
$("export-dialog").onclose = () => {
  const form = $("export-dialog").returnValue;
  if (form === "markdown") download("conversation.md", "text/markdown", store.toMarkdown(open));
  if (form === "all") download("conversations.json", "application/json", JSON.stringify(conversations, null, 2));
};

function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

// --- begin ----------------------------------------------------------------------------------------

conversations = await store.all().catch(() => []); // no storage in some private windows
for (const conversation of conversations) {
  for (const turn of conversation.turns) {
    if (turn.state === "sending" || turn.state === "running") start(conversation, turn);
  }
}
show(conversations.find((item) => `#${item.id}` === location.hash) ?? store.create(""));
loadModels().then(() => drawModels());
