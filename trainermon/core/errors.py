"""Every error that trainermon raises on purpose.

    TrainermonError
    ├── ConfigError        the configuration cannot be met as written: key, found, expected, what to do
    ├── AttachError        the model, optimizer or framework cannot be monitored as asked
    ├── SpoolError         the node-local spool cannot be used (network mount, not writable, foreign owner)
    ├── JournalError       a journal was written by another, incompatible format version
    ├── StoreError         the run's stored segments cannot be read or written
    ├── RuleError          an alert rule is wrong: file, rule, key, found, expected
    ├── DumpError          a dump cannot be read or written
    ├── CheckpointError    a checkpoint cannot be read: file, found, what to do
    ├── PackError          a pack of an environment cannot be read or written
    ├── DashboardError     a Grafana cannot be reached, or refuses the dashboards
    └── QueryError         a query is wrong or too large

They are raised before `set_monitor` returns, by the command line and by the offline tools. After `set_monitor` returned
nothing is ever raised into training: see `trainermon.hooks.guard`. Nor is what the machine lacks, before or after: what
the script has wrong can be mended in it, a full disk cannot, and is no reason not to train (`lacks_room`).
"""

from __future__ import annotations

import errno

_NO_ROOM = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
)


class TrainermonError(Exception):
    """Base of all errors of this package."""


class ConfigError(TrainermonError, ValueError):
    """Raised for a configuration that is wrong, or cannot be met as written."""


class AttachError(TrainermonError, ValueError):
    """Raised if the model, optimizer or framework cannot be monitored as asked."""


class SpoolError(TrainermonError, OSError):
    """Raised if the spool, the node-local folder through which ranks and agent talk, cannot be used."""


class JournalError(TrainermonError):
    """Raised for a journal (a rank's file of rows) that another, incompatible format version wrote."""


class StoreError(TrainermonError):
    """Raised if the run's stored segments (Parquet files) cannot be read or written."""


class RuleError(TrainermonError, ValueError):
    """Raised for an alert rule, or a file of them, that is wrong.

    Attributes:
        where: The file and the rule; "" where that is not known apart from the message.
        path: The keys that lead to what is wrong, joined by dots.
    """

    where = path = ""


class DumpError(TrainermonError):
    """Raised if a dump cannot be read or written."""


class CheckpointError(TrainermonError):
    """Raised if a checkpoint cannot be read: it is damaged, incomplete or of no known format."""


class PackError(TrainermonError):
    """Raised if a pack (what was collected of a training's environment) cannot be read or written."""


class DashboardError(TrainermonError):
    """Raised if a Grafana server cannot be reached, or refuses the dashboards."""


class QueryError(TrainermonError, ValueError):
    """Raised for a query (SQL, or for the page) that is wrong or too large, or a run that does not exist."""


def lacks_room(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, says that the machine takes no more.

    A disk that is full, over its quota, read-only or broken; no memory, or no descriptor, for another file.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return True
        error = error.__cause__
    return False
