"""What differs is found and weighed; each fault of the other tool has its test."""

import json
import zipfile

import pytest

from trainermon import cli
from trainermon.analysis.environment.compare import compare_packs
from trainermon.analysis.environment.differences import DifferenceLevel
from trainermon.analysis.environment.files import read_configuration
from trainermon.analysis.environment.launchers import options_of
from trainermon.analysis.environment.rules import LevelRule, LevelRules, read_rules
from trainermon.analysis.environment.settings import same_value
from trainermon.core.environment.pack import EnvironmentPack, write_pack
from trainermon.core.errors import ConfigError

ERROR, WARNING, INFO, SAME = DifferenceLevel


def compared(section, one, other, rules=()):
    first, second = (EnvironmentPack(sections={section: side}) for side in (one, other))
    return {row.names: (row.level, row.values) for row in compare_packs(first, second, LevelRules(rules)).rows}


@pytest.mark.parametrize(
    ("one", "other"),
    [(9007199254740993, 9007199254740992), ("9007199254740993", "9007199254740992"), (10**80 + 1, 10**80)],
)
def test_numbers_are_never_cut(one, other, tmp_path, capsys):
    for name, seed in (("a", one), ("b", other)):
        write_pack(tmp_path / f"{name}.zip", EnvironmentPack(sections={"hyperparameters": {"seed": seed}}))

    cli.main(["env", "compare", str(tmp_path / "a.zip"), str(tmp_path / "b.zip")])

    assert f"{one}  →  {other}" in capsys.readouterr().out


def test_the_screen_says_what_code_differs_by_the_first_digits_of_its_hashes(tmp_path, capsys):
    one = {"file.train.sh": "0123456789ab" + "c" * 52, "git.commit": "a" * 40, "git.dirty": True}
    other = {"file.train.sh": "ba9876543210" + "d" * 52, "git.commit": "b" * 40, "git.dirty": False}
    for name, code in (("a", one), ("b", other)):
        write_pack(tmp_path / f"{name}.zip", EnvironmentPack(sections={"code": code}))

    assert cli.main(["env", "compare", str(tmp_path / "a.zip"), str(tmp_path / "b.zip")]) == 0
    screen = capsys.readouterr().out
    assert "file.train.sh: 0123456789ab  →  ba9876543210  (train.sh has other content)" in screen
    assert f"git.commit: {'a' * 12}  →  {'b' * 12}  (another commit)" in screen
    assert "git.dirty: true  →  false\n" in screen

    assert cli.main(["env", "show", str(tmp_path / "a.zip"), "code"]) == 0
    assert one["file.train.sh"] in capsys.readouterr().out


def test_hyperparameters_that_lightning_wrote_are_read_and_nothing_in_them_is_run(tmp_path):
    """The text is that of lightning 2.6's `save_hparams_to_yaml`, but for the last line."""
    path = tmp_path / "hparams.yaml"
    path.write_text(
        "betas: !!python/tuple\n- 0.9\n- 0.95\nlr: 0.0001\nns: !!python/object:argparse.Namespace\n  a: 1\n"
        "path: !!python/object/apply:pathlib.PosixPath\n- /\n- data\n"
        f"bad: !!python/object/apply:os.mkdir [{tmp_path}/made]\n"
    )

    found = read_configuration(path)

    assert found == {
        "betas": [0.9, 0.95],
        "lr": 0.0001,
        "ns.a": 1,
        "path": ["/", "data"],
        "bad": [f"{tmp_path}/made"],
    }
    assert not (tmp_path / "made").exists()


def test_the_side_that_set_a_variable_is_shown_as_that_side():
    """Msprobe swaps the two in its sheet env."""
    found = compared("variables", {"NCCL_ALGO": "Ring"}, {})

    assert found == {("NCCL_ALGO", None): (ERROR, ("Ring", None))}


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ERROR),
        ("OMP_NUM_THREADS", ERROR),
        ("NCCL_P2P_DISABLE", INFO),
        ("MASTER_PORT", INFO),
        ("SOMETHING", WARNING),
    ],
)
def test_every_variable_is_compared(name, level):
    """Msprobe compares six; these pass there."""
    assert compared("variables", {name: "1"}, {name: "2"}) == {(name, name): (level, ("1", "2"))}


