// One answer while it is being made: sent once, followed to its end, whatever happens in between.

import { ApiError, json, request } from "../client.js";
import { follow } from "../follow.js";
import { pause } from "../pause.js";
import { alone, streaming } from "./reading.js";
import { load, save } from "./store.js";

const SAVE_MS = 1_000;
const STOP_PAUSE_MS = 1_000;
// When nothing has come for as long, or for as long as so many tokens took so far.
const QUIET_MS = 3_000;
const QUIET_TOKENS = 10;
// What comes so soon after a connection was made had been written before; it tells of no speed.
const BACKLOG_MS = 500;
const WAITING = "Waiting for a worker";

/**
 * Drives an assistant's turn until it is completed, cancelled or failed. What the page shows hears
 * of it by `view` (which may change, or be null): `text(added)`, `state(words)`, `changed()`.
 */
export class Run {
  constructor(conversation, turn) {
    this.conversation = conversation;
    this.turn = turn;
    this.view = null;
    this.words = "";
    this.away = new AbortController();
    this.hurry = new AbortController(); // ends the waiting for other tabs
    this.rejoining = turn.state === "running";
    this.rate = { joined: 0, first: 0, last: 0, timed: 0, tokens: 0 };
  }

  /** Returns when the turn has ended; throws ApiError 401 where a key is needed. */
  async drive() {
    const { turn } = this;
    try {
      if (turn.state === "sending") await this.send();
      if (turn.state === "running") await this.readInTurn();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401) throw error;
      const lost = error.status === 404 || error.status === 410;
      this.end("failed", {
        error: lost && turn.task ? `The fleet no longer has the rest of this answer. ${error.message}` : error.message,
      });
    }
  }

  /** POST it until the fleet has taken it: the same key makes the same task, however often. */
  async send() {
    const { turn } = this;
    for (let tries = 0; turn.state === "sending"; tries += 1) {
      try {
        const answer = await json("tasks", {
          method: "POST", body: turn.body, headers: { "idempotency-key": turn.key },
          signal: this.away.signal,
        });
        turn.task = answer.task_id;
        this.conversation.model ||= answer.model;
        turn.state = "running";
        this.say(answer.queue_position > 1 ? `Waiting: ${ordinal(answer.queue_position)} in the queue` : "");
        await this.save();
      } catch (error) {
        if (this.away.signal.aborted) return;
        if (error instanceof ApiError && !error.passing) throw error;
        const seconds = Math.max(error.retryAfterS ?? 0, Math.min(5, 0.5 * 2 ** tries));
        this.say(error instanceof ApiError
          ? `${error.message} Trying again in ${Math.ceil(seconds)} s.`
          : "The server cannot be reached. Trying again.");
        await pause(seconds * 1000, this.away.signal);
      }
    }
  }

  /** Read it when no other tab does, and not too many are read already. */
  readInTurn() {
    const waiting = { signal: this.hurry.signal, onWait: (words) => this.say(words) };
    return alone(this.turn.task, waiting, async () => {
      await this.adopt();
      if (this.turn.state === "running") await streaming(waiting, () => this.read());
    });
  }

  /** What another tab has read to its end meanwhile is stored, and not read again. */
  async adopt() {
    const { turn } = this;
    const conversation = await load(this.conversation.id).catch(() => null);
    const stored = conversation?.turns.find((other) => other.key === turn.key);
    if (!stored || stored.state === "sending" || stored.state === "running") return;
    this.view?.text(stored.content.slice(turn.content.length));
    Object.assign(turn, stored);
    this.done();
  }

  async read() {
    const { turn } = this;
    let text = ""; // read from its first event: what was stored may be behind
    const stored = turn.content;
    let savedAt = 0;
    const onLink = (up) => {
      if (up && this.lost) turn.rejoined = (turn.rejoined ?? 0) + 1;
      this.lost = !up;
      if (up) Object.assign(this.rate, { joined: performance.now(), first: 0, timed: 0 });
      if (up) this.listen();
      else clearTimeout(this.quiet);
      this.say(up ? "" : "Connection lost. The answer goes on; joining it again.");
      this.view?.changed();
    };
    if (this.rejoining) turn.rejoined = (turn.rejoined ?? 0) + 1;
    for await (const event of follow(turn.task, { signal: this.away.signal, onLink })) {
      if (event.kind === "queued") {
        const eta = event.data.eta_s >= 1 ? `, about ${Math.ceil(event.data.eta_s)} s` : "";
        this.say(`Waiting: ${ordinal(event.data.position)} in the queue${eta}`);
      } else if (event.kind === "token") {
        if (this.words === WAITING) this.look();
        if (this.words) this.say("");
        this.listen();
        text += event.data.text;
        this.count(event.data.n);
        if (text.length > turn.content.length || !stored.startsWith(text)) {
          this.view?.text(text.slice(turn.content.length));
          turn.content = text;
        }
        if (Date.now() - savedAt > SAVE_MS) {
          savedAt = Date.now();
          this.save();
        }
      } else {
        await this.finish(event);
      }
    }
  }

  /** `n` counts the tokens of an event: one, or none where it lets out text that was held back. */
  count(n) {
    const { rate } = this;
    const now = performance.now();
    rate.tokens += n;
    if (now - rate.joined < BACKLOG_MS) return;
    rate.first ||= now;
    rate.last = now;
    rate.timed += n;
  }

  /** Whether another worker goes on with it, as the silence before this token makes likely. */
  async look() {
    const details = await json(`tasks/${this.turn.task}`).catch(() => null);
    if (details) this.turn.attempts = details.attempts;
    this.view?.changed();
  }

  /** From now on, tell of a silence: a worker that is gone says nothing of it. */
  listen() {
    clearTimeout(this.quiet);
    const usual = this.speed ? QUIET_TOKENS * 1000 / this.speed : 0;
    this.quiet = setTimeout(() => {
      if (!this.words) this.say(WAITING);
    }, Math.max(QUIET_MS, usual));
  }

  async finish(event) {
    clearTimeout(this.quiet);
    const { turn } = this;
    const details = await json(`tasks/${turn.task}`).catch(() => null);
    if (details) {
      turn.attempts = details.attempts;
      if (details.started_at) turn.seconds = details.finished_at - details.started_at;
    }
    this.end(event.kind, {
      usage: event.data.usage ?? details?.usage,
      finish: event.data.finish_reason,
      error: event.data.error?.message,
    });
  }

  end(state, facts) {
    clearTimeout(this.quiet);
    Object.assign(this.turn, { state, ...facts });
    this.done();
    this.save();
  }

  done() {
    delete this.turn.body;
    this.say("");
    this.view?.ended();
  }

  /** End the answer in the fleet; the log's last event then ends the run. */
  async stop() {
    const { turn } = this;
    this.hurry.abort(); // what is stopped is soon read
    if (turn.state === "sending") {
      // It may have been taken all the same: the key says which task it is.
      const again = { method: "POST", body: turn.body, headers: { "idempotency-key": turn.key } };
      this.away.abort();
      this.end("cancelled", {});
      const task = await json("tasks", again).catch(() => null);
      if (task) await request(`tasks/${task.task_id}/stop`, { method: "POST" }).catch(() => null);
      return;
    }
    this.say("Stopping");
    while (turn.state === "running") {
      try {
        await request(`tasks/${turn.task}/stop`, { method: "POST" });
        return;
      } catch (error) {
        if (error instanceof ApiError && !error.passing) return;
        await pause(STOP_PAUSE_MS);
      }
    }
  }

  /** Tokens per second so far, or null. */
  get speed() {
    const seconds = (this.rate.last - this.rate.first) / 1000;
    return seconds > 0.5 ? (this.rate.timed - 1) / seconds : null;
  }

  say(words) {
    this.words = words;
    this.view?.state(words);
  }

  save() {
    this.conversation.updated = Date.now();
    return save(this.conversation);
  }
}

function ordinal(n) {
  const rest = n % 100;
  const ending = rest > 10 && rest < 14 ? "th" : (["th", "st", "nd", "rd"][n % 10] ?? "th");
  return `${n}${ending}`;
}
