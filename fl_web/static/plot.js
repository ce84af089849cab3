// One chart: curves over rounds, bytes or time, with marks. Drawn by uPlot, with the colours of the page.
/* global uPlot */
import { AXIS_UNIT, inUnit, tick } from "./format.js";

const MARK_TONE = { refused: "--bad", restart: "--warn", attempts: "--warn", pause: "--calm" };
const ROUNDS = [1, 2, 5].flatMap((step) => [0, 1, 2, 3, 4, 5].map((power) => step * 10 ** power)).sort((a, b) => a - b);
const BYTES = Array.from({ length: 52 }, (_, power) => 2 ** power);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Plot {
  // series: [{title, unit, points: [{rounds, bytes, time, value}], breaks: [round]}], each with own points.
  constructor(element, height) {
    this.element = element;
    this.height = height;
    this.axis = "rounds";
    this.series = [];
    this.marks = [];
    this.chart = null;
    this.shape = "";
    new ResizeObserver(() => this.resize()).observe(element);
  }

  show(series, axis, marks = []) {
    this.series = series;
    this.axis = axis;
    this.marks = marks;
    const shape = `${axis} ${series.map((each) => each.title).join("|")}`;
    const data = aligned(series, axis);
    if (this.chart && shape === this.shape) {
      this.chart.setData(data);
      this.values(null);
      return;
    }
    this.shape = shape;
    this.create(data);
  }

  create(data) {
    if (this.chart) this.chart.destroy();
    this.element.replaceChildren();
    this.element.classList.add("drawn");
    const unit = this.series[0] ? this.series[0].unit : "number";
    this.chart = new uPlot(this.options(unit), data, this.element);
    this.legend = document.createElement("p");
    this.legend.className = "legend";
    this.texts = this.series.map((each, index) => {
      const item = document.createElement("span"), value = document.createElement("b");
      item.className = `c${(index % 8) + 1}`;
      item.append(document.createElement("i"), each.title, value);
      this.legend.append(item);
      return value;
    });
    this.where = document.createElement("span");
    this.legend.append(this.where);
    this.element.append(this.legend);
    this.values(null);
  }

  options(unit) {
    const axis = (values, extra) => ({
      stroke: () => colour("--muted"), font: "11px system-ui, sans-serif", values,
      grid: { stroke: () => colour("--line-soft"), width: 1 }, ticks: { stroke: () => colour("--line-soft"), width: 1, size: 4 },
      ...extra,
    });
    const width = Math.max(120, this.element.clientWidth);
    return {
      width, height: this.height,
      scales: { x: { time: false }, y: { range: (_, low, high) => padded(low, high, unit === "bytes" || unit === "seconds") } },
      cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false } },
      legend: { show: false },
      axes: [
        axis((_, splits) => splits.map((v) => tick(v, AXIS_UNIT[this.axis])), { space: 76, size: 28, incrs: { rounds: ROUNDS, bytes: BYTES }[this.axis] }),
        axis((_, splits) => splits.map((v) => tick(v, unit)), { size: 62, space: 34, incrs: unit === "bytes" ? BYTES : undefined }),
      ],
      series: [{}, ...this.series.map((each, index) => ({
        label: each.title, stroke: () => colour(`--series-${(index % 8) + 1}`), width: 1.6,
        gaps: (chart, position) => this.gaps(chart, position - 1),
        points: { show: each.points.length < 40, size: 4 },
      }))],
      hooks: { draw: [(chart) => this.drawMarks(chart)], setCursor: [(chart) => this.values(chart.cursor.idx)] },
    };
  }

  // Where no line is drawn, in pixels: from the last point before each break to the next one.
  gaps(chart, position) {
    const { points, breaks } = this.series[position], found = [];
    for (const round of breaks) {
      const next = points.findIndex((point) => point.rounds > round);
      if (next > 0) found.push([next - 1, next].map((index) => chart.valToPos(points[index][this.axis], "x", true)));
    }
    return found;
  }

  drawMarks(chart) {
    const { ctx, bbox } = chart;
    ctx.save();
    for (const mark of this.marks) {
      const x = chart.valToPos(mark[this.axis], "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = colour(MARK_TONE[mark.kind] || "--calm");
      ctx.globalAlpha = 0.55;
      ctx.setLineDash([3, 3]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.globalAlpha = 1;
      ctx.beginPath();
      ctx.arc(x, bbox.top + 3, 3 * devicePixelRatio, 0, 7);
      ctx.fill();
    }
    ctx.restore();
  }

  // The values at the cursor, or the newest ones.
  values(index) {
    if (!this.chart || !this.texts) return;
    const data = this.chart.data;
    this.texts.forEach((text, position) => {
      const column = data[position + 1];
      let value = index === null || index === undefined ? undefined : column[index];
      if (index === null || index === undefined) for (let i = column.length - 1; i >= 0; i -= 1) if (column[i] != null) { value = column[i]; break; }
      text.textContent = inUnit(value ?? null, this.series[position].unit);
    });
    const x = index === null || index === undefined ? null : data[0][index];
    this.where.textContent = x === null || x === undefined ? "" : `at ${this.axis === "rounds" ? `round ${x - 1}` : inUnit(x, AXIS_UNIT[this.axis])}`;
    const near = x === null ? null : this.marks.find((mark) => mark[this.axis] === x);
    this.element.title = near ? near.text : "";
  }

  resize() {
    if (this.chart && this.element.clientWidth) this.chart.setSize({ width: this.element.clientWidth, height: this.height });
  }

  redraw() {
    if (this.chart) this.chart.redraw(false, true);
  }
}

// All curves on the union of their positions, as uPlot needs them.
function aligned(series, axis) {
  const positions = new Set();
  for (const each of series) for (const point of each.points) positions.add(point[axis]);
  const xs = [...positions].sort((left, right) => left - right);
  const columns = series.map((each) => {
    const by = new Map(each.points.map((point) => [point[axis], point.value]));
    return xs.map((x) => by.get(x));  // undefined: the line goes on to the next value
  });
  return [xs, ...columns];
}

function padded(low, high, fromZero) {
  if (low === null || low === undefined) return [0, 1];
  if (fromZero) return [0, 1.08 * high || 1];
  const span = high - low || Math.abs(high) || 1;
  const bottom = low - 0.06 * span;
  return [low >= 0 && bottom < 0 ? 0 : bottom, high + 0.06 * span];
}
