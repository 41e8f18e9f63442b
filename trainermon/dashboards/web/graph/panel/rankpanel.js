// The ranks of the step at the selected node: those that are judged alike in one row.

import { el } from "../../dom.js";
import { nodeIn, ranksText } from "../data/ranks.js";
import { MARKS } from "../scene.js";

/** @import { GraphStore } from "../data/store.js" */
/** @import { Graph, Member, RankGroup } from "../types.js" */

const WORDS = ["not judged", "passes", "has no counterpart", "warning", "error", "began here or within"];

/**
 * Each row is filled when its rank is read.
 * @param {{graph: Graph, members: Member[], groups: RankGroup[], shown: number, store: GraphStore}} ranks
 * @param {number} node
 * @param {(place: number) => void} showRank
 */
export function rankTable({ graph, members, groups, shown, store }, node, showRank) {
  const rows = groups.map((group) => {
    const { member, places } = group;
    const choose = el("button", { type: "button", cls: "crumb", "aria-current": places.includes(shown) ? "true" : null, onclick: () => showRank(places[0]) }, ranksText(members, group));
    const axes = places.length === 1 ? member.axes : "";
    const [verdict, differs] = [el("td"), el("td", { cls: "number" })];
    void fill(verdict, differs, { graph, member, node, store });
    return el("tr", {},
      el("td", {}, choose, axes ? el("span", { cls: "dim" }, ` ${axes}`) : null), el("td", { cls: "number" }, String(places.length)), verdict, differs);
  });
  const head = ["rank", "alike", "verdict", "differs"].map((text) => el("th", {}, text));
  return el("div", { cls: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)));
}

/**
 * @param {HTMLElement} verdictCell
 * @param {HTMLElement} differsCell
 * @param {{graph: Graph, member: Member, node: number, store: GraphStore}} place
 */
async function fill(verdictCell, differsCell, { graph, member, node, store }) {
  const judged = await store.judge(member);
  const at = nodeIn(judged, graph, node);
  const verdict = judged.worst[at] ?? 0;
  verdictCell.className = `v${verdict}`;
  verdictCell.textContent = `${MARKS[verdict]} ${at < 0 ? "has no such call" : WORDS[verdict]}`.trim();
  const error = (await store.errors(member))[at] ?? NaN;
  differsCell.textContent = Number.isNaN(error) ? "–" : error === Infinity ? "bits" : error.toPrecision(3);
}
