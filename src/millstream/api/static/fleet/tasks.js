// The tasks of a model that run and wait, in a dialog, to stop one.

import { json } from "../client.js";
import { $, h } from "../dom.js";
import { pause } from "../pause.js";
import { confirmed } from "./confirm.js";
import { fill } from "./table.js";

const LOOK_MS = 1_000;
const dialog = $("tasks");
const note = $("tasks-note");
let shown = 0; // how often it was opened: an earlier look that comes late draws nothing

/** Show them until the dialog is closed. */
export async function showTasks(model) {
  $("tasks-title").textContent = `Tasks of ${model}`;
  note.textContent = "";
  $("tasks-rows").replaceChildren();
  dialog.showModal();
  const mine = ++shown;
  while (dialog.open && mine === shown) {
    try {
      const { data } = await json(`fleet/tasks?model=${encodeURIComponent(model)}`);
      if (mine === shown) draw(data);
    } catch (error) {
      note.textContent = error.message;
    }
    await pause(LOOK_MS);
  }
}

function draw(tasks) {
  fill($("tasks-rows"), tasks, {
    name: (task) => task.id, none: "Nothing runs or waits.", columns: 6,
    cells: (task) => [
      task.id, task.caller, task.state === "queued" ? `waits (${task.priority})` : "runs",
      task.worker, task.tokens,
      h("button", { type: "button", class: "danger", "aria-label": `Stop task ${task.id}`, onclick: () => stop(task.id) }, "Stop")],
  });
}

async function stop(id) {
  const text = `${id} ends now, as cancelled. Whoever reads it is told so; what has been generated stays readable.`;
  if (!await confirmed("Stop this task?", text, "Stop it")) return;
  try {
    const answer = await json(`fleet/tasks/${encodeURIComponent(id)}/stop`, { method: "POST" });
    note.textContent = `${id} is ${answer.status}.`;
  } catch (error) {
    note.textContent = error.message;
  }
}
