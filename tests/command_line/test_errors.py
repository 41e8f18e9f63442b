"""What cannot be done is said in one line that names the file or the option, whatever the command."""

import pytest

from trainermon.cli import main

LINES = """
query missing
diagnose missing
diagnose missing --against missing
replay missing --model a:b
compare missing missing
compare damaged damaged
compare -i missing.json
compare damaged damaged --match missing.yaml
compare damaged damaged --target-split wrong
graph missing
graph damaged
source missing
check run missing
check run damaged
check ops --device nothing
check against missing.csv missing.csv
check calibrate missing -o b.json
check overflow missing
check follow missing --once
script missing key
env collect missing.sh -o x.zip
env compare missing missing
env show missing
gradients compare missing missing
gradients compare missing missing --format wrong
tensor show missing
tensor show garbage.npy
tensor diff garbage.npy garbage.npy
tensor convert garbage.npy out.pt
checkpoint show missing
checkpoint verify garbage.npy
checkpoint compare missing missing
anomalies missing
rules list missing.yaml
rules check garbage.yaml
rules test missing.yaml run
rules prometheus missing.yaml
dashboards write garbage.npy/below
dashboards push http://127.0.0.1:1 --token-file missing
export missing
convert csv2tensorboard missing
convert csv2db missing --db out
agent missing
controller --config missing.yaml
"""
NAMED = ("missing", "damaged", "garbage", "nothing", "wrong")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("errors")
    (folder / "garbage.npy").write_text("garbage")
    (folder / "garbage.yaml").write_text(": : :")
    (folder / "damaged").mkdir()
    (folder / "damaged/dump.json").write_text("not json")
    return folder


@pytest.mark.parametrize("line", LINES.strip().splitlines())
def test_an_error_is_one_line_that_names_what_is_wrong(line, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)

    status = main(line.split())

    said = capsys.readouterr()
    assert status == 1
    assert said.out == ""
    assert said.err.startswith(f"trainermon {line.split()[0]}: ")
    assert said.err.count("\n") == 1
    assert any(name in said.err for name in NAMED)
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("query run --formt csv", "unrecognized arguments: --formt csv; did you mean --format?"),
        ("rl show run --xyzzy", "unrecognized arguments: --xyzzy\n"),
    ],
)
def test_an_unknown_option_shows_the_usage_of_its_command(line, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(line.split())

    err = capsys.readouterr().err
    assert err.startswith(f"usage: trainermon {line.partition(' run')[0]} ")
    assert said in err


def refused(line, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("typed", "meant"), [("diagnos", "diagnose"), ("checkpiont", "checkpoint"), ("quary", "query")]
)
def test_a_command_that_is_misspelt_is_answered_with_the_nearest(typed, meant, capsys):
    assert refused(typed, capsys) == f"trainermon: error: found no command {typed!r}; did you mean {meant}?"


def test_a_command_that_is_like_none_is_answered_with_where_they_are_listed(capsys):
    assert refused("zzz", capsys) == "trainermon: error: found no command 'zzz'; `trainermon --help` lists them"


@pytest.mark.parametrize("command", ["serve", "controller", "node"])
@pytest.mark.parametrize("port", ["99999", "-1", "65536", "x", "1.5"])
def test_a_port_that_is_none_is_refused_before_anything_listens(command, port, capsys):
    said = refused(f"{command} --port={port}", capsys)

    assert f"argument --port: found {port!r}, expected a port from 0 to 65535" in said


def test_a_controller_that_knows_no_agents_says_which_options_name_them(capsys):
    assert main(["controller"]) == 1

    assert "give --agents, --dns, --run-directory or --kubernetes" in capsys.readouterr().err