def test_the_variable_of_pcie_is_read():
    """Msprobe reads that of ROCE in its place."""
    found = compared("variables", {"HCCL_INTRA_PCIE_ENABLE": "0"}, {"HCCL_INTRA_PCIE_ENABLE": "1"})

    assert found[("HCCL_INTRA_PCIE_ENABLE", "HCCL_INTRA_PCIE_ENABLE")][0] is not SAME


def test_an_unset_variable_equals_its_default():
    assert compared("variables", {"CUDA_LAUNCH_BLOCKING": "0"}, {}) == {
        ("CUDA_LAUNCH_BLOCKING", None): (SAME, ("0", None))
    }


def test_variables_of_ascend_are_paired_with_those_of_other_accelerators():
    found = compared("variables", {"NCCL_DETERMINISTIC": "true"}, {"HCCL_DETERMINISTIC": "false"})

    assert found == {("NCCL_DETERMINISTIC", "HCCL_DETERMINISTIC"): (ERROR, ("true", "false"))}


def test_every_package_is_compared():
    """Msprobe compares eight."""
    found = compared(
        "packages",
        {"flash_attn": {"version": "2.5"}, "six": {"version": "1.0"}, "torch": {"version": "2.4.0"}},
        {"flash-attn": {"version": "2.6"}, "six": {"version": "1.1"}, "torch": {"version": "2.4"}},
    )

    assert {names[0]: level for names, (level, _) in found.items()} == {"flash-attn": ERROR, "six": INFO, "torch": SAME}


def test_hyperparameters_are_paired_by_their_whole_name():
    """Msprobe cuts `optim.lr` and `other.lr` to one name, and compares one with the other."""
    found = compared("hyperparameters", {"optim.lr": 1e-4, "other.lr": 1}, {"optim.lr": "0.0001", "other.lr": 2})

    assert found == {
        ("optim.lr", "optim.lr"): (SAME, (1e-4, "0.0001")),
        ("other.lr", "other.lr"): (ERROR, (1, 2)),
    }


def test_a_hyperparameter_is_paired_by_its_alias_and_never_by_a_near_name():
    first, second = (
        EnvironmentPack(sections={"hyperparameters": side})
        for side in (
            {"lr": 1, "num_layers": 2, "hidden-size": 8},
            {"learning_rate": 1, "num_layer": 2, "hidden_size": 8},
        )
    )

    rows = compare_packs(first, second, LevelRules()).rows

    assert {(row.names, row.level, row.matched_with) for row in rows} == {
        (("lr", "learning_rate"), SAME, "mapping"),
        (("hidden-size", "hidden_size"), SAME, "pure name"),
        (("num_layers", None), WARNING, ""),
        ((None, "num_layer"), WARNING, ""),
    }
    assert {row.reason for row in rows if row.names == ("num_layers", None)} == {
        "only the first has it; there is num_layer there"
    }


def rows_of(*lines):
    first, second = (EnvironmentPack(sections={"hyperparameters": options_of(line.split())}) for line in lines)
    return [(row.names, row.level) for row in compare_packs(first, second, LevelRules()).rows if row.level is not SAME]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ("--bf16", "", ("bf16", None)),
        ("--bf16", "--no-bf16", ("bf16", "bf16")),
        ("--bf16", "--no_bf16", ("bf16", "bf16")),
        ("--bf16", "--fp16", ("bf16", "fp16")),
        ("--half", "--bfloat16", ("half", "bfloat16")),
        ("--no-bf16", "", ("no-bf16", None)),
        ("--use-flash-attn", "--no-use-flash-attn", ("use-flash-attn", "use-flash-attn")),
        ("--bf16 True", "--no-bf16", ("bf16", "bf16")),
    ],
)
def test_a_flag_that_differs_is_one_difference_and_an_error(one, other, names, turned):
    common = " --lr 1 --x"

    found = rows_of(*(side + common for side in ((other, one) if turned else (one, other))))

    assert found == [(names[::-1] if turned else names, ERROR)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("--bf16", "--bfloat16"),
        ("--no-x", "--no_x"),
        ("--x --no-x", "--no-x"),
        ("--x", "--no-x --x"),
        ("--x False", "--no-x"),
    ],
)
def test_flags_that_mean_the_same_are_no_difference(one, other):
    assert rows_of(one, other) == []


def test_a_name_that_begins_with_no_and_has_a_value_is_no_flag():
    assert rows_of("--no_repeat_ngram_size 3 --repeat_ngram_size 2", "--no_repeat_ngram_size 3") == [
        (("repeat_ngram_size", None), WARNING)
    ]


