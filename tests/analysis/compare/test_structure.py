"""Two models that are built alike but for one thing: that thing is the answer, whatever follows from it."""

import types

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.analysis.compare.small_models import Block, Language, build, record
from trainermon.analysis.compare import CompareOptions, Mode, compare
from trainermon.analysis.compare.answer.summary import causes_of, headline, summarise
from trainermon.cli import main

MODES = (Mode.STATISTICS, Mode.TENSOR)
every_mode = pytest.mark.parametrize("mode", MODES)
with_modules = pytest.mark.parametrize("level", ["L0", "mix"])


def compared(folder, target, golden, level, mode):
    for name, model in (("target", target), ("golden", golden)):
        if not (folder / name).exists():
            record(folder / name, model, level=level)
    (comparison,) = compare(folder / "target", folder / "golden", options=CompareOptions(mode=mode))
    return comparison


def longer(at):
    """Return a model with one more block, of other weights."""
    model = build("language")
    torch.manual_seed(9)
    model.layers.insert(at, Block(16).eval())
    return model


@with_modules
@every_mode
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_layer_more_is_the_one_finding(at, level, mode, tmp_path):
    comparison = compared(tmp_path, longer(at), build("language"), level, mode)

    ((call, place, words),) = causes_of(comparison)
    assert (call.key, call.golden, place) == (f"Module.layers.{at}.Block.forward.0", None, "")
    assert words.startswith("is in the target alone, and the dumps differ from Module.")
    assert headline(comparison).startswith(f"The first difference: {call.key}, small_models.py:")


@with_modules
@every_mode
def test_a_layer_less_is_the_one_finding_too(level, mode, tmp_path):
    comparison = compared(tmp_path, build("language"), longer(1), level, mode)

    ((call, _, words),) = causes_of(comparison)
    assert (call.target, call.key) == (None, "Module.layers.1.Block.forward.0")
    assert words.startswith("is in the golden dump alone")
    assert words.endswith(
        "the dumps differ from Module.layers.1.Block.forward.0 (Module.layers.2.Block.forward.0 in the golden dump) on"
    )


@with_modules
def test_a_layer_less_is_where_the_tree_opens(level, tmp_path, capsys):
    record(tmp_path / "target", build("language"), level=level)
    record(tmp_path / "golden", longer(1), level=level)

    assert main(["graph", str(tmp_path / "target"), str(tmp_path / "golden")]) == 0

    shown = capsys.readouterr().out
    assert "- layers.1 Block  is in the golden dump alone" in shown


@with_modules
def test_another_weight_beside_a_layer_more_is_found(level, tmp_path):
    golden = build("language")
    with torch.no_grad():
        golden.layers[0].mix.weight.mul_(1.1)

    comparison = compared(tmp_path, longer(2), golden, level, Mode.STATISTICS)

    assert {call.key for call in comparison.blamed} >= {"Module.layers.0.mix.Linear.forward.0"}
    assert not [call for call in comparison.blamed if call.key.startswith("Module.layers.3.mix")]


def with_gelu():
    """Return a model of which one block calls another activation."""
    model = build("language")

    def run(self, hidden):
        hidden = hidden + self.drop(self.mix(self.norm(hidden)))
        return hidden + self.down(functional.gelu(self.gate(hidden)) * self.up(hidden))

    model.layers[1].forward = types.MethodType(run, model.layers[1])
    return model


@pytest.mark.parametrize("level", ["L1", "mix"])
@every_mode
def test_another_function_in_a_place_is_named_with_what_it_stands_for(level, mode, tmp_path):
    comparison = compared(tmp_path, with_gelu(), build("language"), level, mode)

    said = headline(comparison)
    module = " in layers.1 (Block)" if level == "mix" else ""
    assert said.endswith("stands where the golden dump has Functional.silu.1.forward.")
    assert f"Functional.gelu.0.forward{module}, test_structure.py:" in said
    assert said.startswith(
        f"The first difference{' arose in Module.layers.1.Block' if module else ': Functional.gelu'}"
    )


