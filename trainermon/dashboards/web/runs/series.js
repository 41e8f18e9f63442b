// The search for a series that all compared runs get a chart of.

import { getJson } from "../api.js";
import { el, paced } from "../dom.js";

/** @import { OfferedSeries } from "./types.js" */

const SEARCH_MS = 150;

/**
 * A field that lists the series whose names hold all words, each with its statistics.
 * @param {() => string[]} runs - keys of the compared runs
 * @param {(name: string) => void} onChoose - hears the name under which a curve can be read
 */
export function seriesSearch(runs, onChoose) {
  const found = el("div", { cls: "found", hidden: true });
  const input = el("input", { type: "search", placeholder: "Add any series: layer, kind…", "aria-label": "Add the chart of a series" });
  let asked = 0;
  const search = paced(async () => {
    const mine = ++asked;
    const path = `api/series?runs=${runs().map(encodeURIComponent).join(",")}&text=${encodeURIComponent(input.value)}`;
    const answer = /** @type {{series: OfferedSeries[], total: number}} */ (await getJson(path).catch(() => ({ series: [], total: 0 })));
    if (mine !== asked) return;
    const choices = answer.series.flatMap(({ kind, label, statistics }) => Object.entries(statistics).map(([statistic, name]) =>
      el("button", { type: "button", onclick: () => ((found.hidden = true), (input.value = ""), onChoose(name)) }, `${label} · ${statistic} · ${kind}`)));
    const more = answer.total > answer.series.length ? `${answer.total - answer.series.length} more: type more of the name.` : answer.total ? "" : "No series has these words.";
    found.replaceChildren(...choices, more ? el("p", { cls: "hint" }, more) : "");
    found.hidden = false;
  }, SEARCH_MS);
  input.addEventListener("input", search);
  input.addEventListener("focus", search);
  const field = el("span", {}, input, found);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") found.hidden = true;
  });
  addEventListener("pointerdown", (event) => {
    if (event.target instanceof Node && !field.contains(event.target)) found.hidden = true;
  });
  return field;
}

/**
 * What a curve is called, above its chart.
 * @param {string} name
 */
export function titleOf(name) {
  try {
    const [kind, series, slot, statistic] = JSON.parse(name);
    return { title: `${series}${slot ? `.${slot}` : ""}`, hint: `${statistic}, ${kind}` };
  } catch {
    return { title: name, hint: "" };
  }
}
