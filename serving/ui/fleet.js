// Groups of units of a fleet over the last minute, and why they changed.

import { $ } from "./server.js";
import { colour, prepare, roundUp, short, span, times, BOTTOM, LEFT } from "./draw.js";
import { groups } from "./explain.js";
import { kindOf } from "./modes.js";

const SECONDS = 60; // that the strip shows
const BAND = 3; // pixels, in the colour of a mode
let chosen = null; // the change that is explained; null: the latest
let shownFleet = null; // what the strip shows: data of the last poll

const widthName = (width) => `w${Math.min(5, Math.round(Math.log2(width)))}`;
const same = (a, b) => a && b && a.at === b.at && a.first === b.first;

// Units from the top down, seconds to the right: the colour says how wide a group is, what is
// filled how many sequences its units have, the band in which mode it steps.
export function strip(data) {
  const { fleet } = data;
  $("fleet").hidden = !fleet;
  shownFleet = fleet && data;
  if (!fleet) return;
  const chart = prepare("strip");
  const { canvas, context, width, height } = chart;
  const size = (height - BOTTOM) / fleet.units;
  const x = (at) => Math.max(LEFT, width - (data.now - at) * (width - LEFT) / SECONDS);
  const now = fleet.groups.map((each) => [each.first, each.width, each.mode, 0]);
  const all = data.strip.entries.length ? data.strip.entries : [{ at: data.now - SECONDS, groups: now }]; // no step yet
  const entries = all.filter((each, i) => (all[i + 1]?.at ?? data.now) > data.now - SECONDS);
  const loads = entries.flatMap(({ groups }) => groups.map(([, units, , load]) => load / units));
  const top = roundUp(Math.max(1, ...loads));
  let before = new Map(); // groups of the entry before, and where their names stand
  entries.forEach(({ at, groups }, index) => {
    const next = entries[index + 1]?.at ?? data.now;
    const end = Math.min(next, at + data.strip.seconds); // no turn after that: nothing to do
    const names = new Map();
    for (const [first, units, mode, load] of groups) {
      const [y, tall, left] = [first * size, units * size - 1, x(at)];
      const name = widthName(units);
      context.globalAlpha = 0.3;
      context.fillStyle = colour(name);
      context.fillRect(left, y, x(next) - left, tall);
      context.globalAlpha = 1;
      if (load) {
        const filled = Math.max(2, Math.min(1, load / units / top) * (tall - BAND));
        context.fillRect(left, y + tall - filled, x(end) - left, filled);
        context.fillStyle = colour(kindOf(mode));
        if (units > 1) context.fillRect(left, y, x(end) - left, BAND);
      }
      const key = `${first}+${units}`;
      names.set(key, before.get(key) ?? left);
      if (index && !before.has(key)) {
        context.fillStyle = colour("ink");
        context.fillRect(left, y, 1, tall);
      }
    }
    for (const [key, left] of [...before, ...names]) {
      const ended = before.has(key) && !names.has(key);
      const isLast = names.has(key) && index === entries.length - 1;
      if (ended || isLast) label(context, key, left, ended ? x(at) : width, size);
    }
    before = names;
  });
  context.fillStyle = colour("soft");
  context.textAlign = "right";
  const step = Math.ceil(fleet.units / 16);
  for (let unit = 0; unit < fleet.units; unit += step) {
    context.fillText(unit, LEFT - 5, (unit + 0.5) * size + 4);
  }
  times(chart, SECONDS);
  const current = explained();
  for (const change of fleet.changes.filter((each) => each.at > data.now - SECONDS)) {
    context.fillStyle = colour("ink");
    context.beginPath();
    const y = (change.first + change.width / 2) * size;
    context.arc(x(change.at), y, same(change, current) ? 6 : 3, 0, 2 * Math.PI);
    context.fill();
  }
  const most = top === 1 ? "1 sequence each" : `${short(top)} sequences each`;
  $("strip-legend").textContent = "A row is a unit, unit 0 on top; time goes to the right. The colour says how wide a group is. "
    + `What is filled says how many sequences its units have, running or waiting: all of it is ${most}. The band on top of a group `
    + "is the mode of its steps, and a dot is a change.";
  canvas.dataset.changes = String(fleet.changes.length);
  canvas.dataset.entries = String(entries.length);
  words(data);
  groups(data);
}

