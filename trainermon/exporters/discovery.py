"""Tells Prometheus where the agents of a node listen: one file per run, in the form of its file-based discovery.

An embedded agent has a port chosen by the system, and several jobs may share a node, so no fixed list of targets works.
A node's Prometheus reads `<folder>/*.json` (a `*` is allowed in the last part of the path only) and follows changes.

Source: Prometheus documentation, configuration, `<file_sd_config>`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from trainermon.core.private_files import replacing

RESERVED = frozenset({"run", "rank"})
"""Labels of the metrics themselves; a target label of that name would make Prometheus rename ours to `exported_…`."""


def write_targets(path: Path, address: str, labels: Mapping[str, str] | None = None, *, mode: int = 0o600) -> None:
    """Write a target list for Prometheus' file discovery, with one agent, to `path`, replacing it by a rename.

    The folder must exist.

    Args:
        path: The file; its name ends in `.json`.
        address: `host:port` as Prometheus reaches it.
        labels: Target labels, such as the node's name; they are attached to every series of this agent.
        mode: Permissions; Prometheus usually runs as another user than the job.

    Raises:
        ValueError: `address` has no port, or a label is one of the metrics' own.
        OSError: The file cannot be written.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"target address {address!r}: expected host:port")
    taken = sorted(RESERVED.intersection(labels or ()))
    if taken:
        raise ValueError(f"target labels {taken} are labels of the metrics themselves; use other names")
    _replace(path, [{"targets": [address], "labels": dict(labels or {})}], mode)


def clear_targets(path: Path) -> None:
    """Replace the target list at `path` by an empty one, so that Prometheus stops scraping.

    Nothing if it is not there.
    """
    if path.exists():
        _replace(path, [], path.stat().st_mode & 0o777)


def _replace(path: Path, groups: list[dict[str, object]], mode: int) -> None:
    # The temporary name does not end in .json: a Prometheus that follows *.json must not read it.
    if path.parent.is_symlink():
        raise PermissionError(f"{path.parent} is a link, expected a folder: it may lead anywhere")
    with replacing(path) as file:
        os.fchmod(file.fileno(), mode)
        file.write(json.dumps(groups).encode() + b"\n")
