"""What every server program tells of its own process, under the names that all Prometheus clients use; its build.

Source: Prometheus documentation, "Writing client libraries", standard and runtime metrics; proc(5).
"""

from __future__ import annotations

import functools
import os
import platform
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from trainermon import __version__
from trainermon.core.metric import Metric
from trainermon.core.metrics import BUILD_INFO, PROCESS_METRICS
from trainermon.exporters.prometheus.openmetrics import MetricSamples, label_text


def process_families() -> Iterator[tuple[Metric, list[MetricSamples]]]:
    """Yield `trainermon_build_info` and the `process_` metrics of this process, ready for `render_families`.

    Nothing of `/proc` that cannot be read is shown. Cost: 0.1 ms, 1 µs more for each open file.
    """
    labels = {"version": __version__, "python_version": platform.python_version()}
    yield BUILD_INFO, [MetricSamples((f"{BUILD_INFO.name}{{{label_text(labels)}}} ",), (1.0,))]
    values = _values()
    for metric in PROCESS_METRICS:
        if metric.name in values:
            yield metric, [MetricSamples((f"{metric.name} ",), (values[metric.name],))]


def _values() -> dict[str, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    values = {"process_cpu_seconds_total": usage.ru_utime + usage.ru_stime}
    try:
        virtual_pages, resident_pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[:2]
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        values |= {
            "process_virtual_memory_bytes": float(virtual_pages) * page_bytes,
            "process_resident_memory_bytes": float(resident_pages) * page_bytes,
            "process_start_time_seconds": _start_s(os.getpid()),
            "process_open_fds": len(os.listdir("/proc/self/fd")),
            "process_max_fds": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        }
    except OSError:  # /proc is not mounted, or hidden
        pass
    return values


@functools.cache
def _start_s(pid: int) -> float:
    """Return the Unix time at which the process `pid` began."""
    after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    since_boot_s = int(after_name.split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s
