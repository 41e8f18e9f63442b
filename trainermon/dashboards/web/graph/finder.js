// What one goes through one by one: the hits of a search, in one rank or many, else where something began.

import { byId, setText } from "../dom.js";
import { findNodes, ranksOf } from "./data/search.js";
import { pathOf } from "./data/skeleton.js";
import { openMenu } from "./menu.js";
import { MARKS } from "./scene.js";

/** @import { GraphView } from "./graphview.js" */
/** @typedef {{place: number, node: number}} Place - a rank of those that are shown, and its node */

const MOST_HITS = 10_000;
const MOST_LISTED = 200;

export class Finder {
  /** @param {GraphView} view */
  constructor(view) {
    this.view = view;
    this.input = /** @type {HTMLInputElement} */ (byId("search"));
    /** Which of the places is shown; -1: none yet. */
    this.at = -1;
    /** @type {Place[]} */
    this.hits = [];
  }

  get query() {
    return this.input.value;
  }

  /** Whether the query names ranks, so that its hits outlast a change of the rank that is shown. */
  get isAcross() {
    return ranksOf(this.query).isAsked !== null;
  }

  /** The hits in the graph that is shown. */
  get hitsHere() {
    return this.hits.filter(({ place }) => place === this.view.shown).map(({ node }) => node);
  }

  /** What one can go through. */
  get places() {
    return this.hits.length ? this.hits : this.view.graph.findings.map(({ node }) => ({ place: this.view.shown, node }));
  }

  /** @param {string} query */
  ask(query) {
    this.input.value = query;
    void this.search();
  }

  forget() {
    [this.hits, this.at] = [[], -1];
  }

  /** Searches the rank that is shown, or those that the query names, which are read for it. */
  async search() {
    const { query, view } = this;
    const { words, isAsked } = ranksOf(query);
    const { members, graph, store } = view;
    const places = isAsked ? members.flatMap(({ step, rank }, place) => (step === graph.step && isAsked(rank) ? [place] : [])) : [view.shown];
    /** @type {Place[]} */
    const hits = [];
    for (const place of query ? places : []) {
      const searched = store.graphs.get(members[place]) ?? await store.load(members[place]);
      if (this.query !== query) return;
      const nodes = words ? findNodes(searched, words, MOST_HITS - hits.length) : searched.findings.map(({ node }) => node);
      hits.push(...nodes.map((node) => ({ place, node })));
    }
    this.hits = hits;
    this.at = -1;
    this.tell();
    this.mark();
    view.keepSoon();
  }

  /** Lists what was found, the first 200, in a menu that leads to each. */
  list() {
    const { places, view: { members, store, shown } } = this;
    if (!places.length) return;
    const { left, bottom } = byId("finding").getBoundingClientRect();
    const entries = places.slice(0, MOST_LISTED).map(({ place, node }, at) => {
      const graph = store.graphs.get(members[place]);
      const path = graph ? `${MARKS[graph.worst[node]]} ${pathOf(graph, node)}`.trim() : String(node);
      return { text: place === shown ? path : `${members[place].label}: ${path}`, run: () => this.goTo(at) };
    });
    if (places.length > MOST_LISTED) entries.push({ text: `${places.length - MOST_LISTED} more: say more of what you look for`, run: () => this.input.focus() });
    openMenu({ x: left, y: bottom + 4 }, entries);
  }

  /** @param {number} by */
  step(by) {
    const { length } = this.places;
    if (length) this.goTo((Math.max(this.at, by < 0 ? 0 : -1) + by + length) % length);
  }

  /** @param {number} at - which of the places */
  goTo(at) {
    const { places, view } = this;
    this.at = at;
    this.tell();
    const { place, node } = places[this.at];
    if (!this.hits.length) view.panes.folds.open.add(node);
    if (place === view.shown) view.goTo(node);
    else view.showRank(place, () => node);
  }

  /** To the first of all. */
  toFirst() {
    this.at = -1;
    this.step(1);
  }

  mark() {
    this.view.panes.mark(this.hitsHere);
    this.view.map.repaint();
  }

  tell() {
    const { places: { length }, at, hits, query } = this;
    const counted = query ? foundText(hits) : length ? `${length} finding${length > 1 ? "s" : ""}` : "";
    setText(byId("finding"), at >= 0 ? `${at + 1} of ${length}` : counted);
    byId("steps").hidden = !counted;
  }
}

/** @param {Place[]} hits */
function foundText(hits) {
  const ranks = new Set(hits.map(({ place }) => place)).size;
  return `${hits.length.toLocaleString("en")} found${ranks > 1 ? ` in ${ranks} ranks` : ""}`;
}
