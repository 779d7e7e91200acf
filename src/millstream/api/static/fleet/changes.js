// What happened between two looks at the fleet, in words.

/** Lines about workers and pods that came, went, changed or took tasks over; `drained` were told to go. */
export function changes(before, after, drained) {
  const lines = [];
  const old = new Map(before.workers.map((worker) => [worker.id, worker]));
  for (const worker of after.workers) {
    const was = old.get(worker.id);
    old.delete(worker.id);
    if (!was) {
      lines.push(`Worker ${worker.id} joined for ${worker.model}.`);
      continue;
    }
    if (was.state !== worker.state) lines.push(stateLine(worker, was));
    const taken = worker.attempts_reclaimed - was.attempts_reclaimed;
    if (taken > 0) lines.push(`Worker ${worker.id} took over ${count(taken, "task")} of a lost worker.`);
    const refused = worker.stale_refused - was.stale_refused;
    if (refused > 0) lines.push(`${count(refused, "write")} of worker ${worker.id} refused: the task had moved on or ended.`);
  }
  for (const worker of old.values()) {
    lines.push(worker.state === "draining" || drained.has(worker.id)
      ? `Worker ${worker.id} left.`
      : `Worker ${worker.id} is gone; its ${count(worker.running, "task")} will be taken over.`);
  }
  const pods = new Set(before.apis.map((api) => api.id));
  for (const api of after.apis) {
    if (!pods.delete(api.id)) lines.push(`Pod ${api.id} joined at ${api.url}.`);
  }
  for (const id of pods) lines.push(`Pod ${id} left.`);
  return lines;
}

function stateLine(worker, was) {
  switch (worker.state) {
    case "draining": return `Worker ${worker.id} drains: its ${count(was.running, "task")} are handed over.`;
    case "stalled": return `Worker ${worker.id} stalls: its engine makes no step.`;
    default: return `Worker ${worker.id} is ${worker.state}.`;
  }
}

const count = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
