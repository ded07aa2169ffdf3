// The strip on top: what the engine does now or, where it does nothing, what is the matter.

import { $ } from "./server.js";
import { duration, many, span } from "./draw.js";
import { tellOtherwise } from "./explain.js";
import { pictures, sentence } from "./modes.js";

const clock = (seconds) => new Date(Date.now() + 1000 * seconds).toLocaleTimeString("en-GB"); // so far from now
const SPOKEN_SECONDS = 5; // between sentences that are read aloud
let spokenAt = -Infinity;

// By the state of the server: kind, heading, text and reason.
const SENTENCES = {
  starting: ({ phases }) => ({
    head: "STARTING",
    text: phases.words,
    note: phases.end_seconds == null ? "" : `(ready in about ${span(phases.end_seconds)}, at ${clock(phases.end_seconds)}, if all is as last time)`,
    why: "Requests are refused, with this as the reason, until a step has run.",
  }),
  ready: sentence,
  draining: (data) => ({
    head: "SHUTTING DOWN",
    text: `${many(data.num_open, "request")} left`,
    why: "What runs may finish; new requests are refused.",
  }),
  stalled: (data) => ({
    kind: "failed",
    head: "STUCK",
    text: data.bound?.words ?? `no step has ended for ${span(data.stalled_seconds)}`,
    note: `(since ${clock(-data.stalled_seconds)})`,
    why: `${many(data.num_open, "request")} waiting for it. /health/progress says so, too.`,
  }),
  failed: () => ({
    kind: "failed",
    head: "FAILED",
    text: "the engine has stopped",
    why: "Every open request has got an error, new ones are refused, and the process ends. Its log has the cause.",
  }),
};

// What binds latency, and what to do about it. A sentence of STUCK has the words already.
function tellBound(bound) {
  const isTold = bound && bound.code !== "idle";
  $("binds").hidden = !isTold;
  if (!isTold) return;
  $("binds").dataset.code = bound.code;
  $("binds-words").textContent = bound.code === "stuck" ? "" : bound.words;
  $("binds-change").textContent = bound.change;
}

function tell(said) {
  $("mode").textContent = said.head ?? "";
  $("mode").className = said.kind ?? "";
  $("words").textContent = said.text;
  $("rule").textContent = said.note ?? "";
  $("because").textContent = said.why ?? "";
  if (performance.now() - spokenAt > SPOKEN_SECONDS * 1000 && $("spoken").dataset.head !== said.head) {
    spokenAt = performance.now();
    $("spoken").dataset.head = said.head;
    $("spoken").textContent = `${said.head ?? ""} ${said.text} ${said.note ?? ""}`;
  }
}

// The phases of a start that have ended, with their times, how far the one of now is, and those to
// come with what they took at the last start.
function tellStart(start) {
  const { done, total, phase, phase_seconds: seconds } = start?.now ?? {};
  $("started").hidden = !(total > 1);
  if (total > 1) $("started").value = done / total;
  $("phases").hidden = !start;
  const begun = start ? [...start.ended, ...(phase ? [[phase, seconds]] : [])] : [];
  const rows = [...begun, ...(start?.coming ?? [])];
  $("phases").replaceChildren(...rows.map(([name, took], index) => {
    const row = document.createElement("li");
    row.classList.toggle("now", index === start.ended.length && index < begun.length);
    row.classList.toggle("coming", index >= begun.length);
    const time = document.createElement("span");
    const left = index === start.ended.length ? start.now?.expected_seconds : null;
    const last = took == null ? "to come" : `to come, ${duration(took)} last time`;
    time.textContent = index >= begun.length ? last : `${duration(took)}${left >= 1 ? `, about ${span(left)} left` : ""}`;
    row.append(name, time);
    return row;
  }));
}

export function tellNow(data) {
  const said = SENTENCES[data.state](data);
  tellStart(data.phases);
  tell(said);
  tellOtherwise(data, said.label);
  tellBound(data.bound);
  pictures(data.model, data.fleet ? null : said.label);
}

// Instead of data there was an error, since so many seconds.
export function tellLoss(error, seconds) {
  tellBound(null);
  $("otherwise").hidden = true;
  const isGone = error instanceof TypeError; // else the server has said something
  tell({
    kind: "failed",
    head: isGone ? "NO ANSWER" : "NO DATA",
    text: isGone ? `for ${span(seconds)}` : error.message,
    why: "What is below is from before. This page goes on asking.",
  });
}
