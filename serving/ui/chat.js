// A chat with the model: streamed answers as markdown, stop, edit, retry, and what each one took.

import { $, chat } from "./server.js";
import { duration, many } from "./draw.js";
import { markdown } from "./markdown.js";
import { kindOf } from "./modes.js";

let turns = []; // { role, content, element ... }; those that follow one that is edited are dropped
let running = null; // the AbortController of the answer that comes

const make = (name, className, text = "") => {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
};

function button(text, label, action) {
  const made = make("button", "small", text);
  made.type = "button";
  made.setAttribute("aria-label", label);
  made.addEventListener("click", action);
  return made;
}

// ------------------------------------------------------------------ what is shown

// The list stays at its end for whoever looks there.
function keepingEnd(action) {
  const list = $("messages");
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  action();
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}

function add(role, content) {
  const turn = { role, content, reasoning: "", pieces: [], timeline: null };
  turn.element = make("article", `message ${role}`);
  turn.element.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  turn.body = make("div", "body");
  turn.foot = make("footer", "foot");
  turn.element.append(turn.body, turn.foot);
  keepingEnd(() => $("messages").append(turn.element));
  turns.push(turn);
  $("hello").hidden = true;
  return turn;
}

// The text of an answer, or of its tokens in the colours of the modes that made them.
function render(turn) {
  if (turn.role === "user") {
    turn.body.replaceChildren(turn.content);
    return;
  }
  const parts = [];
  if (turn.reasoning) {
    const thoughts = make("details", "thoughts");
    thoughts.open = turn.body.querySelector("details")?.open ?? false;
    thoughts.append(make("summary", "", "Reasoning"), ...markdown(turn.reasoning));
    parts.push(thoughts);
  }
  const runs = turn.timeline?.modes;
  const isColoured = $("coloured").checked && runs?.length;
  turn.body.classList.toggle("plain", Boolean(isColoured));
  parts.push(...(isColoured ? coloured(turn.pieces, runs) : markdown(turn.content)));
  turn.body.replaceChildren(...parts);
}

// Pieces are { text, count }, a token each as a rule; runs are [mode, tokens] in their order.
function coloured(pieces, runs) {
  const modes = runs.flatMap(([mode, count]) => Array(count).fill(mode));
  let place = 0;
  return pieces.map(({ text, count }) => {
    const mode = modes[Math.min(place, modes.length - 1)];
    place += count;
    const made = make("span", `token ${kindOf(mode)}`, text);
    made.title = mode;
    return made;
  });
}

const percent = (share) => `${100 * share}%`;

function bar(parts, label) {
  const made = make("div", "bar");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", label);
  const total = parts.reduce((sum, [, size]) => sum + size, 0) || 1;
  for (const [name, size] of parts) {
    const part = make("i", name);
    part.style.width = percent(size / total);
    made.append(part);
  }
  return made;
}

// Where the time of an answer went, and which modes made its tokens.
function timeline(turn, ended) {
  const found = turn.timeline;
  if (!found?.modes) return [make("p", "told", `${ended}${many(turn.pieces.length, "piece")} in ${duration(turn.seconds)}`)];
  const phases = [["waiting", found.queue_seconds ?? 0, "queued"], ["prefill", found.prefill_seconds ?? 0, "prefill"],
    ["decode", found.decode_seconds ?? 0, "decode"]];
  const counts = new Map();
  for (const [mode, count] of found.modes) counts.set(mode, (counts.get(mode) ?? 0) + count);
  const cached = found.cached_tokens ? `, ${found.cached_tokens} cached` : "";
  const sizes = found.prompt_tokens === undefined ? "" : ` (${many(found.prompt_tokens, "token")}${cached})`;
  const first = phases.map(([, size, name]) => `${name} ${duration(size)}${name === "prefill" ? sizes : ""}`).join(", ");
  const second = [...counts].map(([mode, count]) => `${count} ${mode}`).join(", ");
  return [
    bar(phases, `Phases: ${first}`), make("p", "told", `${ended}${first}`),
    bar(found.modes.map(([mode, count]) => [kindOf(mode), count]), `Tokens by mode: ${second}`),
    make("p", "told", `tokens by mode: ${second}`),
  ];
}

function finish(turn, ended) {
  const actions = make("div", "actions");
  actions.append(
    button("Retry", "Answer again", () => again(turn)),
    button("Copy", "Copy the answer", () => navigator.clipboard?.writeText(turn.content)),
  );
  turn.foot.replaceChildren(...timeline(turn, ended), actions);
}

function addUser(text) {
  const turn = add("user", text);
  turn.foot.append(button("Edit", "Edit this message and ask again", () => edit(turn)));
  render(turn);
}

