// How lines are calmed for the eye: an average that follows, and an axis that a few outliers do not stretch. What is
// shown so is always shown beside, or marked at the edge: nothing disappears.

/** What the reader has chosen for all lines; hear "change". */
class Look extends EventTarget {
  /** Weight of the past, 0 (none) to 0.99. */
  smoothing = 0;
  clips = false;

  /** @param {Partial<{smoothing: number, clips: boolean}>} choice */
  choose(choice) {
    Object.assign(this, choice);
    this.dispatchEvent(new Event("change"));
  }
}

export const look = new Look();

/**
 * Exponential moving average, corrected for its beginning: m_k = w·m_(k−1) + (1−w)·x_k, over 1 − w^k (Kingma and Ba, 2015).
 * What is null or not finite has no average, and changes that of nobody.
 * @param {ArrayLike<number | null>} values
 * @param {number} weight
 * @returns {(number | null)[]}
 */
export function averaged(values, weight) {
  let [sum, total] = [0, 0];
  return Array.from(values, (value) => {
    if (value === null || !Number.isFinite(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/**
 * Between which values nearly all are: the whole of them where nothing lies far out, else the 1st to 99th hundredth
 * with as much air as lies between them. Null without a finite one.
 * @param {Iterable<number | null>} values
 * @returns {[number, number] | null}
 */
export function usual(values) {
  const sorted = Float64Array.from([...values].filter((value) => value !== null && Number.isFinite(value))).sort();
  if (!sorted.length) return null;
  /** @param {number} share */
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  const [low, high] = [at(0.01), at(0.99)];
  const air = (high - low) / 10;
  return [Math.max(sorted[0], low - air), Math.min(sorted[sorted.length - 1], high + air)];
}
