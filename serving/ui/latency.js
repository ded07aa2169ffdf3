// Latency of the last requests: percentiles as curves and as numbers.

import { $ } from "./server.js";
import { colour, describe, duration, levels, prepare, roundUp, rule, LEFT, TOP } from "./draw.js";

const NAMED = [50, 90, 99]; // percentiles whose values are written

// Percentiles stand side by side, so that the few slow requests have half of the room.
function curve(id, data, names, factor, target, title) {
  const { percentiles } = data.curves;
  const lines = names.map(([name, mark]) => [mark, data.curves[name].map((each) => each * factor)]);
  const [, values] = lines[0];
  const top = roundUp(Math.max(...values, (target ?? 0) * factor) || 1);
  const chart = prepare(id);
  const { canvas, context, width, bottom } = chart;
  const y = (value) => bottom - Math.min(1, value / top) * (bottom - TOP);
  const x = (index) => LEFT + 8 + index / (percentiles.length - 1) * (width - LEFT - 34);
  levels(chart, [0, top / 2, top], y);
  context.fillStyle = colour("soft");
  context.textAlign = "center";
  percentiles.forEach((each, index) => context.fillText(each === 100 ? "most" : each ? `p${each}` : "least", x(index), chart.height - 3));
  for (const [mark, all] of [...lines].reverse()) {
    context.strokeStyle = context.fillStyle = colour(mark);
    context.lineWidth = 2;
    context.beginPath();
    all.forEach((value, index) => context.lineTo(x(index), y(value)));
    context.stroke();
    all.forEach((value, index) => context.fillRect(x(index) - 2, y(value) - 2, 4, 4));
  }
  if (target && values.length) rule(chart, y(target * factor), `target ${duration(target)}`);
  values.forEach((value, index) => {
    if (!NAMED.includes(percentiles[index])) return;
    const text = duration(value / factor);
    const half = context.measureText(text).width / 2;
    const high = y(value) < TOP + 14 ? y(value) + 16 : y(value) - 6; // above its point, if there is room
    context.fillStyle = colour("card");
    context.fillRect(x(index) - half - 2, high - 10, 2 * half + 4, 12);
    context.fillStyle = colour("ink");
    context.textAlign = "center";
    context.fillText(text, x(index), high);
  });
  canvas.dataset.points = String(values.length);
  const words = NAMED.map((each) => [each, values[percentiles.indexOf(each)]])
    .filter(([, value]) => value !== undefined)
    .map(([each, value]) => `p${each} ${duration(value / factor)}`);
  describe(canvas, `${title}: ${words.join(", ") || "no request has ended"}.`);
}

export function curves(data) {
  if (data.model.task === "embed") return;
  const { ttft, tpot } = data.targets;
  curve("ttft-curve", data, [["ttft", "decode"], ["queue", "waiting"]], 1, ttft, "Percentiles of the time to the first token");
  curve("tpot-curve", data, [["tpot", "decode"]], 1000, tpot, "Percentiles of the time per later token");
}

export function latency(data) {
  $("latency").hidden = !data.ttft.length;
  const names = [["to the first token", data.ttft], ["per later token", data.tpot]];
  $("latency").tBodies[0].replaceChildren(...names.map(([name, values]) => {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = name;
    row.append(head);
    for (const value of values) row.insertCell().textContent = duration(value);
    return row;
  }));
}
