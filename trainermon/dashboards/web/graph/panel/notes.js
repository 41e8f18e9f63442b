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
 * What the server has kept by now, which others may have written; where it keeps none, what the page came with.
 * @param {GraphHeader} header
 * @returns {Promise<Pick<GraphHeader, "notes" | "keeps_notes">>}
 */
export async function readNotes({ notes, keeps_notes }) {
  const reply = keeps_notes ? await fetch("notes").catch(() => null) : null;
  return reply?.ok ? { notes: await reply.json(), keeps_notes } : { notes, keeps_notes: false };
}

/**
 * Keeps what was written; returns why it could not be kept, or "".
 * @param {Graph} graph
 */
export async function keepNotes(graph) {
  if (!graph.keeps_notes) return "";
  const token = rememberedToken();
  const headers = { "Content-Type": "application/json", ...(token && { Authorization: `Bearer ${token}` }) };
  const reply = await fetch("notes", { method: "POST", headers, body: JSON.stringify(graph.notes) }).catch(() => null);
  if (reply?.ok) return "";
  if (reply?.status === 401) return NEEDS_TOKEN;
  return (await reply?.json().catch(() => null))?.detail ?? "the server does not answer";
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
 * The note on a node, to be changed, and what it was matched with.
 * @param {Graph} graph
 * @param {number} node
 * @param {() => void} onchange
 */
export function notesSection(graph, node, onchange) {
  const text = el("textarea", { rows: 2, "aria-label": "note", placeholder: "note", maxlength: 10000 });
  text.value = noteAt(graph, node);
  const status = el("p", { cls: "dim", role: "status" });
  text.addEventListener("change", () => {
    const key = identityOf(graph, node).trim();
    if (text.value.trim()) graph.notes.notes[key] = text.value.trim();
    else delete graph.notes.notes[key];
    onchange();
    keep();
  });
  const keep = () => void keepNotes(graph).then((why) => {
    if (why === NEEDS_TOKEN) status.replaceChildren(`Not kept: ${why} `, tokenField(keep));
    else status.replaceChildren(why ? `Not kept: ${why}` : graph.keeps_notes ? "kept" : "in this page alone: save it with e");
  });
  const module = moduleOf(graph, node);
  const matches = graph.notes.matches.filter(({ target, golden }) => target.includes(module) || golden.includes(module));
  return el("section", {}, el("h3", {}, "Note"), text, status,
    matches.map(({ target, golden }) => el("p", { cls: "dim" }, `matched by hand: ${target.join(", ")} = ${golden.join(", ")}; it counts from the next comparison on`)));
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
