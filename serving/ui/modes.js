// Which mode steps have, why, and what they would have been otherwise: in words and as a picture.

import { $ } from "./server.js";
import { duration, many, span, whole } from "./draw.js";
import { sampled } from "./explain.js";

export const KINDS = ["base", "between", "shift"];
export const kindOf = (mode) => (mode === "base" || mode === "shift" ? mode : "between");
const NOW_SECONDS = 1.5; // of which "now" is told
const SPOKEN_SECONDS = 5; // between sentences that are read aloud

const waysOf = (mode, model) => {
  const tp = Number(/\btp=(\d+)/.exec(model.mesh)?.[1] ?? 1); // "dp=1 sp=4 tp=2"
  return tp * mode.width / mode.sp;
};
const modeOf = (choice, kind) => choice.modes.find((mode) => kindOf(mode.label) === kind);

// How far a step of so many tokens splits the experts, and why; "" without experts.
function experts(choice, mode, tokens) {
  const rows = choice?.experts ?? [];
  const use = (rows.find(([most]) => most >= tokens) ?? rows.at(-1))?.[1][mode.label];
  if (!use) return "";
  return `, ${use.ways === 1 ? "experts whole" : `experts split ${use.ways} ways`} (${use.why})`;
}

// What a device computes in a step of so many tokens.
function share(mode, model, tokens) {
  const ways = waysOf(mode, model);
  const part = ways === 1 ? "all weights" : `1/${ways} of the weights`;
  const weights = part + experts(model.choice, mode, tokens);
  const size = many(tokens, "token");
  if (mode.sp === 1) return `${size === "1 token" ? "the token" : `all ${size}`} with ${weights}`;
  return `${whole(Math.ceil(tokens / mode.sp))} of ${size} with ${weights}`;
}

// Seconds that are predicted for a step but for attention, by mode; undefined: costs are unknown.
export function predicted(choice, tokens) {
  const rows = choice?.predicted ?? [];
  return (rows.find(([most]) => most >= tokens) ?? rows.at(-1))?.[1];
}

// Tokens a step and milliseconds of the kinds of steps in a range of columns.
export function stepsIn({ columns }, from, to) {
  const sum = (name) => columns[name].slice(from, to).reduce((total, each) => total + each, 0);
  return KINDS.map((kind) => {
    const [steps, busy] = [sum(`${kind}_steps`), sum(`${kind}_busy`)];
    const seconds = steps ? sum(`${kind}_seconds`) / steps : 0;
    return { kind, steps, busy, seconds, tokens: busy ? sum(`${kind}_load`) / busy : 0 };
  }).filter((each) => each.busy);
}

// The rule by which modes are chosen, seen from one of them.
function rule(choice, kind, tokens) {
  const { policy, threshold, modes } = choice;
  if (modes.length === 1) return policy === "threshold" ? "the only mode" : `always: policy ${policy}`;
  if (policy === "threshold") return kind === "shift" ? `base from ${threshold + 1}` : `shift up to ${threshold}`;
  return "predicted to be quickest";
}

// Of a kind of step that was in a column: what the same step would have been in other modes.
function otherwise(data, index, kind, tokens) {
  const { model } = data;
  const from = data.start + index * data.seconds;
  const told = sampled(data, from, from + data.seconds, (mode) => kindOf(mode) === kind);
  if (!model.choice.groups) return told; // groups of a fleet: each step has had its own width
  const others = model.choice.modes.filter((mode) => kindOf(mode.label) !== kind);
  const mean = stepsIn(data, 0, data.columns.tokens.length);
  return others.map((mode) => {
    const name = mode.label.toUpperCase();
    const seconds = predicted(model.choice, tokens)?.[mode.label];
    const seen = mean.find((each) => each.kind === kindOf(mode.label) && each.steps);
    const guess = seconds && !told ? `, predicted ${duration(seconds)}` : "";
    const known = seen ? `; its steps, of ${many(seen.tokens, "token")}, took ${duration(seen.seconds)}` : "";
    return `In ${name} it would have been ${share(mode, model, tokens)}${guess}${known}.`;
  }).concat(told).join(" ");
}

// A kind of mode, with its colour.
function named(kind) {
  const mark = document.createElement("i");
  mark.className = kind;
  mark.textContent = kind === "between" ? "between" : kind.toUpperCase();
  return mark;
}

// What all columns had together, as nodes.
export function summary(data) {
  const start = document.createElement("b");
  start.textContent = `The last ${span(data.span)}: `;
  const found = stepsIn(data, 0, data.columns.tokens.length).filter((each) => each.steps);
  if (!found.length) return [start, "no steps. "];
  return [start, ...found.map(({ kind, steps, tokens, seconds }) => {
    const line = document.createElement("span");
    line.append(named(kind), ` ${many(steps, "step")} of ${many(tokens, "token")}, ${duration(seconds)} each.`);
    return line;
  })];
}

// The most tokens for which splitting none is predicted to be quickest; null: none, or all.
export function crossing(choice) {
  const rows = choice?.predicted ?? [];
  const isShift = ([, seconds]) => Object.values(seconds).every((each) => each >= seconds.shift);
  const last = rows.findLastIndex(isShift);
  return last < 0 || last === rows.length - 1 ? null : rows[last][0];
}

