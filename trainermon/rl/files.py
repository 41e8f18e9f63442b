"""The folder of a watch: what is written where, and how it is read again.

OUT/rank0/reports.jsonl          a report per step
OUT/weights/sent_v12_rank0.json  digests of what a trainer's rank sent
OUT/weights/held_v12_vllm-3_0.json   digests of what an engine's rank holds
OUT/stages/data/…                stages of a step, see `stages.py`
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainermon.core.errors import DumpError
from trainermon.core.ledger import Ledger
from trainermon.core.private_files import make_private_folder, replace_file
from trainermon.core.strict import build
from trainermon.core.values import as_plain
from trainermon.rl.digest import TensorDigest, WeightDigest
from trainermon.rl.values import Report

VERSIONS_KEPT = 8
_SENT = re.compile(r"sent_v(\d+)_rank\d+\.json")


def append_report(folder: Path, rank: int, report: Report) -> None:
    """Add a report to those of a rank."""
    target = folder / f"rank{rank}"
    make_private_folder(target)
    Ledger(target / "reports.jsonl").append(as_plain(report))


def read_reports(folder: Path) -> dict[int, list[Report]]:
    """Return by rank the reports in `folder`, in the order of their steps; of one step the last one counts.

    Raises:
        DumpError: There are none.
    """
    found: dict[int, list[Report]] = {}
    for path in sorted(folder.glob("rank*/reports.jsonl")):
        number = path.parent.name.removeprefix("rank")
        if number.isdigit():
            reports = {report.step: report for report in Ledger(path).read(_report)}
            found[int(number)] = [reports[step] for step in sorted(reports)]
    if not any(found.values()):
        raise DumpError(
            f"{folder}: found no report in rank*/reports.jsonl, expected the folder that rl.Watch was given"
        )
    return found


def write_digest(folder: Path, digest: WeightDigest) -> None:
    """Write what a trainer's rank sent, or an engine's holds; older versions of the same are removed."""
    target = folder / "weights"
    make_private_folder(target)
    who = (
        f"held_v{{}}_{quote(digest.engine, safe='')}_{digest.shard}.json"
        if digest.engine
        else f"sent_v{{}}_rank{digest.shard}.json"
    )
    replace_file(target / who.format(digest.version), json.dumps(as_plain(digest)).encode())
    versions = {}
    for path in target.glob(who.format("*")):
        number = path.name.split("_")[1].removeprefix("v")
        if number.isdigit():
            versions[int(number)] = path
    for version in sorted(versions)[:-VERSIONS_KEPT]:
        versions[version].unlink(missing_ok=True)


def read_sent(folder: Path, version: int) -> list[WeightDigest]:
    """Return what the trainer's ranks sent as `version`; none if nothing is there."""
    return list(_digests(folder / "weights", f"sent_v{version}_rank*.json"))


def read_held(folder: Path, version: int) -> dict[str, list[WeightDigest]]:
    """Return by engine what its ranks hold as `version`."""
    engines: dict[str, list[WeightDigest]] = {}
    for digest in _digests(folder / "weights", f"held_v{version}_*.json"):
        engines.setdefault(digest.engine, []).append(digest)
    return engines


def sent_versions(folder: Path) -> list[int]:
    """Return the versions that were sent and are still known, ascending."""
    names = (_SENT.fullmatch(path.name) for path in (folder / "weights").glob("sent_v*.json"))
    return sorted({int(match[1]) for match in names if match})


def digest_from_json(text: str | bytes) -> WeightDigest:
    """Return the digests that JSON text describes.

    Raises:
        ConfigError: It describes something else; the message has the key.
        ValueError: It is not JSON.
    """
    raw = json.loads(text)
    tensors = {name: build(TensorDigest, entry, f"tensors.{name}.") for name, entry in raw.pop("tensors").items()}
    return WeightDigest(**raw, tensors=tensors)


def read_digest(path: Path) -> WeightDigest:
    """Return the digests in a file.

    Raises:
        DumpError: It cannot be read, or describes something else.
    """
    try:
        return digest_from_json(path.read_bytes())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DumpError(f"{path}: expected digests of weights; {error}") from error


def _digests(folder: Path, pattern: str) -> Iterator[WeightDigest]:
    yield from map(read_digest, sorted(folder.glob(pattern)))


def _report(entry: Any) -> Report:
    return build(Report, entry, finite=False)
