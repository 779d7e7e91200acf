// Small live charts of what this page has seen since it was opened.

import uPlot from "../vendor/uplot/uPlot.esm.js";

const KEEP = 300; // looks, so some minutes
const COLOURS = ["#1f8f99", "#c2762a", "#7a63c9", "#3e8e4f", "#c2497b", "#5b7a9d"];

/** A chart of one figure of each model over time, in some unit. */
export class Chart {
  constructor(root, unit) {
    this.root = root;
    this.unit = unit;
    this.times = [];
    this.series = new Map(); // name → values, as long as times
    this.plot = null;
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(root);
    addEventListener("themechange", () => this.make());
  }

  /** Add a look: `values` is a Map from name to number. */
  add(seconds, values) {
    const fresh = [...values.keys()].filter((name) => !this.series.has(name));
    for (const name of fresh) this.series.set(name, this.times.map(() => null));
    this.times.push(seconds);
    for (const [name, row] of this.series) row.push(values.get(name) ?? null);
    if (this.times.length > KEEP) {
      this.times.shift();
      for (const row of this.series.values()) row.shift();
    }
    if (fresh.length || !this.plot) this.make();
    else this.plot.setData(this.data());
  }

  data() {
    return [this.times, ...this.series.values()];
  }

  size() {
    return { width: Math.max(this.root.clientWidth, 120), height: 130 };
  }

  make() {
    this.plot?.destroy();
    const style = getComputedStyle(document.documentElement);
    const axis = {
      stroke: style.getPropertyValue("--soft"), grid: { stroke: style.getPropertyValue("--line"), width: 1 },
      ticks: { show: false }, font: "11px system-ui",
    };
    this.plot = new uPlot({
      ...this.size(),
      cursor: { show: false },
      legend: { live: false },
      scales: { y: { range: (_, low, high) => [0, Math.max(1, (high ?? 0) * 1.1)] } },
      axes: [
        { ...axis, size: 22 },
        { ...axis, size: 44, label: this.unit, labelSize: 16, labelGap: 0, labelFont: axis.font },
      ],
      series: [{}, ...[...this.series.keys()].map((name, at) => ({
        label: name, stroke: COLOURS[at % COLOURS.length], width: 1.8, points: { show: false },
      }))],
    }, this.data(), this.root);
  }
}
