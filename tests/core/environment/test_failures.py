"""The traceback of a script that failed is what Python prints, without the secrets of its text, variables and words."""

import traceback

import pytest
from hypothesis import given

from tests.core.environment.secret_kinds import LOOKS, WORDS, parts_of
from tests.strategies import fixed
from trainermon.core.environment.code import failure_text


def told(function, *, words=(), environ=None):
    """Return what is told of the error of a function, and what Python prints of it."""
    try:
        function()
    except (ValueError, KeyError, OSError, RuntimeError, NameError) as error:
        return failure_text(error, words, environ or {}), "".join(traceback.format_exception(error))
    raise AssertionError("it did not fail")


def test_a_traceback_without_secrets_is_what_python_prints():
    def fail():
        state = {"key": "optimizer"}
        key = "layer1_weight"
        return state[key]

    text, printed = told(fail)

    assert text == printed
    assert "KeyError: 'layer1_weight'" in text


@fixed
@given(word=WORDS)
def test_what_variables_arguments_and_environment_call_a_secret_is_not_in_the_message(word):
    def refuse(given):
        raise PermissionError(f"the server refused {given}")

    def by_variable():
        api_key = word
        refuse(api_key)

    def by_cause():
        try:
            by_variable()
        except PermissionError as error:
            raise RuntimeError("no login") from error

    for text, _ in (
        told(by_variable),
        told(by_cause),
        told(lambda: refuse(word), words=["--password", word]),
        told(lambda: refuse(word), environ={"DB_PASSWORD": word}),
    ):
        assert word not in text
        assert "PermissionError: the server refused <redacted>" in text


@fixed
@given(secret=LOOKS)
def test_what_looks_like_a_secret_is_not_in_the_message(secret):
    def fail():
        raise ValueError(f"cannot use '{secret}' here")

    text, printed = told(fail)

    assert not [part for part in parts_of(secret) if part in text]
    assert [part for part in parts_of(secret) if part in printed]


@pytest.mark.parametrize(
    "line", ["login(user='anne', password='kumquatx')", "DB.connect('postgres://me:kumquatx@db/x')"]
)
def test_a_literal_in_the_line_that_failed_is_not_told(line, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"\n{line}\n")

    text, printed = told(lambda: exec(compile(script.read_text(), script, "exec"), {}))

    assert "kumquatx" in printed
    assert "kumquatx" not in text
    assert "line 2, in <module>" in text
