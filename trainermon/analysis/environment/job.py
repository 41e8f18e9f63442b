"""Runs a job, and has its processes write into a pack what they show; no line of its scripts is changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainermon.analysis.environment.in_job import VARIABLE
from trainermon.analysis.environment.packs import read_pack
from trainermon.analysis.environment.settings import plain_name, same_value
from trainermon.core.environment.pack import ABOUT, encoded, update_pack
from trainermon.core.errors import PackError

# Python imports a module of this name at its start. Another one on the path is run as it would have been.
_AT_START = """\
import os, sys
sys.path[:] = [path for path in sys.path if path != {folder!r}]
this = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize
except ImportError:
    pass
try:
    sys.path.append({root!r})
    from trainermon.analysis.environment.in_job import begin
    begin()
except Exception:  # what records a job must not stop it
    pass
finally:
    sys.path.remove({root!r})
    sys.modules.setdefault("sitecustomize", this)
"""


def run_job(command: Sequence[str], pack: Path) -> int:
    """Run `command`, and return its exit status; `pack` gets what its Python processes show.

    Words of the real command line that differ from those that were read in a launch script are noted in the pack.

    Raises:
        PackError: There is no such program.
    """
    with tempfile.TemporaryDirectory(prefix="trainermon-env-") as folder:
        root = str(Path(__file__).parents[3])
        (Path(folder) / "sitecustomize.py").write_text(_AT_START.format(folder=folder, root=root), encoding="utf-8")
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
        environ = {**os.environ, "PYTHONPATH": path, VARIABLE: str(pack.absolute())}
        try:
            status = subprocess.run(list(command), env=environ, check=False).returncode  # noqa: S603  # the user's own
        except OSError as error:
            raise PackError(f"--run: {command[0]}: {error.strerror}") from error
    _note_differences(pack)
    return status if status >= 0 else 128 - status


def _note_differences(path: Path) -> None:
    """Add to the pack which options the job got that are not those of its launch script."""
    pack = read_pack(path)
    shown: Mapping[str, Any] = next((pack.ranks[rank] for rank in sorted(pack.ranks)), {})
    notes = [] if shown else ["no process of the job showed anything"]
    with zipfile.ZipFile(path) as archive:
        about = json.loads(archive.read(ABOUT))
    static = {plain_name(name): value for name, value in about["sections"].get("hyperparameters", {}).items()}
    for name, value in shown.get("options", {}).items():
        written = static.get(plain_name(name))
        if static and (plain_name(name) not in static or not same_value(written, value)):
            notes.append(f"option {name}: the job got {value!r}, its script says {written!r}")
    if notes:
        about["notes"] = [*about.get("notes", []), *notes]
        update_pack(path, {ABOUT: encoded(about)})
        for note in notes:
            sys.stderr.write(f"trainermon env: {note}\n")
