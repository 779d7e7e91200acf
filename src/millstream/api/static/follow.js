// Follows a task's log from any event to its end, over as many connections as that takes.

import { EventSourceParserStream } from "./vendor/eventsource-parser/stream.js";
import { ApiError, request } from "./client.js";
import { pause } from "./pause.js";

const TERMINAL = new Set(["completed", "cancelled", "failed"]);
const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 5_000;
// Keepalives come every 10 s by default; a connection that is silent for longer has gone, though a
// phone that changed its network may never be told so.
const SILENCE_MS = 35_000;

/**
 * Yields the task's events after number `after`, each once and in order, the terminal one last:
 * `{kind, id, data}`; `queued` hints have no id. Ends early only by `signal`. `onLink(up)` is told
 * when the connection is lost and when it is back.
 *
 * Throws ApiError where asking again is of no use: 401, 404 (unknown), 410 (expired).
 */
export async function* follow(taskId, { after = 0, signal, onLink = () => {} }) {
  let wait = FIRST_PAUSE_MS;
  while (!signal?.aborted) {
    let retryAfterS = 0;
    try {
      for await (const event of connection(taskId, { after, signal })) {
        if (event === CONNECTED) {
          onLink(true);
          continue;
        }
        wait = FIRST_PAUSE_MS;
        if (event.id !== null) after = event.id;
        yield event;
        if (TERMINAL.has(event.kind)) return;
      }
    } catch (error) {
      if (signal?.aborted) return;
      if (error instanceof ApiError && !error.passing) throw error;
      retryAfterS = error.retryAfterS ?? 0;
    }
    if (signal?.aborted) return;
    onLink(false);
    await pause(Math.max(wait, retryAfterS * 1000), signal);
    wait = Math.min(2 * wait, LONGEST_PAUSE_MS);
  }
}

const CONNECTED = Symbol("connected");

async function* connection(taskId, { after, signal }) {
  const link = new AbortController();
  const end = () => link.abort();
  let watchdog;
  const heard = () => {
    clearTimeout(watchdog);
    watchdog = setTimeout(end, SILENCE_MS);
  };
  signal?.addEventListener("abort", end);
  addEventListener("offline", end);
  try {
    heard();
    const response = await request(`tasks/${taskId}/stream`, {
      headers: { accept: "text/event-stream", ...(after ? { "last-event-id": String(after) } : {}) },
      signal: link.signal,
    });
    if (response.status === 204) throw new ApiError(410, { message: "The answer has ended." }, 0);
    yield CONNECTED;
    const messages = response.body
      .pipeThrough(new TextDecoderStream())
      .pipeThrough(new TransformStream({ transform: (chunk, to) => (heard(), to.enqueue(chunk)) }))
      .pipeThrough(new EventSourceParserStream());
    const reader = messages.getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      if (value.event === "error") continue; // of the stream, not of the task: connect again
      yield { kind: value.event, id: value.id ? Number(value.id) : null, data: JSON.parse(value.data) };
    }
  } finally {
    clearTimeout(watchdog);
    signal?.removeEventListener("abort", end);
    removeEventListener("offline", end);
    link.abort();
  }
}
