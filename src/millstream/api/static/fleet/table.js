// Tables that are drawn anew every second and stay as they are where nothing changed.

import { h } from "../dom.js";

/**
 * The rows of a table's body. What is the same stays the same element, in its place: a selection,
 * and the focus on a button, last.
 * @param rows what the rows show, each with a name of its own by `name`
 * @param cells a row's cells, strings or elements
 */
export function fill(body, rows, { name, none, columns, cells }) {
  const names = new Set(rows.map(name));
  const lines = new Map();
  for (const line of [...body.children]) {
    if (names.has(line.dataset.name)) lines.set(line.dataset.name, line);
    else line.remove();
  }
  rows.forEach((row, at) => {
    const line = lines.get(name(row)) ?? h("tr", { "data-name": name(row) });
    if (body.children[at] !== line) body.insertBefore(line, body.children[at] ?? null);
    cells(row).forEach((cell, column) => {
      const fresh = h("td", {}, cell instanceof Node ? cell : String(cell));
      const old = line.children[column];
      if (!old) line.append(fresh);
      else if (!old.isEqualNode(fresh)) old.replaceWith(fresh);
    });
  });
  if (!rows.length) body.append(h("tr", { "data-name": "" }, h("td", { class: "none", colspan: columns }, none)));
}
