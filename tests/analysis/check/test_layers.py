"""Every layer of `torch.nn`, forward and backward, dumped and judged: a sound one has no error."""

import inspect

import pytest
import torch
from torch import nn

from tests.analysis.check.layer_cases import CASES, NOT_TRIED
from tests.recorded_dumps import recorded
from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import check_dump
from trainermon.analysis.check.screen import described

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def is_layer(found):
    return inspect.isclass(found) and issubclass(found, nn.Module) and found is not nn.Module


def test_every_layer_has_a_case():
    layers = {name for name, found in vars(nn).items() if is_layer(found)}

    assert layers - {case.name for case in CASES} - NOT_TRIED.keys() == set()


@pytest.mark.filterwarnings("ignore")  # layers that are deprecated, or will be
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("precision", [*DTYPES, "autocast"])
def test_a_sound_layer_has_no_error(tmp_path, case, precision):
    dtype = DTYPES.get(precision, torch.float32)
    torch.manual_seed(0)
    layer, inputs = case.made(dtype)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            case.run(layer, inputs)

    try:
        step()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch cannot run it: {error}")
    check = check_dump(recorded(tmp_path, step))

    assert [(call.key, described(call)) for call in check.of(Status.ERROR)] == []
    assert check.of(Status.PASS) or check.of(Status.WARNING) or case.is_random
