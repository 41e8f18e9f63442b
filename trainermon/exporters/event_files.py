"""Event files, as TensorBoard reads them.

Needs the package tensorboard (`pip install tensorboard`), but neither torch nor TensorFlow.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from trainermon.core.errors import ConfigError
from trainermon.core.values import Moments
from trainermon.exporters.histogram_bars import HistogramBars

try:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.summary.writer.record_writer import RecordWriter
except ImportError as error:
    raise ConfigError(
        "event files for TensorBoard need the package tensorboard, which is not installed here: pip install tensorboard"
    ) from error

_numbers = itertools.count()


class EventFile:
    """Writes one TensorBoard event file in `folder`.

    Args:
        folder: Made if it is not there.
        first_step: What older files of the folder say of this step and later ones is replaced by this file.
    """

    def __init__(self, folder: Path, first_step: int | None = None) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers):06d}"
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file: BinaryIO = open(descriptor, "wb")  # noqa: SIM115  (closed by `close`)
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if first_step is not None:
            self._write(Event(wall_time=time.time(), step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add(
        self,
        scalars: Sequence[tuple[str, float]],
        step: int,
        time_s: float,
        histograms: Sequence[tuple[str, HistogramBars, Moments]] = (),
    ) -> None:
        """Add (tag, value) pairs of one step, and histograms with their tags and moments; `time_s` is Unix time."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars]
        values += [Summary.Value(tag=tag, histo=_histogram(bars, moments)) for tag, bars, moments in histograms]
        self._write(Event(wall_time=time_s, step=step, summary=Summary(value=values)))

    def add_text(self, tag: str, text: str) -> None:
        """Add a text, which TensorBoard shows on its page of texts."""
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode(errors="replace")])
        value = Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self._write(Event(wall_time=time.time(), step=0, summary=Summary(value=[value])))

    def flush(self) -> None:
        """Write what was added to the file, where TensorBoard can read it."""
        self._records.flush()

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


def _histogram(bars: HistogramBars, moments: Moments) -> Any:
    """Return what TensorBoard makes a distribution of; it begins its first bar at `min`, and ends the last at `max`."""
    return HistogramProto(
        min=moments.min,
        max=moments.max,
        num=float(bars.counts.sum()),
        sum=moments.sum,
        sum_squares=moments.sum_sq,
        bucket_limit=bars.edges[1:].tolist(),
        bucket=bars.counts.tolist(),
    )
