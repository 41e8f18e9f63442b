// Where one is: step and rank, micro step, direction, modules, each with a choice of what is beside it and how bad that is.

import { el } from "../dom.js";
import { stepsOf } from "./data/ranks.js";
import { MARKS } from "./scene.js";
import { ancestorsOf, childrenOf, KIND, nameOf, VERDICT } from "./data/skeleton.js";

/** @import { Graph, Member } from "./types.js" */

const MOST = 200;
const LEAST_ERROR = 1e-8;

/**
 * @param {HTMLElement} nav
 * @param {Graph} graph
 * @param {Member[]} members
 * @param {{shown: number, selected: number}} place
 * @param {{showRank: (place: number) => void, goTo: (node: number) => void}} go
 */
export function showLevels(nav, graph, members, { shown, selected }, { showRank, goTo }) {
  const path = [...ancestorsOf(graph, selected), selected].slice(1);
  const ranks = members.length > 1 ? [...stepLevel(members, shown, showRank), rankLevel(members, shown, showRank)] : [];
  const root = el("button", { type: "button", cls: "crumb", onclick: () => goTo(0) }, nameOf(graph, 0));
  const levels = [...ranks, root, ...path.map((node) => nodeLevel(graph, node, goTo))];
  nav.replaceChildren(...levels.flatMap((level, at) => (at ? [el("span", { "aria-hidden": "true" }, "›"), level] : [level])));
}

/**
 * @param {Member[]} members
 * @param {number} shown
 * @param {(place: number) => void} showRank
 */
function rankLevel(members, shown, showRank) {
  const options = members.map((one, place) => {
    const axes = one.axes ? ` (${one.axes})` : "";
    return el("option", { value: String(place), selected: place === shown }, `${MARKS[one.worst_verdict]} ${one.label}${axes}`.trim());
  });
  const choice = el("select", { "aria-label": "step and rank", onchange: () => showRank(Number(choice.value)) }, options);
  return choice;
}

/**
 * The steps as bars: the largest relative error of each on a logarithmic scale, its mark by shape and colour.
 * @param {Member[]} members
 * @param {number} shown
 * @param {(place: number) => void} showRank
 */
function stepLevel(members, shown, showRank) {
  const steps = stepsOf(members);
  if (steps.length < 2) return [];
  const bars = steps.map(({ step, place, worst, error }) => {
    const text = `${MARKS[worst]} step ${step ?? "unknown"}${Number.isNaN(error) ? "" : `: differs by ${error === Infinity ? "bits" : error.toPrecision(3)}`}`.trim();
    const bar = el("i", { cls: `v${worst}` });
    bar.style.height = `${Number.isNaN(error) ? 2 : Math.round(2 + 16 * Math.min(1, Math.max(0, 1 + Math.log10(error || LEAST_ERROR) / -Math.log10(LEAST_ERROR))))}px`;
    const isShown = step === members[shown].step;
    return el("button", { type: "button", title: text, "aria-label": text, "aria-current": isShown ? "step" : null, onclick: () => showRank(place) }, bar);
  });
  return [el("span", { cls: "spark", role: "group", "aria-label": "steps, with the largest relative error of each" }, bars)];
}

/**
 * One level as a choice of all nodes beside it, which is filled when somebody reaches for it.
 * @param {Graph} graph
 * @param {number} node
 * @param {(node: number) => void} goTo
 */
function nodeLevel(graph, node, goTo) {
  const choice = el("select", { "aria-label": levelName(graph, node), onchange: () => goTo(Number(choice.value)) }, optionOf(graph, node, node));
  const fill = () => {
    if (choice.options.length === 1) choice.replaceChildren(...besides(graph, node).map((one) => optionOf(graph, one, node)));
  };
  choice.addEventListener("pointerdown", fill);
  choice.addEventListener("focus", fill);
  return choice;
}

/**
 * @param {Graph} graph
 * @param {number} node
 */
function levelName(graph, node) {
  const names = { [KIND.microStep]: "micro step", [KIND.section]: "direction", [KIND.module]: "module", [KIND.parameter]: "parameter" };
  return names[graph.kinds[node]] ?? "call";
}

/**
 * What stands beside a node and the node; of very many those that are wrong, and the first.
 * @param {Graph} graph
 * @param {number} node
 */
function besides(graph, node) {
  const all = childrenOf(graph, graph.parents[node]);
  if (all.length <= MOST) return all;
  const wrong = all.filter((one) => graph.worst[one] > VERDICT.unmatched).slice(0, MOST);
  return [...new Set([...wrong, ...all.slice(0, MOST - wrong.length), node])].sort((a, b) => a - b);
}

/**
 * @param {Graph} graph
 * @param {number} node
 * @param {number} selected
 */
function optionOf(graph, node, selected) {
  let wrong = 0;
  for (let at = node; at < node + graph.sizes[node]; at++) if (graph.verdicts[at] >= VERDICT.error) wrong++;
  const count = wrong ? ` · ${wrong.toLocaleString("en")}` : "";
  return el("option", { value: String(node), selected: node === selected }, `${MARKS[graph.worst[node]]} ${nameOf(graph, node)}${count}`.trim());
}
