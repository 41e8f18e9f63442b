"""Why the first bad operation was not finite: from the replay, from dumped tensors, from statistics."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from tests.analysis.stored_run import dump as hand_made
from trainermon.analysis.diagnosis.bounds import proven_cause
from trainermon.analysis.diagnosis.classify import classified
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.evidence import RankDump
from trainermon.analysis.diagnosis.findings import BadParameter, BadTensor, Diagnosis, DiagnosisVerdict, FaultPhase
from trainermon.analysis.diagnosis.origin import INPUT, LOSS
from trainermon.analysis.diagnosis.report import render_text
from trainermon.core.errors import DumpError
from trainermon.dump.capture import ModuleCapture
from trainermon.dump.files.reader import read_dump
from trainermon.dump.files.records import DumpInfo, EntryRecord, TensorRecord
from trainermon.dump.files.verdicts import NonfiniteCause, OperationVerdict, Reproducibility
from trainermon.dump.function_calls import FunctionCapture
from trainermon.dump.writer import DumpWriter
from trainermon.replay.dumped_calls import function_of, judge_dumped
from trainermon.replay.replay import StepKeeper

INF = float("inf")


class Block(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.fc, self.function = nn.Linear(4, 4, bias=False), function
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(4))

    def forward(self, x):
        return self.function(self.fc(x))


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.block, self.head = Block(function), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.block(x).float())


def replayed(run, function, value):
    model = Net(function)
    keeper = StepKeeper(model)
    keeper.attach()
    model(torch.full((2, 4), value)).sum().backward()
    keeper.replay(run / "dumps/fault/attempt1/step7/rank0", DumpInfo(step=7, attempt=1, rank=0))
    return diagnose(run)


@pytest.mark.parametrize(
    ("function", "value", "cause", "word"),
    [
        (
            lambda x: x.half() @ x.half().T @ torch.ones(2, 4).half(),
            300.0,
            NonfiniteCause.PRECISION,
            "float32 holds it",
        ),
        (torch.exp, 1000.0, NonfiniteCause.RANGE, "in float64 the result is infinite too"),
    ],
    ids=["precision", "range"],
)
def test_diagnosis_tells_cause_operation_and_line(tmp_path, function, value, cause, word):
    diagnosis = replayed(tmp_path, function, value)

    assert diagnosis.module == "block"
    verdict = diagnosis.classification
    assert verdict.cause is cause
    assert word in verdict.reason
    assert diagnosis.reproducibility is Reproducibility.REPRODUCIBLE
    text = render_text(diagnosis)
    assert f"cause      {cause}: aten." in text
    assert "again      reproducible: the replay's forwards gave the same bits as the step's" in text


def test_bad_parameter_is_inherited(tmp_path):
    hand_made(tmp_path, 0, (2.0, 0, 1))

    verdict = diagnose(tmp_path).classification

    assert (verdict.cause, verdict.reason) == (
        NonfiniteCause.INHERITED,
        "the parameter was not finite before anything was computed with it",
    )


def test_a_rank_that_was_sent_its_first_bad_value_is_not_the_first(tmp_path):
    sent = OperationVerdict(operation="c10d.allreduce_.default", cause=NonfiniteCause.INHERITED, reason="sent")
    hand_made(tmp_path, 0, (2.0, 0, 1), operations=(sent,))
    hand_made(tmp_path, 1, (2.0, 0, 1))

    assert diagnose(tmp_path).rank == 1


def recorded(folder, function, *args, task="tensor"):
    """Dump a call of `function` at level mix, in a model so that it has a parent."""
    model = Net(function)
    writer = DumpWriter(folder, DumpInfo(step=1), task=task)
    modules = ModuleCapture(model, writer)
    modules.quiet = True
    functions = FunctionCapture(writer, modules)
    modules.attach()
    functions.attach()
    model(*args)
    functions.detach()
    modules.detach()
    writer.close()
    return read_dump(folder)


def first_bad(dump):
    return next(entry for entry in dump.entries if any(record.nonfinite for record in entry.outputs))


@pytest.mark.parametrize(
    ("function", "value", "key", "cause"),
    [
        (lambda x: torch.matmul(x.half(), x.half().T), 300.0, "Torch.matmul", NonfiniteCause.PRECISION),
        (torch.exp, 1000.0, "Torch.exp", NonfiniteCause.RANGE),
        (torch.exp, 100.0, "Torch.exp", NonfiniteCause.RANGE),
        (lambda x: torch.softmax(torch.where(x > 0, -INF, x), dim=-1), 1.0, "Torch.softmax", NonfiniteCause.RANGE),
    ],
    ids=["product", "float64", "float32", "fully masked"],
)
def test_dumped_function_calls_are_run_again(tmp_path, function, value, key, cause):
    dump = recorded(tmp_path, lambda x: function(x).sum() * torch.ones(2, 4), torch.full((2, 4), value))
    entry = next(entry for entry in dump.entries if entry.key == f"{key}.0.forward")

    judged = judge_dumped(tmp_path, entry)

    assert judged.cause is cause, judged


def test_dumped_result_that_its_inputs_do_not_give_is_the_kernels(tmp_path):
    dump = recorded(tmp_path, torch.tanh, torch.ones(2, 4))
    entry = next(entry for entry in dump.entries if entry.key == "Torch.tanh.0.forward")
    spoiled = torch.load(entry.outputs[0].data_path, weights_only=True)
    spoiled[1, 2] = float("nan")
    entry.outputs[0].data_path.unlink()  # it may be linked to the next call's input
    torch.save(spoiled, entry.outputs[0].data_path)

    judged = judge_dumped(tmp_path, entry)

    assert judged.cause is NonfiniteCause.KERNEL
    assert "the device or its kernel is to blame" in judged.reason


def test_calls_without_tensors_are_refused(tmp_path):
    dump = recorded(tmp_path, torch.exp, torch.full((2, 4), 1000.0), task="statistics")

    with pytest.raises(DumpError, match="tensors were not dumped: expected a dump with task tensor"):
        judge_dumped(tmp_path, first_bad(dump))


def record(slot, high, low=0.0, *, dtype="float32", shape=(8, 8), bad=False, zeros=0):
    numbers = {"max": high, "min": low, "nans": 0, "infs": int(bad), "zeros": zeros}
    return TensorRecord(slot=slot, dtype=f"torch.{dtype}", shape=shape, **numbers)


def call(name, *inputs, dtype="float32"):
    output = record("output.0", 1.0, dtype=dtype, bad=True)
    entry = EntryRecord(key=f"Torch.{name}.0.forward", module=name, class_name="Torch", direction="forward", call=0)
    return dataclasses.replace(entry, inputs=inputs, outputs=(output,))


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        # 8 terms of 100 * 100 are 80 000: more than 65 504, far less than 3.4e38
        (call("matmul", record("input.0", 100.0), record("input.1", 100.0), dtype="float16"), NonfiniteCause.PRECISION),
        # 8 terms of 10 * 10 are 800, which float16 holds
        (
            call("matmul", record("input.0", 10.0), record("input.1", -1.0, -10.0), dtype="float16"),
            NonfiniteCause.KERNEL,
        ),
        (call("matmul", record("input.0", 1e30), record("input.1", 1e30)), None),
        (call("exp", record("input.0", 1000.0)), NonfiniteCause.RANGE),
        (call("exp", record("input.0", 100.0)), NonfiniteCause.RANGE),
        (call("exp", record("input.0", 20.0), dtype="float16"), NonfiniteCause.PRECISION),
        (call("exp", record("input.0", 20.0)), NonfiniteCause.KERNEL),
        (call("log", record("input.0", 1.0, -2.0)), NonfiniteCause.RANGE),
        (call("div", record("input.0", 1.0), record("input.1", 1.0, zeros=3)), NonfiniteCause.RANGE),
        (call("div", record("input.0", 1.0), record("input.1", 1.0)), None),
        (call("softmax", record("input.0", 9e9)), NonfiniteCause.KERNEL),
        (call("softmax", record("input.0", 9.0, bad=True)), NonfiniteCause.INHERITED),
        (call("add", record("input.0", 60000.0), record("input.1", 6000.0), dtype="float16"), NonfiniteCause.PRECISION),
        (call("fft", record("input.0", 1.0)), None),
        (call("exp", record("input.0", 100.0), dtype="float64"), NonfiniteCause.KERNEL),  # e^100 is 2.7e43
        (call("relu", record("input.0", 9.0)), NonfiniteCause.KERNEL),
        (call("sqrt", record("input.0", 1.0, -1.0)), NonfiniteCause.RANGE),
        (call("sqrt", record("input.0", 1.0)), None),
        # 5 + 8 terms of 100 * 100; without the second factor nothing bounds it
        (
            call("addmm", record("input.0", 5.0), record("input.1", 100.0), record("input.2", 100.0), dtype="float16"),
            NonfiniteCause.PRECISION,
        ),
        (call("addmm", record("input.0", 5.0), record("input.1", 100.0)), None),
        (call("softmax", record("input.0", 0.0, -9.0, bad=True)), None),  # it may be a mask
        (call("relu"), None),
        (call("relu", record("input.0", 9.0), dtype="int64"), None),
    ],
)  # fmt: skip
def test_statistics_prove_what_they_can_and_nothing_more(entry, cause):
    proven = proven_cause(entry)

    assert (proven[0] if proven else None) is cause


@pytest.mark.parametrize(
    ("prefix", "name"),
    [
        ("Torch", "load"),
        ("Torch", "save"),
        ("Torch", "from_file"),
        ("Torch", "hub"),
        ("Functional", "compile"),
        ("VF", "__class__"),
        ("aten", "save"),
        ("aten", "from_file"),
        ("debugprims", "load_tensor"),
        ("load_library", "__call__"),
        ("Tensor", "set_"),
        ("Tensor", "resize_"),
        ("Tensor", "__setstate__"),
        ("Tensor", "share_memory_"),
        ("Tensor", "pin_memory"),
        ("Tensor", "new_zeros"),
        ("Tensor", "record_stream"),
        ("Tensor", "backward"),
        ("aten", "set_"),
        ("aten", "resize_"),
    ],
)
def test_only_operations_on_tensors_are_run_for_a_dump(prefix, name):
    with pytest.raises(DumpError, match=f"no function {prefix}.{name} that could be run again"):
        function_of(prefix, name)


@pytest.mark.parametrize(
    ("key", "arguments"),
    [
        ("Torch.zeros", [10**12]),
        ("Tensor.repeat", ["x", 10**6, 10**6]),
        ("Functional.pad", ["x", [0, 10**12]]),
        ("Torch.bincount", ["x"]),
    ],
)
def test_a_dump_cannot_have_memory_taken(tmp_path, key, arguments):
    folder = tmp_path / "dump_tensor_data"
    folder.mkdir()
    torch.save(torch.full((4,), 10**12), folder / "x.pt")
    x = {"type": "torch.Tensor", "dtype": "torch.int64", "shape": [4], "data_name": "x.pt"}
    forms = [x if value == "x" else number_form(value) for value in arguments]
    call = {"input_args": forms, "input_kwargs": {}, "output": [x]}
    (tmp_path / "dump.json").write_text(json.dumps({"task": "tensor", "data": {f"{key}.0.forward": call}}))

    with pytest.raises(DumpError, match=r"would make up to [\d,]+ elements"):
        judge_dumped(tmp_path, read_dump(tmp_path).entries[0])


def number_form(value):
    return [number_form(each) for each in value] if isinstance(value, list) else {"type": "int", "value": value}


def test_a_dump_cannot_have_a_pickle_loaded(tmp_path):
    class Touches:
        def __reduce__(self):
            return (tmp_path / "loaded").touch, ()

    torch.save(Touches(), tmp_path / "pickle.pt")
    call = {
        "input_args": [{"type": "str", "value": str(tmp_path / "pickle.pt")}],
        "input_kwargs": {"weights_only": {"type": "bool", "value": False}},
    }
    (tmp_path / "dump.json").write_text(json.dumps({"task": "tensor", "data": {"Torch.load.0.forward": call}}))

    with pytest.raises(DumpError, match="no function"):
        judge_dumped(tmp_path, read_dump(tmp_path).entries[0])
    assert not (tmp_path / "loaded").exists()


@pytest.mark.parametrize(
    ("prefix", "name"),
    [
        ("Torch", "exp"),
        ("Torch", "full"),
        ("Functional", "layer_norm"),
        ("Functional", "sigmoid"),
        ("VF", "lstm"),
        ("Tensor", "__rdiv__"),
        ("Tensor", "masked_fill"),
        ("Torch", "einsum"),
        ("aten", "add"),
        ("Tensor", "add_"),
        ("Tensor", "__imul__"),
        ("Tensor", "__getitem__"),
        ("Torch", "unique"),
        ("Torch", "nonzero"),
        ("Functional", "cross_entropy"),
    ],
)
def test_operations_are_found_by_their_names(prefix, name):
    assert callable(function_of(prefix, name))


def form(**numbers):
    counts = {"Max": 2.0, "Min": -1.0, "Mean": 0.0, "Norm": 1.0, "nans": 0, "infs": 0, "zeros": 0}
    return {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": [2, 2],
        "requires_grad": True,
        **counts,
        **numbers,
    }


def bad_form():
    return form(infs=1)


def verdict_on(folder, calls, *, parents=(), verdict=DiagnosisVerdict.LOCATED, place=None, **info):
    """Dump calls (key, value), with (key, key of the call around it), and return why what `place` names was bad."""
    writer = DumpWriter(folder, DumpInfo(step=5, attempt=1, rank=0, **info))
    for key, value in calls:
        writer.add(key, {"input_args": [], "input_kwargs": {}, **value})
    writer.close()
    (folder / "construct.json").write_text(json.dumps(dict(parents)))
    found = {"run_id": "run", "headline": "", "reason": "", "rank": 0, "module": "fc", "phase": FaultPhase.FORWARD}
    diagnosis = Diagnosis(verdict=verdict, **(found | (place or {})))
    return classified(diagnosis, [RankDump(rank=0, path="", dump=read_dump(folder))]).classification


ODD = ("Module.fc.Odd.forward.0", {"input_args": [form()], "output": [bad_form()]})
MIX = "a dump of the same step with level mix and task tensor"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ({"module": INPUT}, "the batch was not finite before anything was computed with it"),
        ({"phase": FaultPhase.OPTIMIZER}, "the parameter was not finite before anything was computed with it"),
        (
            {"phase": FaultPhase.PARAMETER, "tensor": BadTensor(slot="parameters.weight", count=4, nans=0, infs=0)},
            "the parameter was far too large before anything was computed with it",
        ),
    ],
)
def test_what_was_bad_before_the_forward_is_inherited(tmp_path, place, reason):
    verdict = verdict_on(tmp_path, [ODD], place=place)

    assert (verdict.cause, verdict.reason) == (NonfiniteCause.INHERITED, reason)


@pytest.mark.parametrize(
    ("reproducibility", "cause", "words"),
    [
        (Reproducibility.STATEFUL, NonfiniteCause.UNKNOWN, "the replay does not show the fault: a buffer changed"),
        (Reproducibility.UNKNOWN, NonfiniteCause.UNKNOWN, "the replay does not show the fault: a buffer changed"),
        (
            Reproducibility.NOT_REPRODUCIBLE,
            NonfiniteCause.KERNEL,
            "gave finite values: the device, a kernel, or a race",
        ),
    ],
)
def test_a_fault_that_did_not_come_back_is_the_devices_unless_the_model_changed(
    tmp_path, reproducibility, cause, words
):
    verdict = verdict_on(
        tmp_path, [ODD], verdict=DiagnosisVerdict.NOT_REPRODUCED,
        reproducibility=reproducibility, reproducibility_reason="a buffer changed",
    )  # fmt: skip

    assert verdict.cause is cause
    assert words in verdict.reason
    assert verdict.collect == (MIX if cause is NonfiniteCause.UNKNOWN else "")


@pytest.mark.parametrize(("is_finite", "words"), [(True, "finite"), (False, "not finite either")])
def test_what_float64_gave_is_told_beside_the_cause(tmp_path, is_finite, words):
    exp = OperationVerdict(
        operation="aten.exp.default", cause=NonfiniteCause.RANGE, reason="too large", call=ODD[0], direction="forward"
    )
    sent = dataclasses.replace(exp, operation="aten.mul.Tensor", cause=NonfiniteCause.INHERITED)
    elsewhere = dataclasses.replace(exp, operation="aten.log.default", call="Module.head.Linear.forward.0")

    verdict = verdict_on(
        tmp_path, [ODD], operations=(elsewhere, sent, exp), float64_finite=is_finite, float64_modules=("fc", "head")
    )

    assert verdict.operation == "aten.exp.default"
    assert verdict.reason == f"too large; with fc, head in float64 the step is {words}"


def test_a_function_deep_within_the_module_is_judged_by_its_statistics(tmp_path):
    inner = {"input_args": [form(Max=1000.0)], "output": [bad_form()]}
    calls = [("Torch.log.0.forward", inner), ("Torch.exp.0.forward", inner), ("Functional.odd.0.forward", ODD[1]), ODD]
    parents = {
        "Torch.log.0.forward": "Module.head.Odd.forward.0",  # bad too, but elsewhere
        "Torch.exp.0.forward": "Functional.odd.0.forward",
        "Functional.odd.0.forward": ODD[0],
        ODD[0]: None,
    }

    verdict = verdict_on(tmp_path, calls, parents=parents)

    assert (verdict.operation, verdict.cause) == ("Torch.exp.0.forward", NonfiniteCause.RANGE)
    assert verdict.evidence == "statistics of its inputs"


@pytest.mark.parametrize(
    ("options", "reason", "collect"),
    [
        (
            {},
            "the statistics of its inputs do not tell",
            f"a replay of the step (replay.enabled, replay.classify), or {MIX}",
        ),
        ({"replay": True}, "no operation of the replay made it from finite values in that module", MIX),
        (
            {"place": {"module": LOSS}},
            "what follows the model is not part of a replay, and no function calls were dumped",
            MIX,
        ),
    ],
)
def test_a_cause_that_is_not_known_says_what_to_collect(tmp_path, options, reason, collect):
    verdict = verdict_on(tmp_path, [ODD], **options)

    assert (verdict.cause, verdict.reason, verdict.collect) == (NonfiniteCause.UNKNOWN, reason, collect)


def test_a_parameter_of_the_module_that_was_bad_is_the_cause(tmp_path):
    other, bad = (BadParameter(name=name, count=4, nans=1, infs=0) for name in ("fc2.weight", "fc.weight"))

    verdict = verdict_on(tmp_path, [ODD], place={"parameters": (other, bad)})

    assert verdict.cause is NonfiniteCause.INHERITED
    assert verdict.reason == "fc.weight was not finite before anything was computed with it"
