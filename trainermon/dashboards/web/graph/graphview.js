// What is shown of the graphs: which rank, which node is selected, which colours, and every part of the page that follows.

import { byId, el, perFrame, select as selectOf, setText } from "../dom.js";
import { nodeChoices, savingChoices } from "./choices.js";
import { colouringOf, MODES } from "./colouring.js";
import { cellsOf, groupsOf, nodeIn, peersOf, stepsOf } from "./data/ranks.js";
import { findNodes } from "./data/search.js";
import { ancestorsOf, nameOf, VERDICT } from "./data/skeleton.js";
import { along } from "./data/walking.js";
import { showLevels } from "./levels.js";
import { MapView } from "./map/mapview.js";
import { worstNodeAt } from "./map/stepmap.js";
import { openMenu } from "./menu.js";
import { GraphPane } from "./pane.js";
import { keepNotes, matchByHand, noteAt, undoMatch } from "./panel/notes.js";
import { showPanel } from "./panel/panel.js";
import { selectInTree, showTree } from "./tree.js";

/** @import { GraphStore } from "./data/store.js" */
/** @import { Graph, Member } from "./types.js" */

const LEVELS = { each: "each rank", tp: "tp merged", model: "whole model" };
const TONES = ["page", "panel", "plot", "ink", "muted", "faint", "grid", "edge", "accent", "accent-2", "good", "good-soft", "info", "info-soft", "warning", "critical", "fatal"];

export class GraphView {
  /**
   * @param {GraphStore} store
   * @param {Graph} graph - the one that is shown first
   */
  constructor(store, graph) {
    this.store = store;
    this.graph = graph;
    /** Those of the level that is shown. */
    this.members = store.members.filter((one) => one.level === graph.level);
    this.shown = this.members.indexOf(graph.member);
    /** @type {Member | null} */
    this.awaited = null;
    this.selected = 0;
    this.finding = -1;
    /** @type {number[]} */
    this.hits = [];
    this.mode = MODES[0];
    /** @type {{place: number, node: number}[]} */
    this.peers = [];
    /** @type {Record<string, string>} */
    this.palette = {};
    this.search = /** @type {HTMLInputElement} */ (byId("search"));
    this.help = /** @type {HTMLDialogElement} */ (byId("help"));
    this.map = this.newMap();
    this.readPalette();
    this.pane = this.newPane();
    this.mirror = perFrame(() => showTree(byId("tree"), this.graph, this.pane.boxes, this.pane.boxOf(this.selected)));
    this.pane.onarrange = this.mirror;
    this.colours = selectOf("colour by", [...MODES, ...graph.overlays].map((mode) => [mode, `colour: ${mode}`]), this.mode, (mode) => this.colourBy(mode));
    const levels = [...new Set(store.members.map((one) => one.level))].map((level) => /** @type {[string, string]} */ ([level, LEVELS[/** @type {keyof typeof LEVELS} */ (level)]]));
    this.levels = selectOf("ranks put together", levels, graph.level, (level) => this.showLevel(level));
    byId("dials").replaceChildren(...(levels.length > 1 ? [this.levels] : []), this.colours);
  }

  newMap() {
    const lines = () => this.members.map((member) => ({ member, judged: this.store.judged.get(member) }));
    const hitsOf = () => this.hits.map((node) => ({ place: this.shown, node }));
    const map = new MapView(/** @type {HTMLCanvasElement} */ (byId("map")), lines, () => ({ ...this, hits: hitsOf() }));
    map.onpick = (line, place) => this.showRank(line, (graph) => worstNodeAt(graph, place));
    return map;
  }

