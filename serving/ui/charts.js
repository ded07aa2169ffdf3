// Charts over time, of the columns of the server's data. One colour means one thing in all of them.

import { $ } from "./server.js";
import { colour, describe, duration, levels, onPixel, prepare, roundUp, rule, short, span, times, whole, LEFT, TOP } from "./draw.js";
import { crossing, explain, KINDS, kindOf, predicted, stepsIn, summary } from "./modes.js";

const CHARTS = ["steps", "seconds", "firsts", "sequences", "tokens", "kv", "accepted"];
let shown = null; // data of the last poll
let cursor = null; // the time that is explained; null: none

// Pixels of a column's left edge; columns move to the left as time goes on.
function scale({ width }, data) {
  const pixels = (width - LEFT) / data.span;
  return (index) => onPixel(Math.max(LEFT, width - (data.now - data.start - index * data.seconds) * pixels));
}

function frame(id, data, top, ticks = [0, 0.5, 1].map((each) => each * top)) {
  const chart = prepare(id);
  const y = (value) => chart.bottom - Math.min(1, value / top) * (chart.bottom - TOP);
  levels(chart, ticks, y);
  times(chart, data.span);
  return { ...chart, x: scale(chart, data), y };
}

function line({ context, x, width, bottom }, data) {
  if (cursor === null) return;
  const index = indexAt(data, cursor);
  context.fillStyle = colour("ink");
  context.globalAlpha = 0.5;
  context.fillRect(Math.min(width - 1, (x(index) + x(index + 1)) / 2), TOP, 1, bottom - TOP);
  context.globalAlpha = 1;
}

// ------------------------------------------------------------------ modes

// Tokens a step, as an area in the colour of the mode; logarithmic, since steps of 1 and of 8,192
// tokens are in one chart. In a column with several modes each has its share of the busy time.
function steps(data) {
  const { columns, model } = data;
  const threshold = model?.choice?.threshold;
  const has = threshold && model.choice.modes.length > 1;
  const cross = crossing(model?.choice);
  const loads = stepsIn(data, 0, columns.tokens.length).map((each) => each.tokens);
  const means = KINDS.flatMap((kind) =>
    columns[`${kind}_load`].map((load, i) => load / (columns[`${kind}_busy`][i] || 1)));
  const power = Math.ceil(Math.log2(Math.max(8, has ? 2 * threshold : 0, 2 * (cross ?? 0), ...loads, ...means)));
  const chart = prepare("steps");
  const { canvas, context, bottom } = chart;
  const y = (value) => bottom - Math.log2(value + 1) / Math.log2(2 ** power + 1) * (bottom - TOP);
  const apart = Math.ceil(power / 4);
  const ticks = [0];
  for (let each = power; each >= 0; each -= apart) ticks.push(2 ** each);
  levels(chart, ticks, y);
  times(chart, data.span);
  const x = scale(chart, data);
  for (let index = 0; index < columns.tokens.length; index += 1) {
    const found = stepsIn(data, index, index + 1);
    const busy = found.reduce((sum, each) => sum + each.busy, 0);
    let left = x(index);
    const room = x(index + 1) - left;
    for (const each of found) {
      const wide = onPixel(left + room * each.busy / busy) - left;
      const high = y(each.tokens);
      context.fillStyle = colour(each.kind);
      context.globalAlpha = 0.45;
      context.fillRect(left, high, wide, bottom - high);
      context.globalAlpha = 1;
      context.fillRect(left, high - 1, wide, 2);
      left += wide;
    }
  }
  if (has) rule(chart, y(threshold + 0.5), `base from ${threshold + 1} tokens`);
  if (cross) rule(chart, y(cross + 0.5), `predicted: shift is quickest up to ${cross}`, has);
  marks({ ...chart, x }, columns.failed, "failed");
  line({ ...chart, x }, data);
  const total = stepsIn(data, 0, columns.tokens.length);
  canvas.dataset.sum = String(total.reduce((sum, each) => sum + each.steps, 0));
  const words = total.map(({ kind, steps: count, tokens }) => `${whole(count)} ${kind} steps of ${whole(tokens)} tokens`);
  describe(canvas, `Tokens per step, last ${span(data.span)}: ${words.join(", ") || "no steps"}. Arrow keys go through time.`);
}

