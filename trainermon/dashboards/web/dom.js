// Elements are made here and nowhere else. Text only ever enters the page as a text node, because layer names, run ids
// and messages come from the training process and are not trusted.

/** @import { Content, Option, Props } from "./types.js" */

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Props} [props] - attributes; `cls` is the class, and a function listens to the event of its name
 * @param {...Content} children
 */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else node.setAttribute(name === "cls" ? "class" : name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** @param {string} id */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element #${id}`);
  return found;
}

/**
 * @param {Node} node
 * @param {string} text
 */
export function setText(node, text) {
  // Writing equal text would still invalidate layout and restart a screen reader's announcement.
  if (node.textContent !== text) node.textContent = text;
}

/**
 * A labelled select; keyboard and screen readers come with the native element.
 * @param {string} label
 * @param {Option[]} options
 * @param {string | undefined} value
 * @param {(value: string) => void} onchange
 */
export function select(label, options, value, onchange) {
  const choices = options.map(([key, text]) => el("option", { value: key, selected: key === value }, text));
  const input = el("select", { "aria-label": label, onchange: () => onchange(input.value) }, choices);
  return input;
}

/**
 * Two or three exclusive choices shown side by side.
 * @param {string} label
 * @param {Option[]} options
 * @param {string} value
 * @param {(value: string) => void} onchange
 */
export function segmented(label, options, value, onchange) {
  const group = el("div", { cls: "segmented", role: "group", "aria-label": label });
  /** @param {string} chosen */
  const mark = (chosen) => {
    for (const button of group.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.value === chosen));
  };
  for (const [key, text] of options) {
    const choose = () => (mark(key), onchange(key));
    group.append(el("button", { type: "button", value: key, onclick: choose }, text));
  }
  mark(value);
  return group;
}

/**
 * Sharp on every display: the bitmap has device pixels, the drawing code thinks in CSS pixels.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 */
export function fitCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [deviceWidth, deviceHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== deviceWidth || canvas.height !== deviceHeight) {
    canvas.width = deviceWidth;
    canvas.height = deviceHeight;
  }
  const context = canvas.getContext("2d");
  if (!context) throw new Error("this browser draws no canvas");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/**
 * Runs `work` soon after a call, but never more often than every `intervalMs`.
 * @param {() => void} work
 * @param {number} intervalMs
 */
export function paced(work, intervalMs) {
  let timer = 0;
  let last = -Infinity;
  const run = () => {
    timer = 0;
    last = performance.now();
    work();
  };
  return () => {
    timer ||= setTimeout(run, Math.max(0, last + intervalMs - performance.now()));
  };
}

/**
 * Runs `work` at most once per frame however often the returned function is called.
 * @param {() => void} work
 */
export function perFrame(work) {
  let pending = 0;
  return () => {
    pending ||= requestAnimationFrame(() => {
      pending = 0;
      work();
    });
  };
}
