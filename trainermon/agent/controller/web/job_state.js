// What the agents' answers mean for the job: which ranks need a look, and the sentence on top of the page.

import { formatSpans, formatStep } from "./scales.js";

/** @import { Agent, Assessment, Job, JobAlert, JobNode, JobRank, JobState, Rank, Severity } from "./types.js" */

const URGENCY = ["fatal", "critical", "warning", "info"];
const BEHIND_STEPS = 2; // ranks of one job are at most a step apart
const MOST_SPANS = 12; // of ranks in one sentence

/**
 * The runs that agents have named, those with living ranks first.
 * @param {Job} job
 */
export function runsOf(job) {
  /** @param {string} run */
  const living = (run) => job.agents.some((agent) => agent.run_id === run && agent.ranks?.some((rank) => rank.alive));
  return [...job.runs].sort((a, b) => Number(living(b)) - Number(living(a)) || (a < b ? -1 : 1));
}

/**
 * Nodes and ranks of one run, with what is wrong with each. Agents that have never answered belong to every run.
 * @param {Job} job
 * @param {string | undefined} run
 * @returns {JobState}
 */
export function readJob(job, run) {
  const agents = job.agents.filter((agent) => agent.run_id === run || agent.run_id === undefined);
  const attempt = most(agents.map((agent) => agent.attempt ?? 0));
  const newest = agents.filter((agent) => agent.run_id === undefined || agent.attempt === attempt);
  const living = newest.flatMap((agent) => ((agent.up && agent.ranks) || [])).filter((rank) => rank.alive);
  const steps = newest.flatMap((agent) => (typeof agent.step === "number" ? [agent.step] : []));
  const pace = most(newest.map((agent) => (agent.up ? agent.steps_per_s : 0) || 0));
  const now = most(newest.filter((agent) => agent.up).flatMap((agent) => (agent.ranks ?? []).filter((rank) => rank.alive).map((rank) => stepNow(rank, agent, pace))));
  const nodes = newest.map((agent) => readNode(agent, now, pace));
  const ranks = nodes.flatMap((node) => node.ranks).sort((a, b) => a.rank - b.rank);
  const world = most(newest.map((agent) => agent.world_size ?? 0));
  const standstill = (run !== undefined && job.standstills?.[run]) || null;
  const divergences = (run !== undefined && job.divergences?.[run]) || [];
  const brokenLaws = (run !== undefined && job.broken_laws?.[run]) || [];
  const isOver = ranks.length > 0 && ranks.every((rank) => !rank.alive && (rank.up || hasEnded(rank)));
  return {
    run, attempt, nodes, standstill, divergences, brokenLaws, ranks, living: living.length, isOver, step: steps.length ? most(steps) : null, pace, world,
    alerts: newest.flatMap((agent) => (agent.up && agent.alerts) || []),
    silenced: newest.flatMap((agent) => (agent.up && agent.silenced) || []),
  };
}

/**
 * The largest of numbers that are not negative. Not Math.max, which takes no more arguments than the stack holds.
 * @param {number[]} numbers
 */
const most = (numbers) => numbers.reduce((largest, number) => (number > largest ? number : largest), 0);

/**
 * The step that a rank has come to since its agent was asked: of a thousand agents some were asked seconds before others.
 * @param {Rank} rank
 * @param {Agent} agent
 * @param {number} pace
 */
const stepNow = (rank, agent, pace) => rank.step + pace * (agent.age_s ?? 0);

/**
 * @param {Agent} agent
 * @param {number} now - the step that the first rank has come to
 * @param {number} pace
 * @returns {JobNode}
 */
function readNode(agent, now, pace) {
  const url = pageOf(agent);
  const alerts = agent.alerts ?? [];
  const ranks = (agent.ranks ?? []).map((rank) => {
    const own = alerts.filter((alert) => alert.rank === rank.rank).sort(byUrgency);
    const behind = rank.alive ? Math.floor(now - stepNow(rank, agent, pace)) : 0;
    const step = hasEnded(rank) ? (agent.step ?? rank.step) : rank.step;
    return { ...rank, step, node: agent.host, url, alerts: own, behind: behind >= BEHIND_STEPS ? behind : 0, up: agent.up };
  });
  return { ...agent, url, name: agent.host ?? agent.url.replace(/^https?:\/\/|\/$/g, ""), alerts, ranks };
}

