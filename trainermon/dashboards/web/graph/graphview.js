// What is shown of the graphs: which rank, which node is selected, which colours, and every part of the page that follows.

import { byId, el, fitCanvas, perFrame, select as selectOf, setText } from "../dom.js";
import { colouringOf, MODES } from "./colouring.js";
import { showLevels } from "./levels.js";
import { openMenu } from "./menu.js";
import { GraphPane } from "./pane.js";
import { showPanel } from "./panel/panel.js";
import { cellsOf, groupsOf, nodeIn, peersOf, stepsOf } from "./ranks.js";
import { collectConfig, diffCommand, saveJson, savePng, saveSvg } from "./saving.js";
import { findNodes } from "./search.js";
import { ancestorsOf, childrenOf, KIND, nameOf, VERDICT } from "./skeleton.js";
import { drawMap, mapHeights } from "./stepmap.js";
import { selectInTree, showTree } from "./tree.js";

/** @import { Graph } from "./types.js" */

const LEVELS = { each: "each rank", tp: "tp merged", model: "whole model" };
const TONES = ["page", "panel", "plot", "ink", "muted", "faint", "grid", "edge", "accent", "accent-2", "good", "good-soft", "info", "info-soft", "warning", "critical", "fatal"];

export class GraphView {
  /**
   * @param {Graph[]} all
   * @param {number} shown
   */
  constructor(all, shown) {
    this.all = all;
    /** Those of the level that is shown. */
    this.graphs = all.filter((one) => one.level === all[shown].level);
    this.shown = this.graphs.indexOf(all[shown]);
    this.selected = 0;
    this.finding = -1;
    /** @type {number[]} */
    this.hits = [];
    this.mode = MODES[0];
    /** @type {{place: number, node: number}[]} */
    this.peers = [];
    /** @type {Record<string, string>} */
    this.palette = {};
    this.map = /** @type {HTMLCanvasElement} */ (byId("map"));
    this.search = /** @type {HTMLInputElement} */ (byId("search"));
    this.help = /** @type {HTMLDialogElement} */ (byId("help"));
    this.paintMap = perFrame(() => this.drawMap());
    this.readPalette();
    this.pane = new GraphPane(/** @type {HTMLCanvasElement} */ (byId("graph")), this.graph, () => this.palette, (node) => this.select(node));
    this.mirror = perFrame(() => showTree(byId("tree"), this.graph, this.pane.boxes, this.pane.boxOf(this.selected)));
    this.pane.onarrange = this.mirror;
    this.pane.onmenu = (node, point) => (this.select(node), this.openMenu(point));
    this.colours = selectOf("colour by", MODES.map((mode) => [mode, `colour: ${mode}`]), this.mode, (mode) => this.colourBy(mode));
    const levels = [...new Set(all.map((one) => one.level))].map((level) => /** @type {[string, string]} */ ([level, LEVELS[/** @type {keyof typeof LEVELS} */ (level)]]));
    this.levels = selectOf("ranks put together", levels, this.graph.level, (level) => this.showLevel(level));
    byId("dials").replaceChildren(...(levels.length > 1 ? [this.levels] : []), this.colours);
  }

  get graph() {
    return this.graphs[this.shown];
  }

  /**
   * Shows the node if there is one of that number, else where something began, else the whole model.
   * @param {number} node
   */
  show(node) {
    this.pane.show(this.graph);
    this.describe();
    if (node > 0 && node < this.graph.count) this.goTo(node);
    else if (this.graph.findings.length) this.stepFinding(1);
    else (this.select(0), this.pane.fit(this.pane.boxes[0]));
  }

  /**
   * Shows the graph of another rank or step, at the same node if it is built alike.
   * @param {number} place
   * @param {Graph} [before] - the graph of the selected node
   */
  showRank(place, before = this.graph) {
    this.shown = (place + this.graphs.length) % this.graphs.length;
    this.finding = -1;
    this.search.value = "";
    this.hits = [];
    this.pane.hits = new Set();
    this.pane.show(this.graph);
    this.describe();
    const there = this.selected > 0 ? nodeIn(this.graph, before, this.selected) : -1;
    this.goTo(there >= 0 ? there : this.graph.findings[0]?.node ?? 0);
  }

