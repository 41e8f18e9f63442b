"""No secret gets past, and what is none stays readable."""

import string

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.core.environment.secret_kinds import LOOKS, ORDINARY, TEXTS_AROUND, WORDS, parts_of
from tests.core.environment.secret_kinds import NAMES as NAMES_OF_SECRETS
from tests.strategies import fixed
from trainermon.core.environment.secrets import REDACTED, Redactor, bits_per_letter, is_secret_name

NAMES = [
    "HF_TOKEN",
    "MY_API_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "DB_PASSWORD",
    "MYSQL_PWD",
    "apiKey",
    "accessToken",
    "http.auth",
    "GOOGLE_CREDENTIALS",
    "COOKIE",
    "SESSION_ID_X",
    "SSH_PRIVATE_FILE",
    "SENTRY_DSN",
    "SLACK_WEBHOOK",
    "SIGN",
    "LICENSE",
    "optimizer.secret",
    "SSHPASS",
    "DBPASS",
    "DBPASSWORD",
    "ROOTPW",
    "userpwd",
    "dbPass",
    "pw",
    "pat",
    "MYSECRETVALUE",
    "REDISAUTH",
    "OAUTH_VALUE",
]
HARMLESS = [
    ("PATH", "/usr/local/sbin:/usr/local/bin:/opt/Some-Long_Name12/bin"),
    ("PWD", "/srv/some/where"),
    ("TOKENIZERS_PARALLELISM", "false"),
    ("num_tokens", "4096"),
    ("pad_token_id", "50256"),
    ("model", "Qwen2ForSequenceClassification"),
    ("name", "qwen2.5-7b-instruct-finetune-2024-11-02"),
    ("kernel", "layernorm_column_parallel_linear"),
    ("commit", "cf30153c4c131c8164ee7798e5022d810682e2cb"),
    ("url", "https://example.com/data/Some_Long_File-name.v2.parquet"),
    ("backend", "cpython-311-x86_64-linux-gnu"),
    ("keyboard", "us"),
    ("AUTHOR", "somebody"),
    ("signal", "SIGTERM"),
    ("auth-type", "none"),
    ("auth_method", "kerberos"),
    ("pass-through", "3"),
    ("password_length", "12"),
    ("compass", "north"),
    ("bypass", "yes"),
    ("pattern", "*.txt"),
    ("path", "/data/some"),
    ("eos_token", "<|endoftext|>"),
    ("note", "key: of shape (B, T); line 3: unresolved"),
    ("step", "a=1,token={token}"),
]
SECRETS = st.text(string.ascii_letters + string.digits, min_size=24, max_size=40).filter(
    lambda text: bits_per_letter(text) > 4.2 and any(letter.isdigit() for letter in text)
)
FORMS = [
    '{{"{name}": "{word}"}}',
    "{{'{name}': '{word}'}}",
    "{name}={word}",
    "{name}: {word}\nother: 1",
    "a: 1\n  {name}: {word}",
    "train --{name} {word} --lr 1",
    "train --{name}={word}",
    "https://example.com/?a=1&{name}={word}",
    "ValueError: bad settings {{'{name}': '{word}', 'lr': 1}}",
    "Net({name}='{word}', size=3)",
    "note = '{name}={word}'",
]
PLACES = [
    "postgres://me:{}@host/db",
    "https://{}@example.com/repository.git",
    "Authorization: Bearer {}",
    "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
    "https://example.com/?token={}&page=1",
    "hf_{}",
    "ghp_{}",
    "words before {} and behind",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_value_with_a_secret_name_is_taken_out(name):
    assert Redactor().value(name, "hello-123") == REDACTED


@pytest.mark.parametrize(("name", "value"), HARMLESS)
def test_what_is_no_secret_stays(name, value):
    assert Redactor().value(name, value) == value


@settings(max_examples=150, deadline=None)
@given(secret=SECRETS, place=st.sampled_from(PLACES))
def test_a_planted_secret_is_found_by_its_look(secret, place):
    assert secret not in Redactor().text(place.format(secret))


@fixed
@given(secret=LOOKS, around=st.sampled_from(TEXTS_AROUND))
def test_a_secret_of_a_known_look_is_found_without_a_name(secret, around):
    cleaned = Redactor().text(around.format(secret))

    assert not [part for part in parts_of(secret) if part in cleaned]


@fixed
@given(name=NAMES_OF_SECRETS, word=WORDS, form=st.sampled_from(FORMS))
def test_a_plain_word_is_found_by_its_name_in_texts_of_every_kind(name, word, form):
    assert word not in Redactor().text(form.format(name=name, word=word))


@fixed
@given(name=NAMES_OF_SECRETS, word=WORDS)
def test_a_plain_word_is_found_by_its_name_in_values_and_arguments(name, word):
    redactor = Redactor()
    nested = redactor.value("settings", {"a": [{name: word}], name: {"of": [word]}, "words": (f"{name}={word}",)})
    argv = redactor.arguments(["train.py", f"--{name}", word, f"--{name}={word}", "-u", f"anne:{word}"])

    assert word not in str(nested)
    assert word not in str(argv)


@pytest.mark.parametrize(
    "text",
    ["the password is {}", "The passphrase was: {}.", "cannot log in with password {}", "wrong password {}, 3 tries"],
)
def test_a_plain_word_that_a_sentence_gives_as_the_password_is_taken_out(text):
    assert Redactor().text(text.format("correcthorse")) == text.format(REDACTED)


@pytest.mark.parametrize("line", ORDINARY)
def test_an_ordinary_line_stays(line):
    assert Redactor().text(line) == line


@settings(max_examples=100, deadline=None)
@given(secret=st.text(min_size=6, max_size=30), name=st.sampled_from(NAMES), elsewhere=st.text(max_size=20))
def test_a_secret_that_was_seen_once_is_found_everywhere(secret, name, elsewhere):
    assume(secret not in REDACTED and not is_secret_name("x", secret) and secret.strip() == secret)
    assume(REDACTED not in secret and Redactor().value(name, secret) == REDACTED)
    redactor = Redactor()
    redactor.learn({name: secret})

    assert secret not in redactor.text(f"{elsewhere}{secret}").replace(REDACTED, "")


def test_secrets_in_a_command_are_taken_out_and_the_rest_stays():
    words = ["train.py", "--api-key", "abc", "--lr", "1e-4", "--hub-token=xyz", "--bf16", "HF_TOKEN=uvw"]

    found = Redactor().arguments(words)

    assert found == ["train.py", "--api-key", REDACTED, "--lr", "1e-4", f"--hub-token={REDACTED}", "--bf16",
                     f"HF_TOKEN={REDACTED}"]  # fmt: skip


def test_with_a_key_equal_secrets_can_be_told_and_nothing_else():
    one, other, same = Redactor(b"k" * 16), Redactor(b"k" * 16), Redactor(b"other key of us ")

    assert one.value("TOKEN", "first secret") == other.value("TOKEN", "first secret")
    assert one.value("TOKEN", "first secret") != one.value("TOKEN", "second secret")
    assert one.value("TOKEN", "first secret") != same.value("TOKEN", "first secret")
    assert len(one.value("TOKEN", "first secret")) == len("<redacted:12345678>")


@pytest.mark.parametrize(
    "text",
    [
        "X-Api-Key: {}",
        "Authorization: Token {}",
        "PRIVATE-TOKEN:{}",
        "Cookie: id={}; other=1",
        "curl -H 'X-Auth-Token: {}' https://example.com",
        '{{"password": "{}"}}',
        "Server=db;Password={};Timeout=3",
        "mysql --password={}",
        "the password '{}' is refused",
        "ssh node 'train --hub-token {} --lr 1'",
    ],
)
@pytest.mark.parametrize("name", ["header", "H", "SETTINGS"])
def test_the_value_of_a_header_or_a_pair_within_a_text_is_taken_out(text, name):
    assert "hello-123" not in str(Redactor().value(name, text.format("hello-123")))


def test_nested_values_are_walked():
    found = Redactor().value("hub", {"token": "abcdefg", "sizes": [1, 2.5, None, True], "users": [{"password": "x"}]})

    assert found == {"token": REDACTED, "sizes": [1, 2.5, None, True], "users": [{"password": REDACTED}]}
