"""Names that secrets go by and looks that give them away, as strategies; and lines of trainings, which have none."""

from __future__ import annotations

import re

from hypothesis import strategies as st

_OWNERS = ("", "foo", "db", "hf", "my app", "aws", "user", "proxy", "spring datasource", "x")
_STEMS = (
    "api token",
    "api key",
    "apikey",
    "access key",
    "access token",
    "auth token",
    "refresh token",
    "secret access key",
    "client secret",
    "password",
    "passwd",
    "passphrase",
    "pwd",
    "authorization",
    "private key",
    "credentials",
    "dsn",
    "connection string",
    "conn str",
    "session id",
    "webhook",
    "otp",
)
_STYLES = (
    "_".join,
    "-".join,
    ".".join,
    lambda words: "_".join(words).upper(),
    lambda words: "-".join(word.capitalize() for word in words),
    lambda words: words[0] + "".join(word.capitalize() for word in words[1:]),
)


def parts_of(secret: str) -> list[str]:
    """Return what alone is of use of a secret: of an address its password, of a command's words those that are long."""
    user = re.search(r"(?<=:)[^:]*(?=@)", secret)
    after = re.search(
        r"(?:key=|sig=|-u \w+:|(?:password|passphrase) (?:is |was )?|services/|webhooks/|-p ?|-a )([^&\s]+)", secret
    )
    return [user[0] if user and "//" not in user[0] else after[1] if after else line for line in secret.splitlines()]


def _named(owner: str, stem: str, style: int) -> str:
    return _STYLES[style](f"{owner} {stem}".split())


NAMES = st.builds(_named, st.sampled_from(_OWNERS), st.sampled_from(_STEMS), st.integers(0, len(_STYLES) - 1))
"""`FOO_API_TOKEN`, `dbPassword`, `X-Auth-Token`, `spring.datasource.password` …"""
WORDS = st.from_regex(r"\A[a-z]{6,12}[0-9]?\Z")
"""What people choose for a password: nothing but its name gives it away."""


def _looks(pattern: str) -> st.SearchStrategy[str]:
    return st.from_regex(rf"\A{pattern}\Z").filter(str.isascii)


LOOKS = st.one_of(
    _looks(r"hf_[A-Za-z0-9]{34}"),
    _looks(r"gh[pousr]_[A-Za-z0-9]{36}"),
    _looks(r"github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}"),
    _looks(r"glpat-[A-Za-z0-9]{20}"),
    _looks(r"sk-(proj-|ant-api03-)?[A-Za-z0-9]{40}"),
    _looks(r"[sr]k_(live|test)_[A-Za-z0-9]{24}"),
    _looks(r"xox[abp]-[0-9]{12}-[0-9]{12}-[A-Za-z0-9]{24}"),
    _looks(r"A[KS]IA[A-Z2-7]{16}"),
    _looks(r"AIza[A-Za-z0-9]{35}"),
    _looks(r"dapi[0-9a-f]{32}"),
    _looks(r"hvs\.[A-Za-z0-9]{24}"),
    _looks(r"npm_[A-Za-z0-9]{36}"),
    _looks(r"eyJ[A-Za-z0-9]{30}\.eyJ[A-Za-z0-9]{40}\.[A-Za-z0-9]{43}"),
    _looks(
        r"-----BEGIN (RSA |EC |OPENSSH )?PRIVATE KEY-----\n([A-Za-z0-9+/]{64}\n){2}-----END (RSA )?PRIVATE KEY-----"
    ),
    _looks(r"https://hooks\.slack\.com/services/T[A-Z0-9]{8}/B[A-Z0-9]{8}/[A-Za-z0-9]{24}"),
    _looks(r"https://discord\.com/api/webhooks/[0-9]{18}/[A-Za-z0-9]{68}"),
    _looks(
        r"(postgresql\+asyncpg|https|redis|mongodb\+srv)://[a-z]{0,5}:[A-Za-z0-9@/]{3,10}[a-z][0-9]@db\.example\.org/x"
    ),
    _looks(r"key=([0-9a-f]{32}|[0-9a-f]{64}|[A-Za-z0-9+/]{43}=)"),
    _looks(r"https://example\.com/o\?sv=1&sig=[A-Za-z0-9]{43}%3D"),
    _looks(r"curl -u [a-z]{3,8}:[a-z]{4,8}[0-9] https://example\.com"),
    _looks(r"(mysql|mysqldump -h db|mariadb) -u root -p[a-z]{4,8}[0-9] data"),
    _looks(r"(sshpass -p ?|redis-cli -h db -a |docker login -u me -p )[a-z]{4,8}[0-9] x"),
    _looks(r"(with|the|wrong) (password|passphrase) (is |was )?[a-z]{4,8}[0-9]"),
    _looks(r"machine example\.com login [a-z]{3,8} password [a-z]{4,8}[0-9]"),
)
"""Secrets that are known without a name: tokens of services, keys, addresses with a user, commands with a password."""
ORDINARY = (
    "token_ids = tokenizer(text, return_tensors='pt')",
    "num_tokens = 4096",
    "max_tokens: int = 2048",
    "mask = dict(key_padding_mask=None, attn_mask='causal')",
    "secret_layer = nn.Linear(1024, 4096, device='cuda')",
    "tokens_per_second = total_tokens / seconds",
    "past_key_values = model_kwargs.get('past_key_values')",
    "_skip_keys_device_placement = ['past_key_values']",
    "_tied_weights_keys = {'lm_head.weight': 'model.embed_tokens.weight'}",
    "key = f'{prefix}{name}_weight'",
    "if key == 'params' or key != 'optimizer': pass",
    "if not hasattr(config, 'pad_token_id') and hasattr(tokenizer, 'image_token'): pass",
    "return_class_token = getattr(config, 'return_class_token', False)",
    "__all__ = ['BertForTokenClassification', 'BertPreTrainedModel']",
    "path = hf_hub_download(repo_id='org/model', filename='config.json')",
    "if hasattr(self, 'hf_device_map'): pass",
    "# a basic triangular schedule, with basic synchronization",
    "# SPDX-License-Identifier: BSD-3-Clause",
    "self.key_proj, self.key_states = nn.Linear(2048, 2048), None",
    "device = 'cuda:0'; url = 'https://example.org:8080/models@main'",
    "KeyError: 'layer1_weight'",
    "commit = 'cf30153c4c131c8164ee7798e5022d810682e2cb'",
    "'''Args:\n    key: bfloat16\n    cls_token: If `True`, a row is put first.\n    token: the one that follows\n'''",
    "loss = criterion(logits, labels) * passes / 1000",
    "ssh -p 2222 host; docker run -p 8080:80 image; mysql --protocol=tcp -u root data",
    "with password authentication; the password was refused, wrong password for anne; password is required",
    "password authentication failed for user 'root'; the password is wrong, 'x' was expected",
)
"""Lines that must stay as they are, whatever they have in common with secrets."""
TEXTS_AROUND = (
    "{}",
    "x = '{}'",
    "error: bad value {} in request",
    '{{"a": "{}"}}',
    "a: {}",
    "({}, 3)",
    "[rank3]: INFO using {}",
    "ValueError: got '{}', expected another",
)
