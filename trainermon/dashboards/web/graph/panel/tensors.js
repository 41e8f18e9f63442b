// The tensors of a call as tables: the values of both sides, and how far they are apart.

import { el } from "../../dom.js";

/** @import { DetailRow } from "../types.js" */

const HEAD = ["max", "min", "mean", "norm"];
const RESULTS = ["error", "warning"];

/**
 * @param {DetailRow[]} rows
 * @param {boolean} isTwofold
 */
export function tensorTable(rows, isTwofold) {
  const head = [...(isTwofold ? ["tensor", "differs"] : ["tensor"]), ...HEAD];
  return table(head, rows.flatMap((row) => tensorLines(row, isTwofold)));
}

/**
 * As wide as what is seen of the table, which can be scrolled.
 * @param {string} message
 */
const messageLine = (message) => el("tr", { cls: "message" }, el("td", { colspan: 7 }, el("p", {}, message)));

/**
 * How far the sides are apart: of each tensor the relative difference that it is judged by, and the target's statistics less
 * the golden ones; what is worst first.
 * @param {DetailRow[]} rows
 */
export function differenceTable(rows) {
  const rankOf = (/** @type {DetailRow} */ { result }) => (RESULTS.indexOf(result) + RESULTS.length + 1) % (RESULTS.length + 1);
  const sorted = [...rows].sort((one, other) => rankOf(one) - rankOf(other));
  const body = sorted.flatMap((row) => {
    const differences = HEAD.map((_, at) => el("td", { cls: "number" }, difference(row, at)));
    const differs = el("td", { cls: `number r-${row.result}` }, row.error === null ? "–" : shortNumber(row.error));
    const line = el("tr", { cls: `r-${row.result}` }, el("td", {}, row.place), el("td", {}, row.result || "–"), differs, ...differences);
    return row.message ? [line, messageLine(row.message)] : [line];
  });
  return table(["tensor", "verdict", "differs", ...HEAD.map((name) => `Δ ${name}`)], body);
}

/**
 * @param {DetailRow} row
 * @param {number} at
 */
function difference({ ours, golden }, at) {
  const [one, other] = [ours?.[at], golden?.[at]];
  if (typeof one === "number" && typeof other === "number") return shortNumber(one - other);
  return !ours ? "golden alone" : !golden ? "target alone" : one === other ? "–" : `${one ?? "–"} / ${other ?? "–"}`;
}

/**
 * @param {string[]} head
 * @param {HTMLElement[]} body
 */
const table = (head, body) =>
  el("div", { cls: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head.map((text) => el("th", {}, text)))), el("tbody", {}, body)));

/**
 * @param {DetailRow} row
 * @param {boolean} isTwofold
 */
function tensorLines(row, isTwofold) {
  const numbers = (/** @type {DetailRow["ours"]} */ side) => HEAD.map((_, at) => el("td", { cls: "number" }, side ? shortNumber(side[at]) : "–"));
  const differs = isTwofold ? [el("td", { cls: `number r-${row.result}`, title: row.message }, row.error === null ? "–" : shortNumber(row.error))] : [];
  const type = el("span", { cls: "dim" }, `${row.kind}${row.merged ? ` of ${row.merged}` : ""}`);
  const lines = [
    el("tr", { cls: "tensor" }, el("td", { colspan: HEAD.length + 2 }, row.place, " ", type)),
    el("tr", { cls: `r-${row.result}` }, el("td", { cls: "dim" }, isTwofold ? "target" : "", ...nonfinite(row.nonfinite)), ...differs, ...numbers(row.ours)),
  ];
  if (isTwofold) lines.push(el("tr", { cls: "golden" }, el("td", {}, "golden", ...nonfinite(row.golden_nonfinite)), el("td", {}, ""), ...numbers(row.golden)));
  if (row.message) lines.push(messageLine(row.message));
  return lines;
}

/** @param {string | undefined} counts */
const nonfinite = (counts) => (counts ? [el("div", { cls: "nonfinite" }, counts)] : []);

/** @param {number | string | null} value */
function shortNumber(value) {
  if (value === null) return "–";
  if (typeof value === "string") return value === "-Inf" ? "−Inf" : value;
  return Number(value.toPrecision(4)).toString().replace(/^-/, "−");
}
