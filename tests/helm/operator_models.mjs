// Checks resources of the Prometheus operator, from a folder with node_modules: `node operator_models.mjs < objects.json`.
// Values by the validators of @kubernetes-models, and unknown keys, which those pass over, by their types.
import { execFileSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";

const PACKAGE = "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";
const objects = JSON.parse(readFileSync(0, "utf8"));
const problems = [];

for (const object of objects) {
  const model = (await import(`${PACKAGE}/${object.kind}`))[object.kind];
  try {
    new model(object).validate();
  } catch (error) {
    problems.push(`${object.kind} ${object.metadata?.name}: ${error.message}`);
  }
}

// A literal may name only keys that its type has.
const kinds = [...new Set(objects.map((object) => object.kind))];
const lines = kinds.map((kind) => `import type { I${kind} } from "${PACKAGE}/${kind}";`);
objects.forEach((object, i) => lines.push(`export const o${i}: I${object.kind} = ${JSON.stringify(object)};`));
writeFileSync("objects.mts", lines.join("\n"));
const options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "objects.mts"];
try {
  execFileSync(process.execPath, ["node_modules/typescript/bin/tsc", ...options], { encoding: "utf8" });
} catch (error) {
  problems.push(error.stdout);
}
process.stdout.write(problems.join("\n"));
