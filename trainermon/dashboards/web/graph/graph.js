// The page of a graph: reads its data, shows what the address asks for, or where something began.

import { byId, setText } from "../dom.js";
import { inlinePiece, servedPiece } from "./data/pieces.js";
import { GraphStore } from "./data/store.js";
import { readFragment } from "./address.js";
import { GraphView } from "./graphview.js";
import { readNotes } from "./panel/notes.js";
import { actionsOf, listenToKeys, showKeys } from "./keys.js";

/** @import { GraphHeader, Member } from "./types.js" */

/**
 * The rank with this label; of a step's name the first of its ranks, those with a finding before the others.
 * @param {Member[]} members
 * @param {string | undefined} label
 */
function named(members, label) {
  const ofStep = members.filter((one) => one.label.startsWith(`${label} `));
  return members.find((one) => one.label === label) ?? ofStep.find((one) => one.findings.length > 0) ?? ofStep[0];
}

async function start() {
  /** @type {GraphHeader} */
  const header = JSON.parse(new TextDecoder().decode(await inlinePiece("head")));
  Object.assign(header, await readNotes(header));
  const store = new GraphStore(header, header.served ? servedPiece : (number) => inlinePiece(`piece${number}`));
  const address = readFragment(location.hash || location.search.slice(1));
  const view = new GraphView(store, await store.load(named(header.members, address.of) ?? header.members[header.first]));
  const actions = actionsOf(view);
  listenToKeys(actions);
  showKeys(byId("keys"), actions);
  listen(view);
  view.show(address);
  document.body.dataset.ready = "true";
}

/** @param {GraphView} view */
function listen(view) {
  const { finder } = view;
  finder.input.addEventListener("input", () => void finder.search());
  finder.input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") finder.step(event.shiftKey ? -1 : 1);
    if (event.key === "ArrowDown") (event.preventDefault(), finder.list());
    if (event.key === "Escape") (finder.ask(""), byId("tree").focus());
  });
  byId("next").addEventListener("click", () => finder.step(1));
  byId("previous").addEventListener("click", () => finder.step(-1));
  byId("finding").addEventListener("click", () => finder.list());
  byId("all").addEventListener("click", () => view.panes.fitAll());
  byId("show-help").addEventListener("click", () => view.help.showModal());
  addEventListener("popstate", () => view.permalink.restore());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.readPalette());
}

start().catch((error) => setText(byId("sentence"), `This page cannot be shown: ${error.message}`));