// Milliseconds a step, by mode, and what was predicted of each, where costs are known.
function seconds(data) {
  const { columns, model } = data;
  const count = columns.tokens.length;
  const all = Array.from({ length: count }, (_, i) => stepsIn(data, i, i + 1));
  const guesses = all.map((found) => {
    const main = [...found].sort((a, b) => b.busy - a.busy)[0];
    return main ? predicted(model?.choice, main.tokens) ?? {} : {};
  });
  const values = [...all.flat().map((each) => each.seconds), ...guesses.flatMap(Object.values)];
  const chart = frame("seconds", data, roundUp(Math.max(1, ...values.map((each) => each * 1000))));
  const { context, x, y } = chart;
  const path = (name, valueAt, dash) => {
    context.strokeStyle = colour(name);
    context.lineWidth = dash.length ? 1 : 2;
    context.setLineDash(dash);
    context.beginPath();
    let before = null;
    for (let index = 0; index < count; index += 1) {
      const value = valueAt(index);
      if (!value) continue;
      const [from, to, high] = [x(index), x(index + 1), y(value * 1000)];
      if (before === index - 1) context.lineTo(from, high);
      else context.moveTo(from, high);
      context.lineTo(to, high);
      before = index;
    }
    context.stroke();
    context.setLineDash([]);
  };
  for (const mode of model?.choice?.predicted?.length ? model.choice.modes : []) {
    path(kindOf(mode.label), (index) => guesses[index][mode.label], [2, 3]);
  }
  for (const kind of KINDS) path(kind, (index) => all[index].find((each) => each.kind === kind && each.steps)?.seconds, []);
  line(chart, data);
  const words = stepsIn(data, 0, count).map((each) => `${each.kind} ${duration(each.seconds)}`);
  describe(chart.canvas, `Time per step, last ${span(data.span)}: ${words.join(", ") || "no steps"}.`);
}

// ------------------------------------------------------------------ the rest

// Stacked columns of `names`; `factor` turns a count into the unit of the axis, `limit` has words.
function stack(id, data, names, factor, most, limit, words) {
  const { columns } = data;
  const total = (index) => names.reduce((sum, name) => sum + columns[name][index], 0) * factor;
  const totals = columns.tokens.map((_, index) => total(index));
  const highest = Math.max(...totals);
  const top = most ?? roundUp(id === "firsts" ? highest || 1 : Math.max(1, highest)); // seconds may be few
  const chart = frame(id, data, top);
  const { canvas, context, x, y } = chart;
  totals.forEach((_, index) => {
    let base = 0;
    for (const name of names) {
      const value = columns[name][index] * factor;
      context.fillStyle = colour(name);
      context.fillRect(x(index), y(base + value), x(index + 1) - x(index), y(base) - y(base + value));
      base += value;
    }
  });
  if (limit && limit <= top) rule(chart, y(limit), words);
  line(chart, data);
  canvas.dataset.sum = String(totals.reduce((sum, each) => sum + each, 0));
  const now = names.map((name) => `${name} ${short((columns[name].at(-1)) * factor)}`);
  describe(canvas, `${canvas.dataset.title}, last ${span(data.span)}: now ${now.join(", ")}, at most ${short(Math.max(...totals))}.`);
  return chart;
}

// What happened at a moment: a tick at the top.
function marks({ context, x }, column, name) {
  context.fillStyle = colour(name);
  column.forEach((count, index) => {
    if (count) context.fillRect(x(index), 0, Math.max(3, x(index + 1) - x(index) - 1), 5);
  });
}