// The width of a group, where there is room for it.
function label(context, key, left, right, size) {
  const [first, units] = key.split("+").map(Number);
  if (right - left < 20 || units * size < 11) return;
  context.textAlign = "left";
  context.fillStyle = colour("ink");
  context.fillText(units, left + 9, (first + units / 2) * size + 4);
}

const explained = () => {
  const changes = shownFleet?.fleet.changes ?? [];
  return changes.find((each) => same(each, chosen)) ?? changes.at(-1);
};

// What a change was and why: two texts, the first is set in bold.
function told(change) {
  const last = change.first + change.width - 1;
  const did = change.what === "bind" ? "were bound into a group" : "were released";
  const went = `${change.num_sequences} went along, ${change.num_recomputed} recomputed`;
  return [
    `units ${change.first} to ${last} ${did}, ${change.from} became ${change.to}:`,
    `${change.why} (${change.reason}; ${change.kind}; ${went}; ${short(change.host_seconds * 1000)} ms)`,
  ];
}

const ago = (change, now) => `${span(now - change.at)} ago`;

function sentence(element, [what, why], start = "") {
  const strong = document.createElement("b");
  strong.textContent = what;
  element.replaceChildren(start, strong, ` ${why}`);
  return element;
}

function words(data) {
  const { fleet } = data;
  $("arrangement").textContent = fleet.arrangement;
  $("widths").replaceChildren(...fleet.widths.map((width) => {
    const mark = document.createElement("i");
    mark.className = widthName(width);
    mark.textContent = width === 1 ? "1 unit" : `${width} units`;
    return mark;
  }));
  const current = explained();
  $("ago").textContent = current ? ago(current, data.now) : "";
  const rule = data.model.choice.fleet_rule;
  const none = `No group has changed since the start: ${rule}.`;
  const isOld = current && data.now - current.at > SECONDS;
  const since = isOld ? ` None in the last ${span(SECONDS)}: ${rule}.` : "";
  const texts = current ? [told(current)[0], told(current)[1] + since] : ["", none];
  if ($("why").textContent !== texts.join(" ")) sentence($("why"), texts); // it is read aloud
  const latest = fleet.changes.slice(-8).reverse();
  $("changes-title").hidden = !latest.length;
  $("changes").replaceChildren(...latest.map((change) =>
    sentence(document.createElement("li"), told(change), `${ago(change, data.now)} `)));
}

function choose(change) {
  chosen = change ?? null;
  if (shownFleet) strip(shownFleet);
}

export function listen() {
  // Of the unit under the pointer: the last change before.
  $("strip").addEventListener("pointermove", (event) => {
    if (!shownFleet) return;
    const { clientWidth: width, clientHeight: height } = event.target;
    const { fleet, now } = shownFleet;
    const at = now - (width - event.offsetX) * SECONDS / (width - LEFT);
    const unit = Math.floor(event.offsetY / (height - BOTTOM) * fleet.units);
    choose(fleet.changes.findLast((each) =>
      each.at <= at && each.first <= unit && unit < each.first + each.width));
  });
  $("strip").addEventListener("pointerleave", () => choose(null));
  $("strip").addEventListener("blur", () => choose(null));
  $("strip").addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way || !shownFleet) return;
    event.preventDefault();
    const { changes } = shownFleet.fleet;
    const place = changes.indexOf(explained()) + way;
    choose(changes[Math.max(0, Math.min(changes.length - 1, place))]);
  });
}
