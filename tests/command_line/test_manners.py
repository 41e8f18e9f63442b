"""What every command does alike, seen in a real terminal: bars, Ctrl-C, colour, quiet."""

import io
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.terminal_programs import CTRL_C, in_terminal
from trainermon.cli import COMMANDS, build_parser, leaves, main
from trainermon.core.terminal import manners
from trainermon.core.terminal.progress import ProgressBar, counted, stage
from trainermon.core.terminal.results import write_text, writing

DUMPS = Path(__file__).parents[1] / "analysis/compare/recorded"
COMPARE = ("compare", "faulty", "sound")
CAUSE = "The first difference arose in Module.layers.1.Block.forward.0"


@pytest.fixture
def dumps(tmp_path):
    """Two dumps, of which one cannot be read to its end before the test has given it."""
    for name in ("faulty", "sound"):
        shutil.copytree(DUMPS / name, tmp_path / name)
    [held] = (tmp_path / "faulty").rglob("construct.json")
    held.rename(held.with_suffix(".whole"))
    os.mkfifo(held)
    return tmp_path


def give(dumps):
    [whole] = dumps.rglob("construct.whole")
    whole.with_suffix(".json").write_bytes(whole.read_bytes())


def test_a_bar_is_shown_while_a_command_works_and_is_gone_at_the_end(dumps):
    with in_terminal(COMPARE, dumps) as program:
        program.read_until("reading dumps … 00:01".encode())
        give(dumps)
        status = program.end()

    assert status == 0
    assert program.screen()[0].startswith(CAUSE)
    assert "reading dumps" not in "\n".join(program.screen())


@pytest.mark.parametrize("more", [("--quiet",), ("-q",)])
def test_with_quiet_nothing_but_the_result_is_shown(dumps, more):
    with in_terminal((*COMPARE, *more), dumps, redirected=dumps / "out") as program:
        give(dumps)
        assert program.end() == 0

    assert program.shown == b""
    assert (dumps / "out").read_text().startswith(CAUSE)


def test_ctrl_c_ends_a_command_with_one_line_and_leaves_no_file(dumps):
    with in_terminal((*COMPARE, "-o", "results"), dumps) as program:
        program.read_until(b"reading dumps")
        program.type(CTRL_C)
        status = program.end()

    assert status == 130
    assert program.screen() == ["trainermon compare: interrupted"]
    assert not (dumps / "results").exists()


def test_ctrl_c_ends_the_processes_of_a_command_too(tmp_path):
    for side in ("faulty", "sound"):
        for rank in (0, 1):
            shutil.copytree(DUMPS / side / "step0/rank0", tmp_path / side / f"step0/rank{rank}")
    held = tmp_path / "faulty/step0/rank1/construct.json"
    held.unlink()
    os.mkfifo(held)

    with in_terminal((*COMPARE, "-o", "results"), tmp_path) as program:
        program.read_until(b"1 of 2 dumps")
        program.type(CTRL_C)
        status = program.end()

    assert status == 130
    assert program.screen() == ["trainermon compare: interrupted"]


def test_a_query_is_interrupted_as_any_other_command():
    endless = "SELECT count(*) FROM range(1000000000000) a(i) WHERE hash(i) = 1"
    run = Path(__file__).parents[1] / "recorded/run"

    with in_terminal(("query", str(run), endless), DUMPS) as program:
        program.read_until("asking … 00:0".encode())
        program.type(CTRL_C)
        status = program.end()

    assert (status, program.screen()) == (130, ["trainermon query: interrupted"])


BOLD = b"\x1b[1m"


@pytest.mark.parametrize(
    ("words", "variables", "is_coloured"),
    [
        ((), {}, True),
        ((), {"NO_COLOR": "1"}, False),
        ((), {"NO_COLOR": ""}, True),
        ((), {"TERM": "dumb"}, False),
        (("--color", "never"), {}, False),
        (("--color=always",), {"NO_COLOR": "1"}, True),
    ],
)
def test_colour_is_as_the_terminal_the_environment_and_the_option_say(words, variables, is_coloured):
    with in_terminal((*COMPARE, *words), DUMPS, **variables) as program:
        assert program.end() == 0

    assert (BOLD in program.shown) == is_coloured


