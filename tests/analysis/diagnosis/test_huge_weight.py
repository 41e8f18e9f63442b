"""A weight that is finite and out of all proportion is blamed, not the module in which its products overflow."""

import pytest

from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import FaultPhase, RankRole
from trainermon.analysis.diagnosis.report import render_text
from trainermon.dump.files.records import DumpInfo
from trainermon.dump.writer import DumpWriter


def form(largest=1.0, infs=0):
    numbers = {"Max": largest / 2, "Min": -largest, "Mean": 0.0, "Norm": largest, "nans": 0, "infs": infs, "zeros": 0}
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 2], "requires_grad": True, **numbers}


def step_in_which_c_overflows(run, weight_of_b, *, rank=0):
    folder = run / f"dumps/replay/attempt1/step5/rank{rank}"
    writer = DumpWriter(folder, DumpInfo(id="replay", step=5, attempt=1, rank=rank, replay=True, micro_steps=1))
    for name, weight, infs in (("a", 1.0, 0), ("b", weight_of_b, 0), ("c", 2.0, 1)):
        value = {"input_args": [form()], "input_kwargs": {}, "output": [form(infs=infs)]}
        writer.add(f"Module.{name}.Linear.forward.0", value | {"parameters": {"weight": form(weight)}})
    writer.add("Module.c.Linear.parameters_grad.0", {"weight": [form(infs=1)]})
    writer.close()


def test_a_weight_far_beyond_all_others_is_named(tmp_path):
    step_in_which_c_overflows(tmp_path, 1e30)

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.module, diagnosis.class_name, diagnosis.phase) == ("b", "Linear", FaultPhase.PARAMETER)
    assert diagnosis.headline == "A parameter was far too large in b on rank 0 in step 5"
    assert diagnosis.reason == (
        "The largest element of b.weight was 1e+30 when the forward began, that of others about 2: finite, and far too"
        " large. What is computed with it overflowed first in c"
    )
    assert diagnosis.tensor is not None
    assert (diagnosis.tensor.slot, diagnosis.tensor.min) == ("parameters.weight", -1e30)
    assert diagnosis.ranks[0].role is RankRole.ORIGIN
    assert diagnosis.headline in render_text(diagnosis)


@pytest.mark.parametrize("weight", [3.0, 1e4, 1e10])
def test_a_weight_whose_products_float32_holds_is_not_blamed(tmp_path, weight):
    step_in_which_c_overflows(tmp_path, weight)  # a product of three such weights is below 3.4e38

    assert (diagnose(tmp_path).module, diagnose(tmp_path).phase) == ("c", FaultPhase.FORWARD)
