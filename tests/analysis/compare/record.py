"""Writes `recorded/`: a sound and a faulty step that mindstudio-probe dumped, and what its own compare said of them.

    python -m tests.analysis.compare.record

Needs the environment that `make bench` makes. Paths of this machine are cut out of the stacks.
"""

import csv
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
OTHER_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
SCRIPT = Path(__file__).with_name("record_with_msprobe.py")
RECORDED = Path(__file__).with_name("recorded")
FACTORS = {"sound": "1", "faulty": "1.5", "nan": "nan"}


def run(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MSPROBE_LOG_LEVEL": "3"}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]


def dump_with_msprobe(folder, mode, factor):
    """Return the directory of the dump."""
    run(OTHER_PYTHON, SCRIPT, folder, mode, factor)
    (found,) = folder.glob("step0/*/dump.json")
    return found.parent


def compare_with_msprobe(target, golden, output):
    """Return the rows of msprobe's csv file as dicts."""
    program = OTHER_PYTHON.with_name("msprobe")
    run(program, "compare", "-tp", target / "dump.json", "-gp", golden / "dump.json", "-o", output)
    (found,) = output.glob("*.csv")
    with found.open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, factor in FACTORS.items():
            dump = dump_with_msprobe(Path(folder) / name, "statistics", factor)
            kept = RECORDED / name / "step0" / "rank0"
            kept.mkdir(parents=True, exist_ok=True)
            for file in ("dump.json", "construct.json", "stack.json"):
                text = (dump / file).read_text()
                text = re.sub(r"File /[^,]*?/(site-packages/)?([\w/]+\.py)", _shortened, text)
                (kept / file).write_text(json.dumps(json.loads(text), separators=(",", ":")) + "\n")
        faulty, sound = (RECORDED / name / "step0" / "rank0" for name in ("faulty", "sound"))
        rows = compare_with_msprobe(faulty, sound, Path(folder))
    with (RECORDED / "faulty_against_sound.csv").open("w", newline="") as table:
        names = [name for name in rows[0] if name != "NPU_Stack_Info"]
        writer = csv.DictWriter(table, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def _shortened(match):
    return f"File site-packages/{match[2]}" if match[1] else f"File {Path(match[2]).name}"


if __name__ == "__main__":
    main()
