// What is known of the selected node: its tensors on both sides, why it is judged so, and the lines that called it.

import { el } from "../../dom.js";
import { stackSection } from "./code.js";
import { askFor, canAsk, detailOf } from "./details.js";
import { notesSection } from "./notes.js";
import { rankTable } from "./rankpanel.js";
import { classOf, keyOf, KIND, nameOf, pathOf } from "../data/skeleton.js";
import { MARKS } from "../scene.js";

/** @import { GraphStore } from "../data/store.js" */
/** @import { DetailRow, Graph, Member, NodeDetail, RankGroup } from "../types.js" */

const WORDS = ["not judged", "passes", "has no counterpart", "differs or is not finite, because of what came before", "is wrong", "is where it began"];
const HEAD = ["max", "min", "mean", "norm"];

/** @typedef {{graph: Graph, members: Member[], shown: number, groups: RankGroup[], peers: {place: number, node: number}[], store: GraphStore}} Shown */
/** @typedef {{showRank: (place: number) => void, meet: (peer: {place: number, node: number}) => void, onnote: () => void}} Go */

const MOST_PEERS = 16;
const TABS = ["Tensors", "Ranks"];
let chosen = TABS[0];

/**
 * @param {HTMLElement} panel
 * @param {Shown} shown
 * @param {number} node
 * @param {Go} go
 */
export function showPanel(panel, shown, node, go) {
  const { graph, members, groups } = shown;
  const said = graph.findings.find((finding) => finding.node === node);
  const several = groups.length > 1 || (groups[0]?.places.length ?? 0) > 1;
  const body = several && chosen === "Ranks"
    ? [rankTable(shown, node, go.showRank)]
    : tensors(graph, node, detailOf(graph, node));
  const parts = [
    el("h2", {}, `${nameOf(graph, node)} `, el("span", { cls: "dim" }, classOf(graph, node))),
    el("p", { cls: `verdict v${graph.worst[node]}` }, `${MARKS[graph.worst[node]]} ${verdictText(graph, node)}`),
    said ? el("p", { cls: "said" }, `${said.message[0].toUpperCase()}${said.message.slice(1)}.`) : null,
    el("dl", {}, ...facts(graph, node, keyOf(graph, node))),
    ...(node === 0 ? graph.remarks.map((note) => el("p", { cls: "dim" }, `${note}.`)) : []),
    shown.peers.length ? jumps(members, shown.peers, go.meet) : null,
    several ? tabs(() => showPanel(panel, shown, node, go)) : null,
    ...body,
    notesSection(graph, node, go.onnote),
  ];
  panel.replaceChildren(...parts.filter((part) => part !== null));
  panel.dataset.node = `${graph.label} ${node}`;
  if (canAsk(graph, node)) void complete(panel, shown, node, go);
}

/**
 * @param {Graph} graph
 * @param {number} node
 * @param {NodeDetail | undefined} detail
 */
function tensors(graph, node, detail) {
  const rows = detail ? ownRows(graph, node, detail.rows) : [];
  return [
    rows.length ? tensorTable(rows, rows.some((row) => row.golden)) : el("p", { cls: "dim missing" }, emptyText(graph, node, Boolean(detail))),
    detail?.stack.length ? stackSection(graph, detail.stack) : null,
  ];
}

/**
 * The ranks that a collective met, each of which one can go to.
 * @param {Member[]} members
 * @param {{place: number, node: number}[]} peers
 * @param {Go["meet"]} meet
 */
function jumps(members, peers, meet) {
  const buttons = peers.slice(0, MOST_PEERS).map((peer) => el("button", { type: "button", cls: "crumb", onclick: () => meet(peer) }, members[peer.place].label));
  const rest = peers.length > MOST_PEERS ? ` and ${peers.length - MOST_PEERS} more` : "";
  return el("p", { cls: "jumps" }, el("span", { cls: "dim" }, "Meets"), buttons, rest);
}

/** @param {() => void} show */
function tabs(show) {
  const buttons = TABS.map((name) => el("button", {
    type: "button", role: "tab", "aria-selected": String(name === chosen), onclick: () => ((chosen = name), show()),
  }, name));
  return el("div", { cls: "tabs", role: "tablist" }, buttons);
}

