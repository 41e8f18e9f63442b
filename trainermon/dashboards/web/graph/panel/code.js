// The lines of code that led to a call, as the dump has kept them.

import { el } from "../../dom.js";

/** @import { Graph, KeptCode } from "../types.js" */

const LIBRARY = /(^File |\/)(site|dist)-packages\/|\/lib\/python3/;

/**
 * The frames of a stack, innermost first; the first of the user's own is open.
 * @param {Graph} graph
 * @param {string[]} stack
 */
export function stackSection(graph, stack) {
  const own = stack.findIndex((frame) => !LIBRARY.test(frame));
  return el("section", {}, el("h3", {}, "Called in"), stack.map((frame, at) => frameBox(frame, graph.code[frame], at === Math.max(0, own))));
}

/**
 * @param {string} frame
 * @param {KeptCode | undefined} kept
 * @param {boolean} isOpen
 */
function frameBox(frame, kept, isOpen) {
  if (!kept) return el("p", { cls: "stack" }, frame);
  const [first, hit, lines] = kept;
  const rows = lines.map((line, at) => el("div", { cls: first + at === hit ? "hit" : "" }, el("i", {}, String(first + at)), line || " "));
  const box = el("details", { cls: "code" }, el("summary", {}, titleOf(frame)), el("pre", {}, rows));
  if (isOpen) box.setAttribute("open", "");
  return box;
}

/**
 * `model.py:118 in forward`, of `File /a/model.py, line 118, in forward, code`.
 * @param {string} frame
 */
function titleOf(frame) {
  const found = /^File (.+?), line (\d+), in ([^,:\n]+)/.exec(frame);
  return found ? `${found[1].slice(found[1].lastIndexOf("/") + 1)}:${found[2]} in ${found[3].trim()}` : frame;
}
