"""Options and configuration that msprobe's checker has: what they choose, what they refuse, what they write."""

import json

import pytest
import torch

from tests.analysis.check.test_backward import FaultyBackward
from tests.analysis.check.test_check import dumped
from tests.recorded_dumps import recorded
from trainermon.analysis.check.checker_config import CheckerConfig, read_checker_config
from trainermon.analysis.check.repeats import repeated_calls
from trainermon.cli import main
from trainermon.core.errors import ConfigError


def written(tmp_path, document, name="config.json"):
    path = tmp_path / name
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def wrong_dump(tmp_path_factory):
    def one_off(numbers):
        numbers[3] += 1

    return dumped(tmp_path_factory.mktemp("dump"), alter=one_off)


def judged_by(capsys, dump, *options):
    assert main(["check", "run", str(dump), "--json", *map(str, options)]) == 0
    return [call["key"] for call in json.loads(capsys.readouterr().out)[0]["calls"]]


@pytest.mark.parametrize("block", ["acc_check", "run_ut"])
def test_lists_choose_by_the_name_of_the_operation(tmp_path, capsys, wrong_dump, block):
    lists = {"white_list": ["linear", "gelu"], "black_list": ["gelu"]}
    path = written(tmp_path, {"task": block, "step": [], block: {**lists, "error_data_path": str(tmp_path)}})

    assert judged_by(capsys, wrong_dump, "-config", path) == [
        "Functional.linear.0.forward",
        "Functional.linear.1.forward",
    ]


def test_the_yaml_file_has_five_keys(tmp_path):
    text = f"""
white_list: []
black_list: [conv2d, linalg.svd, npu_fusion_attention]
error_data_path: '{tmp_path}'
precision: 5
quantization_api_list: ["npu_dynamic_quant"]
"""
    config = read_checker_config(written(tmp_path, text, "config.yaml"))

    assert config == CheckerConfig(
        black_list=("conv2d", "linalg.svd", "npu_fusion_attention"),
        error_data_path=tmp_path,
        precision=5,
        quantization_api_list=("npu_dynamic_quant",),
    )
    assert not config.allows("Torch.linalg.svd.3.forward")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"acc_check": {"white_list": ["conv2"]}},
            "white_list: unknown operation 'conv2'; did you mean 'conv",
        ),
        ({"acc_check": {"white_lst": []}}, "unknown key 'white_lst'; did you mean 'white_list'?"),
        ({"acc_check": {"black_list": "relu"}}, "black_list: found 'relu', expected list"),
        ({"acc_check": {"black_list": [1]}}, "black_list: found 1, expected the name of an operation"),
        ({"acc_check": {"error_data_path": "/nowhere/at/all"}}, "there is no folder /nowhere/at/all"),
        ({"acc_check": {}, "run_ut": {"white_list": ["relu"]}}, "found the blocks acc_check and run_ut, which differ"),
        (
            {"run_ut": {"is_online": True, "port": 1}},
            "is_online: `trainermon check follow --config FILE` takes calls over a network",
        ),
        ({"precision": 21}, "precision: found 21, expected 0 to 20"),
        ({"precision": True}, "precision: found True, expected int"),
        ({"acc_check": []}, "expected keys such as white_list"),
        ("[]", "found list, expected keys and their values"),
        ("{", "cannot read"),
    ],
)
def test_what_is_wrong_in_it_is_said_in_a_line(tmp_path, document, message):
    with pytest.raises(ConfigError) as caught:
        read_checker_config(written(tmp_path, document))

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_with_blocks_of_other_tasks_only_means_the_defaults(tmp_path):
    path = written(tmp_path, {"task": "tensor", "tensor": {"scope": []}, "run_ut": {"is_online": False, "port": 9}})

    assert (
        read_checker_config(path) == read_checker_config(written(tmp_path, {"task": "x"}, "b.json")) == CheckerConfig()
    )


def test_decimals_are_those_of_the_configuration(tmp_path, wrong_dump):
    config, out = written(tmp_path, "precision: 3", "config.yaml"), tmp_path / "out"

    assert main(["check", "run", str(wrong_dump), "-o", str(out), "-config", str(config)]) == 0

    [details] = out.glob("accuracy_checking_details_*.csv")
    cells = details.read_text(encoding="utf-8-sig").splitlines()[1].split(",")
    assert "1.000" in cells


