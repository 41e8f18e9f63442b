"""Takes secrets out of what is collected, before anything is written.

A secret is told by the name that it goes by, or by its own look. It is better to lose a harmless value than to keep a
token: what is taken out can still be compared by a keyed hash, see `Redactor`.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

REDACTED = "<redacted>"
MIN_LENGTH, MIN_BITS = 20, 4.0
"""Letters, and bits per letter, from which a word looks like a random one."""
_LEAST_REMEMBERED = 6  # shorter values would be struck out of innocent texts

# Parts of a name, between anything that is no letter. The first ones are secrets whatever their value is.
_ALWAYS = re.compile(
    r"^(.*SECRET.*|.*PASS(W.*|PHRASE|CODE)|.*(?<!COM)(?<!BY)(?<!TRES)PASS|.*PWD?|.*PSS?W(OR)?D|O?AUTH(ORIZATION)?"
    r"|.*CREDENTIALS?|CREDS?|COOKIES?|PRIVATE|DSN|WEBHOOKS?|BEARER|JWT|T?OTP|[CX]SRF|NETRC)$"
)
_UNLESS_SMALL = re.compile(r"^(.*KEY|KEYS|.*TOKEN|.*AUTH|PAT|SAS|SESSION(ID)?|SIG|SIGN|SIGNATURE|LICEN[CS]E)$")
_TOGETHER = re.compile(r"(^|_)(CONN(ECTION)?_?STR(ING)?|(ACCESS|API|AUTH|REFRESH|BEARER)_TOKENS)$")  # as the last parts
_OF_MODELS = re.compile(
    r"(^|_)(TOKEN_(TYPE_)?(IDS?|INDEX|INDICES|LOGITS|CLASSIFICATION)|KEY_(VALUES?|STATES?|PROJ|CACHE|SUFFIX)"
    r"|(WEIGHTS?|STATE|MISSING|UNEXPECTED|EXPECTED|FORMAT|DTYPE|SHAPE)_KEYS?|SKIP_KEYS_\w+|KEYS_TO_\w+)$"
)
"""Last parts of names that models have for what is no secret: `key_padding_mask`, `pad_token_id`."""
_NEVER = frozenset(["PWD", "OLDPWD"])  # as the whole name: working directories
_ABOUT = frozenset(
    (
        *(
            "THROUGH",
            "TYPE",
            "METHOD",
            "MODE",
            "KIND",
            "SCHEME",
            "TIMEOUT",
            "LENGTH",
            "LEN",
            "SIZE",
            "COUNT",
            "RETRIES",
        ),
        *("LAYER", "LAYERS", "MASK", "IDENTIFIER", "DTYPE"),
    )
)
"""Last parts of a name of something about a secret, or about a pass: `--auth-type`, `--pass-through`."""
_SMALL = re.compile(r"(?i)^(true|false|none|null|\w|[-+]?[0-9.e-]{1,6}|</?\|?\w*\|?>|\[[a-z]*\])?$")
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

_PEM = re.compile(r"-----BEGIN [^-]*-----.*?(-----END [^-]*-----|\Z)", re.DOTALL)
_USER_OF_URL = re.compile(r"(?<=://)(?:[^/\s'\"]+|[^/\s'\":@]+:(?!\d+/)[^\s'\"@]{1,99})(?=@)")
_WEBHOOK = re.compile(r"(?<=://)(?:hooks\.|[\w.-]+/api/webhooks/|[\w.-]+/webhookb2/)[^\s'\"<>]+")  # who has it can post
_USER = re.compile(
    r"(?P<head>(?<![\w-])(?:-u|--user)[ =]+[^\s:'\"]+:|\blogin\s+\S+\s+password\s+"
    r"|\b(?:mysql\w*|mariadb[\w-]*)\b[^|;&\n]*?\s-p|\bsshpass\s+-p\s?|\bredis-cli\b[^|;&\n]*?\s-a\s+"
    r"|\bdocker\s+login\b[^|;&\n]*?\s-p\s+)(?P<value>(?!\d+\b)[^\s'\"]+)"
)
"""What commands take a user's password by."""
_OF_PASSWORDS = (
    *("after", "before", "from", "that", "they", "this", "were", "when", "where", "which", "while", "will", "with"),
    *(
        "again",
        "asked",
        "authentication",
        "based",
        "been",
        "being",
        "cannot",
        "change",
        "changed",
        "checked",
        "correct",
    ),
    *("could", "dialog", "different", "does", "empty", "expired", "field", "file", "given", "hash", "hashed", "hidden"),
    *("incorrect", "invalid", "known", "length", "less", "login", "longer", "manager", "masked", "missing", "must"),
    *("needed", "never", "none", "null", "only", "outdated", "policy", "prompt", "protected", "protection", "read"),
    *(
        "redacted",
        "refused",
        "rejected",
        "required",
        "reset",
        "sent",
        "shorter",
        "should",
        "stored",
        "taken",
        "unknown",
    ),
    *("unset", "used", "valid", "weak", "wrong", "accepted", "also", "already"),
)
"""What follows the word in sentences that do not tell it."""
_TOLD = re.compile(
    r"(?i)(?P<head>\bpass(?:word|wd|phrase)\s+(?:(?:is|was)\s+)?(?P<quote>['\"])?)"
    r"(?P<value>(?(quote)[^\s'\"{}$%<]{4,}(?=['\"])"
    r"|(?!\w*(?:int|float|fp|bf|complex|sha|md)\d+\b)(?=\S*\d)(?=\S*[a-z])[^\s'\"(){}<>$%=:,]{5,}))"
)
"""What a sentence says of a password: in quotes any word, else one that is no word of a language."""
_SAID = re.compile(
    r"(?i)(?P<head>\bpass(?:word|wd|phrase)(?:\s+(?:is|was):?\s+|\s*(?::=|->|=>)\s*)"
    r"|\b(?:with|using|wrong|bad|invalid|incorrect)\s+(?:the\s+)?pass(?:word|wd|phrase)\s+)"
    rf"(?P<value>(?!(?:{'|'.join(_OF_PASSWORDS)})\b)[a-z][^\s'\"(){{}}<>$%=:;,.]{{3,}})"
)
"""A plain word that a sentence gives as the password."""
_QUERY = re.compile(r"(?i)([?&;]([\w.-]*)=)([^&;\s'\"]+)")
# What stands before a value, and the value: the one is looked for, the other read only where the name is a secret's.
_ASSIGNED = (
    re.compile(
        r"""(?<![\w.-])-{0,2}(?P<quote>["']?)(?P<name>[A-Za-z_][\w.-]*)(?P=quote)\s*(?P<sign>[:=])(?!=)\s*["']?"""
    ),
    re.compile(r"""(?<==)[^\s'"&;,]+|(?<=["'])[^\s'"&;,]+|(?<!=)[^\s'",;][^'"\n,;]*"""),
)
_AFTER_OPTION = re.compile(r"(?<![\w-])--?(?P<name>[A-Za-z][\w-]*)\s+"), re.compile(r"[^\s'\"-][^\s'\"]*")
_ORDINARY_NAMES = frozenset(
    ["key", "keys", "token", "pat", "sas", "session", "sig", "sign", "signature", "license", "licence"]
)
"""Names that are secrets before `=`, but ordinary words before a colon: `key: bfloat16`."""
_NO_WORD = re.compile(r"(?!\w*(?:int|float|fp|bf|complex)\d+\b)(?=\S*[0-9])(?=\S*[A-Za-z])[\w+/=~.-]{6,}")
_CODE = re.compile(r"[A-Za-z_]\w*(\.\w+)*\(|self\.\w+\W*$")
_FILLED_IN = ("{", "$", "%", REDACTED[:-1])  # a place for a value, and no value
_BEARER = re.compile(r"\b((?i:bearer)\s+[\w.+/=~-]{8,}|(?i:basic)\s+(?=\w*[A-Z0-9])[\w.+/=~-]{8,})")
_JWT = re.compile(r"\beyJ[\w-]{5,}\.[\w-]+\.?[\w-]*")
_KNOWN = re.compile(
    r"\b(gh[opsur]_|github_pat_|gl(pat|ptt|dt|rt)-|(hf|api_org)_(?=[A-Za-z0-9]{16})|sk-|[sr]k_(live|test)_"
    r"|whsec_|xox[abeprs]-|xapp-|A[KS]IA|AIza|ya29\.|GOCSPX-|pypi-|npm_|do[opr]_v1_|nvapi-|SG\.|hv[sb]\.|gsk_|r8_"
    r"|dckr_pat_|lin_api_|shp(at|ca|pa|ss)_|dapi(?=[0-9a-f]{32})|ATATT|AGE-SECRET-KEY-)[\w.-]{8,}"
)
_WORD = re.compile(r"[\w+/=~.-]{20,}")
_PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_HEX = re.compile(r"(0x)?[0-9a-fA-F]+")


