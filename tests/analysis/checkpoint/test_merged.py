"""A base and an adapter are what PEFT merges them into, and less or more of an adapter is told."""

import json
import random
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tests.analysis.checkpoint.test_damaged import damaged
from trainermon.analysis.checkpoint.comparison import compare_checkpoints
from trainermon.analysis.checkpoint.opening import open_checkpoint, opened
from trainermon.analysis.checkpoint.verdicts import SAME, WeightVerdict
from trainermon.cli import main
from trainermon.core.errors import CheckpointError

RECORDED = Path(__file__).parent / "formats" / "recorded" / "peft.zip"
with zipfile.ZipFile(RECORDED) as _archive:
    CASES = sorted({name.split("/")[0] for name in _archive.namelist()})  # an option of PEFT, and a dtype


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peft")
    with zipfile.ZipFile(RECORDED) as archive:
        archive.extractall(folder)
    return folder


def different(found):
    return {tensor.name for tensor in found.tensors if tensor.verdict not in SAME}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_base_and_its_adapter_are_what_peft_merges_them_into(recorded, case, turned):
    folder = recorded / case
    sides = [f"{folder / 'base.safetensors'}+{folder / 'adapter'}", folder / "merged.safetensors"]

    found = compare_checkpoints(*(sides[::-1] if turned else sides))

    assert found.headline.startswith("the same "), (found.headline, different(found))


@pytest.mark.parametrize("case", CASES)
def test_a_base_without_its_adapter_differs_where_the_adapter_is(recorded, case):
    folder = recorded / case
    base = folder / "base.safetensors"
    changed = different(compare_checkpoints(base, folder / "merged.safetensors"))

    found = compare_checkpoints(f"{base}+{folder / 'adapter'}", base)

    assert changed
    assert different(found) == changed


def write_adapter(folder, tensors, **config):
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": "some/base"}
    (folder / "adapter_config.json").write_text(json.dumps({**plain, **config}))
    return folder


