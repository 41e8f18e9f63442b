"""What a run of MindSpore writes, held against float64; what goes wrong in a hook; what is refused."""

import logging
import subprocess
import sys
import textwrap

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from tests.journal_rows import RankJournal, only_spool
from tests.monitor.mindspore.trainings import SmallTraining, truth
from trainermon import TrainerMon
from trainermon.core.errors import AttachError, ConfigError
from trainermon.core.values import Kind
from trainermon.monitor.mindspore import taps

pytestmark = pytest.mark.mindspore
BEGINNING = """
from tests.monitor.mindspore.trainings import SmallTraining
from trainermon import TrainerMon
training = SmallTraining()
monitor = TrainerMon({"agent": {"start": False}, "xy_distribution": True})
monitor.set_monitor(training.net, optimizer=training.optimizer)
"""
ALL = {"param_distribution": True, "mv_distribution": True, "xy_distribution": True}


def watching(training, **config):
    monitor = TrainerMon({"agent": {"start": False}, **config})
    monitor.set_monitor(training.net, optimizer=training.optimizer)
    return monitor


def assert_rows(found, tensors):
    """Fail unless there is a row for each tensor, and each is that of float64."""
    assert sorted(found) == sorted(tensors)
    for name, tensor in tensors.items():
        row = found[name]
        got = [row.count, row.min, row.max, row.sum, row.sum_sq, row.zeros, row.nans, row.infs]
        np.testing.assert_allclose(got, truth(tensor), rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("mode", ["pynative", "jit step", "jit construct"])
def test_rows_are_those_of_float64(spool, mode):
    training = SmallTraining("AdamWeightDecay", mode=mode)
    monitor = watching(training, **ALL | {"xy_distribution": False})
    if mode == "jit step":
        training.used = monitor.watch(training.optimizer)
    names = [parameter.name for parameter in training.optimizer.parameters]
    kept = []
    for _ in range(3):
        before = [parameter.asnumpy().copy() for parameter in training.optimizer.parameters]
        loss = training.step()
        monitor.record(loss={"loss": loss, "half": loss / 2})
        optimizer = training.optimizer
        held = (optimizer.parameters, optimizer.moments1, optimizer.moments2)
        after = [[ms.Tensor(each.asnumpy().copy()) for each in tensors] for tensors in held]
        kept.append((loss, training.gradients, [ms.Tensor(each) for each in before], *after))
    monitor.close()

    journal = RankJournal(only_spool(spool))
    assert sorted(journal.rows) == [0, 1, 2]
    kinds = (Kind.GRAD_REDUCED, Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED, Kind.EXP_AVG, Kind.EXP_AVG_SQ)
    for step, (loss, *tensors) in enumerate(kept):
        assert journal.of(step, Kind.LOSS)["loss"].sum == float(loss)
        assert journal.of(step, Kind.STEP)["half"].sum == float(loss) / 2
        for kind, of_kind in zip(kinds, tensors, strict=True):
            assert_rows(journal.of(step, kind), dict(zip(names, of_kind, strict=True)))
    assert journal.of(2, Kind.STEP)["learning_rate.0"].max == pytest.approx(1e-2)
    assert journal.of(2, Kind.STEP)["duration_seconds"].max > 0


def test_activations_and_their_gradients_are_those_of_the_script(spool):
    training = SmallTraining()
    seen = {}

    def keep(cell, args, output):
        name = next(name for name, each in training.net.cells_and_names() if each is cell)
        call = sum(key.startswith(f"{name}.output.0") for key in seen)
        key = f"{name}.output.0" + (f"#{call}" if call else "")
        seen[key] = output
        output.register_hook(lambda gradient: seen.update({f"gradient of {key}": gradient}))

    for cell in training.net.cells():
        cell.register_forward_hook(keep)
    monitor = watching(training, xy_distribution=True)
    training.step()
    monitor.close()

    journal = RankJournal(only_spool(spool))
    outputs = {key: row for key, row in journal.of(0, Kind.ACTV).items() if ".output" in key}
    gradients = {key: row for key, row in journal.of(0, Kind.ACTV_GRAD).items() if ".output" in key}
    assert {"first.output.0", "first.output.0#1"} <= set(outputs)
    assert_rows(outputs, {key: value for key, value in seen.items() if not key.startswith("gradient")})
    assert_rows(
        {f"gradient of {key}": row for key, row in gradients.items()}, {k: v for k, v in seen.items() if "gra" in k}
    )


def test_evaluation_and_recomputation_are_not_counted(spool):
    plain, recomputed = SmallTraining(), SmallTraining()
    recomputed.net.first.recompute()
    rows = []
    for number, training in enumerate((plain, recomputed)):
        monitor = watching(training, xy_distribution=True, run_id=f"run{number}")
        for _ in range(2):
            training.step()
            training.net(training.batch()[0])
        monitor.close()
        rows.append(RankJournal(spool / f"run{number}").rows)

    forward = [{k: v for k, v in each[1].items() if k.kind is Kind.ACTV} for each in rows]
    assert forward[0] == forward[1]
    assert {key.call for key in forward[0]} == {0, 1}


def test_a_fault_in_a_tap_ends_the_monitor_and_not_the_training(spool, monkeypatch, caplog):
    training, bare = SmallTraining(), SmallTraining()
    monitor = watching(training, **ALL)
    training.step()
    monkeypatch.setattr(taps.OptimizerTaps, "before_step", lambda *_: 1 / 0)

    with caplog.at_level(logging.ERROR):
        losses = [training.step() for _ in range(3)]
    monitor.close()

    bare.step()
    assert [bare.step() for _ in range(3)] == losses
    assert training.bits() == bare.bits()
    assert [record.message for record in caplog.records if record.name == "trainermon"] == [
        "the monitor detached itself after ZeroDivisionError: division by zero; training goes on unwatched"
    ]
    assert sorted(RankJournal(only_spool(spool)).rows) == [0]


def test_an_exception_of_the_scripts_own_hook_reaches_the_script(tmp_path):
    """In a process of its own: after it MindSpore 2.10 fails in a later backward, monitor or not."""
    run_script(
        tmp_path,
        """
        import pytest
        def fail(*_):
            raise LookupError("the script's own")
        training.step()
        training.net.head.register_forward_hook(fail)
        with pytest.raises(LookupError, match="the script's own"):
            training.step()
        """,
    )

    journal = RankJournal(only_spool(tmp_path))
    assert sorted(journal.rows) == [0]
    assert journal.events == []


def test_a_skipped_step_leaves_no_rows_and_takes_no_number(spool):
    training = SmallTraining(dtype="float16")
    compute = ms.value_and_grad(lambda x, y: ((training.net(x) - y) ** 2).sum(), None, training.optimizer.parameters)
    monitor = watching(training, xy_distribution=True)
    for number in range(4):
        _, gradients = compute(*training.batch())
        if number != 1:  # as a script does whose gradients have overflowed
            training.optimizer(gradients)
    monitor.close()

    journal = RankJournal(only_spool(spool))
    assert sorted(journal.rows) == [0, 1, 2]
    assert {key.call for key in journal.rows[1] if key.kind is Kind.ACTV} == {0, 1}
    assert_rows(
        journal.of(2, Kind.GRAD_REDUCED),
        {p.name: g for p, g in zip(training.optimizer.parameters, gradients, strict=True)},
    )


def test_a_parameter_that_is_frozen_half_way_keeps_its_series(spool):
    training = SmallTraining()
    monitor = watching(training, param_distribution=True)
    training.step()
    training.net.head.weight.requires_grad = False
    training.step()
    monitor.close()

    journal = RankJournal(only_spool(spool))
    assert set(journal.of(0, Kind.PARAM_UPDATED)) == set(journal.of(1, Kind.PARAM_UPDATED))


def test_micro_steps_are_told_apart(spool):
    training = SmallTraining()
    compute = ms.value_and_grad(lambda x, y: ((training.net(x) - y) ** 2).mean(), None, training.optimizer.parameters)
    monitor = TrainerMon({"agent": {"start": False}, "monitor_mbs_grad": True, "xy_distribution": True})
    monitor.set_monitor(training.net, optimizer=training.optimizer, grad_acc_steps=2)
    parts = [compute(*training.batch())[1] for _ in range(2)]
    training.optimizer(tuple(a + b for a, b in zip(*parts, strict=True)))
    monitor.close()

    journal = RankJournal(only_spool(spool))
    found = journal.of(0, Kind.GRAD_UNREDUCED)
    for number, gradients in enumerate(parts):
        of_step = {f"{p.name}@{number}": g for p, g in zip(training.optimizer.parameters, gradients, strict=True)}
        assert_rows({name: row for name, row in found.items() if name.endswith(f"@{number}")}, of_step)
    assert {key.micro_step for key in journal.rows[0] if key.kind is Kind.ACTV} == {0, 1}


def test_only_chosen_parameters_on_chosen_steps(spool):
    training = SmallTraining()
    monitor = watching(training, targets=["head"], start_step=1, step_interval=2, xy_distribution=True)
    for _ in range(4):
        training.step()
    monitor.close()

    rows = RankJournal(only_spool(spool)).rows
    found = [(step, key.name) for step in sorted(rows) for key in rows[step] if key.kind is Kind.GRAD_REDUCED]
    assert found == [(step, f"head.{name}") for step in (1, 3) for name in ("weight", "bias")]


def test_nothing_is_left_behind(spool):
    training = SmallTraining()
    cells = [training.optimizer, *(cell for _, cell in training.net.cells_and_names())]
    monitor = watching(training, **ALL)
    training.step()
    assert any(cell._forward_hook for cell in cells)
    monitor.close()

    assert [cell for cell in cells if cell._forward_hook or cell._forward_pre_hook] == []


def test_a_script_in_graph_mode_is_told_why_there_are_no_activations(spool, caplog):
    training = SmallTraining(mode="jit construct")
    training.prepare()
    monitor = TrainerMon({"agent": {"start": False}, "xy_distribution": True, "targets": ["first"]})
    monitor.set_monitor(training.net, optimizer=training.optimizer)
    with caplog.at_level(logging.WARNING):
        training.step()
    monitor.close()

    assert "MindSpore calls none in what it compiles" in caplog.text


def test_hooks_do_not_keep_a_step_from_being_compiled(spool):
    training, bare = (SmallTraining(mode="jit step") for _ in range(2))
    monitor = watching(training, **ALL)

    losses = [training.step() for _ in range(3)]
    monitor.close()

    assert losses == [bare.step() for _ in range(3)]


def test_several_steps_in_one_call_are_said_to_be_so(spool, caplog):
    training = SmallTraining(mode="jit step")
    monitor = watching(training)
    training.used = monitor.watch(training.optimizer)
    with caplog.at_level(logging.WARNING):
        for number in range(6):
            loss = training.step()
            if number in (0, 3, 5):
                monitor.record(loss=loss)
    monitor.close()

    rows = RankJournal(only_spool(spool)).rows
    assert sorted(rows) == [0, 3, 5]
    assert "3 steps ended with step 3 before the monitor was called again" in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"cc_distribution": {"enable": True}}, "collectives of MindSpore are not seen"),
        ({"framework": "megatron"}, "expected 'mindspore' or nothing"),
        ({"targets": ["haed"]}, "did you mean 'head'"),
    ],
)
def test_what_cannot_be_met_is_refused(spool, config, message):
    training = SmallTraining()

    with pytest.raises(ConfigError, match=message):
        watching(training, **config)


def test_a_wrong_optimizer_is_refused(spool):
    training = SmallTraining()
    monitor = TrainerMon({"agent": {"start": False}})

    with pytest.raises(AttachError, match="expected one of mindspore"):
        monitor.set_monitor(training.net, optimizer=nn.MSELoss())
    with pytest.raises(AttachError, match="set_monitor was called with before"):
        monitor.watch(training.optimizer)


def test_torch_is_never_loaded(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch was loaded')")

    said = run_script(
        tmp_path,
        """
        import sys
        monitor.record(loss=training.step())
        print(monitor.generate_wgrad_metrics({"own": training.gradients[0]})[0]["own"]["norm"] > 0)
        assert not any(name.partition(".")[0] == "torch" for name in sys.modules)
        """,
    )

    assert "True" in said


def run_script(folder, middle):
    """Run `middle` in a process of its own, between `set_monitor` and `close`, and return what it prints."""
    script = "\n".join([BEGINNING, textwrap.dedent(middle), "monitor.close()"])
    environment = {"TRAINERMON_SPOOL": str(folder), "TRAINERMON_OUTPUT": str(folder), "PYTHONPATH": f"{folder}:."}

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)

    assert done.returncode == 0, done.stderr
    return done.stdout