  /**
   * Shows ranks alone, or put together, at the same node of the same step.
   * @param {string} level
   */
  showLevel(level) {
    const before = this.graph;
    this.graphs = this.all.filter((one) => one.level === level);
    const ofStep = (/** @type {Graph} */ one) => one.step === before.step;
    const some = this.graphs.filter(ofStep);
    const shown = some.find((one) => one.isFirst) ?? some.find((one) => one.findings.length > 0) ?? some[0] ?? this.graphs[0];
    this.showRank(this.graphs.indexOf(shown), before);
  }

  describe() {
    const graph = this.graph;
    this.levels.value = graph.level;
    this.map.style.height = `${mapHeights(this.graphs.length).height}px`;
    setText(byId("sentence"), graph.sentence);
    byId("top").dataset.tone = graph.findings.length ? "bad" : graph.worst[0] > VERDICT.unmatched ? "warn" : "good";
    const facts = [nameOf(graph, 0), graph.label, graph.axes, `${graph.count.toLocaleString("en")} nodes`, graph.golden && `against ${graph.golden}`];
    setText(byId("facts"), facts.filter(Boolean).join(" · "));
    setText(byId("finding"), this.findingsText());
    byId("steps").hidden = !graph.findings.length;
    this.groups = groupsOf(this.graphs, graph);
    const { groups } = this;
    this.pane.cellsOf = (box) => cellsOf(groups, graph, box.nodes);
    this.colourBy(this.mode);
  }

  /** @param {string} mode - one of MODES */
  colourBy(mode) {
    this.mode = this.colours.value = mode;
    const { graph } = this;
    const { fillOf, legend, text } = colouringOf(graph, mode, this.palette);
    this.pane.fillOf = (box) => fillOf(box, graph.sizes);
    this.pane.recolour();
    const swatches = legend.map((one) => {
      const swatch = el("i", { cls: "swatch" });
      swatch.style.background = one.colour;
      return el("span", {}, swatch, one.text);
    });
    byId("legend").replaceChildren(...swatches, el("span", { cls: "dim" }, text));
    byId("legend").hidden = !text;
  }

