"""No secret of Python code gets past, and code without any stays as it is."""

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainermon
from tests.core.environment.secret_kinds import LOOKS, NAMES, ORDINARY, WORDS, parts_of
from tests.strategies import fixed
from trainermon.core.environment.literals import masked_code
from trainermon.core.environment.secrets import REDACTED

FORMS = [
    '{plain} = "{word}"',
    "{plain}: str = '{word}'",
    "def f(x, *, {plain}='{word}'): pass",
    "self.{plain} = f'{word}'",
    "settings = {{'a': 1, '{name}': '{word}'}}",
    "settings['{name}'] = '{word}'",
    "os.environ.setdefault('{name}', '{word}')",
    "login(user='anne', {plain}='{word}')",
    "words = ['--{name}', '{word}']",
    "header = f'{name}: {word} {{x}}'",
    "# {name}: {word}",
    "raise ValueError('{name}={word}')",
]
PLACES = [
    "API_TOKEN = '{}'",
    'password: str = "{}"',
    "self.api_key = r'{}'",
    'os.environ["HF_TOKEN"] = "{}"',
    'os.environ.setdefault("WANDB_API_KEY", "{}")',
    'x = os.getenv("DB_PASSWORD", "{}")',
    'login(user="me", token="{}")',
    'config = {{"secret": "{}", "mode": "max"}}',
    '["--hub-token", "{}"]',
    'command = "train --lr 1 DBPASS={}"',
    "curl = \"-H 'X-Api-Key: {}'\"",
    'if password == "{}": pass',
    'token = ("{}"\n    "rest")',
    'secret = f"""{}\n{{x}}"""',
    'set_password("{}")',
    'parser.add_argument("--token", type=str, default="{}")',
    "# password = {}",
    "def f(x, token='{}'): pass",
    "user, password = 'anne', '{}'",
    "password, user = '{}', 'anne'",
    "login(args.password or '{}')",
    "secret = args.secret if args.secret else '{}'",
    "if '{}' == args.password: pass",
    "raise ValueError('wrong password {}')",
]
HARMLESS = [
    'state = {key.replace("module.", ""): value for key, value in state.items()}',
    "y = F.scaled_dot_product_attention(query, key, value, mask='causal')",
    'raise KeyError("missing")',
    'tokenizer.pad_token = "<|endoftext|>"',
    'token = os.environ["HF_TOKEN"]',
    'token = path.read_text(encoding="utf-8", errors="replace")',
    'token = os.environ.get("HF_TOKEN")',
    'def forward(self, key: Tensor, token_ids, mode="max"): return "it"',
    '"""Args:\n    key: of shape (B, T)\n    token: the one that follows\n"""',
    "print(f'token={token}')",
    "password = getpass('Password: ')",
    "password = getpass.getpass('of anne') or input('once more')",
    "secret = vault.get_secret('prod/db')",
]


@settings(max_examples=200, deadline=None)
@given(secret=st.from_regex(r"[a-z]{5,12}[A-Z]?", fullmatch=True), place=st.sampled_from(PLACES))
def test_a_secret_is_masked_wherever_it_stands(secret, place):
    code = place.format(f"x{secret}q")

    masked = masked_code(code)

    assert f"x{secret}q" not in masked
    assert REDACTED in masked
    assert masked.count("\n") == code.count("\n")
    assert masked_code(masked) == masked


@fixed
@given(name=NAMES, word=WORDS, form=st.sampled_from(FORMS))
def test_a_plain_word_is_masked_by_its_name_in_code_of_every_kind(name, word, form):
    plain = re.sub(r"\W", "_", name)

    assert word not in masked_code(form.format(name=name, plain=plain, word=word))


@fixed
@given(secret=LOOKS, form=st.sampled_from(['x = "{}"', "def f(x={!r}): pass", "f({!r}, 1)", "x = f'{} {{y}}'", "# {}"]))
def test_a_secret_of_a_known_look_is_masked_without_a_name(secret, form):
    code = form.format(secret.replace("\n", "\\n"))

    assert not [part for part in parts_of(secret) if part in masked_code(code)]


@pytest.mark.parametrize("code", [*HARMLESS, *ORDINARY])
def test_what_is_no_secret_stays(code):
    assert masked_code(code) == code


def test_a_key_over_several_lines_keeps_their_number():
    code = 'K = """-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----"""\nf()\n'

    assert masked_code(code) == f'K = """{REDACTED}\n\n"""\nf()\n'


def test_masked_code_is_still_python_and_little_of_it_is_lost():
    files = sorted(Path(trainermon.__file__).parent.rglob("*.py"))[::25]
    for file in files:
        code = file.read_text()
        masked = masked_code(code)
        ast.parse(masked)
        changed = [pair for pair in zip(code.split("\n"), masked.split("\n"), strict=True) if pair[0] != pair[1]]
        assert len(changed) <= 0.01 * code.count("\n") + 2, (file, changed)


@settings(max_examples=150, deadline=None)
@given(text=st.text("abk'\"\\\n()[]{},=:#<>key token", max_size=60))
def test_any_text_is_taken_and_keeps_its_lines(text):
    assert masked_code(text).count("\n") == text.count("\n")
