// The one table of words for what is measured: kinds, heat maps and quantities are named here and nowhere else.

/** @type {Record<string, string>} */
const KINDS = {
  loss: "loss", step: "numbers of the step", checksum: "checksums of parameters",
  grad_reduced: "gradients, reduced", grad_unreduced: "gradients, before reduction",
  param_origin: "parameters, before the step", param_used: "parameters, as the forward used them",
  buffer: "buffers that are saved, before the forward",
  param_updated: "parameters, after the step", exp_avg: "Adam, mean", exp_avg_sq: "Adam, variance",
  update: "Adam, update", ratio: "Adam, update ratio", mg_direction: "gradient and momentum agree",
  state: "optimizer state", actv: "activations", actv_grad: "gradients of activations",
  actv_recomputed: "recomputed activations", comm: "collectives",
  feature: "feature",
};

/** @type {Record<string, string>} */
const SLOTS = { wait_seconds: "waiting time in seconds" };

/** @type {Record<string, string>} */
export const QUANTITIES = {
  step_time: "step time against the median", loss: "loss", grad_norm: "gradient norm", lag: "lag behind the first rank",
  wait: "waiting for collectives", accelerator_utilization: "utilisation", accelerator_memory_bytes: "accelerator memory in bytes",
  accelerator_power_watts: "power in watts", accelerator_temperature_celsius: "temperature in °C",
  accelerator_clock_hertz: "accelerator clock in Hz", accelerator_throttled: "throttled",
};

/** @param {string} name */
export const isKind = (name) => Object.hasOwn(KINDS, name);

/** @param {string} name */
const spaced = (name) => name.replaceAll("_", " ");

/**
 * "feature/attention_entropy" is written "feature: attention entropy".
 * @param {string} heatMap - a kind, or a kind and a slot
 */
export function kindText(heatMap) {
  const [kind, slot] = heatMap.split("/", 2);
  const name = KINDS[kind] ?? spaced(kind);
  return slot ? `${name}: ${SLOTS[slot] ?? spaced(slot)}` : name;
}

/** @param {string} quantity - of the ranks */
export const quantityText = (quantity) => QUANTITIES[quantity] ?? spaced(quantity);
