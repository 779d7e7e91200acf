// Which tab of a browser reads which answer: each is read by one, and four are read at once.
//
// A browser opens six connections of HTTP/1.1 to a host, over all its tabs; two stay free for all
// else. Over HTTP/2 streams share one. Where there are no Web Locks (plain HTTP from another
// machine) everything is read at once.

const STREAMS = ["0", "1", "2", "3"].map((number) => `millstream-stream-${number}`);
const TOLD_AFTER_MS = 300; // sooner nobody would read it

const [page] = performance.getEntriesByType("navigation");
const shares = /^h[23]/.test(page?.nextHopProtocol);

/** Do `work` while no other tab has this task, or at once by `signal`; `onWait` is told why it waits. */
export function alone(taskId, waiting, work) {
  return holding(lock(`millstream-task-${taskId}`, waiting.signal), work,
    { ...waiting, words: "Another tab is reading this answer. This one goes on when that is done or closed." });
}

/** Do `work`, which reads one stream, when the browser has one to spare, or at once by `signal`. */
export function streaming(waiting, work) {
  if (shares) return work();
  return holding(oneOf(STREAMS, waiting.signal), work,
    { ...waiting, words: "Four other answers are being read in this browser. This one follows when one of them has ended." });
}

async function holding(held, work, { words, onWait }) {
  const told = setTimeout(() => onWait(words), TOLD_AFTER_MS);
  const free = await held.catch(() => null); // by the signal; or locks are forbidden here
  clearTimeout(told);
  try {
    await work();
  } finally {
    free?.();
  }
}

/** Resolves to what gives the lock back. A tab that closes gives back all it has. */
async function lock(name, signal) {
  if (!navigator.locks) return null;
  return new Promise((taken, refused) => {
    navigator.locks.request(name, { signal }, () => new Promise((free) => taken(free))).catch(refused);
  });
}

/** The same, of whichever is free first. */
async function oneOf(names, signal) {
  const found = new AbortController();
  const locks = names.map((name) => lock(name, AbortSignal.any([signal, found.signal])));
  const first = await Promise.any(locks);
  found.abort();
  for (const other of locks) other.then((free) => free !== first && free(), () => {});
  return first;
}
