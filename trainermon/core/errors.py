"""Every error that trainermon raises on purpose.

    TrainermonError
    ├── ConfigError        the configuration cannot be met as written: key, found, expected, what to do
    ├── AttachError        the model, optimizer or framework cannot be monitored as asked
    ├── SpoolError         the node-local spool cannot be used (network mount, not writable, foreign owner)
    ├── JournalError       a journal was written by another, incompatible format version
    ├── StoreError         the run's stored segments cannot be read or written
    ├── RuleError          an alert rule is wrong: file, rule, key, found, expected
    ├── DumpError          a dump cannot be read or written
    ├── DashboardError     a Grafana cannot be reached, or refuses the dashboards
    └── QueryError         a query is wrong or too large

They are raised before `set_monitor` returns, by the command line and by the offline tools. After `set_monitor` returned
nothing is ever raised into training: see `trainermon.hooks.guard`.
"""

from __future__ import annotations


class TrainermonError(Exception):
    """Base of all errors of this package."""


class ConfigError(TrainermonError, ValueError):
    """The configuration cannot be met as written."""


class AttachError(TrainermonError, ValueError):
    """The model, optimizer or framework cannot be monitored as asked."""


class SpoolError(TrainermonError, OSError):
    """The node-local spool cannot be used."""


class JournalError(TrainermonError):
    """A journal was written by another, incompatible format version."""


class StoreError(TrainermonError):
    """The run's stored segments cannot be read or written."""


class RuleError(TrainermonError, ValueError):
    """An alert rule is wrong."""


class DumpError(TrainermonError):
    """A dump cannot be read or written."""


class DashboardError(TrainermonError):
    """A Grafana cannot be reached, or refuses the dashboards."""


class QueryError(TrainermonError, ValueError):
    """A query is wrong or too large."""
