// Which ranks share a line of the map: those of a step that are judged alike everywhere.

import { groupsOf, groupText } from "../data/ranks.js";

/** @import { GraphStore } from "../data/store.js" */
/** @import { Member } from "../types.js" */
/** @import { Line } from "./stepmap.js" */

/** @type {WeakMap<Member[], Omit<Line, "judged">[]>} */
const known = new WeakMap();

/**
 * @param {GraphStore} store
 * @param {Member[]} members
 * @returns {Line[]}
 */
export function linesOf(store, members) {
  let found = known.get(members);
  if (!found) known.set(members, (found = grouped(store, members)));
  return found.map((line) => ({ ...line, judged: store.judged.get(line.member) }));
}

/**
 * @param {GraphStore} store
 * @param {Member[]} members
 */
function grouped({ header }, members) {
  const steps = [...new Set(members.map(({ step }) => step))];
  return steps.flatMap((step) => groupsOf(header.skeletons, members, step).map(({ member, places }) => {
    const label = groupText(members, { member, places });
    return { member, places, label: steps.length > 1 && step !== null ? `step${step} ${label}` : label };
  }));
}
