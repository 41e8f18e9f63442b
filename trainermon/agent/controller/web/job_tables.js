// The tables of the job page: nodes, ranks, escalations.

import { byId, el, setText } from "./dom.js";
import { formatSeconds, formatSpans, formatStep } from "./scales.js";
import { byTrouble, describe, isDone, needsLook, toneOf, urgencyOf } from "./job_state.js";
import { empty, sentence, table } from "./tables.js";
import { GLYPHS } from "./theme.js";

/** @import { Escalation, JobAlert, JobNode, JobRank, JobState } from "./types.js" */

const SHOWN = 50;
/** @type {Record<string, string>} */
const OUTCOMES = { done: "resolved", partial: "pending", suppressed: "pending", failed: "firing" };
/** Which page of each table is shown, from 0. */
const pages = { nodes: 0, ranks: 0 };

/** Shows the first page of both tables, as after another search. */
export function turnBack() {
  pages.nodes = pages.ranks = 0;
}

/**
 * @param {JobState} state
 * @param {string} search - part of a node's name, or a rank
 * @param {() => void} redraw
 */
export function showNodes(state, search, redraw) {
  const up = state.nodes.filter((node) => node.up).length;
  setText(byId("nodes-hint"), state.nodes.length ? `${up} of ${state.nodes.length} answer` : "");
  if (!state.nodes.length) return byId("nodes").replaceChildren(empty("No nodes.", "Discovery has found no agent yet."));
  /** @param {JobNode} node */
  const trouble = (node) => (node.up ? Math.min(...node.ranks.map(urgencyOf)) : -1);
  const found = state.nodes.filter((node) => node.ranks.some((rank) => isFound(rank, search)) || isNamed(node.name, search));
  if (!found.length) return byId("nodes").replaceChildren(empty("No node is found.", "The search looks at names of nodes and at numbers of ranks."));
  const urgency = new Map(found.map((node) => [node, trouble(node)]));
  const sorted = found.sort((a, b) => (urgency.get(a) ?? 0) - (urgency.get(b) ?? 0) || (a.name < b.name ? -1 : 1));
  const rows = shown("nodes", sorted).map(nodeRow);
  byId("nodes").replaceChildren(table("cards", ["Node", "State", "Step", "Ranks", "Alerts", "Last answer"], rows), pager("nodes", sorted, redraw));
}

/** @param {JobNode} node */
function nodeRow(node) {
  const steps = node.ranks.filter((rank) => rank.alive || toneOf(rank) === "ended").map((rank) => rank.step);
  const [low, high] = [Math.min(...steps), Math.max(...steps)];
  return el("tr", {},
    el("td", {}, pageLink(node.url, node.name)),
    el("td", {}, isDone(node) ? el("span", { cls: "pill resolved" }, "finished") : node.up ? el("span", { cls: "pill resolved" }, "answers") : el("span", { cls: "pill firing", title: node.problem }, "silent")),
    el("td", { cls: "num" }, !steps.length ? "–" : low === high ? formatStep(high) : `${formatStep(low)} – ${formatStep(high)}`),
    el("td", {}, squares(node.ranks), " ", el("span", { cls: "hint" }, formatSpans(node.ranks.map(({ rank }) => rank)))),
    el("td", { cls: "where" }, node.up || isDone(node) ? ruleList(node.alerts) : el("span", { cls: "message" }, node.problem)),
    el("td", {}, node.age_s === undefined ? "never" : node.up ? "now" : `${formatSeconds(node.age_s)} ago`));
}

/** @param {JobRank[]} ranks */
function squares(ranks) {
  const marks = ranks.map((rank) => el("i", { cls: toneOf(rank), title: `rank ${rank.rank}: ${describe(rank)}` }));
  return el("span", { cls: ranks.length > 16 ? "squares wide" : "squares", role: "img", "aria-label": summary(ranks) }, marks);
}

/** @param {JobRank[]} ranks */
function summary(ranks) {
  const troubled = ranks.filter(needsLook).length;
  return troubled ? `${troubled} of ${ranks.length} ranks need a look` : `${ranks.length} ranks, all fine`;
}

/** @param {JobAlert[]} alerts */
function ruleList(alerts) {
  const rules = new Map();
  for (const alert of alerts) if (!rules.has(alert.rule)) rules.set(alert.rule, alert);
  return [...rules.values()].slice(0, 3).map(({ rule, severity, message }) => el("span", { cls: `severity ${severity}`, title: message },
    el("span", { "aria-hidden": "true" }, `${GLYPHS[severity] ?? "●"} `), rule));
}

/**
 * @param {JobState} state
 * @param {boolean} onlyTroubled
 * @param {string} search - part of a node's name, or a rank: then all that are found are shown
 * @param {() => void} redraw
 */
