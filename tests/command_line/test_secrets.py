"""Nothing that a training or a command leaves behind holds a secret of the script, its arguments or its environment."""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import os
import random
import re
import string
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).with_name("secretive_training.py")
_IN_CODE = ("module_level", "default", "attribute", "url", "literal", "header", "keyword", "nested", "variable")
_VARIABLES = (
    "SSHPASS",
    "DBPASS",
    "ROOTPW",
    "GITHUB_PAT",
    "WANDB_API_KEY",
    "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "NEXUSPWD",
)
_OPTIONS = ("pw", "api-key", "header of a request", "db-url")
_IN_FILES = ("hub", "exported", "flag", "in yaml")
_FILES = {
    "export HUB_TOKEN={exported}\npython train.py --client-secret {flag} --lr 1e-4 --list a {listed}\n": "launch.sh",
    '{"hub": {"auth": [{"user": "anne", "value": "{hub}"}]}, "shown_in_file": "{deployed}"}': "hub.json",
    "data:\n  url: https://example.org/?sig={in yaml}\n  password: [{in yaml}]\n": "data.yaml",
}
_LOOKS = ("service", "deployed", "comment", "passed", "raised", "note", "listed")
"""Places of secrets that no name tells, but their look."""
_SHOWN = {b"shown_in_code", b"shown_in_call", b"shown_in_message", b"shown_in_file", b"shown_tag", b"auth"}
_SHAPES = ("hf_", "ghp_", "sk-proj-", "xoxb-", "AKIA", "glpat-", "AIza")
_COMMANDS = (
    "diagnose {out}/run --json",
    "diagnose {out}/run --html {out}/diagnosis.html",
    "env show {out}/run",
    "source {out}/dump/step2 -o {out}/source.html",
    "graph {out}/dump/step0 -o {out}/graph.html",
    "compare {out}/dump/step0 {out}/dump/step1 -o {out}/compared",
    "check run {out}/dump/step0 -o {out}/checked",
    "query {out}/run --format csv",
    "export {out}/run --format csv --again",
    "alerts {out}/run --json",
    "env collect {folder}/launch.sh {folder}/hub.json {folder}/data.yaml -o {out}/environment.zip",
    "env compare {out}/environment.zip {out}/run -o {out}/environment -f json,md,html,xlsx,csv",
    "env show {out}/environment.zip --json",
)


def _secrets(seed: int) -> dict[str, str]:
    """Return a secret for each place: a plain word, as people choose, or a token of a service."""
    drawn = random.Random(seed)
    places = (*_IN_CODE, *_VARIABLES, *_OPTIONS, *_IN_FILES)
    words = {name: f"{''.join(drawn.choices(string.ascii_lowercase, k=11))}{drawn.randrange(10)}" for name in places}
    pairs = zip(_LOOKS, _SHAPES, strict=True)
    tokens = {name: shape + "".join(drawn.choices(string.ascii_uppercase + "234567", k=35)) for name, shape in pairs}
    return {**words, **tokens}


def _train(folder: Path, secrets: Mapping[str, str]) -> Path:
    out = folder / "out"
    out.mkdir()
    for template, file in {_SCRIPT.read_text(): "train.py", **_FILES}.items():
        text = template
        for name, secret in secrets.items():
            text = text.replace(f"{{{name}}}", secret)
        (folder / file).write_text(text)
    options = ["--pw", secrets["pw"], f"--api-key={secrets['api-key']}", "--auth-type", "none", "--pass-through", "3"]
    options += ["--header", f"X-Api-Key: {secrets['header of a request']}", "--note", secrets["note"]]
    options += ["--db-url", f"postgres://anne:{secrets['db-url']}@db/x", "--out", str(out)]
    environ = {**os.environ, **{name: secrets[name] for name in _VARIABLES}}
    _run([sys.executable, str(folder / "train.py"), *options], environ, out / "training.txt", statuses=range(1, 2))
    for number, command in enumerate(_COMMANDS):
        words = command.format(out=out, folder=folder).split()
        _run([sys.executable, "-m", "trainermon", *words], environ, out / f"command{number}.txt", statuses=range(8))
    return out


def _run(command: list[str], environ: Mapping[str, str], output: Path, *, statuses: range = range(1)) -> None:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    output.write_text(done.stdout + done.stderr)
    assert done.returncode in statuses, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def _texts(data: bytes) -> Iterator[bytes]:
    """Yield bytes, and what they hold in archives, compressed or encoded."""
    yield data
    if data[:2] == b"PK":
        archive = zipfile.ZipFile(io.BytesIO(data))
        yield from (archive.read(name) for name in archive.namelist())
    if data[:2] == b"\x1f\x8b":
        yield gzip.decompress(data)
    for word in re.findall(rb"[A-Za-z0-9+/]{100,}={0,2}", data):
        with contextlib.suppress(ValueError):
            raw = base64.b64decode(word, validate=True)
            yield raw
            for kind in (31, 15, -15):
                with contextlib.suppress(zlib.error):
                    yield zlib.decompress(raw, kind)


@pytest.mark.parametrize("seed", [0])
def test_no_secret_is_left_behind_and_what_is_none_is_readable(tmp_path: Path, seed: int) -> None:
    secrets = _secrets(seed)
    out = _train(tmp_path, secrets)
    found, shown = [], set()
    files = [path for path in out.rglob("*") if path.is_file()]
    for path in files:
        for text in _texts(path.read_bytes()):
            found += [(str(path.relative_to(out)), name) for name, word in secrets.items() if word.encode() in text]
            shown |= {word for word in _SHOWN if word in text}

    assert found == []
    assert shown == _SHOWN
    assert {".json", ".html", ".pt", ".txt", ".csv", ".zip", ".xlsx"} <= {path.suffix for path in files}
