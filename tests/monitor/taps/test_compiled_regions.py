"""A monitored run under torch.compile: the same graphs, the same bits, and what is read is what eager code reads."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.core.errors import AttachError, ConfigError
from trainermon.core.values import Kind
from trainermon.monitor.taps.compiled_regions import compile_friendly, site_of

# torch's own, when a part of a model is compiled that takes a tensor with a history
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

STEPS, WIDTH, WORDS = 4, 8, 20
STATE = {
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "ur_distribution": True,
    "agent": {"start": False},
}
ACTIVATIONS = STATE | {"xy_distribution": True, "all_xy": True, "forward_only": True}
STATE_KINDS = (
    Kind.GRAD_REDUCED,
    Kind.PARAM_ORIGIN,
    Kind.PARAM_UPDATED,
    Kind.EXP_AVG,
    Kind.EXP_AVG_SQ,
    Kind.UPDATE,
)


class Block(nn.Module):
    """Post-norm with separate projections: four consumers of one tensor, where the order of additions shows."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))

    def forward(self, x, *, scale):
        mixed = torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2) * scale, -1) @ self.v(x)
        return {"hidden": self.norm(x + mixed + self.out(x))}


class Net(nn.Module):
    def __init__(self, *, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, scale=0.3, use_reentrant=False)["hidden"]
            else:
                x = block(x, scale=0.3)["hidden"]
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def whole(model, backend):
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model, backend):
    model.compile(backend=backend, fullgraph=True)
    return model


def by_block(model, backend):
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def eager(model, backend):
    return model


