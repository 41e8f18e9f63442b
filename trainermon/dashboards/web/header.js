// The run's name, state and figures.

import { byId, el, setText } from "./dom.js";
import { hasEnded, measured, number } from "./api.js";
import { formatBytes, formatCount, formatMeasured, formatSeconds, formatStep, formatTime } from "./scales.js";

/** @import { Numeric, Run, StepFigures } from "./types.js" */

/** @type {Record<string, [string, string]>} */
const STATES = {
  live: ["live", "good"],
  finished: ["finished", "calm"],
  stopped: ["stopped", "calm"],
  interrupted: ["interrupted", "calm"],
  killed: ["killed", "bad"],
  failed: ["failed", "bad"],
  crashed: ["crashed", "bad"],
  draining: ["finishing", "calm"],
  reconnecting: ["reconnecting", "warn"],
};
const MOST_DOTS = 64;
/** Whether a controller shows this page, as that of one of its nodes. */
const IN_JOB = /\/node\/[^/]+\/[^/]+\/$/.test(location.pathname);

/** @param {string} name */
export function showState(name) {
  const [text, tone] = STATES[name] ?? [name, "calm"];
  setText(byId("state"), text);
  byId("state").dataset.tone = tone;
}

/** @param {Run} run */
export function showRun(run) {
  setText(byId("run-id"), run.run_id);
  const model = run.model && `${formatCount(run.model.parameters)} parameters${run.model.is_whole ? "" : " on this node"}`;
  const started = !run.started_s ? null : `started ${formatTime(run.started_s)}`;
  const attempt = run.attempt > 1 ? `attempt ${run.attempt}` : null;
  const facts = [model, `host ${run.host}`, attempt, started].filter(Boolean);
  const others = run.stored ? el("a", { href: "../../" }, "← All runs") : IN_JOB ? el("a", { href: "../../../" }, "← Whole job") : "";
  const leftOut = run.left_out ? el("span", { cls: "bad" }, run.left_out) : "";
  byId("run-facts").replaceChildren(others, ...facts.map((text) => el("span", {}, text)), outputPath(run.output), leftOut);
  showFooter(run);
}

/** @param {string} path */
function outputPath(path) {
  const button = el("button", { type: "button", cls: "path", title: "Copy the output path" }, path ?? "");
  button.addEventListener("click", async () => {
    // The clipboard needs a secure context, which plain HTTP to another host is not: then the text gets selected.
    try {
      await navigator.clipboard.writeText(path);
      button.dataset.copied = "";
      setTimeout(() => delete button.dataset.copied, 1200);
    } catch {
      getSelection()?.selectAllChildren(button);
    }
  });
  return button;
}

/** @param {Run} run */
function showFooter(run) {
  const stored = run.bytes_per_step ? `${formatBytes(run.bytes_per_step)} recorded per step and rank` : null;
  const skipped = run.skipped_records ? `${formatStep(run.skipped_records)} records skipped because the disk was too slow` : null;
  byId("footer").replaceChildren(
    ...[`trainermon ${run.version ?? ""}`.trim(), stored, skipped].filter(Boolean).map((text) => el("span", {}, text)),
    run.stored || IN_JOB ? "" : el("a", { href: "metrics" }, "metrics"),
    el("code", {}, `trainermon query ${run.output} "SELECT …"`),
  );
}

/**
 * Figures that the step event updates come from `now`: {step, loss, grad_norm, step_time_s, tokens_per_second}.
 * @param {Run} run
 * @param {StepFigures} now
 * @param {{ text: string, tone: string }} firing
 */
export function showFigures(run, now, firing) {
  const alive = run.ranks.filter((rank) => rank.alive).length;
  const finished = hasEnded(run);
  figure("step", "Step", formatStep(now.step));
  figure("loss", "Loss", ...valued(now.loss));
  figure("grad-norm", "Gradient norm", ...valued(now.grad_norm));
  figure("step-time", "Step time", formatSeconds(measured(now.step_time_s)));
  const speed = measured(now.tokens_per_second ?? null);
  if (Number.isFinite(speed) && speed !== null) figure("tokens", "Tokens per second", formatCount(Math.round(speed)));
  const lag = number(run.lag_s);
  const short = !finished && alive < run.world_size;
  figure("ranks", finished ? "Ranks" : "Ranks alive", finished ? `${run.world_size}` : `${alive} / ${run.world_size}`, short ? "bad" : "", dots(run));
  figure("lag", "Journal lag", formatSeconds(lag), lag !== null && lag > 5 ? "warn" : "");
  figure("firing", "Alerts firing", firing.text, firing.tone);
}

/**
 * @param {Numeric} value
 * @returns {[string, string]}
 */
function valued(value) {
  const read = measured(value);
  return [formatMeasured(read), read !== null && !Number.isFinite(read) ? "nonfinite" : ""];
}

/**
 * One square per rank; which one is missing is seen at once. Beyond 64 ranks the number alone is clearer.
 * @param {Run} run
 */
function dots(run) {
  if (hasEnded(run) || run.ranks.length > MOST_DOTS || run.ranks.length < 2) return null;
  const squares = run.ranks.map((rank) => {
    const state = rank.alive ? rank.phase : "gone";
    const place = Object.entries(rank.place ?? {}).map(([axis, at]) => `${axis} ${at}`).join(", ");
    const title = `rank ${rank.rank}${place && ` (${place})`}: ${state}, step ${formatStep(rank.step)}`;
    return el("i", { cls: rank.alive ? null : "gone", title });
  });
  return el("span", { cls: "dots", "aria-hidden": "true" }, squares);
}

/**
 * @param {string} id
 * @param {string} label
 * @param {string} text
 * @param {string} [tone]
 * @param {HTMLElement | null} [extra]
 */
function figure(id, label, text, tone = "", extra = null) {
  if (!document.getElementById(`figure-${id}`)) {
    const [name, number] = [el("dt", { id: `label-${id}` }), el("span", { id: `number-${id}`, cls: "number" })];
    byId("figures").append(el("div", { cls: "figure" }, name, el("dd", { id: `figure-${id}` }, number)));
  }
  const value = byId(`figure-${id}`);
  setText(byId(`label-${id}`), label);
  setText(byId(`number-${id}`), text);
  value.dataset.tone = tone;
  value.querySelector(".dots")?.remove();
  if (extra) value.append(extra);
}
