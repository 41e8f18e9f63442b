// What holds for all charts: smoothing, the axis without outliers, what can be saved, and the theme.

import { keep, stated } from "../address.js";
import { stepsAddress } from "../api.js";
import { byId, el, segmented, setText } from "../dom.js";
import { chooseTheme, chosenTheme } from "../theme.js";
import { fileName, savePicture, saveTable } from "./saving.js";
import { look } from "./smooth.js";

/** @import { StepView } from "../view.js" */
/** @import { Track } from "../track.js" */

const MOST_SMOOTHING = 0.99;

/** Takes smoothing and clipping from the address. */
export function followTools() {
  const smoothing = Math.min(MOST_SMOOTHING, Math.max(0, Number(stated("smooth")) || 0));
  look.choose({ smoothing, clips: stated("clip") === "1" });
}

export function showTheme() {
  const themes = [["auto", "auto"], ["light", "light"], ["dark", "dark"]];
  byId("theme").replaceChildren(segmented("Theme", themes, chosenTheme(), chooseTheme));
}

/**
 * @param {{view: StepView, tracks: () => Track[]}} charts
 */
export function showTools({ view, tracks }) {
  const slider = el("input", { type: "range", min: "0", max: String(MOST_SMOOTHING), step: "0.01", id: "smoothing", oninput: () => smooth(Number(slider.value)) });
  const shown = el("output", { for: "smoothing" });
  const clip = el("input", { type: "checkbox", onchange: () => (look.choose({ clips: clip.checked }), keep("clip", clip.checked ? "1" : null)) });
  /** @param {number} smoothing */
  const smooth = (smoothing) => (look.choose({ smoothing }), keep("smooth", smoothing ? String(smoothing) : null));
  const follow = () => {
    slider.value = String(look.smoothing);
    shown.value = look.smoothing.toFixed(2);
    clip.checked = look.clips;
  };
  look.addEventListener("change", follow);
  follow();
  const run = () => byId("run-id").textContent ?? "run";
  const steps = () => (view.zoomed ? `_${view.zoomed.join("-")}` : "");
  const problem = el("span", { cls: "problem", role: "status" });
  const csv = () => {
    setText(problem, "");
    saveTable(stepsAddress(view.zoomed), `${fileName(run())}${steps()}.csv`).catch((error) => setText(problem, `not saved: ${error.message}`));
  };
  const png = () => savePicture(tracks().filter(({ root }) => !root.hidden), run(), `${fileName(run())}${steps()}.png`);
  byId("tools").replaceChildren(
    el("label", { for: "smoothing" }, "smooth", slider, shown),
    el("label", { title: "The axis covers what nearly all values are; what lies outside is marked at the edge" }, clip, "without outliers"),
    el("span", {}, "save ", el("button", { type: "button", cls: "link", title: "Loss, norms and the other numbers of each rank on the steps shown, as they are stored", onclick: csv }, "csv"), " ",
      el("button", { type: "button", cls: "link", title: "All charts as they are now", onclick: png }, "PNG")), problem);
}
