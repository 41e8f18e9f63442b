"""Parts of queries that many panels share, in PromQL and in InfluxQL."""

from __future__ import annotations

RUN = 'run="$run"'
RANK = 'run="$run",rank=~"$rank"'
MODULE = 'run="$run",rank=~"$rank",module=~"$module(\\\\..+)?"'
"""A module and what is below it: where there is room in the budget, parameters stand for themselves."""

INFLUX_MODULE = '"module" =~ /^$module(\\..+)?$/'
OF_MODULE = "rank {{rank}} {{module}}"
INFLUX_OF_MODULE = "rank $tag_rank $tag_module"
RATE = "[$__rate_interval]"

BAD = "red"
WARN = "orange"
GOOD = "green"
NEUTRAL = "blue"
SEVERITIES = {"fatal": "purple", "critical": "red", "warning": "orange", "info": "blue"}

OF_RANK = ("rank {{rank}}", "rank $tag_rank")
"""How the legend of a panel with one series per rank begins."""

RANK_COLOURS = (
    "green",
    "yellow",
    "blue",
    "orange",
    "red",
    "purple",
    "light-blue",
    "dark-yellow",
    "light-purple",
    "dark-green",
)
"""By the last digit of the rank: a rank has the same colour in every panel, and those of a node differ."""

LOSS_COLOUR = "blue"
GRADIENT_COLOUR = "orange"
MUST_BE_ZERO = ((0.0, GOOD), (1.0, BAD))


def depth(expression: str) -> str:
    """Return the PromQL expression with one series per module, in the order of the model.

    Prometheus sorts a result by its labels, where `h.10` stands before `h.2`. The label `depth` is the module's name
    with its first number in three digits.
    """
    padded = placed(expression)
    for digits, zeros in ((3, ""), (2, "0"), (1, "00")):
        pattern = rf"(\\D*)(\\d{{{digits}}})((?:\\D.*)?)"
        padded = f'label_replace({padded}, "depth", "${{1}}{zeros}${{2}}${{3}}", "module", "{pattern}")'
    named = f'label_replace({expression}, "depth", "$1", "module", "(.*)")'
    return padded.replace(expression, named, 1)


def placed(expression: str) -> str:
    """Return the PromQL expression with a label `place` added: the module that a parameter belongs to, for links."""
    return f'label_replace({expression}, "place", "$1", "module", "(.*?)(?:\\\\.(?:weight|bias))?")'


def over_ranks(metric: str, labels: str = RANK) -> str:
    """Return PromQL for the root mean square of `metric` over the ranks that hold a module.

    Right for replicas and for equal shards. `labels` chooses the ranks.
    """
    return f"sqrt(avg by (module) ({metric}{{{labels}}} ^ 2))"


def size_by_depth(metric: str, labels: str = RANK) -> str:
    """Return PromQL for the power of ten of a root mean square, one series per module in the order of the model."""
    return f"log10({depth(over_ranks(metric, labels))} > 0)"


def change_by_depth(metric: str, labels: str = RANK) -> str:
    """Return PromQL for how many times a root mean square has doubled beside its mean over the time shown.

    One series per module.
    """
    size = over_ranks(metric, labels)
    usual = f"avg_over_time({metric}{{{labels}}}[$__range] @ end())"
    return f"log2({depth(f'({size} / avg by (module) ({usual}))')} > 0)"


def age(moment: str) -> str:
    """Return PromQL for the seconds since `moment` (a Unix time); not negative, whatever clocks say."""
    return f"clamp_min(time() - {moment}, 0)"


def mean_duration(labels: str, by: str = "") -> str:
    """Return PromQL for the mean duration of a step in seconds, over the ranks that `labels` choose.

    `by` are labels of which each value has its own series.
    """
    grouped = f"sum by ({by}) " if by else "sum"
    parts = (f"{grouped}(rate(trainermon_step_duration_seconds_{part}{{{labels}}}{RATE}))" for part in ("sum", "count"))
    return " / ".join(parts)


def quantile(share: float, histogram: str, *, by: str = "") -> str:
    """Return PromQL for a quantile of a histogram of the run; `share` is 0.5 for the median.

    `by` are labels of which each value has its own series.
    """
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket{{{RUN}}}{RATE})))"


def influx(
    select: str,
    measurement: str,
    *,
    by: str = "",
    where: str = "",
    of_rank: bool = True,
) -> str:
    """Return an InfluxQL query of a quantity over time.

    Args:
        select: What is selected, an aggregate or more.
        measurement: The measurement it comes from.
        by: Tags of which each value has its own series.
        where: Further conditions.
        of_rank: Whether only of the ranks that were picked.
    """
    conditions = ['"run" =~ /^$run$/', *(['"rank" =~ /^$rank$/'] if of_rank else []), *([where] if where else [])]
    tags = "".join(f', "{tag.strip()}"' for tag in by.split(",") if tag)
    return (
        f'SELECT {select} FROM "{measurement}" WHERE {" AND ".join(conditions)} AND $timeFilter '
        f"GROUP BY time($__interval){tags} fill(none)"
    )


def influx_total(field: str, measurement: str, *, by: str = "", of_rank: bool = False) -> str:
    """Return an InfluxQL query over time that sums, over the ranks, the mean of each rank's `field`."""
    inner = influx(f'mean("{field}") AS "x"', measurement, by=f"rank,{by}" if by else "rank", of_rank=of_rank)
    tags = f', "{by}"' if by else ""
    return f'SELECT sum("x") FROM ({inner}) WHERE $timeFilter GROUP BY time($__interval){tags} fill(none)'
