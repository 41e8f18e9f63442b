"""A list of models, one of them not in DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainermon import TrainerMon
from trainermon.core.errors import AttachError


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.usefixtures("group")
def test_a_list_of_which_one_is_not_wrapped_is_refused_in_words(tmp_path: Path, *, is_wrapped: bool) -> None:
    body, head = DistributedDataParallel(nn.Linear(4, 4)), nn.Linear(4, 2)
    models = [body, DistributedDataParallel(head) if is_wrapped else head]
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()])
    with TrainerMon({"output_dir": str(tmp_path), "spool_dir": str(tmp_path), "agent": {"start": False}}) as monitor:
        if is_wrapped:
            monitor.set_monitor(models, optimizer)
        else:
            with pytest.raises(AttachError, match="DistributedDataParallel and Linear, expected all of them wrapped"):
                monitor.set_monitor(models, optimizer)
