"""Writes schema.json: JSON schema of dashboards and panel options, from the types that Grafana publishes.

`python -m tests.dashboards.grafana.make_schema` installs two npm packages into a temporary folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCHEMA = "@grafana/schema@11.6.16"
GENERATOR = "ts-json-schema-generator@2.9.0"
OUTPUT = Path(__file__).parent / "schema.json"
RAW = "./node_modules/@grafana/schema/dist/esm/raw/composable/{}/panelcfg/x/{}PanelCfg_types.gen.d.ts"
TYPES = {
    "dashboard": ("Dashboard", "@grafana/schema"),
    "timeseriesField": ("GraphFieldConfig", "@grafana/schema"),
    "tableField": ("TableFieldOptions", "@grafana/schema"),
    "heatmapField": ("FieldConfig", RAW.format("heatmap", "Heatmap")),
    **{
        name.lower(): ("Options", RAW.format(name.lower(), name))
        for name in ("Stat", "Heatmap", "BarGauge", "TimeSeries", "Table")
    },
}


def schema_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the schema of one type, its definitions named after it where another type has some of that name."""
    type_name, module = TYPES[name]
    (folder / "types.ts").write_text(f"import type {{ {type_name} as T }} from '{module}';\nexport type Wanted = T;\n")
    command = ["npx", "ts-json-schema-generator", "--tsconfig", "tsconfig.json", "--path", "types.ts"]
    command += ["--type", "Wanted", "--no-type-check", "--expose", "all", "--no-top-ref", "--out", "out.json"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    text = (folder / "out.json").read_text()
    for common in ("Options", "FieldConfig"):
        text = text.replace(f'"#/definitions/{common}"', f'"#/definitions/{name}{common}"')
        text = text.replace(f'"{common}": {{', f'"{name}{common}": {{')
    return dict(json.loads(text))


def without_texts(value: Any) -> Any:
    """Return a schema without what is for readers."""
    if isinstance(value, dict):
        kept = {key: part for key, part in value.items() if not (key == "description" and isinstance(part, str))}
        return {key: without_texts(part) for key, part in kept.items()}
    return [without_texts(part) for part in value] if isinstance(value, list) else value


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "package.json").write_text('{"private": true}')
        compiler = {"target": "es2022", "module": "esnext", "moduleResolution": "bundler", "skipLibCheck": True}
        (folder / "tsconfig.json").write_text(json.dumps({"compilerOptions": compiler, "files": ["types.ts"]}))
        subprocess.run(["npm", "install", "--ignore-scripts", "--no-audit", SCHEMA, GENERATOR], cwd=folder, check=True)
        parts = {name: without_texts(schema_of(name, folder)) for name in TYPES}
    definitions: dict[str, Any] = {}
    for part in parts.values():
        for key, definition in part.pop("definitions").items():
            assert definitions.setdefault(key, definition) == definition, f"two types are named {key}"
        part.pop("$schema", None)
    comment = f"Made by {Path(__file__).name} from {SCHEMA}, Apache-2.0."
    made = {"$comment": comment, "properties": parts, "definitions": definitions}
    OUTPUT.write_text(json.dumps(made, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
