"""Which of several ranks' bad values was the first, where they pass values on to one another."""

from pathlib import Path

import pytest

from trainermon.analysis.diagnosis.across import (
    first_of,
    in_pipeline,
    lost_upstream,
    reached_from,
    with_hidden,
    without_handed,
)
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.evidence import RankDump
from trainermon.analysis.diagnosis.findings import FaultPhase, RankRole
from trainermon.analysis.diagnosis.origin import INPUT, LOSS, Origin
from trainermon.dump.files.records import Dump, DumpInfo, EntryRecord, TensorRecord
from trainermon.dump.writer import DumpWriter


def tensor(slot, *, bad=False, order=None):
    return TensorRecord(slot=slot, dtype="torch.float32", shape=(2,), nans=int(bad), infs=0, order=order)


def rank_dump(rank, *entries, **info):
    dump = Dump(
        directory=Path(), task="statistics", level="L0", info=DumpInfo(rank=rank, **info), entries=tuple(entries)
    )
    return RankDump(rank=rank, path="", dump=dump)


def origin(module="h", phase=FaultPhase.FORWARD, *, order=5, micro_step=0, stage=0, slot="output.0"):
    return Origin(
        phase=phase,
        module=module,
        class_name="",
        tensor=tensor(slot, bad=True),
        reason="",
        order=order,
        micro_step=micro_step,
        stage=stage,
    )


def first_rank(*found):
    return first_of(found)[0].rank


def stage_of(rank, **info):
    return rank_dump(rank, pipeline_stage=rank, pipeline_size=2, replica=0, **info)


def test_forward_goes_down_the_pipeline_and_backward_up():
    backward = FaultPhase.BACKWARD

    assert first_rank((stage_of(1), origin(order=1)), (stage_of(0), origin(order=9))) == 0
    assert first_rank((stage_of(0), origin(phase=backward)), (stage_of(1), origin(phase=backward))) == 1
    assert first_rank((stage_of(1), origin()), (stage_of(0), origin(phase=backward))) == 1


def test_a_virtual_stage_comes_after_all_ranks_of_the_one_before():
    assert first_rank((stage_of(0), origin(stage=1)), (stage_of(1), origin(stage=0))) == 1


def test_an_earlier_micro_step_comes_first_wherever_it_is():
    assert first_rank((stage_of(0), origin(micro_step=1)), (stage_of(1), origin(micro_step=0))) == 1


def test_a_bad_shard_was_there_before_any_micro_step():
    bad = {"phase": FaultPhase.PARAMETER, "slot": "parameters.weight"}
    owner = (rank_dump(1, bad_shards=("h.weight",)), origin(micro_step=1, **bad))

    assert first_rank((rank_dump(0), origin(micro_step=0, **bad)), owner) == 1


def test_of_gathered_parameters_the_owner_of_the_bad_part_is_first():
    bad = origin("h.fc", FaultPhase.PARAMETER, slot="parameters.weight")
    found = [(rank_dump(0), bad), (rank_dump(1, bad_shards=("h.fc.weight",)), bad)]

    assert first_rank(*found) == 1
    assert reached_from(first_of(found), found) == {0}


def test_only_ranks_that_exchange_activations_are_reached():
    fellow, other, alone = rank_dump(1, replica=0), rank_dump(2, replica=1), rank_dump(3)
    found = [(rank_dump(0, replica=0), origin()), *((dump, origin()) for dump in (fellow, other, alone))]

    assert reached_from(found[0], found) == {1}


@pytest.mark.parametrize(
    ("rank", "module", "expected"),
    [(1, INPUT, "stage before"), (0, INPUT, ""), (0, LOSS, "next pipeline stage"), (1, LOSS, "")],
)
def test_ends_of_a_stage_are_not_taken_for_ends_of_the_model(rank, module, expected):
    assert expected in in_pipeline(stage_of(rank), origin(module)).reason
    assert bool(expected) == bool(in_pipeline(stage_of(rank), origin(module)).reason)


def call(module, *, bad, order):
    outputs = (tensor("output.0", bad=bad, order=order),)
    return EntryRecord(
        key=f"Module.{module}.Linear.forward.0",
        module=module,
        class_name="Linear",
        direction="forward",
        call=0,
        order=order,
        micro_step=0,
        inputs=(tensor("input.0", order=order - 1),),
        outputs=outputs,
    )


def test_what_an_expert_sent_to_others_is_found_on_its_own_rank():
    sender = rank_dump(1, call("mlp.experts.2", bad=True, order=4), call("mlp", bad=False, order=8), replica=0)
    taker = rank_dump(0, call("mlp.experts.0", bad=False, order=4), call("mlp", bad=True, order=8), replica=0)
    found = [(taker, origin("mlp", order=8))]

    everything = with_hidden(found, [taker, sender])

    assert first_of(everything)[0].rank == 1
    assert first_of(everything)[1].module == "mlp.experts.2"