// ------------------------------------------------------------------ asking

const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));

function request() {
  const system = $("system").value.trim();
  const messages = turns.map(({ role, content }) => ({ role, content }));
  return {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: number("temperature"),
    top_p: number("top-p"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true,
    timeline: true,
  };
}

function waits(turn, comment) {
  const found = /^waiting (\{.*\})$/.exec(comment);
  if (!found) return;
  const { position, of, expected_seconds: expected } = JSON.parse(found[1]);
  const about = expected == null ? "" : `, about ${duration(expected)}`;
  turn.foot.replaceChildren(make("p", "told", `waits at place ${position}${of ? ` of ${of}` : ""}${about}`));
}

function take(turn, event) {
  turn.timeline = event.timeline ?? turn.timeline;
  for (const { delta, token_ids: ids } of event.choices) {
    turn.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
    const text = delta.content ?? "";
    turn.content += text;
    if (text || ids?.length) turn.pieces.push({ text, count: ids?.length ?? 1 });
  }
}

// An answer to the turns so far. What goes wrong is said in its place.
async function answer() {
  const body = request();
  const turn = add("assistant", "");
  const started = performance.now();
  const controller = running = new AbortController();
  let problem = "";
  let frame = 0;
  setBusy(true);
  try {
    for await (const event of chat(body, controller.signal)) {
      if (event.comment !== undefined) waits(turn, event.comment);
      else take(turn, event);
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        keepingEnd(() => render(turn));
      });
    }
  } catch (error) {
    problem = error.name === "AbortError" ? "stopped; " : error.message;
  }
  cancelAnimationFrame(frame);
  if (!turns.includes(turn)) return setBusy(running === controller ? false : Boolean(running));
  turn.seconds = (performance.now() - started) / 1000;
  running = null;
  const isError = problem && problem !== "stopped; ";
  keepingEnd(() => {
    render(turn);
    finish(turn, isError ? "" : problem);
  });
  if (isError) failed(turn, problem);
  else if (!turn.content && !turn.reasoning && problem) drop(turn);
  $("heard").textContent = isError ? problem : turn.content; // read aloud once it is complete
  setBusy(false);
}

function failed(turn, message) {
  const error = make("div", "message error", message);
  error.setAttribute("role", "alert");
  if (!turn.content) {
    const question = turns[turns.indexOf(turn) - 1];
    $("text").value ||= question.content; // to be sent again
    drop(question);
  }
  keepingEnd(() => $("messages").append(error));
}

// Forget a turn and all that followed.
function drop(turn) {
  const place = turns.indexOf(turn);
  if (place < 0) return;
  for (const each of turns.splice(place)) each.element.remove();
  for (const error of $("messages").querySelectorAll(".error")) error.remove();
}

function again(turn) {
  if (running) return;
  drop(turn);
  answer();
}

function edit(turn) {
  if (running) return;
  const form = make("form", "edit");
  const text = document.createElement("textarea");
  text.value = turn.content;
  text.setAttribute("aria-label", "Edited message");
  const save = make("button", "small", "Send");
  const cancel = button("Cancel", "Leave the message as it was", () => {
    render(turn);
    turn.foot.hidden = false;
    turn.foot.querySelector("button").focus();
  });
  form.append(text, save, cancel);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!text.value.trim() || running) return;
    drop(turn);
    ask(text.value.trim());
  });
  text.addEventListener("keydown", (event) => sendsOnEnter(event, form));
  turn.body.replaceChildren(form);
  turn.foot.hidden = true;
  text.focus();
}

function ask(text) {
  for (const error of $("messages").querySelectorAll(".error")) error.remove();
  addUser(text);
  $("messages").scrollTop = $("messages").scrollHeight;
  answer();
}

function setBusy(busy) {
  $("send").disabled = busy;
  $("stop").disabled = !busy;
  $("messages").setAttribute("aria-busy", String(busy));
}

function sendsOnEnter(event, form) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
}

// Whether there was an answer to stop.
export function stop() {
  running?.abort();
  return Boolean(running);
}

export function listen() {
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("text").value.trim();
    if (!text || running) return;
    $("text").value = "";
    ask(text);
  });
  $("text").addEventListener("keydown", (event) => sendsOnEnter(event, $("form")));
  $("stop").addEventListener("click", stop);
  $("clear").addEventListener("click", () => {
    stop();
    running = null;
    turns = [];
    $("messages").replaceChildren();
    $("hello").hidden = false;
    setBusy(false);
  });
  $("coloured").addEventListener("change", () => turns.forEach((turn) => turn.element.querySelector("form") || render(turn)));
}
