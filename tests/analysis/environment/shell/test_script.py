"""What only a shell can know is said to be unknown; scripts that mean harm are refused soon, and nothing is run."""

import pytest

from trainermon.analysis.environment.shell.script import read_script, read_text
from trainermon.analysis.environment.shell.words import ShellSyntaxError


def test_what_a_shell_would_have_to_run_is_named(tmp_path):
    proof = tmp_path / "proof"
    text = f'HOSTS=$(touch {proof}; echo 3)\nN=`touch {proof}`\nrun --nodes $HOSTS --n "$N" --lr 1\ntouch {proof}\n'

    reading = read_text(text, {})

    assert [command.unresolved for command in reading.commands] == [(f"$(touch {proof}; echo 3)", f"`touch {proof}`")]
    assert reading.commands[0].words[-2:] == ("--lr", "1")
    assert not proof.exists()


def test_both_ways_of_an_unknown_condition_are_read_and_what_they_set_is_unknown():
    reading = read_text("if [ -f conf ]; then LR=1; run a; else LR=2; run b; fi\nrun c $LR\n", {})

    assert [(command.words, command.is_certain) for command in reading.commands] == [
        (("run", "a"), False),
        (("run", "b"), False),
        (("run", "c", "${LR}"), True),
    ]
    assert reading.commands[2].unresolved == ("${LR}",)


def test_what_is_not_followed_is_said():
    assert read_text("source /opt/set_env.sh\nrun a\n", {}).notes == ("line 1: source /opt/set_env.sh: not followed",)


def test_exported_variables_reach_a_command_and_others_do_not():
    reading = read_text("export A=1\nB=2\nC=3 run x\n", {"OLD": "0"})

    assert reading.commands[0].variables == {"A": "1", "C": "3"}


@pytest.mark.parametrize(
    "text",
    [
        "run 'a",
        'run "a',
        "if true; then run a",
        "run ${A",
        "run $(a",
        "while true; do :; done",
        "f() { f; }; f",
        "run {1..1000}{1..1000}",
        "fi",
        "(" * 5000,
        "for i in {1..999}; do for j in {1..999}; do run; done; done",
        "V=xx; for i in {1..50}; do V=$V$V; done",
        "run )",
        "case a in",
        "A=(1 2",
    ],
)
def test_a_script_that_is_wrong_or_endless_is_refused(text, tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(text)

    with pytest.raises(ShellSyntaxError) as caught:
        read_script(path, {})

    assert "\n" not in str(caught.value)


def test_a_script_that_is_not_utf_8_is_refused(tmp_path):
    (tmp_path / "train.sh").write_bytes(b"run \xff")

    with pytest.raises(ShellSyntaxError, match="cannot be read"):
        read_script(tmp_path / "train.sh", {})