@every_mode
def test_where_functions_were_not_recorded_that_is_said(mode, tmp_path):
    said = headline(compared(tmp_path, with_gelu(), build("language"), "L0", mode))

    assert said.startswith("The first difference arose in Module.layers.1.Block.forward.0, ")
    assert said.endswith("; the dumps have modules alone, and not the functions that it calls (level mix has both).")


@with_modules
@every_mode
def test_another_class_in_a_place_is_named_with_what_it_stands_for(level, mode, tmp_path):
    target = build("table")
    target.left[1] = nn.SiLU()
    comparison = compared(tmp_path, target, build("table"), level, mode)

    assert headline(comparison).startswith("The first difference: Module.left.1.SiLU.forward.0, small_models.py:")
    assert headline(comparison).endswith("stands where the golden dump has Module.left.1.GELU.forward.0.")


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden):
        return self.down(functional.silu(self.gate(hidden)))


class Activated(nn.Module):
    """A product whose second factor is computed after the activation."""

    def __init__(self, act):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.act = act

    def forward(self, hidden):
        return self.down(self.act(self.gate(hidden)) * self.up(hidden))


class OtherwiseGated(Gated):
    def forward(self, hidden):
        return self.down(functional.gelu(self.gate(hidden)))


class AlsoGated(Gated):
    pass


def parted(*parts):
    """Return a model with these parts in its blocks, one in each, and equal weights whatever they are."""
    model = named(*["part"] * len(parts))
    for layer, part in zip(model.layers, parts, strict=True):
        part.load_state_dict(
            layer.part.state_dict() | {"up.weight": torch.ones(32, 16), "up.bias": torch.ones(32)}, strict=False
        )
        layer.part = part
    return model.eval()


@pytest.mark.parametrize("level", ["L0", "mix"])
@every_mode
def test_another_class_is_named_whatever_runs_between_it_and_what_differs(level, mode, tmp_path):
    target, golden = (parted(Activated(nn.SiLU()), Activated(act), Gated()) for act in (nn.GELU(), nn.SiLU()))
    comparison = compared(tmp_path, target, golden, level, mode)

    assert len(comparison.blamed) == 1
    assert headline(comparison).startswith("The first difference: Module.layers.1.part.act.GELU.forward.0, ")
    assert headline(comparison).endswith("stands where the golden dump has Module.layers.1.part.act.SiLU.forward.0.")
    assert comparison.notes == ("layers.1.part.act is GELU, and SiLU in the golden dump",)


@pytest.mark.parametrize("level", ["L0", "mix"])
@every_mode
def test_an_own_class_for_another_is_named_and_what_is_within_is_matched(level, mode, tmp_path):
    target, golden = parted(Gated(), OtherwiseGated()), parted(Gated(), Gated())
    comparison = compared(tmp_path, target, golden, level, mode)

    assert headline(comparison).startswith("The first difference: Module.layers.1.part.OtherwiseGated.forward.0, ")
    assert headline(comparison).endswith("stands where the golden dump has Module.layers.1.part.Gated.forward.0.")
    assert not [call for call in comparison.calls if call.target is None and call.key.startswith("Module.")]


@with_modules
@every_mode
def test_another_norm_is_named(level, mode, tmp_path):
    target = named("part", "part", "part")
    target.layers[1].norm = nn.RMSNorm(16)
    comparison = compared(tmp_path, target, named("part", "part", "part"), level, mode)

    assert headline(comparison).startswith("The first difference: Module.layers.1.norm.RMSNorm.forward.0, ")
    assert headline(comparison).endswith("stands where the golden dump has Module.layers.1.norm.LayerNorm.forward.0.")


@with_modules
@every_mode
def test_a_class_of_another_name_that_does_the_same_is_no_difference(level, mode, tmp_path):
    comparison = compared(tmp_path, parted(AlsoGated(), AlsoGated()), parted(Gated(), Gated()), level, mode)

    assert set(comparison.row_counts()) == {"pass"}
    assert comparison.notes == ("layers.*.part, in 2 places, is AlsoGated, and Gated in the golden dump",)


