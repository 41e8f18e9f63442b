"""A weight that is finite and far too large: what first overflows is a consequence of it, modules further on."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from trainermon.analysis.diagnosis.bounds import LARGEST
from trainermon.analysis.diagnosis.evidence import RankDump, StepEvidence
from trainermon.dump.files.records import FORWARD, TensorRecord

# Of the largest number of its type: its cube has no place there. Norms square their input, some activations cube it.
ROOT = 1 / 3
# Beyond this many times the usual largest element of a parameter, one is out of all proportion.
OUTLIER = 1e4


class HugeWeight(NamedTuple):
    """A weight that is far too large beside all others.

    Attributes:
        name: The parameter.
        size: Magnitude of its largest element.
        usual: What that is for other parameters.
        rank: Who holds it.
        record: Its statistics in the dump.
    """

    name: str
    size: float
    usual: float
    rank: int
    record: TensorRecord


def find_huge_weight(where: RankDump, evidence: StepEvidence) -> HugeWeight | None:
    """Return the weight in a rank's dump that is far too large beside all others; None if there is none.

    Of a weight that ranks hold in parts, stored rows tell whose part it is.
    """
    records = {
        f"{entry.module}.{record.slot.removeprefix('parameters.')}": record
        for entry in where.dump.entries
        if entry.direction == FORWARD
        for record in entry.parameters
        if record.max is not None and record.min is not None and record.dtype in LARGEST and not record.nonfinite
    }
    sizes = {name: max(abs(record.max or 0.0), abs(record.min or 0.0)) for name, record in records.items()}
    if not sizes:
        return None
    name = max(sizes, key=sizes.__getitem__)
    usual = statistics.median(sizes.values())
    if sizes[name] < max(OUTLIER * usual, LARGEST[records[name].dtype] ** ROOT):
        return None
    holders = [weight.rank for weight in evidence.large_weights if weight.size >= sizes[name] / 2]
    rank = where.rank if where.rank in holders or not holders else holders[0]
    return HugeWeight(name, sizes[name], usual, rank, records[name])
