// The page of a ShiftJAX server: a chat, and charts of what the engine does. No outside requests.
"use strict";

const POLL_MILLISECONDS = 500;
const $ = (id) => document.getElementById(id);
let conversation = [];
let running = null;

function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

// ------------------------------------------------------------------ chat

function show(role, text) {
  const element = document.createElement("div");
  element.className = `message ${role}`;
  element.textContent = text;
  $("messages").append(element);
  element.scrollIntoView({ block: "end" });
  return element;
}

// An answer grows, and stays in sight for whoever looks at its end.
function grow(element, text) {
  const list = $("messages");
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  element.textContent += text;
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function ask(text) {
  const asked = conversation; // another one, once it is cleared
  asked.push({ role: "user", content: text });
  show("user", text);
  running = new AbortController();
  setBusy(true);
  const element = show("assistant", "");
  try {
    const body = JSON.stringify({ messages: asked, temperature: 0.2, stream: true });
    const options = { method: "POST", headers: headers(), body, signal: running.signal };
    const response = await fetch("/v1/chat/completions", options);
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) grow(element, choice.delta.content ?? "");
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      show("error", error.message);
      if (!element.textContent) $("text").value ||= text; // to be sent again
    }
  }
  if (element.textContent) {
    asked.push({ role: "assistant", content: element.textContent });
  } else {
    asked.pop();
    element.remove();
  }
  setBusy(false);
}

function setBusy(busy) {
  $("send").disabled = busy;
  $("stop").disabled = !busy;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || $("send").disabled) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  $("messages").replaceChildren();
});

// ------------------------------------------------------------------ charts

const SECONDS = 60; // that the charts over time show
const LEFT = 34; // pixels for the labels of an axis
const BOTTOM = 16;
const ROWS = 16; // of the requests' chart

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
const short = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });

function prepare(id) {
  const canvas = $(id);
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = "11px system-ui, sans-serif";
  return { canvas, context, width, height };
}

// The least of 1, 2, 5, 10, 20 ... that is not below `value`.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= value * 0.999);
}

function grid({ context, width, height }, top) {
  const bottom = height - BOTTOM;
  context.strokeStyle = colour("line");
  context.fillStyle = colour("soft");
  context.textAlign = "right";
  for (const share of [0, 0.5, 1]) {
    const y = bottom - share * (bottom - 8) + 0.5;
    context.beginPath();
    context.moveTo(LEFT, y);
    context.lineTo(width, y);
    context.stroke();
    context.fillText(short(share * top), LEFT - 5, y + 4);
  }
  for (const ago of [0, 15, 30, 45, SECONDS]) {
    const x = width - (ago / SECONDS) * (width - LEFT);
    context.textAlign = ago === 0 ? "right" : ago === SECONDS ? "left" : "center";
    context.fillText(ago ? `-${ago} s` : "now", x, height - 2);
  }
}

// Stacked bars of `names` per bucket; `factor` turns a count into the unit of the axis.
function bars(id, data, names, factor, most) {
  const chart = prepare(id);
  const { canvas, context, width, height } = chart;
  const total = (bucket) => names.reduce((sum, name) => sum + bucket[name], 0) * factor;
  const buckets = data.buckets.filter((bucket) => bucket.at > data.now - SECONDS);
  const top = most ?? roundUp(Math.max(1, ...buckets.map(total)));
  grid(chart, top);
  const bottom = height - BOTTOM;
  const pixels = (width - LEFT) / SECONDS;
  for (const bucket of buckets) {
    const x = width - (data.now - bucket.at) * pixels;
    let y = bottom;
    for (const name of names) {
      const size = (bucket[name] * factor / top) * (bottom - 8);
      context.fillStyle = colour(name);
      context.fillRect(Math.max(LEFT, x), y - size, data.bucket_seconds * pixels, size);
      y -= size;
    }
  }
  canvas.dataset.sum = String(data.buckets.reduce((sum, bucket) => sum + total(bucket), 0));
}

