// The lines of code that led to a call, as the dump has kept them.

import { el } from "../../dom.js";

/** @import { Graph, KeptCode } from "../types.js" */

const TITLE = /^File (.+?), line (\d+), in ([^,:\n]+)/;
const LIBRARY = /(^File |\/)(site|dist)-packages\/|\/lib\/python3/;

/**
 * The frames of a stack, innermost first. The innermost and the first of the user's own are open; of three or more
 * between them it is said how many there are.
 * @param {Graph} graph
 * @param {string[]} stack
 */
export function stackSection(graph, stack) {
  const own = Math.max(0, stack.findIndex((frame) => !LIBRARY.test(frame)));
  const boxes = stack.map((frame, at) => frameBox(frame, graph.code[frame], at === 0 || at === own));
  const between = boxes.slice(1, own);
  const shown = between.length < 3 ? between : [el("details", { cls: "between" }, el("summary", {}, `${between.length} more of libraries`), between)];
  return el("section", {}, el("h3", {}, "Called in"), boxes[0], shown, boxes.slice(Math.max(1, own)));
}

/**
 * The user's own line that made the call, which leads to all of them.
 * @param {Graph} graph
 * @param {string[]} stack - innermost first
 * @param {() => void} showAll
 */
export function lineSection(graph, stack, showAll) {
  const frame = stack.find((one) => !LIBRARY.test(one)) ?? stack[0];
  const kept = graph.code[frame];
  const text = kept ? kept[2][kept[1] - kept[0]] : frame.replace(TITLE, "").replace(/^, */, "");
  return el("section", {}, el("h3", {}, "Called in"),
    el("button", { type: "button", cls: "crumb line", onclick: showAll }, titleOf(frame)), el("p", { cls: "stack" }, text.trim()));
}

/**
 * @param {string} frame
 * @param {KeptCode | undefined} kept
 * @param {boolean} isOpen
 */
function frameBox(frame, kept, isOpen) {
  if (!kept) return el("p", { cls: LIBRARY.test(frame) ? "stack dim" : "stack" }, frame);
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
  const found = TITLE.exec(frame);
  return found ? `${found[1].slice(found[1].lastIndexOf("/") + 1)}:${found[2]} in ${found[3].trim()}` : frame;
}
