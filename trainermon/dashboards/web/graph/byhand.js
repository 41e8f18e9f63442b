// Matches made by hand: the selected node with those selected beside it.

import { byId, el } from "../dom.js";
import { keepNotes, matchByHand, undoMatch } from "./panel/notes.js";

/** @import { GraphView } from "./graphview.js" */

/** @param {GraphView} view */
export const matchSelected = (view) => tell(view, matchByHand(view.graph, [view.selected, ...view.panes.folds.others]));

/** @param {GraphView} view */
export const undoLastMatch = (view) => tell(view, undoMatch(view.graph));

/**
 * @param {GraphView} view
 * @param {string} what - was done with the matches, which are kept
 */
function tell(view, what) {
  view.fillPanel();
  const said = el("p", { cls: "told", role: "status" }, what);
  byId("panel").querySelector(".told")?.remove();
  byId("panel").prepend(said);
  void keepNotes(view.graph).then((why) => why && said.append(` Not kept: ${why}.`));
}
