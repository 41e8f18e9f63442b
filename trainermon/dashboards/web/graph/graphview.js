// What is shown of the graphs: which rank, which node is selected, which colours, and every part of the page that follows.

import { byId, el, fitCanvas, perFrame, select as selectOf, setText } from "../dom.js";
import { nodeChoices, savingChoices } from "./choices.js";
import { colouringOf, MODES } from "./colouring.js";
import { showLevels } from "./levels.js";
import { openMenu } from "./menu.js";
import { GraphPane } from "./pane.js";
import { keepNotes, matchByHand, noteAt, undoMatch } from "./panel/notes.js";
import { showPanel } from "./panel/panel.js";
import { cellsOf, groupsOf, nodeIn, peersOf, stepsOf } from "./ranks.js";
import { findNodes } from "./search.js";
import { ancestorsOf, nameOf, VERDICT } from "./skeleton.js";
import { drawMap, mapHeights } from "./stepmap.js";
import { selectInTree, showTree } from "./tree.js";
import { along } from "./walking.js";

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
    this.pane.hasNote = (node) => Boolean(noteAt(this.graph, node));
    this.pane.onadd = (node) => this.add(node);
    this.pane.onmenu = (node, point) => (this.select(node), this.openMenu(point));
    this.colours = selectOf("colour by", [...MODES, ...this.graph.overlays].map((mode) => [mode, `colour: ${mode}`]), this.mode, (mode) => this.colourBy(mode));
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

  /** @param {string} mode - one of MODES, or the name of an overlay */
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
    this.pane.others.clear();
    const goTo = (/** @type {number} */ other) => this.goTo(other);
    const showRank = (/** @type {number} */ place) => this.showRank(place);
    this.peers = peersOf(graphs, graph, node);
    this.fillPanel();
    showLevels(byId("levels"), graphs, { shown, selected: node }, { goTo, showRank });
    setText(byId("status"), `${nameOf(graph, node)}, ${byId("panel").querySelector(".verdict")?.textContent ?? ""}`);
    history.replaceState(null, "", this.all.length > 1 ? `#of=${encodeURIComponent(graph.label)}&node=${node}` : `#node=${node}`);
    selectInTree(byId("tree"), this.pane.boxOf(node));
    this.pane.repaint();
    this.paintMap();
  }

  /**
   * Selects a node beside those that are selected, or no longer.
   * @param {number} node
   */
  add(node) {
    const { others } = this.pane;
    if (!others.delete(node) && node !== this.selected) others.add(node);
    setText(byId("status"), `${others.size + 1} selected`);
    this.pane.repaint();
  }

  match() {
    this.tell(matchByHand(this.graph, [this.selected, ...this.pane.others]));
  }

  undoMatch() {
    this.tell(undoMatch(this.graph));
  }

  /** @param {string} what - was done with the matches, which are kept */
  tell(what) {
    this.fillPanel();
    const said = el("p", { cls: "told", role: "status" }, what);
    byId("panel").prepend(said);
    void keepNotes(this.graph).then((why) => why && said.append(` Not kept: ${why}.`));
  }

  fillPanel() {
    const { graph, graphs, shown, groups = [], peers } = this;
    showPanel(byId("panel"), { graph, graphs, shown, groups, peers }, this.selected, {
      showRank: (place) => this.showRank(place),
      meet: (peer) => (this.showRank(peer.place), this.goTo(peer.node)),
      onnote: () => this.pane.repaint(),
    });
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

  /** @param {number | undefined} node */
  goToIfAny(node) {
    if (node !== undefined) this.goTo(node);
  }

  /** @param {number} by */
  stepStep(by) {
    const steps = stepsOf(this.graphs);
    const next = steps[steps.findIndex(({ step }) => step === this.graph.step) + by];
    if (!next) return;
    const same = this.graphs.findIndex((one) => one.step === next.step && one.rank === this.graph.rank);
    this.showRank(same >= 0 ? same : next.place);
  }

  /** @param {"producers" | "consumers"} which */
  follow(which) {
    this.goToIfAny(along(this.graph, this.selected, which));
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
    const { left, top } = byId("graph").getBoundingClientRect();
    openMenu({ x: left + 16, y: top + 16 }, savingChoices(this));
  }

  /**
   * What can be done with the selected node.
   * @param {{x: number, y: number}} [point]
   */
  openMenu(point) {
    const { left, top } = byId("graph").getBoundingClientRect();
    openMenu(point ?? { x: left + 16, y: top + 16 }, nodeChoices(this));
  }
}