// ------------------------------------------------------------------ groups of units

const BAND = 3; // pixels, in the colour of a mode
let chosen = null; // the change that is explained; null: the latest
let shownFleet = null; // what the strip shows: data of the last poll

const widthName = (width) => `w${Math.min(5, Math.round(Math.log2(width)))}`;
const modeName = (mode) => (mode === "base" || mode === "shift" ? mode : "between");
const seconds = (value) => (value < 90 ? `${Math.round(value)} s` : `${Math.round(value / 60)} min`);
const same = (a, b) => a && b && a.at === b.at && a.first === b.first;

// Units from the top down, seconds to the right: the colour says how wide a group is, what is
// filled how many sequences its units have, the band in which mode it steps.
function strip(data) {
  const { fleet } = data;
  $("fleet").hidden = !fleet;
  shownFleet = fleet && data;
  if (!fleet) return;
  const { canvas, context, width, height } = prepare("strip");
  const size = (height - BOTTOM) / fleet.units;
  const x = (at) => Math.max(LEFT, width - (data.now - at) * (width - LEFT) / SECONDS);
  const entries = data.strip.filter((each, i) => (data.strip[i + 1]?.at ?? data.now) > data.now - SECONDS);
  const loads = entries.flatMap(({ groups }) => groups.map(([, units, , load]) => load / units));
  const top = roundUp(Math.max(1, ...loads));
  let before = new Map(); // groups of the entry before, and where their names stand
  entries.forEach(({ at, groups }, index) => {
    const next = entries[index + 1]?.at ?? data.now;
    const end = Math.min(next, at + data.bucket_seconds); // no turn after that: nothing to do
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
        context.fillStyle = colour(modeName(mode));
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
  for (const ago of [0, 15, 30, 45, SECONDS]) {
    context.textAlign = ago === 0 ? "right" : ago === SECONDS ? "left" : "center";
    context.fillText(ago ? `-${ago} s` : "now", x(data.now - ago), height - 2);
  }
  const current = explained();
  for (const change of fleet.changes.filter((each) => each.at > data.now - SECONDS)) {
    context.fillStyle = colour("ink");
    context.beginPath();
    const y = (change.first + change.width / 2) * size;
    context.arc(x(change.at), y, same(change, current) ? 6 : 3, 0, 2 * Math.PI);
    context.fill();
  }
  canvas.dataset.changes = String(fleet.changes.length);
  canvas.dataset.entries = String(entries.length);
  words(data);
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

const ago = (change, now) => `${seconds(now - change.at)} ago`;

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
  const texts = current ? told(current) : ["", "No group has changed since the start."];
  if ($("why").textContent !== texts.join(" ")) sentence($("why"), texts); // it is read aloud
  const latest = fleet.changes.slice(-8).reverse();
  $("changes").replaceChildren(...latest.map((change) =>
    sentence(document.createElement("li"), told(change), `${ago(change, data.now)} `)));
}

function choose(change) {
  chosen = change ?? null;
  if (shownFleet) strip(shownFleet);
}

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

// One row a request, the newest at the top: when it waited, prefilled and decoded.
function requests(data) {
  const { canvas, context, width, height } = prepare("requests");
  const rows = [...data.requests, ...data.open].slice(-ROWS).reverse();
  const start = Math.min(...rows.map((row) => row.arrival), data.now - 1);
  const room = width - 190;
  const x = (time) => 60 + ((time - start) / (data.now - start)) * room;
  const step = (height - BOTTOM) / ROWS;
  context.textAlign = "left";
  rows.forEach((row, index) => {
    const y = index * step;
    const part = (from, to, name) => {
      context.fillStyle = colour(name);
      context.fillRect(x(from), y + 2, Math.max(1, x(to) - x(from)), step - 5);
    };
    const end = row.end ?? data.now;
    const scheduled = row.queue === null ? end : row.arrival + row.queue;
    const first = row.ttft === null ? end : row.arrival + row.ttft;
    part(row.arrival, scheduled, row.end === null ? "open" : row.queue === null ? "failed" : "queued");
    part(scheduled, first, "prefill");
    part(first, end, row.preemptions ? "preempted" : "decode");
    context.fillStyle = colour("soft");
    context.fillText(row.id.slice(0, 8), 0, y + step - 6);
    const preempted = row.preemptions ? `, ${row.preemptions}x preempted` : "";
    context.fillText(`${row.output_tokens} tokens${preempted}`, x(end) + 5, y + step - 6);
  });
  context.fillStyle = colour("soft");
  context.fillText(`-${short(data.now - start)} s`, 60, height - 2);
  context.textAlign = "right";
  context.fillText("now", 60 + room, height - 2);
  canvas.dataset.rows = String(rows.filter((row) => row.end !== null).length);
}

function latency(data) {
  const body = $("latency").tBodies[0];
  const shown = (seconds) => `${short(seconds * 1000)} ms`;
  const names = [["TTFT (to the first token)", data.ttft], ["TPOT (per later token)", data.tpot]];
  body.replaceChildren(...names.map(([name, values]) => {
    const row = document.createElement("tr");
    for (const text of [name, ...values.map(shown)]) row.insertCell().textContent = text;
    return row;
  }));
}

function tiles(data) {
  const seconds = 5;
  const last = data.buckets.filter((bucket) => bucket.at > data.now - seconds);
  const sum = (name) => last.reduce((total, bucket) => total + bucket[name], 0);
  $("tile-running").textContent = data.load.running;
  $("tile-waiting").textContent = data.load.waiting;
  $("tile-tokens").textContent = short(sum("tokens") / seconds);
  $("tile-texts").textContent = short(sum("texts") / seconds);
  $("tile-fill").textContent = `${short(100 * sum("tokens") / Math.max(1, sum("computed")))} %`;
  $("tile-kv").textContent = `${short(100 * data.load.kv)} %`;
  $("tile-switches").textContent = data.load.switches.toLocaleString("en");
}

// What only a decoder, or only an encoder, has.
function showTask(task) {
  for (const element of document.querySelectorAll("[data-task]")) {
    element.hidden = element.dataset.task !== task;
  }
}

function draw(data) {
  showTask(data.task);
  $("state").textContent = data.state;
  $("state").className = data.state;
  $("model").textContent = data.model;
  $("mesh").textContent = data.mesh;
  strip(data);
  bars("modes", data, ["base", "between", "shift"], 1 / data.bucket_seconds);
  $("drafts").hidden = !data.load.drafts;
  if (data.load.drafts) {
    const steps = (bucket) => Math.max(1, bucket.base + bucket.between + bucket.shift);
    const buckets = data.buckets.map((each) => ({ ...each, accepted: each.accepted / steps(each) }));
    bars("accepted", { ...data, buckets }, ["accepted"], 1);
    const line = ([name, { accepted, rejected }]) => `${name} ${accepted} of ${accepted + rejected}`;
    $("drafters").textContent = Object.entries(data.load.drafts).map(line).join(", ");
  }
  bars("batch", data, ["running", "waiting"], 1);
  bars("tokens", data, ["tokens"], 1 / data.bucket_seconds);
  bars("kv", data, ["kv"], 100, 100);
  requests(data);
  latency(data);
  tiles(data);
}

async function poll() {
  try {
    const response = await fetch("/ui/data", { headers: headers() });
    $("key-field").hidden = response.status !== 401 && !$("key").value;
    if (!response.ok) throw new Error((await response.json()).error.message);
    draw(await response.json());
  } catch (error) {
    $("state").textContent = error.message;
    $("state").className = "";
  }
  setTimeout(poll, POLL_MILLISECONDS);
}
poll();
