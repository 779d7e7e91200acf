/** Resolves after so long, or sooner when the network comes back, or at once by `signal`. */
export function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(done, milliseconds);
    function done() {
      clearTimeout(timer);
      removeEventListener("online", done);
      signal?.removeEventListener("abort", done);
      resolve();
    }
    if (signal?.aborted) return done();
    addEventListener("online", done);
    signal?.addEventListener("abort", done);
  });
}
