"""Calls on tensors of every dtype and layout: a wrong result never passes, a sound one is no error."""

import pytest
import torch

from tests.tensor_kinds import DAMAGES, all_dtypes, every_kind, numbers
from tests.tensor_pairs import pairs
from trainermon import PrecisionDebugger
from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.judge import Status, judge_call
from trainermon.analysis.check.checking import check_dump
from trainermon.statistics.layout import readable

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: quantized, sparse and masked tensors may change
OPERATIONS = {
    "clone": lambda tensor: tensor.clone(),
    "neg": lambda tensor: tensor.neg(),
    "mul": lambda tensor: tensor * 2,
    "add": lambda tensor: tensor + tensor,
    "abs": lambda tensor: tensor.abs(),
    "relu": lambda tensor: torch.relu(tensor),
    "to": lambda tensor: tensor.to(torch.float32),
    "sum": lambda tensor: tensor.sum(),
    "mean": lambda tensor: tensor.mean(),
    "mean of rows": lambda tensor: tensor.mean(0),
    "amax": lambda tensor: tensor.amax(),
    "exp": lambda tensor: tensor.to(torch.float32).exp(),
    "to_dense": lambda tensor: tensor.to_dense(),
    "dequantize": lambda tensor: tensor.dequantize(),
    "matmul": lambda tensor: tensor @ tensor,
    "softmax": lambda tensor: tensor.softmax(-1),
}


UNJUDGED = ("masked", "nested", "jagged", "meta", "fake", "wrapped")


def result_of(operation, tensor):
    try:
        return OPERATIONS[operation](tensor)
    except (RuntimeError, TypeError, AttributeError, ValueError):
        return None


def is_same(one, other):
    try:
        return are_equal(one, other)
    except RuntimeError:  # torch makes a sparse tensor of this dtype, and no dense one of it
        return False


def are_equal(one, other):
    parts = [readable(side) for side in (one, other)]
    if parts[0].shape != parts[1].shape:
        return False
    one, other = (part.to_dense() if part.layout is not torch.strided else part for part in parts)
    kind = torch.complex128 if one.is_complex() else torch.float64
    return torch.equal(one.to(kind).nan_to_num(7), other.to(kind).nan_to_num(7))


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in ("mean of rows", "exp")])
def test_no_wrong_result_passes_and_no_sound_one_is_an_error(operation):
    passed, wrong, judged = [], [], 0
    sides = {"sound": numbers()} | {name: damage(numbers()) for name, damage in DAMAGES.items()}
    made = {name: every_kind(values) for name, values in sides.items()}
    for name in ("sound", "zeroed", "negated"):  # of each damage they would take a minute more
        made[name] |= pairs(sides[name])
    for kind, tensor in made["sound"].items():
        sound = result_of(operation, tensor)
        if sound is None or kind.rpartition(" ")[2] in UNJUDGED:
            continue
        for damage in DAMAGES:
            given = result_of(operation, made[damage].get(kind))
            if given is None or is_same(given, sound):
                continue
            found = judged_or_skipped(operation, tensor, given)
            judged += found not in (None, Status.SKIP)
            is_cancelled = operation in ("sum", "mean") and kind.endswith(" expanded")  # to less than its rounding
            is_certain = damage in ("zeroed", "negated") and not is_cancelled
            bad = (Status.PASS, Status.WARNING) if is_certain else (Status.PASS,)
            passed += [(kind, damage, found)] * (found in bad)
        wrong += [kind] * (judged_or_skipped(operation, tensor, sound) is Status.ERROR)

    assert (passed, wrong) == ([], [])
    assert judged


def judged_or_skipped(operation, tensor, result):
    """Return the verdict; None where the judge raises, for which the row of a dump says that it cannot be judged."""
    try:
        (found,) = judge_call(operation, OperationCall(OPERATIONS[operation], [tensor], {}), result)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    return found.status


@pytest.fixture
def debugger(tmp_path):
    made = PrecisionDebugger(dump_path=tmp_path, level="L1", task="tensor")
    made.start(None)
    yield made
    PrecisionDebugger.close()


def checked(debugger, folder):
    debugger.stop()
    debugger.close()
    return check_dump(folder / "step0/rank0")


def test_a_dump_of_every_kind_has_no_error(debugger, tmp_path):
    for tensor in every_kind(numbers()).values():
        for operation in OPERATIONS:
            result_of(operation, tensor)

    found = checked(debugger, tmp_path)

    assert found.of(Status.ERROR) == []
    assert len(found.of(Status.PASS)) > 200
    reasons = {reason.partition(":")[0]: number for reason, number in found.skipped.items()}
    assert reasons["it ran on masked tensors"] >= 5
    assert reasons["it ran on nested tensors"] >= 2


def test_calls_within_vmap_are_skipped_and_counted_and_those_within_grad_are_judged(debugger, tmp_path):
    given = torch.randn(5, 4)
    torch.func.vmap(lambda row: (row.softmax(0) * row.sum()).mean())(given)
    torch.func.vmap(lambda one, other: one * other.sum(), (0, 1))(given, torch.randn(3, 5))
    torch.func.grad(lambda whole: whole.sin().sum())(given)

    found = checked(debugger, tmp_path)

    assert found.of(Status.ERROR) == []
    skipped = {call.key.rpartition(".")[0] for call in found.calls if call.reason.startswith("it ran inside vmap")}
    assert {"Tensor.softmax.0", "Tensor.sum.0", "Tensor.mean.0", "Tensor.sum.1", "Tensor.__mul__.1"} <= skipped
    assert {"Tensor.sin.0", "Tensor.sum.2"} <= {call.key.rpartition(".")[0] for call in found.of(Status.PASS)}
    assert found.skipped["it ran inside vmap: the dump has what the whole batch took, and not each call"] >= 5


@pytest.mark.parametrize("dtype", [each for each in all_dtypes() if each.is_floating_point or each.is_complex], ids=str)
@pytest.mark.parametrize("damage", ["zeroed", "negated"])
def test_no_wrong_gradient_passes(debugger, tmp_path, dtype, damage):
    """Gradients of what is cast to the type, summed with others, and cast back."""
    wide = torch.complex64 if dtype.is_complex else torch.float32
    given = numbers().to(wide).requires_grad_()
    try:
        narrow = given.to(dtype)
        (narrow.to(wide) * numbers()[:, :1]).abs().square().mean().backward()
    except (RuntimeError, NotImplementedError):
        pytest.skip("torch does not differentiate it")
    debugger.stop()
    debugger.close()
    changed = 0
    for path in (tmp_path / "step0/rank0").rglob("*.backward.output.*.pt"):
        tensor = torch.load(path)
        change = tensor.to(wide) * 0 if damage == "zeroed" else -tensor.to(wide)
        changed += not torch.equal(change.to(tensor.dtype).to(wide), tensor.to(wide))
        path.unlink()  # it is the file of what the next backward was given, too
        torch.save(change.to(tensor.dtype), path)

    found = check_dump(tmp_path / "step0/rank0")

    judged = [call for call in found.calls if call.is_backward and call.status is not Status.SKIP]
    assert len(judged) == len([call for call in judged if call.status is Status.ERROR])
    assert changed
    assert judged