def test_a_section_on_one_side_only_is_an_error():
    """Msprobe leaves it out."""
    one = EnvironmentPack(sections={"system": {}, "hyperparameters": {"lr": 1}})
    comparison = compare_packs(one, EnvironmentPack(sections={"system": {}}), LevelRules())

    assert comparison.sections["hyperparameters"] is ERROR
    assert [row.reason for row in comparison.rows] == ["not collected there"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1e-4", 0.0001, True),
        ("true", "True", True),
        (True, 1, True),
        (True, "1", True),
        (False, "true", False),
        ("1", "2", False),
        (None, "None", True),
        (None, "", False),
        ([1, "2"], ["1", 2.0], True),
        ([1], [1, 2], False),
        ("a", "A", False),
        ("nan", float("nan"), True),
        (2**53, 2**53 + 1, False),
        (str(2**53), str(2**53 + 1), False),
        ("1_0", "10", False),
    ],
)
def test_values_are_compared_as_what_they_mean(one, other, same):
    assert same_value(one, other) is same
    assert same_value(other, one) is same


def test_rules_of_a_file_come_first(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text("- {section: variables, name: 'NCCL_*', level: ignore}\n- {name: lr, level: info}\n")

    rules = read_rules(path)

    assert rules == (LevelRule("variables", "NCCL_*", SAME), LevelRule("*", "lr", INFO))
    assert compared("variables", {"NCCL_ALGO": "a"}, {"NCCL_ALGO": "b"}, rules)[("NCCL_ALGO", "NCCL_ALGO")][0] is SAME


@pytest.mark.parametrize("text", ["{}", "- {level: bad}", "- 3", "- {level: info, colour: x}", "- ["])
def test_wrong_rules_are_refused(text, tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"rules\.yaml"):
        read_rules(path)


@pytest.mark.parametrize(
    ("other", "status"), [({"NCCL_ALGO": "x"}, 3), ({"UNKNOWN_ONE": "x"}, 4), ({"NCCL_BUFFSIZE": "1"}, 0)]
)
def test_the_exit_status_tells(other, status, tmp_path, capsys):
    """Msprobe ends with 0 whatever it has found."""
    write_pack(tmp_path / "a.zip", EnvironmentPack(sections={"variables": {}}))
    write_pack(tmp_path / "b.zip", EnvironmentPack(sections={"variables": other}))
    words = ["env", "compare", str(tmp_path / "a.zip"), str(tmp_path / "b.zip")]

    assert cli.main([*words, "--exit-code"]) == status
    assert cli.main(words) == 0
    assert capsys.readouterr().out.startswith("env: ")


def test_collecting_and_showing_leaves_no_secret(tmp_path, monkeypatch, capsys):
    """Msprobe writes tokens in clear."""
    monkeypatch.setenv("MY_API_TOKEN", "plain-secret-of-mine")
    monkeypatch.setenv("A_COPY", "x plain-secret-of-mine y")
    (tmp_path / "conf.yaml").write_text("hub:\n  token: other-secret-of-mine\noptim:\n  lr: 1e-4\n")
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": {"params": {"lr": 0.1}}, "train_batch_size": 8}))
    (tmp_path / "x.toml").write_text("[model]\nlayers = 3\n")
    monkeypatch.chdir(tmp_path)

    assert cli.main(["env", "collect", "conf.yaml", "ds.json", "x.toml", "-o", "p.zip"]) == 0
    assert cli.main(["env", "show", "p.zip", "variables"]) == 0
    assert cli.main(["env", "show", "p.zip", "hyperparameters"]) == 0
    shown = capsys.readouterr().out
    assert cli.main(["env", "show", "p.zip", "hyperparameters", "--json"]) == 0
    section = json.loads(plain := capsys.readouterr().out)["hyperparameters"]
    assert cli.main(["env", "show", "p.zip", "--json"]) == 0
    whole = json.loads(both := capsys.readouterr().out)
    assert (section["optimizer.params.lr"], whole["sections"]["hyperparameters"]) == (0.1, section)
    shown += plain + both

    assert "optimizer.params.lr: 0.1" in shown
    assert "model.layers: 3" in shown
    with zipfile.ZipFile("p.zip") as archive:
        everything = b"".join(archive.read(name) for name in archive.namelist())
    for secret in (b"plain-secret-of-mine", b"other-secret-of-mine"):
        assert secret not in everything
        assert secret.decode() not in shown