/**
 * Shows the tensors as soon as the server has told them, if the node is still the selected one.
 * @param {HTMLElement} panel
 * @param {Shown} shown
 * @param {number} node
 * @param {Go} go
 */
async function complete(panel, shown, node, go) {
  const asked = panel.dataset.node;
  try {
    await askFor(shown.graph, node);
    if (panel.dataset.node === asked) showPanel(panel, shown, node, go);
  } catch (error) {
    const why = error instanceof Error ? error.message : String(error);
    if (panel.dataset.node === asked) panel.querySelector(".missing")?.replaceChildren(`Its tensors cannot be shown: ${why}`);
  }
}

/**
 * @param {Graph} graph
 * @param {number} node
 * @param {DetailRow[]} rows
 */
const ownRows = (graph, node, rows) =>
  graph.kinds[node] === KIND.parameter ? rows.filter((row) => row.place === `parameters.${nameOf(graph, node)}`) : rows;

/**
 * @param {Graph} graph
 * @param {number} node
 */
function verdictText(graph, node) {
  const [own, worst] = [graph.verdicts[node], graph.worst[node]];
  if (graph.sides[node]) return graph.sides[node] === 1 ? "is in the target alone" : "is in the golden dump alone";
  if (worst > own && worst === 5) return "something began within";
  return worst > own ? `${WORDS[worst]} (within)` : WORDS[own];
}

/**
 * @param {Graph} graph
 * @param {number} node
 * @param {string} key
 */
function facts(graph, node, key) {
  const error = graph.errors[node];
  /** @type {[string, string][]} */
  const found = [["path", pathOf(graph, node)]];
  if (key) found.push(["call", key]);
  if (graph.sizes[node] > 1) found.push(["within", `${(graph.sizes[node] - 1).toLocaleString("en")} nodes`]);
  if (!Number.isNaN(error)) found.push(["differs by", error === Infinity ? "bits" : error.toPrecision(3)]);
  return found.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]);
}

/**
 * @param {Graph} graph
 * @param {number} node
 * @param {boolean} hasDetail
 */
function emptyText(graph, node, hasDetail) {
  if (graph.kinds[node] < KIND.module) return "A group: select what is within it.";
  if (canAsk(graph, node)) return "Reading its tensors…";
  return hasDetail ? "No tensor was recorded." : "Its tensors are not in this file: write it again with --details all.";
}

/**
 * @param {DetailRow[]} rows
 * @param {boolean} isTwofold
 */
function tensorTable(rows, isTwofold) {
  const head = ["tensor", "type", ...HEAD, ...(isTwofold ? ["differs"] : [])];
  const body = rows.flatMap((row) => tensorLines(row, isTwofold));
  return el("div", { cls: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head.map((text) => el("th", {}, text)))), el("tbody", {}, body)));
}

/**
 * @param {DetailRow} row
 * @param {boolean} isTwofold
 */
function tensorLines(row, isTwofold) {
  const numbers = (/** @type {DetailRow["ours"]} */ side) => HEAD.map((_, at) => el("td", { cls: "number" }, side ? shortNumber(side[at]) : "–"));
  const differs = isTwofold ? [el("td", { cls: `number r-${row.result}`, title: row.message }, row.error === null ? "–" : shortNumber(row.error))] : [];
  const lines = [el("tr", { cls: `r-${row.result}` }, el("td", {}, row.place), el("td", {}, row.kind, row.merged ? el("span", { cls: "dim" }, ` of ${row.merged}`) : null), ...numbers(row.ours), ...differs)];
  if (isTwofold) lines.push(el("tr", { cls: "golden" }, el("td", {}, ""), el("td", {}, "golden"), ...numbers(row.golden), el("td", {}, "")));
  if (row.message) lines.push(el("tr", { cls: "message" }, el("td", { colspan: 7 }, row.message)));
  return lines;
}

/** @param {number | string | null} value */
function shortNumber(value) {
  if (value === null) return "–";
  return typeof value === "string" ? value : Number(value.toPrecision(4)).toString();
}