@with_modules
def test_a_fault_within_another_class_is_found_there(level, tmp_path):
    target = parted(AlsoGated(), AlsoGated())
    with torch.no_grad():
        target.layers[1].part.down.weight.mul_(1.3)
    comparison = compared(tmp_path, target, parted(Gated(), Gated()), level, Mode.STATISTICS)

    (call,) = comparison.blamed
    assert (call.key, call.origin) == ("Module.layers.1.part.down.Linear.forward.0", "parameters.weight")


@with_modules
def test_numbers_tell_no_place_where_one_side_has_more(level, tmp_path):
    target, golden = build("table"), build("table")
    target.left.insert(1, nn.Identity())
    comparison = compared(tmp_path, target, golden, level, Mode.STATISTICS)

    assert comparison.notes == ()
    assert comparison.blamed == ()


class Named(nn.Module):
    """A block whose inner part has a name of choice."""

    def __init__(self, name):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.add_module(name, Gated())
        self.inner = name

    def forward(self, hidden):
        return hidden + getattr(self, self.inner)(self.norm(hidden))


def named(*names):
    torch.manual_seed(5)
    model = Language()
    model.layers = nn.ModuleList(Named(name) for name in names)
    return model.eval()


@with_modules
@every_mode
def test_parts_of_another_name_are_matched_by_class_and_place_and_the_rule_is_told(level, mode, tmp_path):
    comparison = compared(tmp_path, named(*["ffn"] * 4), named(*["mlp"] * 4), level, mode)

    assert set(comparison.row_counts()) == {"pass"}
    (note,) = summarise(comparison).notes
    assert note.startswith("layers.*.ffn was taken for layers.*.mlp in 4 places")
    rule = note.partition("for --match: ")[2]
    assert rule == '- {target: "layers.*.ffn", golden: "layers.*.mlp"}'


def test_the_rule_that_is_told_does_the_same(tmp_path, capsys):
    record(tmp_path / "target", named("ffn", "ffn"))
    record(tmp_path / "golden", named("mlp", "mlp"))
    (tmp_path / "rules.yaml").write_text('- {target: "layers.*.ffn", golden: "layers.*.mlp"}\n')

    main(["compare", str(tmp_path / "target"), str(tmp_path / "golden"), "--match", str(tmp_path / "rules.yaml")])

    assert "0 error, 0 warning" in capsys.readouterr().out


@with_modules
@every_mode
def test_a_fault_in_a_part_of_another_name_is_found_there(level, mode, tmp_path):
    target = named(*["ffn"] * 4)
    with torch.no_grad():
        target.layers[1].ffn.down.weight.mul_(1.3)
    comparison = compared(tmp_path, target, named(*["mlp"] * 4), level, mode)

    (call,) = comparison.blamed
    assert (call.key, call.origin) == ("Module.layers.1.ffn.down.Linear.forward.0", "parameters.weight")


class Doubled(nn.Module):
    """A block of two parts of one class."""

    def __init__(self, one, other):
        super().__init__()
        self.add_module(one, Gated())
        self.add_module(other, Gated())

    def forward(self, hidden):
        return sum(part(hidden) for part in self.children())


@with_modules
def test_two_parts_of_one_class_are_not_guessed_at(level, tmp_path):
    target, golden = named("ffn"), named("ffn")
    target.layers[0], golden.layers[0] = Doubled("a", "b").eval(), Doubled("c", "d").eval()

    comparison = compared(tmp_path, target, golden, level, Mode.STATISTICS)

    assert not [note for note in comparison.notes if "was taken for" in note]


def test_other_shapes_are_not_taken_for_one_another(tmp_path):
    target = named("ffn")
    target.layers[0].ffn.gate, target.layers[0].ffn.down = nn.Linear(16, 8), nn.Linear(8, 16)

    comparison = compared(tmp_path, target, named("mlp"), "mix", Mode.STATISTICS)

    assert comparison.notes == ()
