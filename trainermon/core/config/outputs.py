"""Forms that a run is written in beside its store: which names there are, and what servers need."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import importlib.util
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from trainermon.core.errors import ConfigError
from trainermon.core.strict import require, shown

FORMAT_NAME = re.compile(r"[a-z][a-z0-9_.-]*")
FORMATS: Mapping[str, str | None] = MappingProxyType(
    {
        "api": None,
        "csv": None,
        "influxdb": "influxdb_client",
        "mindformers": "tensorboard",
        "mlflow": "mlflow",
        "null": None,
        "pushgateway": "prometheus_client",
        "tensorboard": "tensorboard",
        "wandb": "wandb",
    }
)
"""Names that trainermon itself knows, and the package that each needs beside it, which is also the name of an extra."""

EVENT_FORMS = ("tensorboard", "log")
"""Where `format: mindformers` writes a metric: event files, lines of text."""

ENTRY_POINTS = "trainermon.exporters"
"""Group of the entry points by which other packages register further names."""


def _check_url(path: str, url: str) -> None:
    if url:
        parts = urllib.parse.urlsplit(url)
        is_plain = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
        # Not the text itself: whoever puts a password there does not want it in a log.
        require(is_plain, path, "another one", "http://host:port or https://…, without user and password")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InfluxDBConfig:
    """Where `format: influxdb` sends points. The token is never part of the configuration, which is stored.

    Attributes:
        url: Address of the server, `http://host:8086` or `https://…`, without user and password.
        api: `v2` (InfluxDB 2.x, and 3.x by its v2 API) or `v1` (1.x, by `/write`).
        org: Organisation, by name or id; `v2` only.
        bucket: Bucket; for `v1` the database, or `database/retention-policy`.
        username: User that the token is the password of; `v1` only.
        token_file: File that holds the token; it is read again whenever the server refuses it. Without it the
            environment variable INFLUXDB_TOKEN of the agent is taken.
        ca_file: File with the certificates that the server's one is checked against, instead of the usual ones.
        batch_points: Most points of one request.
        timeout_s: Longest time in seconds that one request may take.
        max_backoff_s: Longest pause in seconds after requests that failed.
    """

    url: str = ""
    api: str = "v2"
    org: str = ""
    bucket: str = "trainermon"
    username: str = ""
    token_file: str | None = None
    ca_file: str | None = None
    batch_points: int = 5_000
    timeout_s: float = 10.0
    max_backoff_s: float = 60.0

    def __post_init__(self) -> None:
        _check_url("influxdb.url", self.url)
        require(self.api in ("v1", "v2"), "influxdb.api", self.api, "v1 or v2")
        require(bool(self.bucket), "influxdb.bucket", self.bucket, "a name that is not empty")
        require(1 <= self.batch_points <= 100_000, "influxdb.batch_points", self.batch_points, "1 to 100000")
        require(0 < self.timeout_s <= 600, "influxdb.timeout_s", self.timeout_s, "a number of seconds, at most 600")
        require(self.max_backoff_s > 0, "influxdb.max_backoff_s", self.max_backoff_s, "a number of seconds above 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PushgatewayConfig:
    """Where `format: pushgateway` pushes what `/metrics` shows, for nodes that Prometheus cannot reach.

    Attributes:
        url: Address of the Pushgateway, `http://host:9091` or `https://…`, without user and password.
        job: Label `job` of the group; its other labels are `run` and `node`.
        interval_s: Seconds between two pushes.
        delete_at_end: Delete the group at the end of the run, instead of leaving the last values there.
        username: User, where the Pushgateway wants one.
        password_file: File that holds the password of `username`; it is read for every push.
        timeout_s: Longest time in seconds that one push may take.
    """

    url: str = ""
    job: str = "trainermon"
    interval_s: float = 15.0
    delete_at_end: bool = False
    username: str = ""
    password_file: str | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        _check_url("pushgateway.url", self.url)
        require(bool(self.job), "pushgateway.job", self.job, "a name that is not empty")
        require(self.interval_s > 0, "pushgateway.interval_s", self.interval_s, "a number of seconds above 0")
        require(0 < self.timeout_s <= 600, "pushgateway.timeout_s", self.timeout_s, "a number of seconds, at most 600")
        is_whole = bool(self.username) == (self.password_file is not None)
        require(is_whole, "pushgateway.password_file", self.password_file, "one together with pushgateway.username")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    """What `format: wandb` tells Weights & Biases. The API key is never part of the configuration, which is stored.

    Attributes:
        project: Project; empty: WANDB_PROJECT of the agent, else `trainermon`.
        entity: User or team; empty: WANDB_ENTITY, else the default of the API key.
        mode: `online`, or `offline`, which writes a file for `wandb sync` and asks no server; empty: WANDB_MODE, else
            `online`.
        rank: Rank whose numbers are told; with pipeline parallelism one of the last stage, which has the loss.
        series: Further series, as globs for `kind/name` such as `grad_reduced/*.attn.*`, or for a recorded number.
    """

    project: str = ""
    entity: str = ""
    mode: str = ""
    rank: int = 0
    series: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.mode in ("", "online", "offline"), "wandb.mode", self.mode, "online or offline")
        require(self.rank >= 0, "wandb.rank", self.rank, "0 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MlflowConfig:
    """What `format: mlflow` tells MLflow. Credentials are never part of the configuration, which is stored.

    Attributes:
        tracking_uri: Address of the tracking server, without a password, or `file:///folder`; empty:
            MLFLOW_TRACKING_URI of the agent, else the folder `mlflow` of the run directory.
        experiment: Name of the experiment; made if there is none. Empty: MLFLOW_EXPERIMENT_NAME, else `trainermon`.
        rank: Rank whose numbers are told; with pipeline parallelism one of the last stage, which has the loss.
        series: Further series, as globs for `kind/name` such as `grad_reduced/*.attn.*`, or for a recorded number.
    """

    tracking_uri: str = ""
    experiment: str = ""
    rank: int = 0
    series: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.rank >= 0, "mlflow.rank", self.rank, "0 or more")
        # Not the text itself, as above.
        has_user = re.match(r"[\w+.-]+://[^/@]*:[^/]*@", self.tracking_uri)
        expected = "one without it: set MLFLOW_TRACKING_URI, which is not stored, or their own variables"
        require(not has_user, "mlflow.tracking_uri", "an address with a password", expected)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MindFormersConfig:
    """What `format: mindformers` writes beside loss, norm, rates and times: `tensorboard`, `log`, or both, of each.

    Attributes:
        local_norm: Norm of each parameter's gradient on this rank.
        device_local_norm: Norm of all of them together.
        local_loss: Loss of this rank: of each micro step in the log, their mean in event files.
        device_local_loss: Mean of this rank's losses in the step.
        optimizer_state: Norms of each parameter's moments.
        weight_state: Norm of all parameters together.
        throughput_baseline: Samples per second and device that count as 1 in `throughput_linearity`; 0: none.
    """

    local_norm: tuple[str, ...] = ()
    device_local_norm: tuple[str, ...] = ()
    local_loss: tuple[str, ...] = ()
    device_local_loss: tuple[str, ...] = ()
    optimizer_state: tuple[str, ...] = ()
    weight_state: tuple[str, ...] = ()
    throughput_baseline: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[:-1]:
            for index, form in enumerate(getattr(self, field.name)):
                require(form in EVENT_FORMS, f"mindformers.{field.name}[{index}]", form, "tensorboard or log")
        baseline = self.throughput_baseline
        require(baseline >= 0, "mindformers.throughput_baseline", baseline, "samples per second and device, 0 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """In which forms a run is written beside its store.

    Attributes:
        format: Forms that the run is written in beside its store: `csv`, `tensorboard`, `influxdb`, `pushgateway`,
            `wandb`, `mlflow`, `mindformers`, `api`, or what another package registers; a name or a list of names.
        ops: Statistics that `format` writes; `shape` and `dtype` always are.
        ndigits: Significant digits in csv files, 1 to 20.
        step_count_per_record: Steps per csv file.
        append_output: Two timestamps as `Dec03_21-34-40`: csv rows are appended to the newest folder between them.
        influxdb: Where `format: influxdb` sends points.
        pushgateway: Where `format: pushgateway` pushes metrics.
        wandb: What `format: wandb` tells Weights & Biases.
        mlflow: What `format: mlflow` tells MLflow.
        mindformers: What `format: mindformers` writes.
    """

    format: tuple[str, ...] = ()
    ops: tuple[str, ...] = ("norm",)
    ndigits: int = 6
    step_count_per_record: int = 1
    append_output: tuple[str, ...] = ()
    influxdb: InfluxDBConfig = InfluxDBConfig()
    pushgateway: PushgatewayConfig = PushgatewayConfig()
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    mindformers: MindFormersConfig = MindFormersConfig()

    def output_fields(self) -> dict[str, Any]:
        """Return the keys and values of `OutputConfig` alone, also of a subclass that has more."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(OutputConfig)}


def check_formats(names: Sequence[str]) -> None:
    """Raise an error for a format that no exporter writes. Lists installed packages for names that are not ours.

    Raises:
        ConfigError: There is none of that name, or it needs a package that is not installed.
    """
    for index, name in enumerate(names):
        path = f"format[{index}]"
        require(FORMAT_NAME.fullmatch(name), path, name, "a name such as csv, tensorboard or influxdb")
        if name in FORMATS:
            package = FORMATS[name]
            if package is not None and importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"{path}: {name!r} needs the package {package}, which is not installed; "
                    f"pip install {package.replace('_', '-')}"
                )
            continue
        known = sorted({*FORMATS, *(point.name for point in importlib.metadata.entry_points(group=ENTRY_POINTS))})
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            advice = f"did you mean {' or '.join(map(repr, near))}?" if near else f"expected one of {', '.join(known)}"
            raise ConfigError(f"{path}: found {shown(name)}, which nothing writes; {advice}")
