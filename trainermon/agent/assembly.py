"""Puts an agent together from its parts, and brings back what an earlier agent of the run knew.

All of this touches the run directory, which may be slow, so it runs in the worker thread.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from trainermon.agent.accelerators.node import NodeAccelerators, validity_s
from trainermon.agent.accelerators.rows import AcceleratorRows
from trainermon.agent.across_nodes.folded_rows import FoldedRows
from trainermon.agent.across_nodes.replicas import ReplicaChecksums
from trainermon.agent.alert_page import PlainAlerts
from trainermon.agent.alerting import AlertBook
from trainermon.agent.consumers import RecordConsumer
from trainermon.agent.exports import ExportProcess
from trainermon.agent.feed import EventFeed
from trainermon.agent.follower import FollowedRecord, JournalFollower
from trainermon.agent.hang.records import LastRecords
from trainermon.agent.health import UnseenSteps
from trainermon.agent.integrity import IntegrityCheck
from trainermon.agent.orders.commands import CommandBook
from trainermon.agent.orders.dumps import RunDumps
from trainermon.agent.orders.reconfigure import ConfigFile, ConfigWatch, StepPlan
from trainermon.agent.pipeline import RecordPipeline
from trainermon.agent.place import AgentPlace
from trainermon.agent.reactions import DumpReports, HistoryConsumer, MetricsConsumer, Reactions, RuleConsumer
from trainermon.agent.settings import AgentSettings
from trainermon.agent.turn.views import RunViews
from trainermon.agent.watch import RankWatch
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.escalation import Escalator
from trainermon.alerts.handling import FILE as HANDLING_FILE
from trainermon.alerts.handling import AlertHandling
from trainermon.alerts.log import AlertLog
from trainermon.alerts.rules import AlertRule, load_rules, with_reported
from trainermon.core.errors import RuleError, StoreError
from trainermon.core.journal import Header
from trainermon.core.private_files import make_private_directory, open_private, replace_file
from trainermon.core.spool import list_ranks
from trainermon.core.values import SeriesKey, StatBlock
from trainermon.exporters.prometheus.exposition import Exposition
from trainermon.exporters.store.blocks import GrowingTables, newest_segments, read_blocks, read_rows
from trainermon.exporters.store.damaged import set_aside_unreadable
from trainermon.exporters.store.segments import cover
from trainermon.exporters.store.store import read_cursors
from trainermon.exporters.views import RunHistory
from trainermon.msprobe.anomalies import anomaly_rules

TOKEN_FILE = "token"  # noqa: S105 - the name of the file
ALERTS_FILE = "alerts.jsonl"
ESCALATIONS_FILE = "agent.escalations.jsonl"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AlertParts:
    """The parts of an agent that make, keep and follow up alerts.

    Attributes:
        rules: The rules that are evaluated.
        engine: Evaluates them on every row.
        judge: Passes the rows to the engine.
        book: Keeps and logs the alerts.
        escalator: Decides which alerts lead to a dump.
        plain: Turns alerts into JSON for the page.
        handling: What people have said about alerts.
    """

    rules: tuple[AlertRule, ...]
    engine: RuleEngine
    judge: RuleConsumer
    book: AlertBook
    escalator: Escalator
    plain: PlainAlerts
    handling: AlertHandling

    @property
    def num_firing(self) -> int:
        """Number of alerts that fire now."""
        return len(self.book.firing)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OrderParts:
    """The parts of an agent that bring orders (collect, dump, new configuration) to ranks and know what became of them.

    Attributes:
        commands: The commands that ranks have yet to carry out, on disk.
        config_watch: Finds edits of the configuration file.
        dump_reports: What became of each ordered dump.
        dumps: All dumps of the run.
        reactions: Reacts to alerts and to what ranks report.
    """

    commands: CommandBook
    config_watch: ConfigWatch
    dump_reports: DumpReports
    dumps: RunDumps
    reactions: Reactions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentParts:
    """All parts of an agent, made by `assemble` and used by its loop, its page and its metrics.

    Attributes:
        settings: Those of the agent.
        place: The folders it uses.
        token: What control calls must be signed with.
        watch: Heartbeats of the ranks.
        pipeline: Reads the journals and stores them.
        alerting: The parts for alerts.
        orders: The parts for orders to ranks.
        views: What page and metrics show.
        checksums: Checksums of copies of parameters.
        folds: Gradients, folded, of the steps that a controller is told of.
        exports: The process that writes other forms (csv, InfluxDB …).
        integrity: Checks that what all ranks report fits together.
        records: The last steps of each rank.
        accelerators: What the driver says of the ranks' accelerators.
    """

    settings: AgentSettings
    place: AgentPlace
    token: str
    watch: RankWatch
    pipeline: RecordPipeline
    alerting: AlertParts
    orders: OrderParts
    views: RunViews
    checksums: ReplicaChecksums
    folds: FoldedRows
    exports: ExportProcess
    integrity: IntegrityCheck
    records: LastRecords
    accelerators: NodeAccelerators

    def look_for_edits(self, now_s: float) -> None:
        """Check whether the configuration file was edited, if a check is due; `now_s` is monotonic."""
        orders = self.orders
        orders.config_watch.poll(now_s, orders.reactions.attempt)

    def end_feed(self) -> None:
        """Close the event streams of open pages, which would otherwise delay the end of the web server."""
        self.views.close()

    def close(self) -> None:
        """Close journals, exporters and control pages; the exporters write what is committed first."""
        self.accelerators.close()
        self.pipeline.close()
        self.exports.close()
        self.watch.close()


def assemble(spool: Path, settings: AgentSettings, node_dir: Path, executor: Executor) -> AgentParts:
    """Make all parts of the agent that follows `spool`; restore alerts, history and positions from the run directory.

    Args:
        spool: The folder on the node through which ranks and agent talk.
        settings: Those of the agent.
        node_dir: The node's own folder in the run directory.
        executor: Does what touches the run directory; one job at a time.

    Raises:
        OSError, StoreError: The run directory cannot be read or written.
    """
    place = AgentPlace(run_id=settings.run_id, spool=spool, run_dir=settings.run_dir, node_dir=node_dir)
    make_private_directory(node_dir, settings.run_dir)
    rules = with_reported((*_load_rules(settings), *anomaly_rules(settings.alert.rules, settings.outputs.ops)))
    log = AlertLog(node_dir / ALERTS_FILE)
    parts = _connect(place, settings, rules, log, executor)
    restore(spool, place.segments, engine=parts.alerting.engine, history=parts.views.history, log=log)
    return parts


def _connect(
    place: AgentPlace, settings: AgentSettings, rules: tuple[AlertRule, ...], log: AlertLog, executor: Executor
) -> AgentParts:
    """Make the parts and connect them; nothing is restored yet."""
    book = AlertBook(executor, log)
    engine = RuleEngine(rules)
    views = RunViews(feed=EventFeed(), history=RunHistory(), metrics=_exposition(settings, rules))
    watch = RankWatch(place.spool)
    escalator = Escalator(settings.escalation, rules, path=place.spool / ESCALATIONS_FILE)
    commands = CommandBook(place.spool, watch.send)
    dumps = RunDumps()
    dumps.scan(settings.run_dir)
    handling = AlertHandling(place.node_dir / HANDLING_FILE)
    plain = PlainAlerts(rules, dumps, node=place.node, handling=handling)
    reactions = Reactions(
        alerts=book,
        commands=commands,
        dumps=dumps,
        escalator=escalator,
        feed=views.feed,
        handling=handling,
        metrics=views.metrics,
        plain=plain,
        watch=watch,
    )
    config_watch = _config_watch(settings, watch=watch, executor=executor, reactions=reactions, metrics=views.metrics)
    dump_reports = DumpReports()
    exports = ExportProcess(place.spool, settings, place.node_dir)
    judge = RuleConsumer(engine, reactions.on_alert)
    integrity = IntegrityCheck(judge.report, checks_norm=settings.watches_all_parameters)
    records = LastRecords()
    checksums, folds = ReplicaChecksums(), FoldedRows()
    shown = (MetricsConsumer(views.metrics), HistoryConsumer(views.history))
    health = UnseenSteps(judge.report)
    consumers = (judge, *shown, integrity, health, reactions, dump_reports, records, checksums, folds)
    rows = AcceleratorRows(max_age_s=validity_s(settings.agent.accelerators_s))
    pipeline = _pipeline(place, settings, executor, consumers=consumers, extend=rows.extend)
    return AgentParts(
        settings=settings,
        place=place,
        token=read_token(place.node_dir / TOKEN_FILE),
        watch=watch,
        pipeline=pipeline,
        alerting=AlertParts(
            rules=rules, engine=engine, judge=judge, book=book, escalator=escalator, plain=plain, handling=handling
        ),
        orders=OrderParts(
            commands=commands, config_watch=config_watch, dump_reports=dump_reports, dumps=dumps, reactions=reactions
        ),
        views=views,
        checksums=checksums,
        folds=folds,
        exports=exports,
        integrity=integrity,
        records=records,
        accelerators=NodeAccelerators(settings.agent.accelerators_s, rows=rows, metrics=views.metrics),
    )


def _pipeline(
    place: AgentPlace,
    settings: AgentSettings,
    executor: Executor,
    *,
    consumers: Sequence[RecordConsumer],
    extend: Callable[[FollowedRecord], FollowedRecord],
) -> RecordPipeline:
    return RecordPipeline(
        place.spool,
        place.segments,
        executor=executor,
        consumers=consumers,
        extend=extend,
        flush_bytes=settings.flush_bytes,
        flush_s=settings.agent.flush_s,
    )


def restore(spool: Path, segments: Path, *, engine: RuleEngine, history: RunHistory, log: AlertLog) -> None:
    """Refill rules and history from the store: usual ranges, open alerts, lines and heat maps.

    The rules know a series by its number in the rank's own table, a segment has a table of its own. So the series of
    the present attempt are looked up in the tables that the journals have now; of attempts before it, whose journals
    are gone, they are numbered anew.

    Raises:
        StoreError: A segment could not be read; if it is damaged, it was set aside.
    """
    engine.resume(log.open_alerts())
    try:
        _take_back(spool, segments, engine=engine, history=history)
    except StoreError:  # whoever tries again finds what is damaged out of the way
        set_aside_unreadable(segment.path for segment in cover(segments))
        set_aside_unreadable((path for path, _ in newest_segments(segments)), read_rows)
        raise


def _take_back(spool: Path, segments: Path, *, engine: RuleEngine, history: RunHistory) -> None:
    began_s = time.monotonic()
    history.refill(segments)
    tables, earlier = _live_tables(spool, segments), GrowingTables()
    present = max((live.attempt for live in tables.values()), default=0)
    num_blocks = 0
    numbers: dict[int, tuple[tuple[SeriesKey, ...], np.ndarray]] = {}
    for header, block in read_blocks(segments):
        rank = header.coordinates.rank
        if header.attempt < present:
            before, keys, translated = earlier.translate(header, block)
            engine.prime(before, keys, [translated])
            num_blocks += 1
        elif live := tables.get(rank):
            if rank not in numbers or numbers[rank][0] is not header.series:
                index = {key: number for number, key in enumerate(live.series)}
                numbers[rank] = (header.series, np.array([index.get(key, -1) for key in header.series], np.int64))
            engine.prime(live, live.series, [_translate(block, numbers[rank][1])])
            num_blocks += 1
    if num_blocks:
        _log.info("%d steps of the store were taken back in %.1f s", num_blocks, time.monotonic() - began_s)


def read_token(path: Path) -> str:
    """Return the secret in the file `path` that control calls on this node need; make it (0600) if there is none.

    It is also made anew if another user may know it: the file is a link, belongs to another owner, or others may read
    it.

    Raises:
        OSError: It cannot be read or written.
    """
    try:
        descriptor = open_private(path, os.O_RDONLY)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return _new_token(path)
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        status = os.fstat(descriptor)
        is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o077 and stat.S_ISREG(status.st_mode)
        token = file.read().strip() if is_ours else ""
    return token or _new_token(path)


def _new_token(path: Path) -> str:
    token = secrets.token_urlsafe(32)
    replace_file(path, token.encode())
    return token


def _config_watch(
    settings: AgentSettings, *, watch: RankWatch, executor: Executor, reactions: Reactions, metrics: Exposition
) -> ConfigWatch:
    return ConfigWatch(
        ConfigFile(
            path=Path(settings.config_file) if settings.config_file else None,
            mtime_ns=settings.config_mtime_ns,
            run_dir=settings.run_dir,
        ),
        StepPlan(watch=watch, world_size=settings.world_size, margin_steps=settings.escalation.margin_steps),
        executor=executor,
        submit=reactions.configure,
        count_problem=lambda: metrics.add("trainermon_refused_configurations_total"),
    )


def _load_rules(settings: AgentSettings) -> tuple[AlertRule, ...]:
    try:
        return load_rules(settings.rules)
    except RuleError as error:
        # The rank has accepted this file, so it was changed since. Watching by other rules beats not watching.
        _log.error("the built-in rules are used instead of %s: %s", settings.rules, error)
        return load_rules()


def _exposition(settings: AgentSettings, rules: Sequence[AlertRule]) -> Exposition:
    severities = {rule.name: rule.severity for rule in rules}
    return Exposition(settings.run_id, rules=severities, budget=settings.budget)


def _live_tables(spool: Path, segments: Path) -> dict[int, Header]:
    """Return, by rank, the header of its journal at the position up to which it is stored."""
    follower = JournalFollower(spool, read_cursors(segments))
    try:
        follower.poll(len(list_ranks(spool)))  # of each rank, what it begins with
        return follower.headers
    finally:
        follower.close()


def _translate(block: StatBlock, numbers: np.ndarray) -> StatBlock:
    series = numbers[np.asarray(block.series)]
    known: Sequence[bool] | np.ndarray = series >= 0
    return dataclasses.replace(
        block,
        series=series[known].astype(np.uint32),
        values=np.ascontiguousarray(np.asarray(block.values)[:, known]),
    )
