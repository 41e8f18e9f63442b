// What is shown of the graphs: which rank, which node is selected, which colours, and every part of the page that follows.

import { byId, el, paced, perFrame, select as selectOf, setText } from "../dom.js";
import { asFragment, readFragment } from "./address.js";
import { nodeChoices, savingChoices } from "./choices.js";
import { colouringOf, MODES } from "./colouring.js";
import { cellsOf, groupsOf, nodeIn, peersOf, stepsOf } from "./data/ranks.js";
import { findNodes, ranksOf } from "./data/search.js";
import { ancestorsOf, nameOf, VERDICT } from "./data/skeleton.js";
import { along } from "./data/walking.js";
import { firstOpen, SIDES } from "./folds.js";
import { showLevels } from "./levels.js";
import { MapView, WHOLE } from "./map/mapview.js";
import { worstNodeAt } from "./map/stepmap.js";
import { openMenu } from "./menu.js";
import { GraphPanes } from "./panes.js";
import { keepNotes, matchByHand, noteAt, undoMatch } from "./panel/notes.js";
import { chooseTab, chosenTab, showPanel } from "./panel/panel.js";
import { selectInTree, showTree } from "./tree.js";

/** @import { GraphStore } from "./data/store.js" */
/** @import { Address } from "./address.js" */
/** @import { Graph, Member } from "./types.js" */
/** @typedef {{place: number, node: number}} Place - a rank of those that are shown, and its node */