/**
 * The page of a node, at this controller's address: not every browser reaches the nodes. An agent that has not said
 * which run it watches has only its own.
 * @param {Agent} agent
 */
function pageOf({ url, run_id: run, host }) {
  return run === undefined || host === undefined ? url : `node/${encodeURIComponent(run)}/${encodeURIComponent(host)}/`;
}

/**
 * @param {JobAlert} a
 * @param {JobAlert} b
 */
const byUrgency = (a, b) => URGENCY.indexOf(a.severity) - URGENCY.indexOf(b.severity) || a.step - b.step;

/**
 * Whether a rank has closed its journal and ended, and was not killed.
 * @param {Rank} rank
 */
const hasEnded = ({ alive, phase }) => !alive && phase === "closed";

/**
 * Whether all that a node had to do is done; then its agent may leave.
 * @param {JobNode} node
 */
export const isDone = ({ ranks }) => ranks.length > 0 && ranks.every(hasEnded);

/**
 * One word for a rank, the worst that is to be said: gone, unknown, a severity, behind, ended in good order, or fine.
 * @param {JobRank} rank
 * @returns {"unknown" | "gone" | Severity | "behind" | "ended" | "fine"}
 */
export function toneOf(rank) {
  if (hasEnded(rank)) return rank.alerts[0]?.severity ?? "ended";
  if (!rank.up) return "unknown";
  if (!rank.alive) return "gone";
  return rank.alerts[0]?.severity ?? (rank.behind ? "behind" : "fine");
}

/** @param {JobRank} rank */
export const needsLook = (rank) => !["fine", "ended"].includes(toneOf(rank));

/** @param {JobRank} rank */
export function describe(rank) {
  const tone = toneOf(rank);
  if (tone === "unknown") return "its agent does not answer";
  if (tone === "gone") return `gone, last seen at step ${formatStep(rank.step)}`;
  if (hasEnded(rank)) return [`ended after step ${formatStep(rank.step)}`, ...rank.alerts.map(({ rule }) => rule)].join(", ");
  return [rank.phase, `step ${formatStep(rank.step)}`, ...rank.alerts.map(({ rule }) => rule)].join(", ");
}

const TONES = ["gone", ...URGENCY, "behind", "unknown", "ended", "fine"];

/**
 * 0 for the rank that needs a look most.
 * @param {JobRank} rank
 */
export const urgencyOf = (rank) => TONES.indexOf(toneOf(rank));

/**
 * @param {JobRank} a
 * @param {JobRank} b
 */
export const byTrouble = (a, b) => urgencyOf(a) - urgencyOf(b) || a.rank - b.rank;

/**
 * {tone, headline, details}: the one thing to know first, and what else there is.
 * @param {JobState} state
 * @param {boolean} ready
 * @returns {Assessment}
 */
export function assess(state, ready) {
  const findings = [standing(state), lawless(state), diverging(state), silent(state), gone(state), alerting(state), lagging(state), missing(state)].filter((found) => found !== null);
  findings.sort((a, b) => Number(a.tone === "warn") - Number(b.tone === "warn"));
  const [first, ...others] = findings;
  if (first) {
    return { ...first, details: [...first.details, ...others.map(({ headline }) => `${headline}.`)] };
  }
  if (!state.ranks.length) {
    const headline = ready ? "No agent of a run is found" : "Looking for agents";
    return { tone: "calm", headline, details: ["Agents appear here as soon as they answer."] };
  }
  const but = state.silenced.length ? " that is not silenced" : "";
  if (state.isOver) return { tone: "good", headline: `Finished at step ${formatStep(state.step)}`, details: [`Every rank has ended in good order, and no alert${but} was firing.`] };
  return { tone: "good", headline: state.living === 1 ? "The rank is training" : `All ${formatStep(state.living)} ranks are training`, details: [`No alert${but} is firing on any node.`] };
}

