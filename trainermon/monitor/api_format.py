"""The calls of msprobe's `TrainerMon` beside `set_monitor`: statistics for the script (`format: api`), old names."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainermon.core.config import OPS, MonitorConfig
from trainermon.core.naming import COLUMNS, SeriesNames, dtype_of, shape_of, tag_of, with_shape
from trainermon.core.values import STATISTICS, Kind, Moments, Placement, StatBlock
from trainermon.monitor.sessions import is_of_mindspore
from trainermon.monitor.taps.row_collector import SeriesNumbers

if TYPE_CHECKING:
    from torch import Tensor

    from trainermon.monitor.session.attached_rank import AttachedRank

logger = logging.getLogger("trainermon")

Metrics = dict[str, dict[str, Any]]
"""By tag (`0:fc1.weight/rank0/post_grad`), each statistic by its name in `ops`; `shape` and `dtype` too."""


class CallsOfMsprobe:
    """The methods that `TrainerMon` has from msprobe; safe in a training loop, raising nothing but TypeError."""

    _config: MonitorConfig
    _attached: AttachedRank | None
    _ops: tuple[str, ...] | None = None
    _optimizer_of_old_call: Any = None

    @property
    def ops(self) -> list[str]:
        """Statistics that the calls below return; those of the configuration until others are set."""
        return list(with_shape(self._config.ops if self._ops is None else self._ops))

    @ops.setter
    def ops(self, ops: Sequence[str]) -> None:
        unknown = [op for op in ops if op not in OPS]
        if unknown:
            logger.warning("ops: %s is left out; known are %s", ", ".join(map(repr, unknown)), ", ".join(OPS))
        self._ops = tuple(op for op in ops if op in OPS) or ("norm",)

    def generate_wgrad_metrics(self, post_grad_dict: Mapping[str, Tensor] | None = None) -> tuple[Metrics, Metrics]:
        """Return the statistics of reduced and of unreduced gradients in the newest step that has ended.

        Call it after `optimizer.step()`, and after `record`. Both are empty without `wg_distribution`. The tensors of
        `post_grad_dict` join the first under their own keys, whatever they are. Waits for the device.
        """
        reduced = self._latest(Kind.GRAD_REDUCED)
        for tag, tensor in (post_grad_dict or {}).items():
            reduced[tag] = statistics_of(tensor, self.ops)
        return reduced, self._latest(Kind.GRAD_UNREDUCED)

    def generate_xy_metrics(self) -> tuple[Metrics, Metrics]:
        """Return the statistics of activations and of their gradients in the newest step that has ended.

        Call it after `optimizer.step()`, and after `record`. Both are empty without `xy_distribution`. Waits for the
        device.
        """
        return self._latest(Kind.ACTV), self._latest(Kind.ACTV_GRAD)

    def adhoc_check(
        self,
        target_tensor: Tensor,
        module_name: str,
        tensor_name: str,
        rank_list: Sequence[int] = (),
        ops_list: Sequence[str] = (),
    ) -> None:
        """Record the statistics of any tensor under this step, as `<module_name>.<tensor_name>`; never waits.

        Args:
            target_tensor: Of any shape.
            module_name: First part of the name.
            tensor_name: Second part of the name.
            rank_list: Ranks on which to do it; empty means all.
            ops_list: Without effect: all statistics are kept.
        """
        del ops_list
        if self._attached is not None and (not rank_list or self._attached.rank in rank_list):
            self._attached.file(f"{module_name}.{tensor_name}", target_tensor)

    def set_wrapped_optimizer(self, optimizer: Any) -> None:
        """Remember the optimizer for `monitor_gnorm_with_ad`. Deprecated: pass it to `set_monitor`."""
        logger.warning("set_wrapped_optimizer is deprecated: pass the optimizer to set_monitor")
        self._optimizer_of_old_call = optimizer

    def monitor_gnorm_with_ad(  # noqa: PLR0913, PLR0917  (the signature that users know)
        self,
        model: Any,
        optimizer: Any = None,
        grad_acc_steps: int = 1,
        tp_group: Any = None,
        dp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        """Start watching, as `set_monitor` does, with msprobe's older arguments. Deprecated: call `set_monitor`."""
        logger.warning("monitor_gnorm_with_ad is deprecated: call set_monitor, which takes the same arguments")
        if optimizer is None:
            optimizer = self._optimizer_of_old_call
        self.set_monitor(model, optimizer, grad_acc_steps, tp_group, dp_group, start_iteration)

    def reload_xy(self, xy_distribution: bool = False) -> None:  # noqa: FBT001, FBT002  (the signature that users know)
        """Only log that this call of msprobe's changes nothing, and what replaces it (`dynamic_on`)."""
        logger.warning(
            "reload_xy(%s) changes nothing: set dynamic_on in the configuration file and edit xy_distribution there, "
            "which takes effect on all ranks at the same step",
            xy_distribution,
        )

    def set_monitor(  # noqa: D102, PLR0913, PLR0917  (TrainerMon's)
        self,
        model: Any,
        optimizer: Any = None,
        grad_acc_steps: Any = 1,
        tp_group: Any = None,
        dp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        raise NotImplementedError

    def _latest(self, kind: Kind) -> Metrics:
        return {} if self._attached is None else self._attached.latest_rows(kind, self.ops)


def metrics_of(block: StatBlock, table: SeriesNumbers, kind: Kind, rank: int, ops: Sequence[str]) -> Metrics:
    """Return the statistics `ops` of the series of `kind` in a block (one step), by msprobe's tags."""
    places = SeriesNames().places(table.keys)
    values = np.asarray(block.values, np.float64).reshape(len(STATISTICS), -1).T.tolist()
    return {
        tag_of(places[number], kind, rank): _chosen(Moments(*row), table.placements[number], ops)
        for number, row in zip(np.asarray(block.series).tolist(), values, strict=True)
        if table.keys[number].kind is kind
    }


def statistics_of(tensor: Tensor, ops: Sequence[str]) -> dict[str, Any]:
    """Return the statistics `ops` (`norm`, `max` …) of a tensor by name. Waits for the device."""
    row = (_row_of_mindspore if is_of_mindspore(tensor) else _row_of_torch)(tensor)
    placement = Placement(dtype=str(tensor.dtype), shape=tuple(tensor.shape))
    return _chosen(Moments(*row), placement, ops)


def _row_of_torch(tensor: Tensor) -> list[float]:
    import torch

    from trainermon.statistics.kernel import moments

    row = torch.empty((1, len(STATISTICS)), dtype=torch.float64, device=tensor.device)
    moments((tensor.detach(),), row)
    numbers: list[float] = row[0].tolist()
    return numbers


def _row_of_mindspore(tensor: Any) -> list[float]:
    from trainermon.statistics.mindspore.moments import MomentsOfTensors

    row = np.empty((1, len(STATISTICS)))
    MomentsOfTensors().write([tensor], row)
    numbers: list[float] = row[0].tolist()
    return numbers


def _chosen(row: Moments, placement: Placement | None, ops: Sequence[str]) -> dict[str, Any]:
    said = {"shape": shape_of(placement, row), "dtype": dtype_of(placement), "id": None}
    return {op: said[op] if op in said else COLUMNS[op](row) for op in ops}