const MOST_HITS = 10_000;
const ADDRESS_INTERVAL_MS = 150;
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
    /** What the address says; before it says anything, there is nothing that one could go back to. */
    this.kept = "";
    this.finding = -1;
    /** @type {Place[]} */
    this.hits = [];
    this.mode = MODES[0];
    this.modes = [...MODES, ...graph.overlays];
    /** @type {Place[]} */
    this.peers = [];
    /** @type {Record<string, string>} */
    this.palette = {};
    this.search = /** @type {HTMLInputElement} */ (byId("search"));
    this.help = /** @type {HTMLDialogElement} */ (byId("help"));
    this.map = this.newMap();
    this.keepSoon = paced(() => this.keepAddress(), ADDRESS_INTERVAL_MS);
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
    const lines = () => this.members.map((member) => ({ member, judged: this.store.judged.get(member) }));
    const map = new MapView(/** @type {HTMLCanvasElement} */ (byId("map")), lines, () => this);
    map.onpick = (line, place) => this.showRank(line, (graph) => worstNodeAt(graph, place));
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
      pane.onmenu = (node, point) => (this.select(node), this.openMenu(point));
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
    if (node > 0 && node < graph.count) this.open(address, node);
    else if (graph.findings.length && address.node === undefined) this.stepFinding(1);
    else this.open(address, 0);
    void this.readOthers();
  }

  /**
   * Shows the graph as an address says.
   * @param {Address} address
   * @param {number} node
   */
  open({ open = [], shut = [], apart = [], at, colour, direction = 0, two = false, search = "", map, tab }, node) {
    const { graph, panes, panes: { folds } } = this;
    const known = (/** @type {number[]} */ nodes) => nodes.filter((one) => one < graph.count);
    folds.reset(graph);
    folds.reveal(graph, node);
    for (const one of known(open)) folds.open.add(one);
    for (const one of shut) folds.open.delete(one);
    if (apart.length) folds.apart = new Set(known(apart));
    folds.direction = direction;
    if (tab) chooseTab(tab);
    panes.main.side = two && graph.golden ? SIDES.target : SIDES.union;
    panes.show(graph);
    panes.arrange();
    this.map.range = map ?? WHOLE;
    this.colourBy(colour && this.modes.includes(colour) ? colour : MODES[0]);
    this.search.value = search;
    void this.runSearch();
    if (node) panes.center(node);
    else panes.fitAll();
    if (at) panes.moveTo({ x: at[0], y: at[1], zoom: at[2] });
    this.select(node);
  }

  /** @returns {Address} */
  get address() {
    const { graph, panes: { folds, isSplit, main: { camera } } } = this;
    const first = firstOpen(graph);
    const isWhole = this.map.range === WHOLE;
    return {
      of: this.store.members.length > 1 ? graph.label : undefined, node: this.selected,
      open: [...folds.open].filter((node) => !first.has(node)), shut: [...first].filter((node) => !folds.open.has(node)), apart: [...folds.apart],
      at: [camera.x, camera.y, camera.zoom], colour: this.mode === MODES[0] ? undefined : this.mode, direction: folds.direction,
      two: isSplit, search: this.search.value, map: isWhole ? undefined : this.map.range, tab: chosenTab(),
    };
  }

  /** Another rank or node is a new entry of the history, to which one can go back. */
  keepAddress() {
    const shown = `${this.graph.label} ${this.selected}`;
    history[this.kept && this.kept !== shown ? "pushState" : "replaceState"](null, "", `#${asFragment(this.address)}`);
    this.kept = shown;
  }

  /** Shows what the address says now, after somebody has gone back or changed it. */
  restore() {
    const address = readFragment(location.hash);
    const member = this.store.members.find((one) => one.label === address.of) ?? this.graph.member;
    this.kept = `${member.label} ${address.node ?? 0}`;
    this.members = this.store.members.filter((one) => one.level === member.level);
    this.showRank(this.members.indexOf(member), (graph) => ((address.node ?? 0) < graph.count ? (address.node ?? 0) : 0), address);
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
    const isAcross = isOther && ranksOf(this.search.value).isAsked !== null;
    if (isOther && !isAcross) [this.hits, this.finding] = [[], -1];
    if (isOther) {
      this.panes.show(graph);
      this.describe();
    }
    if (address) this.open(address, node);
    else this.goTo(node);
    this.tellFacts();
    if (!isOther) return;
    if (isAcross) this.markHits();
    else void this.runSearch();
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
    this.tellFindings();
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
    const swatches = legend.map((one) => {
      const swatch = el("i", { cls: "swatch" });
      swatch.style.background = one.colour;
      return el("span", {}, swatch, one.text);
    });
    byId("legend").replaceChildren(...swatches, el("span", { cls: "dim" }, text));
    byId("legend").hidden = !text;
    this.keepSoon();
  }

  readPalette() {
    const style = getComputedStyle(document.documentElement);
    const colours = Object.fromEntries(TONES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.palette = { ...colours, font: style.getPropertyValue("--font").trim() };
    if (this.panes) (this.colourBy(this.mode), this.map.repaint());
  }

  /** Shows both sides beside each other, or again in one picture. */
  split() {
    const { panes, graph } = this;
    if (!graph.golden) return void setText(byId("status"), "There is one side only.");
    panes.split(!panes.isSplit);
    panes.mark(this.hitsHere());
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
    this.keepAddress();
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

  match() {
    this.tell(matchByHand(this.graph, [this.selected, ...this.panes.folds.others]));
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
      onnote: () => this.panes.repaint(),
      ontab: this.keepSoon,
    });
  }

  /** @param {number} node */
  goTo(node) {
    this.panes.reveal(node);
    this.select(node);
    this.panes.center(node);
    this.panes.mark(this.hitsHere());
  }

  /** @param {number} step */
  stepFinding(step) {
    const { places } = this;
    if (!places.length) return;
    this.finding = (Math.max(this.finding, step < 0 ? 0 : -1) + step + places.length) % places.length;
    this.tellFindings();
    const { place, node } = places[this.finding];
    if (!this.hits.length) this.panes.folds.open.add(node);
    if (place === this.shown) this.goTo(node);
    else this.showRank(place, () => node);
  }

  /** @param {number | undefined} node */
  goToIfAny(node) {
    if (node !== undefined && node >= 0) this.goTo(node);
  }

  /** One level up: what it is in; from the model, ranks put together further. */
  toParent() {
    const { graph, selected, levels } = this;
    if (selected > 0) this.goTo(graph.parents[selected]);
    else if (levels.selectedIndex + 1 < levels.options.length) this.showLevel(levels.options[levels.selectedIndex + 1].value);
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
   * Shows one direction alone; again: both.
   * @param {number} direction
   */
  showDirection(direction) {
    const { panes, graph, panes: { folds } } = this;
    folds.direction = folds.direction === direction ? 0 : direction;
    if ([...ancestorsOf(graph, this.selected), this.selected].some((node) => folds.isLeftOut(graph, node))) this.select(0);
    panes.arrange();
    panes.fitAll();
  }

  /** Looks closer on the map at what is selected; again: shows the whole step. */
  zoomMap() {
    const { graph: { sizes, count }, selected, map } = this;
    const margin = sizes[selected] / 4;
    if (map.range === WHOLE && selected > 0) map.zoom((selected - margin) / count, (selected + sizes[selected] + margin) / count);
    else map.zoom(...WHOLE);
  }

  /** Searches the rank that is shown, or those that the query names, which are read for it. */
  async runSearch() {
    const query = this.search.value;
    const { words, isAsked } = ranksOf(query);
    const { members, graph, store } = this;
    const places = isAsked ? members.flatMap(({ step, rank }, place) => (step === graph.step && isAsked(rank) ? [place] : [])) : [this.shown];
    /** @type {Place[]} */
    const hits = [];
    for (const place of query ? places : []) {
      const searched = store.graphs.get(members[place]) ?? await store.load(members[place]);
      if (this.search.value !== query) return;
      const nodes = words ? findNodes(searched, words, MOST_HITS - hits.length) : searched.findings.map(({ node }) => node);
      hits.push(...nodes.map((node) => ({ place, node })));
    }
    this.hits = hits;
    this.finding = -1;
    this.tellFindings();
    this.markHits();
    this.keepSoon();
  }

  markHits() {
    this.panes.mark(this.hitsHere());
    this.map.repaint();
  }

  /** The hits in the graph that is shown. */
  hitsHere() {
    return this.hits.filter(({ place }) => place === this.shown).map(({ node }) => node);
  }

  /** What one can go through: the hits of a search, else where something began. */
  get places() {
    return this.hits.length ? this.hits : this.graph.findings.map(({ node }) => ({ place: this.shown, node }));
  }

  tellFindings() {
    const { places: { length }, finding, hits, search } = this;
    const counted = search.value ? foundText(hits) : length ? `${length} finding${length > 1 ? "s" : ""}` : "";
    setText(byId("finding"), finding >= 0 ? `${finding + 1} of ${length}` : counted);
    byId("steps").hidden = !counted;
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

  /** @param {string} text */
  copy(text) {
    void navigator.clipboard?.writeText(text);
    setText(byId("status"), "copied");
  }

  copyAddress() {
    this.keepAddress();
    this.copy(location.href);
  }
}

/** @param {Place[]} hits */
function foundText(hits) {
  const ranks = new Set(hits.map(({ place }) => place)).size;
  return `${hits.length.toLocaleString("en")} found${ranks > 1 ? ` in ${ranks} ranks` : ""}`;
}
