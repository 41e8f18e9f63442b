// What is known of the selected node: its tensors on both sides, why it is judged so, and the lines that called it.

import { el } from "../../dom.js";
import { lineSection, stackSection } from "./code.js";
import { askFor, canAsk, detailOf } from "./details.js";
import { matchLines, notesSection } from "./notes.js";
import { rankTable } from "./rankpanel.js";
import { rawSection } from "./raw.js";
import { differenceTable, tensorTable } from "./tensors.js";
import { classOf, keyOf, KIND, nameOf, pathOf } from "../data/skeleton.js";
import { MARKS } from "../scene.js";

/** @import { GraphStore } from "../data/store.js" */
/** @import { DetailRow, Graph, Member, RankGroup } from "../types.js" */

const WORDS = ["not judged", "passes", "has no counterpart", "differs or is not finite, because of what came before", "is wrong", "is where it began"];

/** @typedef {{graph: Graph, members: Member[], shown: number, groups: RankGroup[], peers: {place: number, node: number}[], store: GraphStore}} Shown */
/** @typedef {{showRank: (place: number) => void, meet: (peer: {place: number, node: number}) => void, onnote: () => void, ontab: () => void}} Go */

const MOST_PEERS = 16;
const TABS = ["Tensors", "Difference", "Ranks", "Code", "Raw"];
let [chosen] = TABS;

/** The tab that is chosen, if it is not the first. */
export const chosenTab = () => (chosen === TABS[0] ? undefined : chosen);

/** @param {string} [name] - else the first */
export function chooseTab(name = TABS[0]) {
  chosen = TABS.includes(name) ? name : TABS[0];
}

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
  const tabs = TABS.filter((name) => (name !== "Ranks" || several) && (name !== "Difference" || graph.golden));
  if (!tabs.includes(chosen)) chooseTab();
  const choose = (/** @type {string} */ name) => {
    chooseTab(name);
    go.ontab();
    showPanel(panel, shown, node, go);
    /** @type {HTMLElement | null} */ (panel.querySelector('[aria-selected="true"]'))?.focus();
  };
  const parts = [
    el("h2", {}, `${nameOf(graph, node)} `, el("span", { cls: "dim" }, classOf(graph, node))),
    el("p", { cls: `verdict v${graph.worst[node]}` }, `${MARKS[graph.worst[node]]} ${verdictText(graph, node)}`),
    said ? el("p", { cls: "said" }, `${said.message[0].toUpperCase()}${said.message.slice(1)}.`) : null,
    el("dl", {}, ...facts(graph, node, keyOf(graph, node))),
    ...(node === 0 ? graph.remarks.map((note) => el("p", { cls: "dim" }, `${note}.`)) : []),
    shown.peers.length ? jumps(members, shown.peers, go.meet) : null,
    tabList(tabs, choose),
    el("div", { role: "tabpanel", "aria-label": chosen }, ...body(shown, node, go, () => choose("Code"))),
    ...matchLines(graph, node),
  ];
  const place = `${graph.label} ${node}`;
  if (panel.dataset.node !== place) panel.replaceChildren(el("div"), notesSection(graph, node, go.onnote));
  panel.dataset.node = place; // what is being written, and what was told, outlasts a look at another tab
  panel.querySelector(":scope > div")?.replaceChildren(...parts.filter((part) => part !== null));
  if (canAsk(graph, node)) void complete(panel, shown, node, go);
}

/**
 * What the chosen tab shows.
 * @param {Shown} shown
 * @param {number} node
 * @param {Go} go
 * @param {() => void} showCode
 */
function body({ graph, ...shown }, node, go, showCode) {
  const detail = detailOf(graph, node);
  const missing = el("p", { cls: "dim missing" }, emptyText(graph, node, Boolean(detail)));
  if (chosen === "Ranks") return [rankTable({ graph, ...shown }, node, go.showRank)];
  if (chosen === "Raw") return [canAsk(graph, node) ? missing : null, rawSection(graph, node)];
  if (chosen === "Code") return [detail?.stack.length ? stackSection(graph, detail.stack) : detail ? el("p", { cls: "dim" }, "No stack was recorded.") : missing];
  const rows = detail ? ownRows(graph, node, detail.rows) : [];
  if (chosen === "Difference") return [rows.length ? differenceTable(rows) : missing];
  return [
    rows.length ? tensorTable(rows, rows.some((row) => row.golden)) : missing,
    detail?.stack.length ? lineSection(graph, detail.stack, showCode) : null,
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

/**
 * @param {string[]} names
 * @param {(name: string) => void} choose
 */
function tabList(names, choose) {
  const buttons = names.map((name) => el("button", {
    type: "button", role: "tab", "aria-selected": String(name === chosen), tabindex: name === chosen ? 0 : -1, onclick: () => choose(name),
  }, name));
  const list = el("div", { cls: "tabs", role: "tablist" }, buttons);
  list.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.stopPropagation();
    choose(names[(names.indexOf(chosen) + by + names.length) % names.length]);
  });
  return list;
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
  const found = node ? [["path", pathOf(graph, node)]] : [];
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