class Trained:
    """Losses and gradients of every step, and how often torch compiled."""

    def __init__(self, compiled, model, optimizer, *, micro_steps=1):
        counters.clear()
        words = torch.arange(12).reshape(2, 6) % WORDS
        self.losses, self.gradients, self.graphs = [], [], []
        for step in range(STEPS):
            for micro_step in range(micro_steps):
                loss = compiled(words + step + 3 * micro_step)
                loss.backward()
                self.losses.append(loss.detach())
            self.gradients += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            self.graphs.append(counters["stats"]["unique_graphs"])
        assert not counters["graph_break"]

    def __eq__(self, other):
        pairs = zip(self.losses + self.gradients, other.losses + other.gradients, strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture(autouse=True, scope="module")
def compiler():
    """Let torch start what stays: the first compilation of a process leaves a thread of tqdm behind."""
    torch.compile(nn.Linear(2, 2), backend="aot_eager")(torch.ones(1, 2))
    yield
    torch._dynamo.reset()


def train(how, config=None, *, late=False, prepare=False, backend="aot_eager", micro_steps=1, dtype=None, **options):
    """Train, with a monitor if there is a `config`, attached before compilation or `late`, after the first step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(**options).to(dtype)
    if prepare:
        compile_friendly(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    monitor = None if config is None else TrainerMon(config)
    compiled = how(model, backend) if late else None
    if monitor:
        monitor.set_monitor(compiled if late else model, optimizer, grad_acc_steps=micro_steps)
    trained = Trained(compiled if late else how(model, backend), model, optimizer, micro_steps=micro_steps)
    if monitor:
        monitor.close()
    return trained


def journal_in(places):
    return RankJournal(only_spool(places[0]))


def assert_same_rows(found, expected, kinds, *, steps=STEPS):
    for step in range(steps):
        for kind in kinds:
            rows, truth = found.of(step, kind), expected.of(step, kind)
            assert rows.keys() == truth.keys()
            assert rows
            for label, row in rows.items():
                assert (row.count, row.nans, row.infs) == (truth[label].count, 0, 0)
                scale = math.sqrt(row.count * truth[label].sum_sq)
                assert row.sum == pytest.approx(truth[label].sum, rel=1e-4, abs=1e-4 * scale), (step, kind, label)
                assert row.norm == pytest.approx(truth[label].norm, rel=1e-4, abs=1e-12), (step, kind, label)


@pytest.fixture
def eager_rows(places, tmp_path, monkeypatch):
    """Return the rows of an eager run with a configuration."""

    def rows_of(config, **options):
        with monkeypatch.context() as patch:
            patch.setenv("TRAINERMON_SPOOL", str(tmp_path / "eager"))
            train(eager, config, **options)
        return RankJournal(only_spool(tmp_path / "eager"))

    return rows_of


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("how", [whole, in_place, by_block])
def test_gradients_parameters_and_state_need_no_graph_of_their_own(places, eager_rows, how, late):
    expected = train(how)

    trained = train(how, STATE, late=late)

    assert trained == expected
    assert trained.graphs == expected.graphs == [1] * STEPS
    assert_same_rows(journal_in(places), eager_rows(STATE), STATE_KINDS)


@pytest.mark.parametrize(("how", "graphs"), [(whole, 1), (in_place, 1), (by_block, 3)])
def test_prepared_modules_are_seen_in_compiled_code_without_changing_a_bit(places, eager_rows, how, graphs):
    expected = train(how)

    trained = train(how, ACTIVATIONS, prepare=True, late=True)

    assert trained == expected
    # a hook on the very module that is compiled has a graph of its own, shared by all blocks
    assert trained.graphs == [graphs] * STEPS
    assert_same_rows(journal_in(places), eager_rows(ACTIVATIONS), (*STATE_KINDS, Kind.ACTV))


def test_a_schedule_causes_no_recompilation(places, eager_rows):
    config = ACTIVATIONS | {"step_interval": 2}

    trained = train(whole, config, prepare=True, late=True)

    journal, expected = journal_in(places), eager_rows(config)
    assert trained.graphs == [1] * STEPS
    assert [bool(journal.of(step, Kind.ACTV)) for step in range(STEPS)] == [True, False, True, False]
    assert journal.of(2, Kind.ACTV).keys() == expected.of(2, Kind.ACTV).keys()


@pytest.mark.parametrize("how", [whole, in_place])
def test_micro_steps_are_told_apart(places, eager_rows, how):
    trained = train(how, ACTIVATIONS, prepare=True, late=True, micro_steps=2)

    assert trained.graphs == [1] * STEPS
    assert_same_rows(journal_in(places), eager_rows(ACTIVATIONS, micro_steps=2), (Kind.ACTV,))


def test_recomputation_of_a_checkpoint_is_not_counted(places, eager_rows):
    expected = train(whole, checkpointed=True)

    assert train(whole, ACTIVATIONS, prepare=True, late=True, checkpointed=True) == expected

    assert_same_rows(journal_in(places), eager_rows(ACTIVATIONS, checkpointed=True), (Kind.ACTV,))


def test_a_prepared_model_that_is_not_compiled_is_seen_once(places, eager_rows):
    train(eager, ACTIVATIONS, prepare=True)

    assert_same_rows(journal_in(places), eager_rows(ACTIVATIONS), (*STATE_KINDS, Kind.ACTV))


def test_evaluation_is_not_seen(places):
    model = compile_friendly(Net())
    compiled = whole(model, "aot_eager")
    monitor = TrainerMon(ACTIVATIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    monitor.set_monitor(compiled, optimizer)

    model.eval()
    compiled(torch.arange(6).reshape(1, 6))
    model.train()
    with torch.no_grad():
        compiled(torch.arange(6).reshape(1, 6))
    optimizer.step()
    monitor.close()

    assert not journal_in(places).of(0, Kind.ACTV)


def test_a_compiled_model_that_was_not_prepared_is_refused(places):
    with pytest.raises(ConfigError, match=r"19 modules \(.*\) lie in compiled code.*call trainermon.compile_friendly"):
        train(whole, ACTIVATIONS, late=True)


def test_gradients_of_activations_in_compiled_code_are_refused(places):
    with pytest.raises(ConfigError, match=r"gradients of activations.*lie in compiled code.*set forward_only to true"):
        train(whole, ACTIVATIONS | {"forward_only": False}, prepare=True, late=True)


def test_a_model_compiled_later_without_preparation_is_reported(places, caplog):
    expected = train(whole)

    trained = train(whole, ACTIVATIONS)

    assert trained == expected
    assert trained.graphs == [1] * STEPS
    journal = journal_in(places)
    assert not journal.of(0, Kind.ACTV)
    (told,) = [event["message"] for event in journal.events if "not one module" in event.get("message", "")]
    assert "call trainermon.compile_friendly(model) before torch.compile" in told


def test_to_prepare_what_is_compiled_already_is_refused():
    model = Net()
    model.blocks[1].compile(backend="aot_eager")

    with pytest.raises(AttachError, match=r"blocks\.1 is compiled already; call compile_friendly before torch.compile"):
        compile_friendly(model)
    with pytest.raises(AttachError, match="the model is compiled already"):
        compile_friendly(whole(Net(), "aot_eager"))


def test_copies_of_a_prepared_model_are_not_prepared():
    model: Any = compile_friendly(Net())

    other: Any
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert site_of(other.head) is None
        other(torch.arange(6).reshape(1, 6)).backward()
    assert site_of(model.head) is not None
    assert model.state_dict().keys() == Net().state_dict().keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports
@pytest.mark.parametrize(("dtype", "precise"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_inductor_reads_the_same_without_changing_a_bit(places, eager_rows, dtype, precise):
    with torch._inductor.config.patch(emulate_precision_casts=precise, compile_threads=1):
        expected = train(whole, backend="inductor", dtype=dtype)

        trained = train(whole, ACTIVATIONS, prepare=True, late=True, backend="inductor", dtype=dtype)

    assert trained == expected
    assert trained.graphs == [1] * STEPS
    if dtype is torch.float32:  # Inductor's bfloat16 is not eager code's, and Adam makes steps of a last bit
        assert_same_rows(journal_in(places), eager_rows(ACTIVATIONS), (Kind.ACTV,), steps=1)
