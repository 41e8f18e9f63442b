// The names beside a heat map: every row where there is room, else the blocks they belong to, else every k-th block.

import { theme } from "../theme.js";

/** @import { Block } from "../types.js" */

const LINE = 12;
const EVERY = [1, 2, 5, 10, 20, 50, 100, 200, 500];

/**
 * "model.layers.3.mlp.fc.weight" belongs to "model.layers.3", "wte.weight" to "wte".
 * @param {string} name
 * @returns {{text: string, index: number | null}}
 */
function blockOf(name) {
  const parts = name.split(".");
  const numbered = parts.findIndex((part) => /^\d+$/.test(part));
  if (numbered > 0) return { text: parts.slice(0, numbered + 1).join("."), index: Number(parts[numbered]) };
  return { text: parts.length > 1 ? parts.slice(0, -1).join(".") : name, index: null };
}

/**
 * Neighbouring rows of one block: [{text, index, from, to}], `to` exclusive.
 * @param {string[]} names
 */
export function blocksOf(names) {
  /** @type {Block[]} */
  const blocks = [];
  names.forEach((name, row) => {
    const block = blockOf(name);
    const last = blocks[blocks.length - 1];
    if (last?.text === block.text) last.to = row + 1;
    else blocks.push({ ...block, from: row, to: row + 1 });
  });
  return blocks;
}

/**
 * Shorter forms of a name, best first: without what stands before the layer's number, without "weight", without what is
 * between number and end. These two tell a row from its neighbours.
 * @param {string} name
 */
function* shorter(name) {
  const parts = name.split(".");
  const numbered = parts.findIndex((part) => /^\d+$/.test(part));
  const place = Math.max(0, numbered);
  const isWeight = parts[parts.length - 1] === "weight" && place < parts.length - 2;
  for (const end of isWeight ? [parts.length, parts.length - 1] : [parts.length]) {
    for (const from of [0, place]) yield parts.slice(from, end).join(".");
  }
  const rest = parts.slice(place + 1, isWeight ? -1 : undefined);
  if (numbered < 0 || !rest.length) return;
  // "bias" alone tells of no module.
  const last = Math.max(0, rest.length - (rest[rest.length - 1] === "bias" ? 2 : 1));
  for (let from = 1; from <= last; from++) yield `${parts[place]}…${rest.slice(from).join(".")}`;
  const tail = rest.slice(last).join(".");
  for (let from = 1; from < tail.length; from++) yield `${parts[place]}…${tail.slice(from)}`;
}

/**
 * The name, shortened until it is at most so wide.
 * @param {CanvasRenderingContext2D} context
 * @param {string} name
 * @param {number} width
 */
export function fitText(context, name, width) {
  /** @param {string} text */
  const fits = (text) => context.measureText(text).width <= width;
  for (const text of shorter(name)) if (fits(text)) return text;
  let [lo, hi] = [0, name.length];
  while (lo < hi) {
    const middle = (lo + hi) >> 1;
    if (fits(`…${name.slice(middle)}`)) hi = middle;
    else lo = middle + 1;
  }
  return `…${name.slice(lo)}`;
}

/**
 * @param {string[]} names
 * @param {Block[]} blocks
 * @param {number} rowHeight
 */
function labels(names, blocks, rowHeight) {
  if (rowHeight >= LINE - 1) return names.map((text, row) => ({ text, at: row + 0.5 }));
  const numbered = blocks.filter(({ index }) => index !== null);
  const blockHeight = numbered.length ? (rowHeight * numbered.reduce((sum, { from, to }) => sum + to - from, 0)) / numbered.length : LINE;
  const every = EVERY.find((k) => k * blockHeight >= LINE) ?? 1000;
  return blocks
    .filter(({ index }) => index === null || index % every === 0)
    .map(({ text, from, to }) => ({ text, at: (from + to) / 2 }));
}

/**
 * Paints the labels right-aligned at `right`; one that would touch its neighbour is left out, never the first one.
 * @param {CanvasRenderingContext2D} context
 * @param {string[]} names
 * @param {Block[]} blocks
 * @param {{right: number, width: number, height: number}} place
 */
export function paintLabels(context, names, blocks, { right, width, height }) {
  const rowHeight = height / names.length;
  context.textAlign = "right";
  context.fillStyle = theme.muted;
  let last = -Infinity;
  for (const { text, at } of labels(names, blocks, rowHeight)) {
    const y = Math.min(height - 5, Math.max(6, at * rowHeight));
    if (y - last < LINE - 1) continue;
    context.fillText(fitText(context, text, width), right, y);
    last = y;
  }
}
