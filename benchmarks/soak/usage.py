"""What a process holds now, from /proc: memory, open files, threads; and its children."""

from __future__ import annotations

from pathlib import Path


def usage_of(pid: int) -> dict[str, float]:
    """Return `rss_mb`, `files` and `threads` of a process; empty once it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        files = len(list((folder / "fd").iterdir()))
    except OSError:
        return {}
    return {"rss_mb": int(fields["VmRSS"].split()[0]) / 1e3, "files": files, "threads": int(fields["Threads"])}


def children_of(pid: int) -> list[int]:
    """Return the processes that `pid` has started and that live."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, children.read_text().split())
    return found


def command_of(pid: int) -> str:
    """Return the command line of a process, words separated by spaces; "" once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
