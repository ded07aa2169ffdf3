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