  readPalette() {
    const style = getComputedStyle(document.documentElement);
    const colours = Object.fromEntries(TONES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.palette = { ...colours, font: style.getPropertyValue("--font").trim() };
    if (this.pane) (this.colourBy(this.mode), this.paintMap());
  }

  drawMap() {
    const [width, height] = [this.map.clientWidth, this.map.clientHeight];
    const frame = { width, height, shown: this.shown, selected: this.selected, peers: this.peers, palette: this.palette };
    drawMap(fitCanvas(this.map, width, height), this.graphs, frame);
  }

  /** @param {number} node */
  select(node) {
    const { graph, graphs, shown } = this;
    this.selected = this.pane.selected = node;
    const goTo = (/** @type {number} */ other) => this.goTo(other);
    const showRank = (/** @type {number} */ place) => this.showRank(place);
    this.peers = peersOf(graphs, graph, node);
    const meet = (/** @type {{place: number, node: number}} */ peer) => (this.showRank(peer.place), this.goTo(peer.node));
    showPanel(byId("panel"), { graph, graphs, shown, groups: this.groups ?? [], peers: this.peers }, node, { goTo, showRank, meet });
    showLevels(byId("levels"), graphs, { shown, selected: node }, { goTo, showRank });
    setText(byId("status"), `${nameOf(graph, node)}, ${byId("panel").querySelector(".verdict")?.textContent ?? ""}`);
    history.replaceState(null, "", this.all.length > 1 ? `#of=${encodeURIComponent(graph.label)}&node=${node}` : `#node=${node}`);
    selectInTree(byId("tree"), this.pane.boxOf(node));
    this.pane.repaint();
    this.paintMap();
  }

  /** @param {number} node */
  goTo(node) {
    this.pane.reveal(node);
    this.select(node);
    this.pane.center(node);
  }

  /** @param {number} step */
  stepFinding(step) {
    const places = this.hits.length ? this.hits : this.graph.findings.map((one) => one.node);
    if (!places.length) return;
    this.finding = (this.finding + step + places.length) % places.length;
    setText(byId("finding"), `${this.finding + 1} of ${places.length}`);
    if (!this.hits.length) this.pane.open.add(places[this.finding]);
    this.goTo(places[this.finding]);
  }

  /** @param {number} step */
  stepSibling(step) {
    const parent = this.graph.parents[this.selected];
    if (parent < 0) return;
    const siblings = childrenOf(this.graph, parent);
    const next = siblings[siblings.indexOf(this.selected) + step];
    if (next !== undefined) this.goTo(next);
  }

  /**
   * To the same place in another micro step, or to that micro step where it is built otherwise.
   * @param {number} step
   */
  stepMicro(step) {
    const { graph, selected } = this;
    const own = [...ancestorsOf(graph, selected), selected].find((node) => graph.kinds[node] === KIND.microStep);
    const all = childrenOf(graph, 0);
    const next = own === undefined ? all[0] : all[all.indexOf(own) + step];
    if (next === undefined || own === undefined) return void (next !== undefined && this.goTo(next));
    this.goTo(graph.structures[own] === graph.structures[next] ? next + selected - own : next);
  }

  /** @param {number} by */
  stepStep(by) {
    const steps = stepsOf(this.graphs);
    const next = steps[steps.findIndex(({ step }) => step === this.graph.step) + by];
    if (!next) return;
    const same = this.graphs.findIndex((one) => one.step === next.step && one.rank === this.graph.rank);
    this.showRank(same >= 0 ? same : next.place);
  }

  /**
   * To a node that gives the selected one a value (the last that does), or takes one of it (the first).
   * @param {"producers" | "consumers"} which
   */
  follow(which) {
    const { graph, selected } = this;
    const end = selected + graph.sizes[selected];
    const near = which === "producers" ? graph.consumers : graph.producers;
    const isWithin = (/** @type {number} */ node) => node >= selected && node < end;
    const found = Array.from(graph[which].filter((node, edge) => isWithin(near[edge]) && !isWithin(node)));
    if (found.length) this.goTo(which === "producers" ? found.reduce((a, b) => Math.max(a, b)) : found.reduce((a, b) => Math.min(a, b)));
  }

  /**
   * Shows one direction alone; again, or with 0: both.
   * @param {number} direction
   */
  showDirection(direction) {
    this.pane.direction = this.pane.direction === direction ? 0 : direction;
    if ([...ancestorsOf(this.graph, this.selected), this.selected].some((node) => this.pane.isHidden(node))) this.select(0);
    this.pane.arrange();
    this.pane.fit(this.pane.boxes[0]);
  }

  runSearch() {
    this.hits = findNodes(this.graph, this.search.value);
    this.pane.hits = new Set(this.hits.map((node) => this.pane.boxOf(node).node));
    this.finding = -1;
    setText(byId("finding"), this.search.value ? `${this.hits.length.toLocaleString("en")} found` : this.findingsText());
    this.pane.repaint();
  }

  findingsText() {
    const { length } = this.graph.findings;
    return length ? `${length} finding${length > 1 ? "s" : ""}` : "";
  }

  /** What can be saved, as a menu. */
  openExport() {
    const area = this.pane.boxes[0];
    const { left, top } = byId("graph").getBoundingClientRect();
    openMenu({ x: left + 16, y: top + 16 }, [
      { text: "Save the boxes as SVG", run: () => saveSvg(this.pane.shapes(), area, this.palette) },
      { text: "Save the boxes as PNG", run: () => savePng(this.pane.shapes(), area, this.palette) },
      { text: "Save the selection as JSON", run: () => saveJson(this.graph, this.selected) },
    ]);
  }

  /**
   * What can be done with the selected node.
   * @param {{x: number, y: number}} [point]
   */
  openMenu(point) {
    const { graph, selected } = this;
    const box = byId("graph").getBoundingClientRect();
    const command = diffCommand(graph, selected);
    const copy = (/** @type {string} */ text) => void navigator.clipboard?.writeText(text);
    openMenu(point ?? { x: box.left + 16, y: box.top + 16 }, [
      ...(graph.sizes[selected] > 1 ? [{ text: "Unfold, fold", run: () => this.pane.toggle(selected) }] : []),
      { text: "To what gives it a value", run: () => this.follow("producers") },
      { text: "To what takes its value", run: () => this.follow("consumers") },
      { text: "Copy the address of this view", run: () => copy(location.href) },
      ...(graph.keys[selected] ? [
        { text: "Copy the call’s key", run: () => copy(graph.keys[selected]) },
        { text: "Copy a configuration that collects its tensors", run: () => copy(collectConfig(graph, selected)) },
      ] : []),
      ...(command ? [{ text: "Copy the command that compares its tensors", run: () => copy(command) }] : []),
    ]);
  }
}
