// What is shown of the graphs: which rank, which node is selected, which colours, and every part of the page that follows.

import { byId, el, paced, perFrame, select as selectOf, setText } from "../dom.js";
import { openNodeMenu } from "./choices.js";
import { colouringOf, MODES, paletteNow, showLegend } from "./colouring.js";
import { cellsOf, groupsOf, groupText, nodeIn, peersOf } from "./data/ranks.js";
import { nameOf, VERDICT } from "./data/skeleton.js";
import { Finder } from "./finder.js";
import { showLevels } from "./levels.js";
import { linesOf } from "./map/lines.js";
import { MapView } from "./map/mapview.js";
import { worstNodeAt } from "./map/stepmap.js";
import { GraphPanes } from "./panes.js";
import { noteAt } from "./panel/notes.js";
import { showPanel } from "./panel/panel.js";
import { Permalink } from "./permalink.js";
import { selectInTree, showTree } from "./tree.js";

/** @import { GraphStore } from "./data/store.js" */
/** @import { Address } from "./address.js" */
/** @import { Graph, Member } from "./types.js" */
/** @import { Place } from "./finder.js" */

const ADDRESS_INTERVAL_MS = 150;
const LEVELS = { each: "each rank", tp: "tp merged", model: "whole model" };

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
    this.finder = new Finder(this);
    this.permalink = new Permalink(this);
    this.mode = MODES[0];
    this.modes = [...MODES, ...graph.overlays];
    /** @type {Place[]} */
    this.peers = [];
    /** @type {Record<string, string>} */
    this.palette = {};
    this.help = /** @type {HTMLDialogElement} */ (byId("help"));
    this.map = this.newMap();
    this.keepSoon = paced(() => this.permalink.keep(), ADDRESS_INTERVAL_MS);
    this.map.onzoom = this.keepSoon;
    this.readPalette();
    this.panes = this.newPanes();
    this.colours = selectOf("colour by", this.modes.map((mode) => [mode, `colour: ${mode}`]), this.mode, (mode) => this.colourBy(mode));
    const levels = [...new Set(store.members.map((one) => one.level))].map((level) => /** @type {[string, string]} */ ([level, LEVELS[/** @type {keyof typeof LEVELS} */ (level)]]));
    this.levels = selectOf("ranks put together", levels, graph.level, (level) => this.showLevel(level));
    const sides = graph.golden ? [el("button", { type: "button", id: "split", "aria-pressed": "false", onclick: () => this.split() }, "two panes")] : [];
    byId("dials").replaceChildren(...sides, ...(levels.length > 1 ? [this.levels] : []), this.colours);
  }

  newMap() {
    const lines = () => linesOf(this.store, this.members);
    const map = new MapView(/** @type {HTMLCanvasElement} */ (byId("map")), lines, () => {
      const { shown, selected, peers, palette, finder: { hits } } = this;
      return { shown, selected, peers, palette, hits };
    });
    map.onpick = (line, place) => {
      const { places } = lines()[line];
      this.showRank(places.includes(this.shown) ? this.shown : places[0], (graph) => worstNodeAt(graph, place));
    };
    return map;
  }

  newPanes() {
    const panes = new GraphPanes(this.graph, () => this.palette);
    panes.onselect = (node, pane) => (this.select(node), panes.center(node, pane));
    panes.onfold = this.keepSoon;
    const { main } = panes;
    main.onarrange = perFrame(() => showTree(byId("tree"), this.graph, main.boxes, main.boxOf(this.selected)));
    main.onmove = this.keepSoon;
    for (const pane of [main, panes.golden]) {
      pane.hasNote = (node) => Boolean(noteAt(this.graph, node));
      pane.onadd = (node) => this.add(node);
      pane.onmenu = (node, point) => (this.select(node), openNodeMenu(this, point));
    }
    return panes;
  }

  get selected() {
    return this.panes.folds.selected;
  }

  /**
   * Shows what an address says: its node, else where something began, else the whole model.
   * @param {Address} address
   */
  show(address) {
    const { graph, panes } = this;
    panes.show(graph);
    this.describe();
    const node = address.node ?? 0;
    if (node > 0 && node < graph.count) this.permalink.open(address, node);
    else if (graph.findings.length && address.node === undefined) this.finder.step(1);
    else this.permalink.open(address, 0);
    void this.readOthers();
  }

  /**
   * Shows the graph of another rank or step, at once if it is read already.
   * @param {number} place
   * @param {(graph: Graph) => number} [nodeOf] - the node to go to, else the same as here if there is one
   * @param {Address} [address] - how it is shown
   */
  showRank(place, nodeOf, address) {
    const member = this.members[(place + this.members.length) % this.members.length];
    const nodeOfIt = nodeOf ?? ((/** @type {Graph} */ graph) => this.counterpart(graph));
    const known = this.store.graphs.get(member);
    this.awaited = member;
    if (known) return void this.put(known, nodeOfIt, address);
    setText(byId("facts"), `Reading ${member.label}…`);
    this.store.load(member).then(
      (graph) => this.awaited === member && this.put(graph, nodeOfIt, address),
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
   * @param {Address} [address]
   */
  put(graph, nodeOf, address) {
    const node = nodeOf(graph);
    const isOther = graph !== this.graph;
    this.graph = graph;
    this.shown = this.members.indexOf(graph.member);
    const { finder, finder: { isAcross } } = this;
    if (isOther && !isAcross) finder.forget();
    if (isOther) {
      this.panes.show(graph);
      this.describe();
    }
    if (address) this.permalink.open(address, node);
    else this.goTo(node);
    this.tellFacts();
    if (!isOther) return;
    if (isAcross) finder.mark();
    else void finder.search();
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
    document.body.dataset.complete = "true";
    if (graph !== this.graph) return;
    this.peers = this.findPeers();
    if (this.peers.length) this.fillPanel();
    this.map.repaint();
    this.colourBy(this.mode);
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
    this.finder.tell();
    this.groups = groupsOf(store.header.skeletons, this.members, graph.step);
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
    const { graph, store, groups = [] } = this;
    const { fillOf, legend, text } = colouringOf(graph, mode, this.palette);
    const judged = groups.map(({ member }) => store.judged.get(member));
    this.panes.colour((box) => fillOf(box, graph.sizes), (box) => cellsOf(judged, graph, box.nodes));
    const cells = groups.length > 1 && legend.length ? `cells below a box: ${groups.map((group) => groupText(this.members, group)).join(" | ")}` : "";
    showLegend(byId("legend"), legend, [text, cells].filter(Boolean).join("; "));
    this.keepSoon();
  }

  readPalette() {
    this.palette = paletteNow();
    if (this.panes) (this.colourBy(this.mode), this.map.repaint());
  }

  /** Shows both sides beside each other, or again in one picture. */
  split() {
    const { panes, graph } = this;
    if (!graph.golden) return void setText(byId("status"), "There is one side only.");
    panes.split(!panes.isSplit);
    panes.mark(this.finder.hitsHere);
    if (this.selected) panes.center(this.selected);
    else panes.fitAll();
  }

  /** @param {number} node */
  select(node) {
    const { graph, members, shown, panes } = this;
    panes.folds.selected = node;
    panes.folds.others.clear();
    const goTo = (/** @type {number} */ other) => this.goTo(other);
    const showRank = (/** @type {number} */ place) => this.showRank(place);
    this.peers = this.findPeers();
    this.fillPanel();
    showLevels(byId("levels"), graph, members, { shown, selected: node }, { goTo, showRank });
    setText(byId("status"), `${nameOf(graph, node)}, ${byId("panel").querySelector(".verdict")?.textContent ?? ""}`);
    this.permalink.keep();
    selectInTree(byId("tree"), panes.main.boxOf(node));
    panes.repaint();
    this.map.repaint();
  }

  /**
   * Selects a node beside those that are selected, or no longer.
   * @param {number} node
   */
  add(node) {
    const { others } = this.panes.folds;
    if (!others.delete(node) && node !== this.selected) others.add(node);
    setText(byId("status"), `${others.size + 1} selected`);
    this.panes.repaint();
  }

  findPeers() {
    return peersOf(this.members.map((member) => this.store.judged.get(member)), this.graph, this.selected);
  }

  fillPanel() {
    const { graph, members, shown, groups = [], peers, store } = this;
    showPanel(byId("panel"), { graph, members, shown, groups, peers, store }, this.selected, {
      showRank: (place) => this.showRank(place),
      meet: (peer) => this.showRank(peer.place, () => peer.node),
      onnote: () => this.panes.repaint(),
      ontab: this.keepSoon,
    });
  }

  /** @param {number} node */
  goTo(node) {
    this.panes.reveal(node);
    this.select(node);
    this.panes.center(node);
    this.panes.mark(this.finder.hitsHere);
  }

  /** @param {string} text */
  copy(text) {
    void navigator.clipboard?.writeText(text);
    setText(byId("status"), "copied");
  }

  copyAddress() {
    this.permalink.keep();
    this.copy(location.href);
  }
}