function accepted(data) {
  $("drafts").hidden = !data.drafts;
  if (!data.drafts) return;
  const { columns } = data;
  const count = (index) => KINDS.reduce((sum, kind) => sum + columns[`${kind}_steps`][index], 0);
  const perStep = columns.accepted.map((each, index) => each / Math.max(1, count(index)));
  stack("accepted", { ...data, columns: { ...columns, accepted: perStep } }, ["accepted"], 1);
  const words = ([name, { accepted: right, rejected }]) => `${name} ${right} of ${right + rejected}`;
  $("drafters").textContent = Object.entries(data.drafts).map(words).join(", ");
}

// Mean seconds to the first token, of those that came in a column: in the queue, and of the prompt.
function firsts(data) {
  const { columns, targets } = data;
  const mean = (name) => columns[name].map((sum, index) => sum / (columns.firsts[index] || 1));
  const parts = { tokens: columns.tokens, waiting: mean("queued"), prefill: mean("prefilled") };
  const target = targets.ttft;
  const words = target && `target ${duration(target)}`;
  const chart = stack("firsts", { ...data, columns: parts }, ["waiting", "prefill"], 1, undefined, target, words);
  chart.canvas.dataset.count = String(columns.firsts.reduce((total, each) => total + each, 0));
}

// Only what can occur is in the legends.
function legends(choice) {
  const has = choice?.modes.some((mode) => kindOf(mode.label) === "between");
  for (const mark of document.querySelectorAll("h2 .between")) mark.hidden = !has && !mark.closest("#fleet");
  $("foretold").hidden = !choice?.predicted.length;
}

export function charts(data) {
  shown = data;
  legends(data.model?.choice);
  if (data.model?.task !== "embed") {
    steps(data);
    seconds(data);
    firsts(data);
    accepted(data);
    const kv = stack("kv", data, ["kv"], 100, 100);
    marks(kv, data.columns.preempted, "preempted");
  }
  stack("sequences", data, ["running", "waiting"], 1, undefined, data.load?.most_running, `at most ${whole(data.load?.most_running ?? 0)}`);
  stack("tokens", data, ["tokens"], 1 / data.seconds);
  readout();
}

// ------------------------------------------------------------------ the cursor

const indexAt = (data, time) =>
  Math.max(0, Math.min(data.columns.tokens.length - 1, Math.floor((time - data.start) / data.seconds)));
const HINT = "Point at a chart, or go through it with the arrow keys, to see what a step would have been otherwise.";

// What the last step with prompts takes, and would in other sizes.
const sizes = ({ step_sizes: told }) => (told?.last ? `The last size of a step with prompts: ${told.last}. ` : "");

function readout() {
  if (!shown?.model) return;
  const words = cursor === null ? [...summary(shown), sizes(shown), HINT] : explain(shown, indexAt(shown, cursor));
  $("readout").replaceChildren(...words);
}

function point(time) {
  cursor = time;
  if (shown) charts(shown);
}

function move(event) {
  const way = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
  if (event.key === "Escape") point(null);
  if (!way || !shown) return;
  event.preventDefault();
  const last = shown.columns.tokens.length - 1;
  const index = cursor === null ? last : indexAt(shown, cursor) + way;
  point(shown.start + (Math.max(0, Math.min(last, index)) + 0.5) * shown.seconds);
  $("told").textContent = $("readout").textContent; // read aloud
}

export function listen() {
  for (const id of CHARTS) {
    const canvas = $(id);
    canvas.addEventListener("pointermove", (event) => {
      if (!shown) return;
      const { clientWidth: width } = canvas;
      point(shown.now - (width - event.offsetX) * shown.span / (width - LEFT));
    });
    canvas.addEventListener("pointerleave", () => point(null));
    canvas.addEventListener("keydown", move);
    canvas.addEventListener("blur", () => point(null));
  }
}