def test_scores_under_a_mask_are_bad_everywhere_and_blamed_nowhere():
    entries = (call("mlp.scores", bad=True, order=4), call("mlp", bad=True, order=8))
    one, other = (rank_dump(rank, *entries, replica=0) for rank in (0, 1))
    found = [(one, origin("mlp", order=8))]

    assert with_hidden(found, [one, other]) == found


def test_a_stage_that_lost_its_fault_is_to_blame_for_what_the_next_was_handed():
    lost, clean = stage_of(0, lost_nonfinite=True), stage_of(0)
    shown, other = stage_of(1), rank_dump(3, pipeline_stage=1, pipeline_size=2, replica=1)

    assert lost_upstream([(shown, origin())], [lost, shown]) == [lost]
    assert lost_upstream([(shown, origin())], [clean, shown]) == []
    assert lost_upstream([(clean, origin(phase=FaultPhase.BACKWARD))], [clean, shown]) == []
    assert lost_upstream([(other, origin())], [lost, other]) == []


def test_a_last_stage_that_lost_its_fault_is_to_blame_for_the_gradient_that_it_handed_back():
    lost, given = stage_of(1, lost_nonfinite=True), stage_of(0)

    assert lost_upstream([(given, origin(LOSS, FaultPhase.BACKWARD))], [given, lost]) == [lost]


def test_a_bad_part_of_a_weight_explains_an_output_that_is_summed_over_ranks():
    """As of a layer whose input dimension is split: the other rank sees a bad output of finite inputs and weights."""
    other, owner = rank_dump(0, replica=0), rank_dump(1, replica=0)
    weight = origin("h", FaultPhase.PARAMETER, slot="parameters.weight")

    assert first_rank((other, origin("h")), (owner, weight)) == 1
    assert first_rank((other, origin("g", order=4)), (owner, weight)) == 0
    assert first_rank((other, origin("h")), (rank_dump(1, replica=1), weight)) == 0


@pytest.mark.parametrize("given", [INPUT, LOSS])
def test_a_stage_that_was_handed_the_bad_value_is_no_origin(given):
    first, other, same = (
        rank_dump(rank, call(name, bad=False, order=4)) for rank, name in enumerate(("front", "back", "front"))
    )
    made, handed = (first, origin("front")), origin(given, FaultPhase.BACKWARD)

    assert without_handed([made, (other, handed)]) == [made]
    assert without_handed([made, (same, handed)]) == [made, (same, handed)]
    assert without_handed([(first, handed), (other, handed)]) == [(first, handed), (other, handed)]


def stage_dump(run_dir, rank, name, *, is_handed):
    """Write the replay of a stage with one layer: it makes a bad gradient, or its output is handed one."""

    def form(order, nans=0):
        numbers = {"Max": None if nans else 1.0, "Min": None if nans else -1.0, "Mean": 0.0, "Norm": 1.0}
        return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "nans": nans, "infs": 0, "order": order,
                "zeros": 0, **numbers}  # fmt: skip

    info = DumpInfo(id="r", step=5, attempt=1, rank=rank, replay=True, micro_steps=1)
    writer = DumpWriter(run_dir / f"dumps/r/attempt1/step5/rank{rank}", info)
    place = {"trainermon": {"micro_step": 0, "stage": 0, "order": 3}}
    given, made = form(3, 2 * is_handed), form(4, 2)
    writer.add(f"Module.{name}.Linear.forward.0", {"input_args": [form(1)], "output": [form(2)], **place})
    writer.add(f"Module.{name}.Linear.backward.0", {"input": [given], "output": [made], **place})
    writer.add_gradients(f"Module.{name}.Linear.parameters_grad.0", {"weight": [form(5, 2)]})
    writer.add_root("Module.root.Stage.forward.0", {"input_args": [form(1)], "output": [form(2)], **place})
    writer.add_root("Module.root.Stage.backward.0", {"input": [given], "output": [], **place})
    writer.close()


def test_of_two_stages_that_no_framework_tells_of_the_one_that_was_handed_the_gradient_is_reached(tmp_path):
    stage_dump(tmp_path, 0, "front", is_handed=True)
    stage_dump(tmp_path, 1, "back", is_handed=False)

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.rank, diagnosis.module, diagnosis.phase) == (1, "back", FaultPhase.BACKWARD)
    assert [finding.role for finding in diagnosis.ranks] == [RankRole.REACHED, RankRole.ORIGIN]
    assert "by itself, too" not in diagnosis.reason
