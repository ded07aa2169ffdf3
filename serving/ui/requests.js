// Requests, one row each: how long they waited, prefilled and decoded. Open ones come first.

import { $ } from "./server.js";
import { duration, many, short } from "./draw.js";

const ROWS = 16;

// Phases of a request as (name, from, to), from what is known of it now.
function phases(row, now) {
  const end = row.end ?? now;
  const begun = row.queue === null ? null : row.arrival + row.queue;
  const first = row.ttft === null ? null : row.arrival + row.ttft;
  const parts = [["waiting", row.arrival, begun ?? first ?? end]];
  if (begun !== null) parts.push(["prefill", begun, first ?? end]);
  if (first !== null) parts.push([row.preemptions ? "preempted" : "decode", first, end]);
  return parts;
}

function told(row, now) {
  const parts = phases(row, now);
  const states = { waiting: "waiting", prefill: "prefill", decode: "decoding", preempted: "decoding" };
  const ended = row.reason === "finished" ? "" : `, ${row.reason}`;
  const state = row.end === null ? `${states[parts.at(-1)[0]]}, ` : "";
  const preempted = row.preemptions ? `, ${row.preemptions}x preempted` : "";
  return [state, `${row.prompt_tokens} in, ${row.output_tokens} out${preempted}${ended}`];
}

function drawn(row, start, now) {
  const item = document.createElement("li");
  const name = document.createElement("span");
  name.textContent = row.id.slice(0, 8);
  const bar = document.createElement("div");
  const parts = phases(row, now);
  for (const [kind, from, to] of parts) {
    const part = document.createElement("i");
    part.className = row.end !== null && row.reason !== "finished" && kind === "waiting" && parts.length === 1 ? "failed" : kind;
    part.style.left = `${100 * (from - start) / (now - start)}%`;
    part.style.width = `${100 * (to - from) / (now - start)}%`;
    bar.append(part);
  }
  const text = document.createElement("small");
  const cached = document.createElement("em");
  cached.textContent = row.cached_tokens ? ` (${row.cached_tokens} cached)` : "";
  const [state, counts] = told(row, now);
  const doing = document.createElement("em");
  doing.textContent = state;
  text.append(doing, counts, cached);
  item.title = parts.map(([kind, from, to]) => `${kind} ${duration(to - from)}`).join(", ");
  item.append(name, bar, text);
  return item;
}

export function requests(data) {
  const list = $("requests");
  const open = data.open.slice(0, ROWS);
  const ended = open.length < ROWS ? data.requests.slice(open.length - ROWS).reverse() : [];
  const rows = [...open, ...ended];
  const start = Math.min(...rows.map((row) => row.arrival), data.now - 1);
  list.replaceChildren(...rows.map((row) => drawn(row, start, data.now)));
  list.dataset.rows = String(ended.length);
  $("open-count").textContent = data.num_open ? `${many(data.num_open, "request")} open` : "none open";
  $("requests-since").textContent = rows.length ? `from ${short(data.now - start)} s ago to now` : "No request has come yet.";
}