@pytest.mark.parametrize(("variables", "is_coloured"), [({}, False), ({"FORCE_COLOR": "1"}, True)])
def test_a_file_has_no_colour_unless_it_is_asked_for(variables, is_coloured, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    assert manners.has_colour(io.StringIO(), variables) == is_coloured


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("alerts RUN", ("auto", False, False)),
        ("--color never -q alerts RUN", ("never", True, False)),
        ("alerts RUN --color never -q", ("never", True, False)),
        ("--color never -v alerts --color always RUN", ("always", False, True)),
        ("--quiet run -- python train.py", ("auto", True, False)),
        ("run --quiet -- python train.py", ("auto", True, False)),
        ("run -- python train.py --quiet", ("auto", False, False)),
    ],
)
def test_options_before_the_command_count_like_those_after_it(words, expected):
    given = build_parser(("alerts", "run")).parse_args(words.split())
    assert (given.color, given.quiet, given.verbose) == expected


def test_every_command_takes_the_same_three_options():
    for leaf in leaves(build_parser(COMMANDS)):
        assert {"--color", "--quiet", "--verbose"} <= leaf._option_string_actions.keys(), leaf.prog


def test_verbose_says_where_an_error_was_raised(capsys):
    assert main(["compare", "missing", "missing", "--verbose"]) == 1

    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith("trainermon compare: ")


def test_a_file_that_cannot_be_read_is_named(tmp_path, capsys):
    missing = tmp_path / "missing.yaml"

    assert main(["rules", "check", str(missing)]) == 1

    assert str(missing) in capsys.readouterr().err


def test_without_an_open_bar_telling_does_nothing_and_no_thread_is_left():
    stage("working")
    threads = threading.active_count()

    with ProgressBar("working") as bar:
        bar(1, 2, "files")
        assert list(counted("ab", 2, "letters")) == ["a", "b"]

    assert threading.active_count() == threads


def interrupt_while_writing(path):
    with writing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt


def test_a_result_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "result.csv"
    path.write_text("before")
    path.chmod(0o640)

    with pytest.raises(KeyboardInterrupt):
        interrupt_while_writing(path)

    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("result.csv", "before")]
    write_text(path, "after")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("after", 0o640)


def test_a_link_and_what_is_no_file_are_written_through(tmp_path):
    (tmp_path / "target").write_text("before")
    link = tmp_path / "link"
    link.symlink_to("target")

    write_text(link, "after")
    write_text(Path("/dev/null"), "lost")

    assert link.is_symlink()
    assert (tmp_path / "target").read_text() == "after"
    assert Path("/dev/null").is_char_device()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing/result\.csv"):
        write_text(tmp_path / "missing/result.csv", "")


BASH = shutil.which("bash")
OFFERED = 'printf "%s\\n" "${COMPREPLY[@]}"'


def completions(*words):
    """Return what bash offers for the last of `words`, where the program cannot be started."""
    program = [sys.executable, "-m", "trainermon", "completion", "bash"]
    script = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    typed = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _shtab_trainermon; {OFFERED}"
    shell = [BASH, "--norc", "-c", f"{script}\n{ask}"]
    return set(subprocess.run(shell, capture_output=True, text=True, env={"PATH": "/nowhere"}).stdout.split())


def test_bash_completes_commands_options_and_choices_without_the_program():
    assert COMMANDS.keys() <= completions("trainermon", "")
    assert {"--exit-code", "--quiet", "--color"} <= completions("trainermon", "compare", "--")
    assert completions("trainermon", "completion", "") >= {"bash", "zsh", "tcsh"}


@pytest.mark.parametrize("shell", ["zsh", "tcsh", "fish"])
def test_other_shells_get_a_script_that_names_every_command(shell, capsys):
    assert main(["completion", shell]) == 0

    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)


def test_json_is_printed_without_anything_beside_it(capsys):
    assert main(["compare", str(DUMPS / "faulty"), str(DUMPS / "sound"), "--json"]) == 0

    printed = capsys.readouterr()
    assert json.loads(printed.out)
    assert printed.err == ""
