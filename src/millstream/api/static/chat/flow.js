// Text that arrives in bursts is let out frame by frame, so that it flows at 5 and at 200 tokens/s.

const FRAMES = 8; // what has piled up is let out over about so many frames

const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** Calls `draw(text)` at most once a frame with what may be shown, in order and without loss. */
export class Flow {
  constructor(draw) {
    this.draw = draw;
    this.waiting = "";
    this.frame = 0;
  }

  push(text) {
    this.waiting += text;
    if (document.hidden || calm.matches) this.flush(); // no frames are drawn out of sight
    else this.frame ||= requestAnimationFrame(() => this.step());
  }

  step() {
    this.frame = 0;
    let count = Math.ceil(this.waiting.length / FRAMES);
    // Not in the middle of a surrogate pair.
    if (/[\ud800-\udbff]/.test(this.waiting[count - 1] ?? "")) count += 1;
    const text = this.waiting.slice(0, count);
    this.waiting = this.waiting.slice(count);
    this.draw(text);
    if (this.waiting) this.frame = requestAnimationFrame(() => this.step());
  }

  /** Show all of it now. */
  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const text = this.waiting;
    this.waiting = "";
    if (text) this.draw(text);
  }
}