def noise(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def small(folder, *, size=0.1, rows=32, name="model.layers.0.q_proj"):
    """Return a base of one weight, an adapter of rank 2 and scale 1, and both as arrays."""
    factors = {"A": noise(1, 2, 16), "B": size * noise(2, rows, 2)}
    base = {f"{name}.weight": noise(3, rows, 16), "other.weight": noise(4, 4)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(base, folder / "base.safetensors")
    write_adapter(
        folder / "adapter", {f"base_model.model.{name}.lora_{part}.weight": array for part, array in factors.items()}
    )
    return base, factors["B"].astype(np.float64) @ factors["A"]


@settings(max_examples=30)
@given(share=st.sampled_from([-1.0, 0.0, 0.5, 0.9, 1.0, 2.0, 4.0]), size=st.sampled_from([1e-3, 1e-2, 1.0, 30.0]))
def test_how_much_of_an_adapter_a_weight_holds_is_told(tmp_path_factory, share, size):
    folder = tmp_path_factory.mktemp("share")
    base, added = small(folder, size=size)
    name = next(iter(base))
    save_file({**base, name: (base[name] + share * added).astype(np.float32)}, folder / "merged.safetensors")

    found = compare_checkpoints(f"{folder / 'base.safetensors'}+{folder / 'adapter'}", folder / "merged.safetensors")

    (tensor,) = [tensor for tensor in found.tensors if tensor.name == name]
    if share == 1.0:
        assert tensor.verdict in SAME
    else:
        assert tensor.verdict is WeightVerdict.DIFFERENT
        assert f"holds {share:.3g} times what the adapter adds" in " ".join(tensor.notes)


@pytest.mark.parametrize("share", [0.0, 1.0, 2.0])
def test_an_adapter_below_the_rounding_of_each_element_is_told_over_all_of_them(tmp_path, share):
    base, added = small(tmp_path, size=1e-4, rows=512)
    name = next(iter(base))
    base[name] = np.copysign(1 + np.abs(base[name]), base[name])
    save_file(base, tmp_path / "base.safetensors")
    merged = (base[name] + share * added).astype(np.float16)
    save_file({**base, name: merged}, tmp_path / "merged.safetensors")
    assert np.max(np.abs(added)) < 2.0**-10  # half a step of float16 from 1 on: no element alone tells

    sides = f"{tmp_path / 'base.safetensors'}+{tmp_path / 'adapter'}", tmp_path / "merged.safetensors"

    assert different(compare_checkpoints(*sides)) == (set() if share == 1.0 else {name})


def test_one_element_that_rounding_does_not_explain_is_a_difference(tmp_path):
    base, added = small(tmp_path)
    name = next(iter(base))
    merged = (base[name] + added).astype(np.float32)
    merged[3, 5] += 1e-4
    save_file({**base, name: merged}, tmp_path / "merged.safetensors")

    found = compare_checkpoints(
        f"{tmp_path / 'base.safetensors'}+{tmp_path / 'adapter'}", tmp_path / "merged.safetensors"
    )

    assert different(found) == {name}
    assert "1 elements differ by more than rounding" in " ".join(found.differing()[0].notes)


def test_an_adapter_below_the_rounding_of_its_merge_is_said_not_to_be_told(tmp_path):
    base, _ = small(tmp_path, size=1e-6)
    half = {name: array.astype(np.float16) for name, array in base.items()}
    save_file(half, tmp_path / "half.safetensors")

    found = compare_checkpoints(
        f"{tmp_path / 'base.safetensors'}+{tmp_path / 'adapter'}", tmp_path / "half.safetensors"
    )

    (tensor,) = [tensor for tensor in found.tensors if tensor.name != "other.weight"]
    assert tensor.verdict in SAME
    assert tensor.notes[-1].endswith("is smaller than rounding to float16: not told whether it is in it")


@pytest.mark.parametrize(("ours", "theirs"), [("transformer.h.0.q", "h.0.q"), ("h.0.q", "model.h.0.q")])
def test_a_prefix_that_one_side_lacks_does_not_matter(tmp_path, ours, theirs):
    small(tmp_path / "of", name=ours)
    base, _ = small(tmp_path / "base", name=theirs)

    with opened(f"{tmp_path / 'base' / 'base.safetensors'}+{tmp_path / 'of' / 'adapter'}") as merged:
        assert list(merged.before) == [f"{theirs}.weight"]
        assert set(merged.tensors) == set(base)


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("model.layers.1.q_proj", {}, "changes model.layers.1.q_proj.weight, and is of some/base; "),
        ("q_proj", {"peft_type": "IA3"}, "is a IA3 adapter: only plain LoRA is merged here; merge it with PEFT"),
        ("q_proj", {"layer_replication": [[0, 1]]}, "is a LORA adapter with layer_replication: only plain LoRA"),
        ("model.layers.0.q_proj", {"alpha_pattern": {"(": 1}}, "adapter_config.json is damaged"),
        ("model.layers.0.q_proj", {"lora_alpha": "x"}, "adapter_config.json is damaged"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(tmp_path, name, config, said):
    small(tmp_path)
    factors = {
        f"base_model.model.{name}.lora_A.weight": noise(1, 2, 16),
        f"base_model.model.{name}.lora_B.weight": noise(2, 32, 2),
    }
    adapter = write_adapter(tmp_path / "odd", factors, **config)

    with (
        pytest.raises(CheckpointError, match=said.replace("(", r"\(")),
        opened(f"{tmp_path / 'base.safetensors'}+{adapter}"),
    ):
        pass


def test_factors_of_another_shape_than_the_weight_are_refused(tmp_path):
    small(tmp_path / "a", rows=32)
    small(tmp_path / "b", rows=24)

    with pytest.raises(
        CheckpointError, match=r"changes model.layers.0.q_proj.weight by \[24, 16\], the base has \[32, 16\]"
    ):
        compare_checkpoints(f"{tmp_path}/a/base.safetensors+{tmp_path}/b/adapter", tmp_path / "a" / "base.safetensors")


def test_an_adapter_beside_a_model_says_what_to_type(tmp_path, capsys):
    small(tmp_path)
    adapter, model = tmp_path / "adapter", tmp_path / "base.safetensors"

    for file in (adapter, adapter / "adapter_model.safetensors"):
        assert main(["checkpoint", "compare", str(model), str(file), "--exit-code"]) == 4

        said = capsys.readouterr().out.splitlines()[0]
        assert said.startswith(
            f"nothing to compare: {adapter} is a LoRA adapter, which changes a base model; give both"
        )
        assert said.endswith(f"trainermon checkpoint compare BASE+{adapter} {model}")


def test_a_file_with_an_adapter_that_is_not_merged_says_so(tmp_path):
    small(tmp_path)
    names = ("base_layer.weight", "lora_A.default.weight", "lora_B.default.weight")
    save_file({f"base_model.model.l.{name}": noise(1, 3) for name in names}, tmp_path / "both.safetensors")

    sides = (tmp_path / "both.safetensors", tmp_path / "base.safetensors")
    for pair in (sides, sides[::-1]):
        assert compare_checkpoints(*pair).headline.startswith(
            f"nothing to compare: {tmp_path / 'both.safetensors'} holds a base and a LoRA adapter that is not merged"
        )


def test_a_plus_in_the_name_of_a_file_is_no_adapter(tmp_path):
    save_file({"w": noise(1, 3)}, tmp_path / "a+b.safetensors")
    small(tmp_path / "x+y")

    assert compare_checkpoints(tmp_path / "a+b.safetensors", tmp_path / "a+b.safetensors").headline == "the same model"
    with opened(f"{tmp_path}/x+y/base.safetensors+{tmp_path}/x+y/adapter") as merged:
        assert len(merged.before) == 1
    with pytest.raises(CheckpointError, match=r"a cannot be opened|No such file"), opened(f"{tmp_path}/a+{tmp_path}/b"):
        pass


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_damaged_adapter_is_merged_or_refused(recorded, tmp_path, name):
    case = recorded / "patterns-float32"
    adapter = shutil.copytree(case / "adapter", tmp_path / "adapter")
    data, chance, refusals = (adapter / name).read_bytes(), random.Random(name), []
    for _ in range(150):
        (adapter / name).write_bytes(damaged(data, chance))
        try:
            compare_checkpoints(f"{case / 'base.safetensors'}+{adapter}", case / "merged.safetensors")
        except CheckpointError as error:
            refusals.append(str(error))

    assert len(refusals) > 15
    assert not any("\n" in text for text in refusals)


def test_what_was_merged_leaves_nothing_behind(tmp_path, monkeypatch):
    base, added = small(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    with opened(f"{tmp_path / 'base.safetensors'}+{tmp_path / 'adapter'}") as merged:
        (name,) = merged.before
        array = merged.tensors[name].pieces[0].stored.array()
        assert np.array_equal(array, (base[name].astype(np.float64) + added).astype(np.float32))
        del array

    assert list(temporary.iterdir()) == []
    assert open_checkpoint(tmp_path / "adapter").format == "lora"
    assert load_file(tmp_path / "base.safetensors").keys() == base.keys()
