"""Token ids as text, by the tokenizer that a model has in its folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trainermon.core.errors import ConfigError
from trainermon.rl.values import TokenAt

Decode = Callable[[Sequence[int]], str]


def read_tokenizer(path: Path) -> Decode:
    """Return a function from ids to text; `path` is a tokenizer.json, or a folder with one.

    Raises:
        ConfigError: There is none, or it cannot be read.
        ModuleNotFoundError: The package tokenizers is not installed.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"--tokenizer: {file} is not there, expected a model's folder with tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing more precise
        raise ConfigError(f"--tokenizer: {file} cannot be read: {error}") from error
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def text_at(token: TokenAt, decode: Decode) -> str:
    """Return the text up to a token, and in brackets that of the token itself; empty where ids are not known."""
    if token.id is None:
        return ""
    before, whole = decode(token.before), decode((*token.before, token.id))
    own = whole[len(before) :] if whole.startswith(before) else decode([token.id])
    return f"{before}[{own}]"
