// What a person writes at nodes, and which modules they match by hand; kept by the server, where it does, and else in a file.

import { el } from "../../dom.js";
import { rememberToken, rememberedToken } from "../../token.js";
import { identityOf } from "../data/ranks.js";
import { keyOf, KIND, nameOf } from "../data/skeleton.js";

/** @import { Graph, GraphHeader, GraphNotes } from "../types.js" */

const NEEDS_TOKEN = "this run takes them with its token only.";

/**
 * @param {Graph} graph
 * @param {number} node
 */
export function noteAt(graph, node) {
  const { notes } = graph.notes;
  return hasAny(notes) ? (notes[identityOf(graph, node).trim()] ?? "") : "";
}

/**
 * Looked at for every box that is drawn.
 * @param {Record<string, string>} notes
 */
function hasAny(notes) {
  for (const _ in notes) return true;
  return false;
}

/**
 * What the server had when it last said so, which the page's own notes may be ahead of.
 * @type {GraphNotes}
 */
let known = { notes: {}, matches: [] };

/** @type {Promise<string>} */
let sending = Promise.resolve("");

/**
 * What the server has kept by now, which others may have written; where it keeps none, what the page came with.
 * @param {GraphHeader} header
 * @returns {Promise<Pick<GraphHeader, "notes" | "keeps_notes">>}
 */
export async function readNotes({ notes, keeps_notes }) {
  const reply = keeps_notes ? await fetch("notes").catch(() => null) : null;
  if (!reply?.ok) return { notes, keeps_notes: false };
  known = await reply.json();
  return { notes: structuredClone(known), keeps_notes };
}

/**
 * Keeps what was changed, with what others have written meanwhile; returns why it could not be kept, or "".
 * @param {Graph} graph
 */
export function keepNotes({ notes, keeps_notes }) {
  if (keeps_notes) sending = sending.then(() => send(notes)); // one after the other: each begins from what the last has left
  return keeps_notes ? sending : Promise.resolve("");
}

/** @param {GraphNotes} notes */
async function send(notes) {
  const sent = structuredClone(notes);
  const token = rememberedToken();
  const headers = { "Content-Type": "application/json", ...(token && { Authorization: `Bearer ${token}` }) };
  const reply = await fetch("notes", { method: "POST", headers, body: JSON.stringify(changeOf(known, sent)) }).catch(() => null);
  const found = await reply?.json().catch(() => null);
  if (reply?.status === 401) return NEEDS_TOKEN;
  if (!reply?.ok || !found) return found?.detail ?? "the server does not answer";
  known = found;
  Object.assign(notes, withChange(known, changeOf(sent, notes)));
  return "";
}

/**
 * What differs between two states of the notes, and all matches.
 * @param {GraphNotes} before
 * @param {GraphNotes} after
 */
function changeOf(before, after) {
  const places = Object.keys({ ...before.notes, ...after.notes }).filter((place) => before.notes[place] !== after.notes[place]);
  const partOf = (/** @type {GraphNotes} */ { notes, matches }) =>
    ({ notes: Object.fromEntries(places.filter((place) => notes[place]).map((place) => [place, notes[place]])), matches });
  return { before: partOf(before), after: partOf(after) };
}

/**
 * @param {GraphNotes} base
 * @param {{before: GraphNotes, after: GraphNotes}} change
 * @returns {GraphNotes}
 */
function withChange(base, { before, after }) {
  const without = (/** @type {GraphNotes["matches"]} */ matches, /** @type {GraphNotes["matches"]} */ others) => {
    const left = new Set(others.map((one) => JSON.stringify(one)));
    return matches.filter((one) => !left.has(JSON.stringify(one)));
  };
  const notes = { ...base.notes, ...after.notes };
  for (const place of Object.keys(before.notes)) if (!after.notes[place]) delete notes[place];
  return { notes, matches: [...without(base.matches, without(before.matches, after.matches)), ...without(after.matches, before.matches)] };
}

/**
 * The text that keeps what two people made of the one that both saw; the same rule as dashboards/graph_notes.py.
 * @param {string} seen
 * @param {string} theirs
 * @param {string} own
 */
