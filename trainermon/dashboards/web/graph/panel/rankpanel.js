// The ranks of the step at the selected node: those that are judged alike in one row.

import { el } from "../../dom.js";
import { nodeIn, ranksText } from "../ranks.js";
import { MARKS } from "../scene.js";

/** @import { Graph, RankGroup } from "../types.js" */

const WORDS = ["not judged", "passes", "has no counterpart", "warning", "error", "began here or within"];

/**
 * @param {Graph[]} graphs
 * @param {RankGroup[]} groups
 * @param {{node: number, shown: number}} place
 * @param {(place: number) => void} showRank
 */
export function rankTable(graphs, groups, { node, shown }, showRank) {
  const rows = groups.map((group) => {
    const { graph, places } = group;
    const at = nodeIn(graph, graphs[shown], node);
    const error = graph.errors[at] ?? NaN;
    const verdict = graph.worst[at] ?? 0;
    const word = at < 0 ? "has no such call" : WORDS[verdict];
    const choose = el("button", { type: "button", cls: "crumb", "aria-current": places.includes(shown) ? "true" : null, onclick: () => showRank(places[0]) }, ranksText(graphs, group));
    const axes = places.length === 1 ? graph.axes : "";
    return el("tr", {},
      el("td", {}, choose, axes ? el("span", { cls: "dim" }, ` ${axes}`) : null), el("td", { cls: "number" }, String(places.length)),
      el("td", { cls: `v${verdict}` }, `${MARKS[verdict]} ${word}`.trim()),
      el("td", { cls: "number" }, Number.isNaN(error) ? "–" : error === Infinity ? "bits" : error.toPrecision(3)));
  });
  const head = ["rank", "alike", "verdict", "differs"].map((text) => el("th", {}, text));
  return el("div", { cls: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)));
}
