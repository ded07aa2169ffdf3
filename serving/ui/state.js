// The strip on top: what the engine does now or, where it does nothing, what is the matter.

import { $ } from "./server.js";
import { duration, many, span } from "./draw.js";
import { pictures, sentence } from "./modes.js";

const SPOKEN_SECONDS = 5; // between sentences that are read aloud
let spokenAt = -Infinity;

// By the state of the server: kind, heading, text and reason.
const SENTENCES = {
  starting: ({ phases }) => ({ head: "STARTING", text: phases.words, why: "Requests are refused, with this as the reason, until a step has run." }),
  ready: sentence,
  draining: (data) => ({
    head: "SHUTTING DOWN",
    text: `${many(data.num_open, "request")} left`,
    why: "What runs may finish; new requests are refused.",
  }),
  stalled: (data) => ({
    kind: "failed",
    head: "STUCK",
    text: `no step has ended for ${span(data.stalled_seconds)}`,
    why: `${many(data.num_open, "request")} waiting for it. /health/progress says so, too.`,
  }),
  failed: () => ({
    kind: "failed",
    head: "FAILED",
    text: "the engine has stopped",
    why: "Every open request has got an error, new ones are refused, and the process ends. Its log has the cause.",
  }),
};

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

// The phases of a start that have ended, with their times, and how far the one of now is.
function tellStart(start) {
  const { done, total, phase, phase_seconds: seconds } = start?.now ?? {};
  $("started").hidden = !(total > 1);
  if (total > 1) $("started").value = done / total;
  $("phases").hidden = !start;
  const rows = start ? [...start.ended, ...(phase ? [[phase, seconds]] : [])] : [];
  $("phases").replaceChildren(...rows.map(([name, took], index) => {
    const row = document.createElement("li");
    row.classList.toggle("now", index === start.ended.length);
    const time = document.createElement("span");
    time.textContent = duration(took);
    row.append(name, time);
    return row;
  }));
}

export function tellNow(data) {
  const said = SENTENCES[data.state](data);
  tellStart(data.phases);
  tell(said);
  pictures(data.model, data.fleet ? null : said.label);
}

// Instead of data there was an error, since so many seconds.
export function tellLoss(error, seconds) {
  const isGone = error instanceof TypeError; // else the server has said something
  tell({
    kind: "failed",
    head: isGone ? "NO ANSWER" : "NO DATA",
    text: isGone ? `for ${span(seconds)}` : error.message,
    why: "What is below is from before. This page goes on asking.",
  });
}
