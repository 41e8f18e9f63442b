"""Records the graphs of this folder with mindstudio-probe 26.2.0, whose interpreter is the first argument.

python -m tests.analysis.graph.recorded.record_with_msprobe PYTHON
"""

import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
DUMPS = HERE.parents[1] / "compare" / "recorded"
TRIPLED = "Module.layers.1.fc2.Linear.forward.0"


def main(python: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sound, bad = DUMPS / "sound" / "step0" / "rank0", DUMPS / "nan" / "step0" / "rank0"
        tripled, ranks = folder / "tripled", folder / "ranks"
        shutil.copytree(sound, tripled)
        dump = json.loads((tripled / "dump.json").read_bytes())
        for tensor in dump["data"][TRIPLED]["output"]:
            tensor |= {name: 3 * tensor[name] for name in ("Max", "Min", "Mean", "Norm")}
        (tripled / "dump.json").write_text(json.dumps(dump))
        shutil.copytree(sound, ranks / "rank0")
        shutil.copytree(DUMPS / "faulty" / "step0" / "rank0", ranks / "rank1")
        _record(python, "build", "-tp", bad, "-oc")
        _record(python, "compare", "-tp", tripled, "-gp", sound)
        _record(python, "merged", "-tp", ranks, "--rank_size", "2", "--tp", "2", "--pp", "1")


def _record(python: str, name: str, *options: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "msprobe.msprobe", "graph_visualize", *map(str, options), "-o", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        [path] = Path(folder).glob("*.vis.db")
        (HERE / f"{name}.vis.db.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))


if __name__ == "__main__":
    main(sys.argv[1])
