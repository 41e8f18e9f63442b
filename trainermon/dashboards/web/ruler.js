// The time axis on top of all charts: step numbers, and one lane with the marks of alerts and dumps. It stays in sight
// while the page scrolls.

import { formatStep } from "./scales.js";
import { GLYPHS, theme } from "./theme.js";
import { Track } from "./track.js";

/** @import { Alert, Box, Dump } from "./types.js" */

const LANE = 20;
const REACH = 8;
const ORDER = ["info", "warning", "critical", "fatal"];

/** @import { TrackOptions } from "./track.js" */
/** @typedef {{alerts: () => Alert[], dumps: () => Dump[]}} Marked */

export class Ruler extends Track {
  /** @param {Pick<TrackOptions, "parent" | "view"> & Marked} options */
  constructor({ alerts, dumps, ...track }) {
    super({ ...track, height: LANE + 22, title: "Alerts and dumps", label: "Alerts and dumps over steps" });
    this.alerts = alerts;
    this.dumps = dumps;
    this.root.classList.add("ruler");
    this.header.classList.add("visually-hidden");
  }

  /**
   * Everything that has a place on the lane; the worst is drawn last, so on top.
   * @param {Box} box
   */
  #marks(box) {
    const alerts = this.alerts().map((alert) => ({ step: alert.first_step, alert, dump: null }));
    const dumps = this.dumps().map((dump) => ({ step: dump.step, alert: null, dump }));
    /** @param {{alert: Alert | null}} mark */
    const rank = ({ alert }) => (alert ? ORDER.indexOf(alert.severity) : -1);
    return [...dumps, ...alerts]
      .map((mark) => ({ ...mark, x: this.x(mark.step + 0.5, box) }))
      .filter(({ x }) => x >= box.left - 1 && x <= box.right + 1)
      .sort((a, b) => rank(a) - rank(b));
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   */
  paint(context, box) {
    context.fillStyle = theme.plot;
    context.fillRect(box.left, 0, box.width, LANE);
    this.paintSteps(context, box, { height: LANE, labels: true });
    context.fillStyle = theme.muted;
    context.textAlign = "right";
    context.fillText(box.left < 100 ? "alerts" : "alerts, dumps", box.left - 8, LANE / 2);
    context.fillText("step", box.left - (box.left < 100 ? 8 : 30), LANE + 10);
    for (const mark of this.#marks(box)) {
      if (mark.alert) this.#paintAlert(context, { x: mark.x, alert: mark.alert });
      else this.#paintDump(context, mark);
    }
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {{x: number, alert: Alert}} mark
   */
  #paintAlert(context, { x, alert }) {
    context.textAlign = "center";
    context.font = `13px ${theme.font}`;
    context.lineWidth = 3;
    context.strokeStyle = theme.plot;
    context.strokeText(GLYPHS[alert.severity] ?? "●", x, LANE / 2);
    context.lineWidth = 1;
    context.fillStyle = theme.severity[alert.severity] ?? theme.muted;
    context.fillText(GLYPHS[alert.severity] ?? "●", x, LANE / 2);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {{x: number}} mark
   */
  #paintDump(context, { x }) {
    context.fillStyle = theme.accent;
    context.fillRect(x - 4, LANE - 4, 8, 4);
  }

  /**
   * @param {number} step
   * @param {number} y
   * @param {Box} box
   * @param {number} x
   */
  describe(step, y, box, x) {
    const near = this.#marks(box).filter((mark) => Math.abs(mark.x - x) <= REACH);
    if (y > LANE || !near.length) return null;
    const texts = near.slice(-6).map(({ alert, dump }) =>
      alert ? `${GLYPHS[alert.severity] ?? "●"} ${alert.rule}, rank ${alert.rank}, step ${formatStep(alert.first_step)}`
        : `dump of step ${formatStep(dump.step)}, ${dump.status}`);
    return [`Step ${formatStep(near[near.length - 1].step)}`, ...texts, "Click to look closer"];
  }

  /**
   * @param {number} x
   * @param {number} y
   * @param {Box} box
   */
  click(x, y, box) {
    const near = this.#marks(box).filter((mark) => Math.abs(mark.x - x) <= REACH);
    if (near.length) this.view.focus(near[near.length - 1].step);
  }

  /**
   * @param {CanvasRenderingContext2D | null} context
   * @param {Box} box
   */
  paintCursor(context, box) {
    if (!context || this.view.cursor === null) return;
    const text = formatStep(this.view.cursor);
    context.font = `600 11px ${theme.font}`;
    const width = context.measureText(text).width + 12;
    const x = this.x(this.view.cursor + 0.5, box);
    context.fillStyle = theme.ink;
    context.fillRect(x - width / 2, LANE + 2, width, 17);
    context.fillStyle = theme.panel;
    context.textAlign = "center";
    context.fillText(text, x, LANE + 11);
  }
}
