// Asks for an API key, in the one dialog that both pages have.

import { key } from "./client.js";
import { $, h } from "./dom.js";

let asked = null;

const why = h("p", { class: "quiet" });
const field = h("input", { name: "key", type: "password", autocomplete: "off", spellcheck: "false", required: true });
const keep = h("input", { type: "checkbox" });
const forget = h("button", { value: "forget", class: "danger", formnovalidate: true }, "Forget the key in use");
const dialog = h("dialog", { "aria-labelledby": "key-title" },
  h("form", { method: "dialog" },
    h("h2", { id: "key-title" }, "This fleet needs an API key"),
    why,
    h("label", {}, "API key", field),
    h("label", { class: "row" }, keep, " Remember it in this browser, not only until this tab is closed"),
    h("div", { class: "row end" },
      forget,
      h("button", { value: "cancel", formnovalidate: true }, "Cancel"),
      h("button", { value: "save", class: "main" }, "Use this key"))));
document.body.append(dialog);

/** True once a key has been given or forgotten, false if the reader would rather not. */
export function askForKey(reason) {
  $("key").hidden = false;
  asked ??= new Promise((resolve) => {
    why.textContent = reason;
    field.value = "";
    forget.hidden = key.get() === null;
    dialog.returnValue = "";
    dialog.onclose = () => {
      const choice = dialog.returnValue;
      if (choice === "save") key.set(field.value.trim(), keep.checked);
      if (choice === "forget") key.forget();
      field.value = "";
      asked = null;
      resolve(choice === "save" || choice === "forget");
    };
    dialog.showModal();
  });
  return asked;
}
