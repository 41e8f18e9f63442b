// The page of a graph: reads its data, shows what the address asks for, or where something began.

import { byId, setText } from "../dom.js";
import { GraphView } from "./graphview.js";
import { actionsOf, listenToKeys, showKeys } from "./keys.js";
import { unpack } from "./skeleton.js";
import { placeAt } from "./stepmap.js";

/** @import { Graph } from "./types.js" */

/**
 * The graph with this label; of a step's name the first of its ranks, those with a finding before the others. -1: none.
 * @param {Graph[]} graphs
 * @param {string | null} label
 */
function placeOf(graphs, label) {
  const exact = graphs.findIndex((one) => one.label === label);
  if (exact >= 0 || !label) return exact;
  const ofStep = (/** @type {Graph} */ one) => one.label.startsWith(`${label} `);
  const wrong = graphs.findIndex((one) => ofStep(one) && one.findings.length > 0);
  return wrong >= 0 ? wrong : graphs.findIndex(ofStep);
}

async function loadGraphs() {
  const text = byId("data").textContent ?? "";
  const letters = atob(text.trim());
  const packed = new Uint8Array(letters.length);
  for (let at = 0; at < packed.length; at++) packed[at] = letters.charCodeAt(at);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return unpack(await new Response(stream).arrayBuffer());
}

/** @param {Graph[]} graphs */
function start(graphs) {
  const asked = new URLSearchParams(location.hash.slice(1) || location.search);
  const place = placeOf(graphs, asked.get("of"));
  const view = new GraphView(graphs, place >= 0 ? place : graphs.findIndex((one) => one.isFirst));
  const actions = actionsOf(view);
  listenToKeys(actions);
  showKeys(byId("keys"), actions);
  listen(view);
  view.show(Number(asked.get("node")));
  document.body.dataset.ready = "true";
}

/** @param {GraphView} view */
function listen(view) {
  view.search.addEventListener("input", () => view.runSearch());
  view.search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") view.stepFinding(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") ((view.search.value = ""), view.runSearch(), byId("tree").focus());
  });
  byId("next").addEventListener("click", () => view.stepFinding(1));
  byId("previous").addEventListener("click", () => view.stepFinding(-1));
  byId("all").addEventListener("click", () => view.pane.fit(view.pane.boxes[0]));
  byId("show-help").addEventListener("click", () => view.help.showModal());
  view.map.addEventListener("click", (event) => {
    const { line, node } = placeAt(view.graphs, { x: event.offsetX, y: event.offsetY, width: view.map.clientWidth });
    if (line !== view.shown) view.showRank(line);
    view.goTo(node);
  });
  new ResizeObserver(() => view.paintMap()).observe(view.map);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.readPalette());
}

loadGraphs().then(start, (error) => setText(byId("sentence"), `This page cannot be shown: ${error.message}`));