export function showRanks(state, onlyTroubled, search, redraw) {
  const troubled = state.ranks.filter(needsLook);
  const chosen = search ? state.ranks.filter((rank) => isFound(rank, search)) : onlyTroubled ? troubled.sort(byTrouble) : state.ranks;
  setText(byId("ranks-hint"), state.ranks.length ? `${troubled.length} of ${formatStep(state.ranks.length)} need a look` : "");
  if (!chosen.length) {
    /** @type {[string, string]} */
    const texts = search ? ["No rank is found.", "The search looks at names of nodes and at numbers of ranks."] : state.ranks.length ? ["Every rank is fine.", state.isOver ? `All have ended after step ${formatStep(state.step)}.` : `All are at step ${formatStep(state.step)} or one after it.`] : ["No ranks.", "No agent has said which it has."];
    return byId("ranks").replaceChildren(empty(...texts));
  }
  const rows = shown("ranks", chosen).map(rankRow);
  const head = ["Rank", "Node", "Place", "State", "Step", "Behind", "Last sign", "Alerts"];
  byId("ranks").replaceChildren(table("cards", head, rows), pager("ranks", chosen, redraw));
}

/** @param {JobRank} rank */
function rankRow(rank) {
  const place = Object.entries(rank.place ?? {}).map(([axis, index]) => `${axis} ${index}`).join("  ");
  const state = toneOf(rank) === "gone" ? el("span", { cls: "gone" }, "gone") : toneOf(rank) === "ended" ? "ended" : rank.up ? rank.phase : el("span", { cls: "message" }, "not known");
  return el("tr", {},
    el("td", {}, String(rank.rank)),
    el("td", {}, pageLink(rank.url, rank.node ?? "")),
    el("td", {}, place || "–"),
    el("td", {}, state),
    el("td", { cls: "num" }, formatStep(rank.step)),
    el("td", {}, rank.behind ? el("span", { cls: "behind" }, `${rank.behind} steps`) : "–"),
    el("td", {}, `${formatSeconds(rank.lag_s)} ago`),
    el("td", { cls: "where" }, ...(rank.alerts.length ? [...ruleList(rank.alerts), " ", el("span", { cls: "message" }, sentence(rank.alerts[0]))] : ["–"])));
}

/** @param {Escalation[]} escalations */
export function showEscalations(escalations) {
  const open = escalations.filter((entry) => !entry.outcome).length;
  setText(byId("escalations-hint"), escalations.length ? `${open} open, ${escalations.length} in all` : "");
  if (!escalations.length) {
    return byId("escalations").replaceChildren(empty("No escalations.", "Alertmanager posts alerts with the label escalate to /api/v1/alerts."));
  }
  const rows = escalations.slice(0, SHOWN).map((entry) => el("tr", {},
    el("td", {}, new Date(entry.accepted_s * 1000).toLocaleTimeString([], { hour12: false })),
    el("td", { cls: "where", title: entry.id }, entry.reason || entry.id),
    el("td", {}, entry.ranks ?? "all"),
    el("td", {}, entry.num_steps === 1 ? entry.task : `${entry.task}, ${entry.num_steps} steps`),
    el("td", { cls: "num" }, entry.first_step === null ? "–" : formatStep(entry.first_step)),
    el("td", {}, el("span", { cls: `pill ${OUTCOMES[entry.outcome ?? ""] ?? ""}` }, entry.outcome ?? (entry.first_step === null ? "accepted" : "ordered"))),
    el("td", { cls: "where" }, coverage(entry))));
  byId("escalations").replaceChildren(table("cards", ["Accepted", "Because of", "Ranks", "Dump", "Step", "Outcome", "Became of it"], rows));
}

/** @param {Escalation} escalation */
function coverage({ coverage: statuses, detail }) {
  const parts = Object.entries(statuses).map(([status, ranks]) => `${status}: ${ranks}`);
  return [...parts, detail].filter(Boolean).join("; ") || "–";
}

/**
 * A page is linked only where it is one: an address comes from discovery, but a name comes from the network.
 * @param {string} url
 * @param {string} text
 * @param {string} [cls]
 */
export const pageLink = (url, text, cls) => (/^(https?:\/\/|node\/)/.test(url) ? el("a", { href: url, cls }, text) : text);

/**
 * @param {JobRank} rank
 * @param {string} search
 */
const isFound = (rank, search) => String(rank.rank) === search || isNamed(rank.node ?? rank.url, search);

/**
 * @param {string} name
 * @param {string} search
 */
const isNamed = (name, search) => name.toLowerCase().includes(search);

/**
 * The rows of the page that is shown; tables of thousands of rows would hold the browser up at every answer.
 * @template T
 * @param {keyof typeof pages} name
 * @param {T[]} list
 */
function shown(name, list) {
  pages[name] = Math.min(pages[name], Math.ceil(list.length / SHOWN) - 1);
  return list.slice(pages[name] * SHOWN, (pages[name] + 1) * SHOWN);
}

/**
 * @param {keyof typeof pages} name
 * @param {unknown[]} list
 * @param {() => void} redraw
 */
function pager(name, list, redraw) {
  if (list.length <= SHOWN) return "";
  const [page, last] = [pages[name], Math.ceil(list.length / SHOWN) - 1];
  /**
   * @param {string} text
   * @param {string} label
   * @param {number} to
   */
  const turn = (text, label, to) => el("button", { type: "button", "aria-label": label, disabled: to < 0 || to > last, onclick: () => ((pages[name] = to), redraw()) }, text);
  const place = `${formatStep(page * SHOWN + 1)} to ${formatStep(Math.min((page + 1) * SHOWN, list.length))} of ${formatStep(list.length)}`;
  return el("p", { cls: "pager" }, turn("‹", `Previous ${name}`, page - 1), el("span", {}, place), turn("›", `Next ${name}`, page + 1));
}
