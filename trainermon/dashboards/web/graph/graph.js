// The page of a graph: one sentence, the whole step as a strip, the boxes, and what is known of the selected one.

import { byId, el, fitCanvas, perFrame, select as selectOf, setText } from "../dom.js";
import { listenToKeys } from "./keys.js";
import { GraphPane } from "./pane.js";
import { showPanel } from "./panel.js";
import { findNodes } from "./search.js";
import { shapesOf } from "./scene.js";
import { childrenOf, nameOf, unpack, VERDICT, worstWithin } from "./skeleton.js";
import { drawMap, mapHeights, placeAt } from "./stepmap.js";
import { asSvg } from "./svg.js";

/** @import { Graph } from "./types.js" */

const NAMES = ["page", "panel", "plot", "ink", "muted", "faint", "grid", "edge", "accent", "accent-2", "good-soft", "info", "info-soft", "warning", "critical", "fatal"];
const PAN = 60;

/** @returns {Record<string, string>} */
function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const colours = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  return { ...colours, font: style.getPropertyValue("--font").trim() };
}

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
  const packed = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return unpack(await new Response(stream).arrayBuffer());
}

/** @param {Graph[]} graphs */
function start(graphs) {
  let palette = readPalette();
  let shown = Math.max(0, graphs.findIndex((one) => one.findings.length));
  let graph = graphs[shown];
  let selected = 0;
  let finding = -1;
  /** @type {number[]} */
  let hits = [];
  const map = /** @type {HTMLCanvasElement} */ (byId("map"));
  const search = /** @type {HTMLInputElement} */ (byId("search"));
  const help = /** @type {HTMLDialogElement} */ (byId("help"));
  const pane = new GraphPane(/** @type {HTMLCanvasElement} */ (byId("graph")), graph, () => palette, (node) => select(node));
  map.style.height = `${mapHeights(graphs.length).height}px`;
  const paintMap = perFrame(() => {
    const [width, height] = [map.clientWidth, map.clientHeight];
    drawMap(fitCanvas(map, width, height), graphs, { width, height, shown, selected, palette });
  });

  /**
   * Shows the graph of another rank or step, at the same node if it is built alike.
   * @param {number} place
   */
  function showRank(place) {
    const before = graph;
    shown = (place + graphs.length) % graphs.length;
    graph = graphs[shown];
    finding = -1;
    search.value = "";
    hits = [];
    pane.hits = new Set();
    pane.show(graph);
    describe();
    goTo(before.skeleton === graph.skeleton ? selected : graph.findings[0]?.node ?? 0);
  }

  function describe() {
    setText(byId("sentence"), graph.sentence);
    byId("top").dataset.tone = graph.findings.length ? "bad" : graph.worst[0] > VERDICT.unmatched ? "warn" : "good";
    const facts = [nameOf(graph, 0), graph.label, `${graph.count.toLocaleString("en")} nodes`, graph.golden && `against ${graph.golden}`];
    setText(byId("facts"), facts.filter(Boolean).join(" · "));
    setText(byId("finding"), findingsText());
    byId("steps").hidden = !graph.findings.length;
    ranks.value = String(shown);
  }

  /** @param {number} node */
  function select(node) {
    selected = pane.selected = node;
    showPanel(byId("panel"), graph, node, goTo);
    setText(byId("status"), `${nameOf(graph, node)}, ${byId("panel").querySelector(".verdict")?.textContent ?? ""}`);
    history.replaceState(null, "", graphs.length > 1 ? `#of=${encodeURIComponent(graph.label)}&node=${node}` : `#node=${node}`);
    pane.repaint();
    paintMap();
  }

  /** @param {number} node */
  function goTo(node) {
    pane.reveal(node);
    select(node);
    pane.center(node);
  }

  /** @param {number} step */
  function stepFinding(step) {
    const places = hits.length ? hits : graph.findings.map((one) => one.node);
    if (!places.length) return;
    finding = (finding + step + places.length) % places.length;
    setText(byId("finding"), `${finding + 1} of ${places.length}`);
    if (!hits.length) pane.open.add(places[finding]);
    goTo(places[finding]);
  }

  /** @param {number} step */
  function stepSibling(step) {
    const parent = graph.parents[selected];
    if (parent < 0) return;
    const siblings = childrenOf(graph, parent);
    const next = siblings[siblings.indexOf(selected) + step];
    if (next !== undefined) goTo(next);
  }

  function runSearch() {
    hits = findNodes(graph, search.value);
    pane.hits = new Set(hits.map((node) => pane.boxOf(node).node));
    finding = -1;
    setText(byId("finding"), search.value ? `${hits.length.toLocaleString("en")} found` : findingsText());
    pane.repaint();
  }

  const findingsText = () => (graph.findings.length ? `${graph.findings.length} finding${graph.findings.length > 1 ? "s" : ""}` : "");

  function save() {
    const area = pane.boxes[0];
    const shapes = shapesOf(graph, pane.boxes, pane.wires, { selected, palette, hits: pane.hits });
    const blob = new Blob([asSvg(shapes, area, { font: palette.font, background: palette.page })], { type: "image/svg+xml" });
    const link = el("a", { href: URL.createObjectURL(blob), download: "graph.svg" });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  const actions = [
    { keys: ["n"], text: "next finding, or hit of the search", run: () => stepFinding(1) },
    { keys: ["p"], text: "previous finding, or hit", run: () => stepFinding(-1) },
    { keys: ["o"], text: "to the origin: the first finding", run: () => ((finding = -1), stepFinding(1)) },
    { keys: ["ArrowDown"], text: "next beside it", run: () => stepSibling(1) },
    { keys: ["ArrowUp"], text: "previous beside it", run: () => stepSibling(-1) },
    { keys: ["ArrowLeft"], text: "what it is in", run: () => graph.parents[selected] >= 0 && goTo(graph.parents[selected]) },
    { keys: ["ArrowRight"], text: "the first within it", run: () => graph.sizes[selected] > 1 && goTo(selected + 1) },
    { keys: ["Enter"], text: "unfold, fold", run: () => pane.toggle(selected) },
    { keys: ["Shift+Enter"], text: "to the worst within", run: () => goTo(worstWithin(graph, selected)) },
    { keys: [","], text: "the rank before", run: () => showRank(shown - 1) },
    { keys: ["."], text: "the next rank", run: () => showRank(shown + 1) },
    { keys: ["/"], text: "search", run: () => search.focus() },
    { keys: ["0"], text: "show all", run: () => pane.fit(pane.boxes[0]) },
    { keys: ["z"], text: "fit the selection", run: () => pane.fit(pane.boxOf(selected)) },
    { keys: ["+", "="], text: "closer", run: () => pane.zoom(1.25) },
    { keys: ["-"], text: "further away", run: () => pane.zoom(0.8) },
    { keys: ["w"], text: "move up", run: () => pane.pan(0, -PAN) },
    { keys: ["s"], text: "move down", run: () => pane.pan(0, PAN) },
    { keys: ["a"], text: "move left", run: () => pane.pan(-PAN, 0) },
    { keys: ["d"], text: "move right", run: () => pane.pan(PAN, 0) },
    { keys: ["e"], text: "save as SVG", run: save },
    { keys: ["c"], text: "copy the address of the selection", run: () => void navigator.clipboard?.writeText(location.href) },
    { keys: ["?"], text: "this help", run: () => help.showModal() },
  ];
  listenToKeys(actions);
  byId("keys").replaceChildren(...actions.flatMap(({ keys, text }) => [el("dt", {}, keys.map((key) => el("kbd", {}, key))), el("dd", {}, text)]));

  search.addEventListener("input", runSearch);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") stepFinding(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") ((search.value = ""), runSearch(), search.blur());
  });
  byId("next").addEventListener("click", () => stepFinding(1));
  byId("previous").addEventListener("click", () => stepFinding(-1));
  byId("all").addEventListener("click", () => pane.fit(pane.boxes[0]));
  byId("show-help").addEventListener("click", () => help.showModal());
  map.addEventListener("click", (event) => {
    const { line, node } = placeAt(graphs, { x: event.offsetX, y: event.offsetY, width: map.clientWidth });
    if (line !== shown) showRank(line);
    goTo(node);
  });
  new ResizeObserver(paintMap).observe(map);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => ((palette = readPalette()), pane.repaint(), paintMap()));

  const options = graphs.map((one, place) => [String(place), `${one.findings.length ? "▲ " : ""}${one.label}`]);
  const ranks = selectOf("step and rank", options, String(shown), (value) => showRank(Number(value)));
  ranks.hidden = graphs.length === 1;
  byId("ranks").replaceChildren(ranks);
  const asked = new URLSearchParams(location.hash.slice(1) || location.search);
  const place = placeOf(graphs, asked.get("of"));
  if (place >= 0) [shown, graph] = [place, graphs[place]];
  pane.show(graph);
  describe();
  const node = Number(asked.get("node"));
  if (node > 0 && node < graph.count) goTo(node);
  else if (graph.findings.length) stepFinding(1);
  else (select(0), pane.fit(pane.boxes[0]));
  document.body.dataset.ready = "true";
}

loadGraphs().then(start, (error) => setText(byId("sentence"), `This page cannot be shown: ${error.message}`));
