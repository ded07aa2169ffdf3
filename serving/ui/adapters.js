// Adapters: which ones devices hold, and the sequences that have them or wait for them.

import { $ } from "./server.js";
import { whole } from "./draw.js";

const rowOf = ({ name, in_slot: inSlot, running, waiting }) => {
  const row = document.createElement("li");
  const words = [inSlot ? "on devices" : "in host memory"];
  if (running) words.push(`${whole(running)} running`);
  if (waiting) words.push(`${whole(waiting)} waiting`);
  const title = document.createElement("b");
  title.textContent = name;
  row.append(title, ` ${words.join(", ")}`);
  return row;
};

let shown = ""; // what the list says: it is made anew when that changes

export function adapters({ adapters: told }) {
  $("adapters").hidden = !told;
  if (!told) return;
  $("adapters-of").textContent = `${whole(told.num_loaded)} loaded, ${whole(told.num_in_slots)} of ${whole(told.num_slots)} slots filled`;
  const text = JSON.stringify(told.rows);
  if (text === shown) return;
  shown = text;
  $("adapters-list").replaceChildren(...told.rows.map(rowOf));
}
