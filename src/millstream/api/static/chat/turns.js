// What is seen of a conversation's turns.

import { h } from "../dom.js";
import { Flow } from "./flow.js";
import { Markdown } from "./markdown.js";

/** A question, with the ways to change it. */
export function questionView(turn, { onEdit }) {
  return h("article", { class: "turn user", "aria-label": "You" },
    h("div", { class: "text" }, turn.content),
    h("div", { class: "tools" },
      h("button", { type: "button", class: "plain", onclick: onEdit }, "Edit"),
      copyButton(() => turn.content)));
}

/** An answer: a run that is under way tells it what to show. */
export class AnswerView {
  constructor(turn, { run, model, onRetry, onGrow, onEnd }) {
    this.turn = turn;
    this.run = run;
    this.onGrow = onGrow;
    this.onEnd = onEnd;
    this.answer = h("div", { class: "answer" });
    this.words = h("div", { class: "state" });
    this.trouble = h("div", { class: "error", hidden: true });
    this.facts = h("span", {});
    this.marks = h("span", { class: "row" });
    this.retry = h("button", { type: "button", class: "plain", onclick: onRetry }, "Retry");
    this.element = h("article", { class: "turn assistant", "aria-label": model ? `Answer of ${model}` : "Answer" },
      this.answer, this.words, this.trouble,
      h("div", { class: "tools" }, copyButton(() => turn.content), this.retry, this.facts, this.marks));
    this.markdown = new Markdown(this.answer);
    this.flow = new Flow((text) => {
      this.markdown.write(text);
      this.onGrow();
    });
    if (turn.content) this.markdown.write(turn.content);
    if (run) {
      run.view = this;
      this.answer.classList.add("live");
      this.state(run.words);
      this.clock = setInterval(() => this.changed(), 500);
    } else {
      this.markdown.end();
    }
    this.changed();
  }

  text(added) {
    this.flow.push(added);
  }

  state(words) {
    this.words.textContent = words;
    this.words.classList.toggle("dots", words !== "");
  }

  ended() {
    clearInterval(this.clock);
    this.flow.flush();
    this.markdown.end();
    this.answer.classList.remove("live");
    this.run = null;
    this.changed();
    this.onEnd();
  }

  /** No longer in sight; the run goes on without it. */
  leave() {
    clearInterval(this.clock);
    if (this.run) this.run.view = null;
  }

  changed() {
    const { turn, run } = this;
    const busy = run !== null;
    this.element.setAttribute("aria-busy", String(busy));
    this.retry.hidden = busy;
    this.trouble.hidden = !turn.error;
    this.trouble.textContent = turn.error ?? "";
    const tokens = turn.usage?.completion_tokens ?? run?.rate.tokens;
    const speed = run ? run.speed : turn.seconds > 0 && tokens ? tokens / turn.seconds : null;
    this.facts.textContent = [
      tokens ? `${tokens} tokens` : "",
      speed ? `${speed < 10 ? speed.toFixed(1) : Math.round(speed)} tokens/s` : "",
      { cancelled: "stopped", length: "length limit reached" }[turn.state === "cancelled" ? "cancelled" : turn.finish] ?? "",
    ].filter(Boolean).join(" · ");
    const marks = [];
    if (turn.rejoined) marks.push(["rejoined", "The connection was lost, and the same answer was joined again."]);
    if (turn.attempts > 1) marks.push(["moved to another worker", `${turn.attempts} workers made this answer, one after the other.`]);
    this.marks.replaceChildren(...marks.map(([word, why]) => h("span", { class: "mark", title: why }, word)));
  }
}

function copyButton(text) {
  return h("button", { type: "button", class: "plain", onclick: (event) => copy(text(), event.currentTarget) }, "Copy");
}

/** Copy, and say so on the button. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no clipboard on plain http, or none allowed
    const area = h("textarea", { class: "unseen" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
