// All that the page knows of a node, as JSON.

import { el } from "../../dom.js";
import { keyOf, pathOf, VERDICT } from "../data/skeleton.js";
import { detailOf } from "./details.js";

/** @import { Graph } from "../types.js" */

/**
 * @param {Graph} graph
 * @param {number} node
 */
export function nodeJson(graph, node) {
  const names = Object.keys(VERDICT);
  const error = graph.errors[node];
  return `${JSON.stringify({
    dump: graph.dump, golden: graph.golden_dump || null, label: graph.label, path: pathOf(graph, node), key: keyOf(graph, node) || null,
    verdict: names[graph.verdicts[node]], worst_within: names[graph.worst[node]], nodes: graph.sizes[node],
    relative_error: Number.isFinite(error) ? error : null,
    finding: graph.findings.find((one) => one.node === node)?.message ?? null, ...detailOf(graph, node),
  }, null, 1)}\n`;
}

/**
 * @param {Graph} graph
 * @param {number} node
 */
export function rawSection(graph, node) {
  const text = nodeJson(graph, node);
  const copy = () => void navigator.clipboard?.writeText(text);
  return el("section", { cls: "raw" }, el("button", { type: "button", cls: "crumb", onclick: copy }, "copy"), el("pre", { tabindex: 0 }, text));
}