// What happened in a column, as nodes.
export function explain(data, index) {
  const ago = data.now - (data.start + (index + 0.5) * data.seconds);
  const start = document.createElement("b");
  start.textContent = `${span(Math.max(0, ago))} ago: `;
  const found = stepsIn(data, index, index + 1);
  if (!found.length) return [start, "no step."];
  return [start, ...found.map((each) => {
    const line = document.createElement("span");
    const { kind, steps, tokens, seconds } = each;
    const time = steps ? `${many(steps, "step")} of ${many(tokens, "token")}, ${duration(seconds)}${steps > 1 ? " each" : ""}` : "a step went on";
    const choice = data.model?.choice;
    line.append(named(kind), ` ${time}`);
    if (!choice || choice.modes.length === 1) return line;
    const mode = choice.groups && modeOf(choice, kind);
    const did = mode ? `, every device computed ${share(mode, data.model, tokens)}` : "";
    line.append(`${did} (${rule(choice, kind, tokens)}). ${otherwise(data, index, kind, tokens)}`);
    return line;
  })];
}

// ------------------------------------------------------------------ now

// Kind, heading, text and reason of what the engine does now.
export function sentence(data) {
  const { model, last_step: last } = data;
  const choice = model.choice;
  const count = data.columns.tokens.length;
  if (!choice) return embedding(data, count);
  const newest = stepsIn(data, count - Math.ceil(NOW_SECONDS / data.seconds) - 1, count);
  const main = newest.sort((a, b) => b.busy - a.busy)[0];
  if (!main) {
    if (!last) return { head: "IDLE", text: "no request has come yet", why: expectation(model) };
    const text = `the last step was ${last.mode}, ${many(last.tokens, "token")}, ${span(data.now - last.at)} ago`;
    return { head: "IDLE", text, why: expectation(model) };
  }
  const { kind, tokens } = main;
  const label = kind === last?.kind ? last.mode : modeOf(choice, kind)?.label ?? kind;
  const mode = choice.modes.find((each) => each.label === label);
  const size = Math.abs(tokens - Math.round(tokens)) < 0.1 || tokens > 10 ? whole(tokens) : tokens.toFixed(1);
  const text = `${size} ${size === "1" ? "token" : "tokens"} a step`;
  const why = reason(data, mode, tokens, kind === "shift" || tokens <= 1 ? "Few tokens" : "Many tokens");
  return { kind, label, head: label.toUpperCase(), text, note: `(${rule(choice, kind, tokens)})`, why };
}

// An encoder has no modes.
function embedding({ columns, seconds, model }, count) {
  const recent = columns.texts.slice(count - Math.ceil(NOW_SECONDS / seconds) - 1).reduce((sum, each) => sum + each, 0);
  return { head: recent ? "EMBEDDING" : "IDLE", text: recent ? "texts" : "waits for texts", why: model.mesh };
}

function reason({ model, fleet }, mode, tokens, size) {
  const { groups } = model.choice;
  if (fleet) return `Groups of units: ${fleet.arrangement}.`;
  if (!mode) return "";
  const where = groups > 1 ? `, in each of ${groups} groups` : "";
  return `${size}: every device computes ${share(mode, model, tokens)}${where}.`;
}

function expectation(model) {
  const { policy, threshold, modes } = model.choice;
  if (modes.length === 1) return "";
  if (policy === "threshold") return `Steps of ${threshold + 1} tokens and more will run in BASE, smaller ones in SHIFT.`;
  return "Each step will run in the mode that is predicted to be quickest for it.";
}

// ------------------------------------------------------------------ the mesh

const MOST_NAMED = 16; // devices in a row that have room for their names

// A group's devices in a mode: rows share the tokens, columns the weights. Device j holds the heads
// of place j in every mode.
function grid(mode, model) {
  const ways = waysOf(mode, model);
  const perTp = mode.width / mode.sp;
  const place = (row, column) =>
    Math.floor(column / perTp) * mode.width + (column % perTp) * mode.sp + row;
  return Array.from({ length: mode.sp }, (_, row) =>
    Array.from({ length: ways }, (_, column) => place(row, column)));
}

const cut = (part, parts) => (part === 0 ? "0" : part === parts ? "n" : `${part === 1 ? "" : part}n/${parts}`);

function picture(mode, model) {
  const figure = document.createElement("figure");
  figure.dataset.mode = mode.label;
  figure.className = kindOf(mode.label);
  const rows = grid(mode, model);
  const caption = document.createElement("figcaption");
  const name = document.createElement("b");
  name.textContent = mode.label.toUpperCase();
  caption.append(name, ` sp ${mode.sp}, tp ${rows[0].length}`);
  const table = document.createElement("div");
  table.className = "mesh";
  rows.forEach((row, index) => {
    const line = document.createElement("div");
    for (const device of row) {
      const cell = document.createElement("span");
      cell.textContent = row.length > MOST_NAMED ? "" : `d${device}`;
      line.append(cell);
    }
    const tokens = document.createElement("small");
    tokens.textContent = mode.sp === 1 ? "all n tokens" : `tokens [${cut(index, mode.sp)}, ${cut(index + 1, mode.sp)})`;
    line.append(tokens);
    table.append(line);
  });
  figure.append(caption, table);
  return figure;
}

let drawn = "";

export function pictures(model, active) {
  const choice = model?.choice;
  const has = choice && choice.groups && choice.modes.length > 1;
  $("meshes").hidden = !has;
  if (!has) return;
  const key = JSON.stringify([choice.modes, model.mesh]);
  if (key !== drawn) {
    drawn = key;
    $("meshes").replaceChildren(...choice.modes.map((mode) => picture(mode, model)));
  }
  for (const figure of $("meshes").children) {
    figure.classList.toggle("active", figure.dataset.mode === active);
  }
}
