// Canvases: sizes, axes, colours, numbers for people.

import { $ } from "./server.js";

export const LEFT = 40; // pixels for the labels of an axis
export const BOTTOM = 17;
export const TOP = 8;

const style = getComputedStyle(document.documentElement);
export const colour = (name) => style.getPropertyValue(`--${name}`);
export const short = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });
export const whole = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });
export const span = (seconds) => seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`;
export const duration = (seconds) => seconds < 1 ? `${short(seconds * 1000)} ms` : `${short(seconds)} s`;
export const many = (count, noun) => `${whole(count)} ${noun}${Math.round(count) === 1 ? "" : "s"}`;

export const onPixel = (x) => Math.round(x * (window.devicePixelRatio || 1)) / (window.devicePixelRatio || 1);

export function prepare(id) {
  const canvas = $(id);
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = "11px system-ui, sans-serif";
  return { canvas, context, width, height, bottom: height - BOTTOM };
}

// The least of 1, 2, 5, 10, 20 ... that is not below `value`.
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= value * 0.999);
}

// Lines at values of the vertical axis; `y` gives their places.
export function levels({ context, width }, values, y, shown = short) {
  context.textAlign = "right";
  for (const value of values) {
    context.strokeStyle = colour("line");
    context.fillStyle = colour("soft");
    context.beginPath();
    context.moveTo(LEFT, Math.round(y(value)) + 0.5);
    context.lineTo(width, Math.round(y(value)) + 0.5);
    context.stroke();
    const text = value >= 10_000 ? `${short(value / 1000)}k` : shown(value); // there is room for five
    context.fillText(text, LEFT - 6, y(value) + 4);
  }
}

// Labels of the horizontal axis: how long ago.
export function times({ context, width, height }, seconds) {
  context.fillStyle = colour("soft");
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const ago = seconds * share;
    context.textAlign = share === 0 ? "right" : share === 1 ? "left" : "center";
    const text = seconds > 90 ? `-${short(ago / 60)} min` : `-${short(ago)} s`;
    context.fillText(share ? text : "now", width - share * (width - LEFT), height - 3);
  }
}

// A dashed line with words at its left end, or at its right one.
export function rule({ context, width }, y, text, isRight = false, name = "ink") {
  context.save();
  context.strokeStyle = context.fillStyle = colour(name);
  context.lineWidth = 1;
  context.setLineDash([5, 4]);
  context.beginPath();
  context.moveTo(LEFT, Math.round(y) + 0.5);
  context.lineTo(width, Math.round(y) + 0.5);
  context.stroke();
  context.textAlign = "left";
  const room = context.measureText(text).width;
  context.globalAlpha = 0.85;
  context.fillStyle = colour("card");
  const base = y < 18 ? y + 13 : y - 4; // above the line, if there is room
  const left = isRight ? width - room - 8 : LEFT + 8;
  context.fillRect(left - 3, base - 10, room + 6, 13);
  context.globalAlpha = 1;
  context.fillStyle = colour(name);
  context.fillText(text, left, base);
  context.restore();
}

// Words for those who do not see a chart. They change at most every few seconds.
const described = new Map();
export function describe(canvas, text) {
  const last = described.get(canvas.id) ?? -Infinity;
  if (performance.now() - last < 5000) return;
  described.set(canvas.id, performance.now());
  canvas.setAttribute("aria-label", text);
}
