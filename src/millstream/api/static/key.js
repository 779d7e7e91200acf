// Asks for an API key; both pages have the same dialog.

import { key } from "./client.js";
import { $ } from "./dom.js";

let asked = null;

/** True once a key has been given or forgotten, false if the reader would rather not. */
export function askForKey(why) {
  $("key").hidden = false;
  asked ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    const field = dialog.querySelector("[name=key]");
    $("key-why").textContent = why;
    field.value = "";
    dialog.returnValue = "";
    dialog.onclose = () => {
      const choice = dialog.returnValue;
      if (choice === "save") key.set(field.value.trim(), dialog.querySelector("[name=keep]").checked);
      if (choice === "forget") key.forget();
      field.value = "";
      asked = null;
      resolve(choice === "save" || choice === "forget");
    };
    dialog.showModal();
  });
  return asked;
}