  newPane() {
    const pane = new GraphPane(/** @type {HTMLCanvasElement} */ (byId("graph")), this.graph, () => this.palette, (node) => this.select(node));
    pane.hasNote = (node) => Boolean(noteAt(this.graph, node));
    pane.onadd = (node) => this.add(node);
    pane.onmenu = (node, point) => (this.select(node), this.openMenu(point));
    return pane;
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
   * Shows the graph of another rank or step, at once if it is read already.
   * @param {number} place
   * @param {(graph: Graph) => number} [nodeOf] - the node to go to, else the same as here if there is one
   */
  showRank(place, nodeOf) {
    const member = this.members[(place + this.members.length) % this.members.length];
    const nodeOfIt = nodeOf ?? ((/** @type {Graph} */ graph) => this.counterpart(graph));
    const known = this.store.graphs.get(member);
    this.awaited = member;
    if (known) return void this.put(known, nodeOfIt);
    setText(byId("facts"), `Reading ${member.label}…`);
    this.store.load(member).then(
      (graph) => this.awaited === member && this.put(graph, nodeOfIt),
      (error) => this.awaited === member && setText(byId("facts"), `${member.label} cannot be shown: ${error.message}`),
    );
  }

  /**
   * The selected node in another graph, else where something began in that.
   * @param {Graph} graph
   */
  counterpart(graph) {
    const there = this.selected > 0 ? nodeIn(graph, this.graph, this.selected) : -1;
    return there >= 0 ? there : (graph.findings[0]?.node ?? 0);
  }

  /**
   * @param {Graph} graph
   * @param {(graph: Graph) => number} nodeOf
   */
  put(graph, nodeOf) {
    const node = nodeOf(graph);
    if (graph === this.graph) return void (this.goTo(node), this.tellFacts());
    this.graph = graph;
    this.shown = this.members.indexOf(graph.member);
    this.finding = -1;
    this.search.value = "";
    this.hits = [];
    this.pane.hits = new Set();
    this.pane.show(graph);
    this.describe();
    this.goTo(node);
    void this.readOthers();
  }

  /** Reads how the other ranks of the step are judged, for the cells of boxes, collectives and the map. */
  async readOthers() {
    const { graph, store } = this;
    for (const member of this.members) {
      if (member.step !== graph.step || store.judged.has(member)) continue;
      await store.judge(member).catch((error) => setText(byId("facts"), `${member.label} cannot be shown: ${error.message}`));
      await new Promise((done) => setTimeout(done, 0)); // whatever the reader does goes first
    }
    if (graph !== this.graph) return;
    this.peers = this.findPeers();
    if (this.peers.length) this.fillPanel();
    this.map.repaint();
    this.pane.recolour();
  }

  /**
   * Shows ranks alone, or put together, at the same node of the same step.
   * @param {string} level
   */
  showLevel(level) {
    const { step } = this.graph;
    this.members = this.store.members.filter((one) => one.level === level);
    const some = this.members.filter((one) => one.step === step);
    const first = this.store.members[this.store.header.first];
    const shown = some.find((one) => one === first) ?? some.find((one) => one.findings.length > 0) ?? some[0] ?? this.members[0];
    this.showRank(this.members.indexOf(shown));
  }

  describe() {
    const { graph, store } = this;
    this.levels.value = graph.level;
    this.map.fit();
    setText(byId("sentence"), graph.sentence);
    byId("top").dataset.tone = graph.findings.length ? "bad" : graph.worst[0] > VERDICT.unmatched ? "warn" : "good";
    this.tellFacts();
    setText(byId("finding"), this.findingsText());
    byId("steps").hidden = !graph.findings.length;
    this.groups = groupsOf(store.header.skeletons, this.members, graph.step);
    const { groups } = this;
    this.pane.cellsOf = (box) => cellsOf(groups.map(({ member }) => store.judged.get(member)), graph, box.nodes);
    this.colourBy(this.mode);
  }

  tellFacts() {
    const { graph } = this;
    const facts = [nameOf(graph, 0), graph.label, graph.axes, `${graph.count.toLocaleString("en")} nodes`, graph.golden && `against ${graph.golden}`];
    setText(byId("facts"), facts.filter(Boolean).join(" · "));
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
    if (this.pane) (this.colourBy(this.mode), this.map.repaint());
  }

  /** @param {number} node */
  select(node) {
    const { graph, members, shown } = this;
    this.selected = this.pane.selected = node;
    this.pane.others.clear();
    const goTo = (/** @type {number} */ other) => this.goTo(other);
    const showRank = (/** @type {number} */ place) => this.showRank(place);
    this.peers = this.findPeers();
    this.fillPanel();
    showLevels(byId("levels"), graph, members, { shown, selected: node }, { goTo, showRank });
    setText(byId("status"), `${nameOf(graph, node)}, ${byId("panel").querySelector(".verdict")?.textContent ?? ""}`);
    history.replaceState(null, "", this.store.members.length > 1 ? `#of=${encodeURIComponent(graph.label)}&node=${node}` : `#node=${node}`);
    selectInTree(byId("tree"), this.pane.boxOf(node));
    this.pane.repaint();
    this.map.repaint();
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

  findPeers() {
    return peersOf(this.members.map((member) => this.store.judged.get(member)), this.graph, this.selected);
  }

  fillPanel() {
    const { graph, members, shown, groups = [], peers, store } = this;
    showPanel(byId("panel"), { graph, members, shown, groups, peers, store }, this.selected, {
      showRank: (place) => this.showRank(place),
      meet: (peer) => this.showRank(peer.place, () => peer.node),
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
    const steps = stepsOf(this.members);
    const next = steps[steps.findIndex(({ step }) => step === this.graph.step) + by];
    if (!next) return;
    const same = this.members.findIndex((one) => one.step === next.step && one.rank === this.graph.rank);
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
    this.map.repaint();
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
