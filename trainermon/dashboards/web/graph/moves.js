// Where one goes from what is selected: up, along the data, to another step, or closer.

import { stepsOf } from "./data/ranks.js";
import { ancestorsOf } from "./data/skeleton.js";
import { along } from "./data/walking.js";
import { WHOLE } from "./map/mapview.js";

/** @import { GraphView } from "./graphview.js" */

/**
 * @param {GraphView} view
 * @param {number | undefined} node
 */
export function goToIfAny(view, node) {
  if (node !== undefined && node >= 0) view.goTo(node);
}

/**
 * One level up: what it is in; from the model, ranks put together further.
 * @param {GraphView} view
 */
export function toParent(view) {
  const { graph, selected, levels } = view;
  if (selected > 0) view.goTo(graph.parents[selected]);
  else if (levels.selectedIndex + 1 < levels.options.length) view.showLevel(levels.options[levels.selectedIndex + 1].value);
}

/**
 * @param {GraphView} view
 * @param {"producers" | "consumers"} which
 */
export const follow = (view, which) => goToIfAny(view, along(view.graph, view.selected, which));

/**
 * To the same rank in a step before or after.
 * @param {GraphView} view
 * @param {number} by
 */
export function toStep(view, by) {
  const { members, graph } = view;
  const steps = stepsOf(members);
  const next = steps[steps.findIndex(({ step }) => step === graph.step) + by];
  if (!next) return;
  const same = members.findIndex((one) => one.step === next.step && one.rank === graph.rank);
  view.showRank(same >= 0 ? same : next.place);
}

/**
 * Shows one direction alone; again: both.
 * @param {GraphView} view
 * @param {number} direction
 */
export function showDirection(view, direction) {
  const { panes, graph, selected, panes: { folds } } = view;
  folds.direction = folds.direction === direction ? 0 : direction;
  if ([...ancestorsOf(graph, selected), selected].some((node) => folds.isLeftOut(graph, node))) view.select(0);
  panes.arrange();
  panes.fitAll();
}

/**
 * Looks closer on the map at what is selected; again: shows the whole step.
 * @param {GraphView} view
 */
export function zoomMap({ graph: { sizes, count }, selected, map }) {
  const margin = sizes[selected] / 4;
  if (map.range === WHOLE && selected > 0) map.zoom((selected - margin) / count, (selected + sizes[selected] + margin) / count);
  else map.zoom(...WHOLE);
}