def test_wrong_calls_are_saved_with_what_they_took_and_gave(tmp_path, wrong_dump):
    config = written(tmp_path, {"acc_check": {"error_data_path": str(tmp_path)}})

    assert main(["check", "run", str(wrong_dump), "-config", str(config), "-save_error_data"]) == 0

    [folder] = tmp_path.glob("ut_error_data*")
    names = sorted(path.name for path in folder.glob("Functional.linear.0.*"))
    assert names == [f"Functional.linear.0.forward.input.{n}.pt" for n in range(3)] + [
        "Functional.linear.0.forward.output.bench.0.pt",
        "Functional.linear.0.forward.output.device.0.pt",
    ]
    x, weight, bias = (torch.load(folder / name, weights_only=True) for name in names[:3])
    bench, device = (torch.load(folder / name, weights_only=True) for name in names[3:])
    torch.testing.assert_close(bench, x.double() @ weight.double().T + bias.double())
    assert (device.double() - bench).abs().view(-1).argmax() == 3
    assert not list(folder.glob("*gelu*"))


def test_wrong_backwards_are_saved_with_the_gradients_of_both_sides(tmp_path):
    torch.manual_seed(0)
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(10, 8, requires_grad=True)

    def off_by_one(gradients, *_):
        gradients.view(-1)[3] += 1
        return gradients

    def step():
        loss = torch.nn.functional.linear(x.cos(), weight).square().sum() + weight.square().sum()
        with FaultyBackward(torch.ops.aten.mm, off_by_one):
            loss.backward()

    dump = recorded(tmp_path / "dump", step)
    folder = tmp_path / "saved"
    assert main(["check", "run", str(dump), "--save", str(folder)]) == 0

    found = {path.name.removeprefix("Functional.linear.0."): torch.load(path) for path in folder.rglob("*linear*")}
    assert sorted(found) == sorted(
        [f"forward.input.{n}.pt" for n in range(2)]
        + [f"forward.output.{side}.0.pt" for side in ("bench", "device")]
        + ["backward.input.0.pt"]
        + [f"backward.output.{side}.{n}.pt" for side in ("bench", "device") for n in range(2)]
    )
    given = 2 * (x.cos() @ weight.T)
    torch.testing.assert_close(found["backward.input.0.pt"], given.detach())
    wide = found["backward.input.0.pt"].double()
    shared = 2 * weight.double()  # the weight is squared, too: its gradient is a sum
    torch.testing.assert_close(found["backward.output.bench.0.pt"], wide @ weight.double())
    torch.testing.assert_close(found["backward.output.bench.1.pt"], wide.T @ x.cos().double() + shared)
    for number in range(2):
        off = found[f"backward.output.device.{number}.pt"] - found[f"backward.output.bench.{number}.pt"]
        assert (off.abs().flatten() > 0.5).nonzero().tolist() == [[3]]


def test_unique_keeps_the_first_call_of_arguments_of_the_same_kinds():
    def entry(shape, value, alpha=1):
        tensor = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": shape, "Max": value, "data_name": "x"}
        return {"input_args": [tensor], "input_kwargs": {"alpha": {"type": "int", "value": alpha}}}

    data = {
        "Torch.add.0.forward": entry([2], 1.0),
        "Torch.add.1.forward": entry([2], 5.0),
        "Torch.add.2.forward": entry([3], 1.0),
        "Torch.add.3.forward": entry([2], 1.0, alpha=2),
        "Torch.sub.0.forward": entry([2], 1.0),
        "Torch.add.1.backward": {"input": []},
    }

    assert repeated_calls(data) == {"Torch.add.1"}


def test_unique_is_understood_by_msprobes_name_too(capsys, wrong_dump):
    every = judged_by(capsys, wrong_dump)

    assert judged_by(capsys, wrong_dump, "--filter_api") == judged_by(capsys, wrong_dump, "--unique") == every


def test_formats_are_separated_by_commas_and_need_a_folder(wrong_dump, tmp_path, capsys):
    words = ["check", "run", str(wrong_dump), "-f", "csv,md"]

    assert main([*words, "-o", str(tmp_path)]) == 0
    assert {path.suffix for path in tmp_path.rglob("accuracy*")} == {".csv", ".md"}
    assert main(words) == 1
    assert "-f says what to write: expected -o DIR with it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "-f", "csv,pdf"])
    assert "found 'pdf', expected some of csv, json, html, md" in capsys.readouterr().err


def test_a_pattern_that_chooses_nothing_is_said(wrong_dump, capsys):
    assert main(["check", "run", str(wrong_dump), "--only", "linear"]) == 0
    assert "no call to judge: none was recorded, or none is chosen" in capsys.readouterr().out
