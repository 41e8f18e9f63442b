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
_IN_CODE = ("module_level", "default", "attribute", "url", "literal", "header", "keyword", "nested")
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
_COMMANDS = (
    "diagnose {out}/run --json",
    "diagnose {out}/run --html {out}/diagnosis.html",
    "env show {out}/run",
    "source {out}/dump/step2 -o {out}/source.html",
    "graph {out}/dump/step0 -o {out}/graph.html",
    "compare {out}/dump/step0 {out}/dump/step1 -o {out}/compared",
    "check run {out}/dump/step0 -o {out}/checked",
    "query {out}/run --format csv",
)


def _secrets(seed: int) -> dict[str, str]:
    """Return a secret for each place: a plain word, as people choose, that nothing but its name gives away."""
    drawn = random.Random(seed)
    words = {name: "".join(drawn.choices(string.ascii_lowercase, k=11)) for name in (*_IN_CODE, *_VARIABLES, *_OPTIONS)}
    return {name: f"{word}{drawn.randrange(10)}" for name, word in words.items()}


def _train(folder: Path, secrets: Mapping[str, str]) -> Path:
    out = folder / "out"
    out.mkdir()
    script = folder / "train.py"
    text = _SCRIPT.read_text()
    for name in _IN_CODE:
        text = text.replace(f"{{{name}}}", secrets[name])
    script.write_text(text)
    options = ["--pw", secrets["pw"], f"--api-key={secrets['api-key']}", "--auth-type", "none", "--pass-through", "3"]
    options += ["--header", f"X-Api-Key: {secrets['header of a request']}"]
    options += ["--db-url", f"postgres://anne:{secrets['db-url']}@db/x", "--out", str(out)]
    environ = {**os.environ, **{name: secrets[name] for name in _VARIABLES}}
    _run([sys.executable, str(script), *options], environ, out / "training.txt")
    for number, command in enumerate(_COMMANDS):
        words = command.format(out=out).split()
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
            shown |= {word for word in (b"shown_in_code", b"shown_in_call", b"auth") if word in text}

    assert found == []
    assert shown == {b"shown_in_code", b"shown_in_call", b"auth"}
    assert {".json", ".html", ".pt", ".txt"} <= {path.suffix for path in files}
