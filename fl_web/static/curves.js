// The charts of a run, and of a comparison. New points are added as they come.
import { Plot } from "./plot.js";

const MOST_POINTS = 2500;
const HEIGHT = 196, BIG_HEIGHT = 356;

export class RunCurves {
  constructor(section) {
    this.section = section;
    this.address = section.dataset.curves;
    this.charts = new Map();
    this.marks = [];
    this.plots = new Map();
    this.axis = "rounds";
    this.loading = null;
    const axes = document.getElementById("axes");
    axes.hidden = false;
    axes.addEventListener("change", (event) => { this.axis = event.target.value; this.draw(); });
    themed(() => this.plots.forEach((plot) => plot.redraw()));
  }

  async load() {
    // One request at a time: a second one that comes meanwhile is made after it.
    if (this.loading) { this.again = true; return; }
    this.loading = this.fetch().catch(() => {});
    await this.loading;
    this.loading = null;
    if (this.again) { this.again = false; await this.load(); }
  }

  async fetch() {
    const response = await fetch(this.address);
    if (!response.ok) return;
    const content = await response.json();
    this.charts.clear();
    for (const chart of content.charts) this.charts.set(chart.key, chart);
    this.marks = content.marks;
    this.draw();
  }

  add(update) {
    if (update.reload || this.loading) { this.load(); return; }
    for (const chart of update.charts) {
      const known = this.charts.get(chart.key);
      if (!known || known.series.length !== chart.series.length) { this.load(); return; }
      merge(known, chart);
      if (known.x.length > MOST_POINTS) { this.load(); return; }
    }
    this.marks = update.marks;
    this.draw();
  }

  draw() {
    for (const element of this.section.querySelectorAll("[data-chart]")) {
      const chart = this.charts.get(element.dataset.chart);
      if (!chart) continue;
      if (!this.plots.has(element)) this.plots.set(element, new Plot(element, HEIGHT));
      const series = chart.series.map((each) => ({
        title: each.title, unit: chart.unit, breaks: each.breaks,
        points: chart.x.map((x, index) => ({ ...x, value: each.values[index] })).filter((point) => point.value !== null),
      }));
      this.plots.get(element).show(series, this.axis, this.marks);
    }
    for (const element of this.plots.keys()) if (!element.isConnected) this.plots.delete(element);
  }
}

// Points of rounds that are known replace them; others are added in order.
function merge(known, more) {
  more.x.forEach((x, index) => {
    let at = known.x.length;
    while (at > 0 && known.x[at - 1].rounds >= x.rounds) at -= 1;
    const replaces = at < known.x.length && known.x[at].rounds === x.rounds ? 1 : 0;
    known.x.splice(at, replaces, x);
    known.series.forEach((each, position) => each.values.splice(at, replaces, more.series[position].values[index]));
  });
  known.series.forEach((each, position) => { each.breaks = more.series[position].breaks; });
}

export class CompareCurves {
  constructor(figure) {
    this.figure = figure;
    this.plot = new Plot(figure.querySelector(".plot"), BIG_HEIGHT);
    themed(() => this.plot.redraw());
  }

  async load() {
    const response = await fetch(this.figure.dataset.compare);
    if (!response.ok) return;
    const content = await response.json();
    const series = content.curves.map((curve) => ({
      title: curve.run, unit: content.unit, breaks: curve.breaks,
      points: curve.x.map((x, index) => ({ ...x, value: curve.values[index] })).filter((point) => point.value !== null),
    }));
    this.plot.show(series, this.figure.dataset.axis);
  }
}

function themed(redraw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
