// The page of a ShiftJAX server: a chat, and what the engine does. No outside requests.

import { $, fetchData } from "./server.js";
import { adapters } from "./adapters.js";
import * as chart from "./charts.js";
import * as chat from "./chat.js";
import * as fleet from "./fleet.js";
import { short, whole } from "./draw.js";
import { curves, latency } from "./latency.js";
import { requests } from "./requests.js";
import { tellLoss, tellNow } from "./state.js";

const POLL_MILLISECONDS = { 60: 500, 600: 2500 }; // by the span that is shown
const RETRY_MILLISECONDS = 2000; // after no answer
const TILE_SECONDS = 5; // that rates are means of
let span = 60;
let timer = 0;
let answeredAt = performance.now();

// ------------------------------------------------------------------ the numbers

const of = (most) => (most == null ? "" : `of ${whole(most)}`);

function tiles(data) {
  const { load, columns } = data;
  const count = Math.ceil(TILE_SECONDS / data.seconds);
  const sum = (name, from = -count) => columns[name].slice(from).reduce((total, each) => total + each, 0);
  const set = (name, value, note = "") => {
    $(`tile-${name}`).textContent = value;
    $(`tile-${name}-of`).textContent = note;
  };
  const covered = count * data.seconds;
  const most = load.most_running ?? (data.fleet ? data.fleet.groups.length * load.most_group_running : null);
  set("running", whole(load.running), of(most));
  set("waiting", whole(load.waiting), of(load.most_waiting));
  set("tokens", short(sum("tokens") / covered), `mean of ${covered} s`);
  set("texts", short(sum("texts") / covered), `mean of ${covered} s`);
  set("fill", `${whole(100 * sum("tokens") / Math.max(1, sum("computed")))} %`, "of what is computed");
  const blocks = load.most_blocks;
  set("kv", `${whole(100 * load.kv)} %`, blocks ? `${whole(load.kv * blocks)} of ${whole(blocks)} blocks` : "of the blocks");
  const { ttft, tpot } = data.targets;
  $("goodput").hidden ||= ttft == null && tpot == null;
  const [ended, good] = [sum("ended", 0), sum("good", 0)];
  const rate = (count) => short(count / (columns.tokens.length * data.seconds));
  set("good", ended ? `${whole(100 * good / ended)} %` : "\u2013", ended ? `${rate(good)} of ${rate(ended)} requests/s` : "no request ended");
  const { targets = 0, ...others } = data.step_sizes?.reasons ?? {}; // steps by what decided their size
  const sized = Object.values(others).reduce((sum, num) => sum + num, targets);
  $("goodput").title = data.by_targets ? `Targets chose the size of ${whole(targets)} of ${whole(sized)} steps. The last one: ${data.by_targets}.` : "";
  // What the last step with prompts takes, and would; how uneven the load of experts is.
  $("steps").title = [data.step_sizes?.last, data.experts?.words].filter(Boolean).join(" ");
  set("switches", whole(load.switches), `${whole(sum("switches", 0))} in ${span === 60 ? "1 min" : "10 min"}`);
}

// What only a decoder, or only an encoder, has.
function showTask(task) {
  document.body.dataset.kind = task;
  for (const element of document.querySelectorAll("[data-task]")) {
    element.hidden = element.dataset.task !== task;
  }
}

// ------------------------------------------------------------------ polling

// Of a server that is not ready.
const SAID = { starting: "still starting", draining: "shutting down", stalled: "stuck", failed: "out of order", lost: "out of reach" };

function state(name, text) {
  $("state").textContent = text;
  $("state").className = name;
  document.body.dataset.state = name;
  $("text").placeholder = name === "ready" ? "Say something" : `The server is ${SAID[name]}`;
}

function draw(data) {
  state(data.state, data.state);
  tellNow(data);
  if (!data.model) return;
  showTask(data.model.task);
  $("model").textContent = data.model.name;
  $("mesh").textContent = data.model.mesh;
  fleet.strip(data);
  adapters(data);
  chart.charts(data);
  tiles(data);
  requests(data);
  latency(data);
  curves(data);
}

function lose(error) {
  state("lost", error instanceof TypeError ? "no answer" : "no data");
  tellLoss(error, (performance.now() - answeredAt) / 1000);
}

async function poll() {
  clearTimeout(timer);
  const data = await fetchData(span).catch(lose);
  clearTimeout(timer);
  const pause = data ? POLL_MILLISECONDS[span] : RETRY_MILLISECONDS;
  if (!document.hidden) timer = setTimeout(poll, pause); // a hidden page asks for nothing
  if (!data) return;
  answeredAt = performance.now();
  draw(data);
}

function show(seconds) {
  span = seconds;
  for (const each of $("spans").querySelectorAll("input")) each.checked = Number(each.value) === span;
  poll();
}

// ------------------------------------------------------------------ the drawer of the chat

function openChat(isOpen) {
  document.body.dataset.chat = isOpen ? "open" : "closed";
  $("chat-button").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) $("text").focus();
  else if ($("chat").contains(document.activeElement)) $("chat-button").focus();
  poll(); // charts have their sizes only now
}

const isChatOpen = () => document.body.dataset.chat === "open";

// ------------------------------------------------------------------ keys

const SHORTCUTS = {
  "/": () => openChat(true),
  h: () => show(span === 60 ? 600 : 60),
  "?": () => $("keys").open = !$("keys").open,
};

function press(event) {
  if (event.key === "Escape" && !chat.stop() && isChatOpen() && !event.target.closest("canvas")) openChat(false);
  const isTyping = event.target.matches("input, textarea, select");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !SHORTCUTS[event.key]) return;
  event.preventDefault();
  SHORTCUTS[event.key]();
}

chat.listen();
chart.listen();
fleet.listen();
document.addEventListener("keydown", press);
document.addEventListener("visibilitychange", () => document.hidden || poll());
window.addEventListener("resize", () => document.hidden || poll());
$("key").addEventListener("change", poll);
$("spans").addEventListener("change", (event) => show(Number(event.target.value)));
$("chat-button").addEventListener("click", () => openChat(!isChatOpen()));
$("chat-close").addEventListener("click", () => openChat(false));
openChat(false);
