// What a step would have taken in other modes, and what other groups would make all wait: predicted
// by the costs of the machine, where they are known.

import { $ } from "./server.js";
import { duration, many, span } from "./draw.js";

// How much more or less than what was chosen: "+43 %", "4 times".
function beside(seconds, chosen) {
  const ratio = seconds / chosen;
  if (ratio >= 2) return `${ratio.toPrecision(2)} times`;
  const more = Math.round(100 * (ratio - 1));
  return `${more < 0 ? "\u2212" : "+"}${Math.abs(more)} %`;
}

// Of a step that was kept: "SHIFT 5.7 ms, BASE 22.7 ms (4 times)"; "" where nothing is predicted.
function prices({ mode, predicted }) {
  const chosen = predicted[mode];
  const others = Object.entries(predicted).filter(([name]) => name !== mode);
  if (!chosen || !others.length) return "";
  const rows = others.map(([name, seconds]) => `${name.toUpperCase()} ${duration(seconds)} (${beside(seconds, chosen)})`);
  return `${mode.toUpperCase()} ${duration(chosen)}, ${rows.join(", ")}`;
}

// A step with what each mode takes for it.
function words(step, { fleet }) {
  const where = fleet && step.width > 1 ? ` on ${step.width} units` : "";
  return `${many(step.tokens, "token")}${where} took ${duration(step.seconds)}; predicted ${prices(step)}. Chosen: ${step.reason}.`;
}

// Of the steps of these modes that ended in a stretch of time the last that was kept; "": none was.
export function sampled(data, from, to, isWanted) {
  const steps = data.explained?.steps ?? [];
  const step = steps.findLast((each) => from <= each.at && each.at < to && isWanted(each.mode) && prices(each));
  return step ? `One of ${words(step, data)}` : "";
}

// Below the sentence on top: of the last step in this mode, or why nothing is told.
export function tellOtherwise(data, label) {
  const { explained, model } = data;
  const hasChoice = model?.choice?.modes.length > 1 || data.fleet;
  const step = explained?.steps.findLast((each) => (!label || each.mode === label) && prices(each));
  const text = step ? `A step of ${words(step, data)}` : (hasChoice && explained?.unknown) || "";
  $("otherwise").hidden = !text || data.state !== "ready";
  if ($("otherwise").textContent !== text) $("otherwise").textContent = text;
}

// ------------------------------------------------------------------ groups of a fleet

// "1+1+1+1+2" is "4 x 1 + 2".
function shown(arrangement) {
  const runs = [];
  for (const width of arrangement.split("+")) {
    if (runs.at(-1)?.width === width) runs.at(-1).count += 1;
    else runs.push({ width, count: 1 });
  }
  return runs.map(({ width, count }) => (count === 1 ? width : `${count} \u00d7 ${width}`)).join(" + ");
}

function column(told) {
  if (!told) return new Map();
  const each = (seconds) => duration(seconds / Math.max(1, told.num_sequences));
  const chosen = told.arrangements.find((row) => row.is_chosen);
  return new Map(told.arrangements.map((row) => {
    const more = row.is_chosen || !chosen.wait_seconds ? "" : ` (${beside(row.wait_seconds, chosen.wait_seconds)})`;
    return [row.arrangement, { text: `${each(row.wait_seconds)}${more}`, isChosen: row.is_chosen }];
  }));
}

function cell(text, isChosen, name = "td") {
  const made = document.createElement(name);
  made.textContent = text;
  made.classList.toggle("chosen", isChosen);
  return made;
}

let drawn = "";

// A table of arrangements: what each makes a sequence wait, now and as of the last change.
export function groups({ explained, now, fleet }) {
  const told = explained?.fleet;
  $("groups-otherwise").hidden = !told?.now;
  $("groups-unknown").textContent = fleet && explained && !told ? explained.unknown : "";
  if (!told?.now) return;
  const [current, before] = [told.now, told.last_change];
  const key = JSON.stringify([current.arrangements, before?.arrangements, Math.round(before?.seconds_ago ?? 0)]);
  if (key === drawn) return;
  drawn = key;
  const columns = [column(current), column(before)];
  const head = document.createElement("tr");
  const ago = before ? `at the last change, ${span(before.seconds_ago)} ago` : "";
  const sequences = (each) => ` (${many(each.num_sequences, "sequence")})`;
  head.append(cell("Groups \u00d7 units", false, "th"), cell(`now${sequences(current)}`, false, "th"));
  if (before) head.append(cell(ago + sequences(before), false, "th"));
  const rows = [...new Set(columns.flatMap((each) => [...each.keys()]))].map((arrangement) => {
    const row = document.createElement("tr");
    const isChosen = columns[0].get(arrangement)?.isChosen ?? false;
    row.append(cell(shown(arrangement), isChosen, "th"));
    for (const each of before ? columns : columns.slice(0, 1)) {
      const found = each.get(arrangement);
      row.append(cell(found?.text ?? "\u2013", found?.isChosen ?? false));
    }
    return row;
  });
  $("groups-head").replaceChildren(head);
  $("groups-rows").replaceChildren(...rows);
}