function both(seen, theirs, own) {
  if (own === seen) return theirs;
  if (theirs === seen || own.includes(theirs)) return own;
  return theirs.includes(own) ? theirs : `${theirs}\n\n${own}`;
}

/**
 * Where the run's token is given, without which an agent keeps no notes.
 * @param {() => void} retry
 */
function tokenField(retry) {
  const token = el("input", { type: "password", autocomplete: "off", value: rememberedToken() });
  token.addEventListener("change", () => (rememberToken(token.value.trim()), retry()));
  return el("label", {}, "Token ", token, el("span", { cls: "hint" }, " from nodes/<host>/token in the run's directory; this tab remembers it"));
}

/**
 * The note on a node, to be changed.
 * @param {Graph} graph
 * @param {number} node
 * @param {() => void} onchange
 */
export function notesSection(graph, node, onchange) {
  const text = el("textarea", { rows: 2, "aria-label": "note", placeholder: "note", maxlength: 10000 });
  const status = el("p", { cls: "dim", role: "status" });
  let seen = noteAt(graph, node);
  const show = () => (text.value = seen = noteAt(graph, node));
  text.addEventListener("change", () => {
    const key = identityOf(graph, node).trim();
    const own = both(seen, noteAt(graph, node), text.value.trim());
    if (own) graph.notes.notes[key] = own;
    else delete graph.notes.notes[key];
    show();
    onchange();
    keep();
  });
  const keep = () => void keepNotes(graph).then((why) => {
    const [mine, isBeingWritten] = [seen, text.value.trim() !== seen];
    if (!isBeingWritten) show();
    const isJoined = !why && noteAt(graph, node) !== mine;
    if (why === NEEDS_TOKEN) status.replaceChildren(`Not kept: ${why} `, tokenField(keep));
    else status.replaceChildren(why ? `Not kept: ${why}` : !graph.keeps_notes ? "in this page alone: save it with e" : isJoined ? "kept, with what somebody else has written here meanwhile" : "kept");
    onchange();
  });
  show();
  return el("section", { cls: "note" }, el("h3", {}, "Note"), text, status);
}

/**
 * What a node was matched with.
 * @param {Graph} graph
 * @param {number} node
 */
export function matchLines(graph, node) {
  const module = moduleOf(graph, node);
  return graph.notes.matches.filter(({ target, golden }) => target.includes(module) || golden.includes(module)).map(({ target, golden }) =>
    el("p", { cls: "dim" }, `matched by hand: ${target.join(", ")} = ${golden.join(", ")}; it counts from the next comparison on`));
}

/**
 * A module with its class as mappings name it, `fc1.Linear`; "" for what is none.
 * @param {Graph} graph
 * @param {number} node
 */
function moduleOf(graph, node) {
  const found = graph.kinds[node] === KIND.module ? /^(?:Module|Cell)\.(.+)\.(?:forward|backward)\.\d+$/.exec(keyOf(graph, node)) : null;
  return found ? found[1] : "";
}

/**
 * Takes the selected nodes for the same; returns what was done, or why not.
 * @param {Graph} graph
 * @param {number[]} nodes
 */
export function matchByHand(graph, nodes) {
  const [target, golden] = [[0, 1], [2]].map((sides) => nodes.filter((node) => sides.includes(graph.sides[node])).map((node) => moduleOf(graph, node)));
  if (!target.length || !golden.length) return "Select what the golden dump alone has, and with Shift and click what does the same.";
  if (![...target, ...golden].every(Boolean)) return "Only modules can be matched by hand.";
  graph.notes.matches.push({ target, golden });
  return `Matched ${nodes.map((node) => nameOf(graph, node)).join(", ")}; it counts from the next comparison on.`;
}

/** @param {Graph} graph */
export function undoMatch(graph) {
  const last = graph.notes.matches.pop();
  return last ? `${last.target.join(", ")} and ${last.golden.join(", ")} are no longer matched.` : "Nothing was matched by hand.";
}

/** @param {GraphNotes} notes */
export const notesText = (notes) => `${JSON.stringify(notes, null, 1)}\n`;
