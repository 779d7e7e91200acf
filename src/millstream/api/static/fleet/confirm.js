// Asks before something is done that cannot be undone.

import { h } from "../dom.js";

const title = h("h2", { id: "confirm-title" });
const what = h("p", { id: "confirm-what" });
const yes = h("button", { value: "yes", class: "danger" });
const dialog = h("dialog", { "aria-labelledby": "confirm-title", "aria-describedby": "confirm-what" },
  h("form", { method: "dialog" }, title, what,
    h("div", { class: "row end" }, h("button", { value: "no", autofocus: true }, "Cancel"), yes)));
document.body.append(dialog);

/** Whether the reader says yes; Escape and the first button, which has the focus, say no. */
export function confirmed(question, explanation, word) {
  title.textContent = question;
  what.textContent = explanation;
  yes.textContent = word;
  dialog.returnValue = "";
  return new Promise((resolve) => {
    dialog.onclose = () => resolve(dialog.returnValue === "yes");
    dialog.showModal();
  });
}