class Redactor:
    """Takes secrets out of values, and remembers those that it has seen, so that it finds them elsewhere.

    Args:
        key: Secret of both sides of a comparison. With it a secret is replaced by 32 bits of its keyed hash, so that
            equal ones can be told; without it by `<redacted>`.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key
        self._seen: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None

    def learn(self, named: Mapping[str, str]) -> None:
        """Remember the values of names that are secret."""
        for name, value in named.items():
            self.value(name, value)

    def value(self, name: str, value: Any) -> Any:
        """Return `value`, which goes by `name`, without secrets: texts, numbers, lists and mappings of them."""
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(f"{name}.{key}", item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(name, item) for item in value]
        if value is None or isinstance(value, bool):
            return value
        if is_secret_name(name, str(value)):
            return self._taken(str(value))
        return self.text(value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        """Return a text without what looks like a secret, and without those that were seen before."""
        text = self._without_seen(text)
        text = _PEM.sub(self._found, text)
        text = _USER_OF_URL.sub(self._found, text)
        text = _QUERY.sub(self._in_query, text)
        for pattern in (_WEBHOOK, _BEARER, _JWT, _KNOWN):
            text = pattern.sub(self._found, text)
        for pattern in (_USER, _TOLD):
            text = pattern.sub(lambda match: match["head"] + self._taken(match["value"]), text)
        text = _SAID.sub(lambda match: match["head"] + REDACTED, text)  # a word that may stand elsewhere as well
        for head, value in (_ASSIGNED, _AFTER_OPTION):
            text = "".join(self._without_assigned(head, value, text))
        return _WORD.sub(self._if_random, text)

    def arguments(self, words: Iterable[str]) -> list[str]:
        """Return a command's words without secrets: those after, or behind the `=` of, an option of such a name."""
        found: list[str] = []
        option = ""
        for word in words:
            name, is_pair, value = word.partition("=")
            if is_pair and is_secret_name(name, value):
                found.append(f"{name}={self._taken(value)}")
            elif option and not word.startswith("--"):
                found.append(str(self.value(option, self.text(f"{option} {word}").removeprefix(f"{option} "))))
            else:
                found.append(self.text(word))
            option = word if word.startswith("-") and not is_pair else ""
        return found

    def _without_seen(self, text: str) -> str:
        if not self._seen:
            return text
        if self._pattern is None:
            longest_first = sorted(self._seen, key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        return self._pattern.sub(lambda match: self._seen[match[0]], text)

    def _taken(self, secret: str) -> str:
        if secret.startswith(REDACTED[:-1]) or not secret:
            return secret
        mark = REDACTED
        if self._key is not None:
            digest = hmac.new(self._key, secret.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()
            mark = f"{REDACTED[:-1]}:{digest[:8]}>"
        if len(secret) >= _LEAST_REMEMBERED and secret not in self._seen:
            self._seen[secret] = mark
            self._pattern = None
        return mark

    def _found(self, match: re.Match[str]) -> str:
        return self._taken(match[0])

    def _in_query(self, match: re.Match[str]) -> str:
        return match[1] + (self._taken(match[3]) if is_secret_name(match[2], match[3]) else match[3])

    def _without_assigned(self, head: re.Pattern[str], of_value: re.Pattern[str], text: str) -> Iterator[str]:
        """Yield the parts of `text`; a value that is no secret is searched in turn: `note = "key=…"`."""
        at = 0
        for match in head.finditer(text):
            if match.end() < at or not is_secret_name(match["name"]):
                continue
            value = of_value.match(text, match.end())
            if value is not None and _is_assigned_secret(match, value[0]):
                yield text[at : match.end()]
                yield self._taken(value[0])
                at = value.end()
        yield text[at:]

    def _if_random(self, match: re.Match[str]) -> str:
        word = match[0]
        if word.startswith(("/", "./", "../", "~")) or not looks_random(word):
            return word
        return self._taken(word)


def _is_assigned_secret(head: re.Match[str], value: str) -> bool:
    name, given = head["name"], head.groupdict()
    if value.startswith(_FILLED_IN) or _CODE.match(value):
        return False
    if given.get("sign") == ":" and not given["quote"]:
        words = value.partition(" #")[0].split()
        is_sentence = len(words) > 1 and not is_secret_name(name, "1")
        if not _NO_WORD.fullmatch(words[0]) and (is_sentence or name.lower() in _ORDINARY_NAMES):
            return False
    return is_secret_name(name, value.rstrip("`.)]}"))


@functools.lru_cache(maxsize=4096)
def clean_argument(name: str, text: str) -> str:
    """Return `text`, an argument of a call that goes by `name`, without what is or looks like a secret.

    >>> clean_argument("api_key", "vG3xK9pQ2m"), clean_argument("reduction", "mean")
    ('<redacted>', 'mean')
    """
    return str(Redactor().value(name, text))


def is_secret_name(name: str, value: str = "") -> bool:
    """Return whether what goes by `name` is a secret: `HF_TOKEN`, `apiKey`, `db.password`; `value` may be too small.

    >>> is_secret_name("HF_TOKEN"), is_secret_name("pad_token_id", "0"), is_secret_name("PWD")
    (True, False, False)
    """
    if name in _NEVER or name.endswith(("Error", "Exception")):
        return False
    parts = [part.upper() for part in _PARTS.findall(name)]
    joined = "_".join(parts)
    if (len(parts) > 1 and parts[-1] in _ABOUT) or _OF_MODELS.search(joined):
        return False
    if any(_ALWAYS.match(part) for part in parts) or _TOGETHER.search(joined):
        return True
    return any(_UNLESS_SMALL.match(part) for part in parts) and not (value and is_small(value))


def is_small(value: str) -> bool:
    """Return whether a value is too small for a secret: a truth value, a short number, or the text of a token."""
    return bool(_SMALL.match(value))


def looks_random(word: str) -> bool:
    """Return whether a word is long and has more than four bits per letter, as keys have and names have not.

    >>> looks_random("vG3xK9pQ2mZ7tR5wL8yN4b"), looks_random("layernorm_column_parallel_linear")
    (True, False)
    """
    if len(word) < MIN_LENGTH or bits_per_letter(word) <= MIN_BITS or _HEX.fullmatch(word):
        return False
    return not _is_made_of_words(word)


def bits_per_letter(word: str) -> float:
    """Return the entropy of a word's letters in bits; 0 for an empty one."""
    counts: Sequence[int] = list(Counter(word).values())
    return -sum(count / len(word) * math.log2(count / len(word)) for count in counts)


def _is_made_of_words(word: str) -> bool:
    """Return whether it reads like names, versions and dates that are joined: runs of one kind of letter are long."""
    pieces = _PIECE.findall(word)
    longest = max((len(piece) for piece in pieces if piece.isalpha()), default=0)
    return bool(pieces) and sum(map(len, pieces)) / len(pieces) >= 2.8 and longest <= 18