/**
 * The verdict over all nodes: an agent alone sees only who waits on its own.
 * @param {JobState} state
 * @returns {Assessment | null}
 */
function standing({ standstill }) {
  if (!standstill) return null;
  const { culprits, text } = standstill;
  const headline = culprits.length ? `${culprits.length === 1 ? "Rank" : "Ranks"} ${formatSpans(culprits, MOST_SPANS)} ${culprits.length === 1 ? "holds" : "hold"} the job up` : "The job stands still";
  return { tone: "bad", headline, details: [text] };
}

/**
 * What no agent can see: it has the gradients of its own ranks only.
 * @param {JobState} state
 * @returns {Assessment | null}
 */
function lawless({ brokenLaws }) {
  if (!brokenLaws.length) return null;
  const headline = `${brokenLaws.length === 1 ? "A law" : `${brokenLaws.length} laws`} of every correct training ${brokenLaws.length === 1 ? "does" : "do"} not hold`;
  return { tone: "bad", headline, details: brokenLaws.map(({ text }) => text) };
}

/**
 * What no agent can see: it has the copies of its own ranks only.
 * @param {JobState} state
 * @returns {Assessment | null}
 */
function diverging({ divergences }) {
  if (!divergences.length) return null;
  const ranks = [...new Set(divergences.flatMap((found) => found.ranks))].sort((a, b) => a - b);
  const headline = `The weights of ${plural(ranks).toLowerCase()} ${formatSpans(ranks, MOST_SPANS)} are not those of their replicas`;
  return { tone: "bad", headline, details: divergences.map(({ text }) => text) };
}

/**
 * @param {JobState} state
 * @returns {Assessment | null}
 */
function silent({ nodes }) {
  const down = nodes.filter((node) => !node.up && !isDone(node));
  if (!down.length) return null;
  const headline = down.length === 1 ? `Node ${down[0].name} does not answer` : `${down.length} of ${nodes.length} nodes do not answer`;
  return { tone: "bad", headline, details: down.length === 1 ? [down[0].problem] : [] };
}

/**
 * @param {JobState} state
 * @returns {Assessment | null}
 */
function gone({ ranks }) {
  const lost = ranks.filter((rank) => toneOf(rank) === "gone");
  if (!lost.length) return null;
  return { tone: "bad", headline: `${plural(lost)} ${formatSpans(lost.map(({ rank }) => rank), MOST_SPANS)} ${lost.length === 1 ? "is" : "are"} gone`, details: [] };
}

/**
 * @param {JobState} state
 * @returns {Assessment | null}
 */
function alerting({ alerts }) {
  const [worst] = [...alerts].sort(byUrgency);
  if (!worst) return null;
  const same = alerts.filter((alert) => alert.rule === worst.rule);
  const tone = ["fatal", "critical"].includes(worst.severity) ? "bad" : "warn";
  const rules = new Set(alerts.map((alert) => alert.rule)).size;
  const details = [worst.message ?? worst.rule, ...(rules > 1 ? [`${rules} rules are firing in all.`] : [])];
  return { tone, headline: `${worst.rule} on ${plural(same).toLowerCase()} ${formatSpans(same.map(({ rank }) => rank), MOST_SPANS)} since step ${formatStep(worst.step)}`, details };
}

/**
 * @param {JobState} state
 * @returns {Assessment | null}
 */
function lagging({ ranks }) {
  const late = ranks.filter((rank) => rank.up && rank.behind);
  if (!late.length) return null;
  const steps = most(late.map(({ behind }) => behind));
  return { tone: "warn", headline: `${plural(late)} ${formatSpans(late.map(({ rank }) => rank), MOST_SPANS)} up to ${steps} steps behind`, details: [] };
}

/**
 * @param {JobState} state
 * @returns {Assessment | null}
 */
function missing({ ranks, world }) {
  const lacking = world - new Set(ranks.map(({ rank }) => rank)).size;
  return lacking > 0 && ranks.length ? { tone: "warn", headline: `${lacking} of ${formatStep(world)} ranks are on nodes that are not found`, details: [] } : null;
}

/** @param {unknown[]} list */
const plural = (list) => (list.length === 1 ? "Rank" : "Ranks");
