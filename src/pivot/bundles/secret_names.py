"""Names that say secret. Travels to hosts with `pivot.bundles.redact`: standard library only, Python 3.9."""

from __future__ import annotations

import functools
import re

_SURE = frozenset(
    {"apikey", "password", "passwd", "passphrase", "passwords", "secret", "secrets", "credential", "credentials"}
)
_SURE_ENDS = ("password", "passwd", "passphrase", "secret", "apikey")  # also of pgpassword, cipassword
_SURE_PAIRS = frozenset(
    {
        ("api", "key"),
        ("api", "keys"),
        ("access", "key"),
        ("access", "keys"),
        ("private", "key"),
        ("auth", "key"),
        ("encryption", "key"),
        ("signing", "key"),
        ("hmac", "key"),
        ("preshared", "key"),
        ("subscription", "key"),
        ("account", "key"),
    }
)
_HEADERS = frozenset({"authorization", "proxyauthorization", "cookie", "setcookie", "xapikey", "csrfpreventiontoken"})
_ENV_LAST = frozenset({"key", "pass", "pwd", "auth", "cookie", "dsn", "ticket", "credentials"})
# words before "token" that make it a token of text, not of trust
_TEXT_TOKENS = frozenset(
    {
        "bos",
        "eos",
        "pad",
        "unk",
        "sep",
        "cls",
        "mask",
        "image",
        "audio",
        "video",
        "next",
        "draft",
        "max",
        "min",
        "num",
        "new",
        "per",
        "stop",
        "special",
        "prompt",
        "input",
        "output",
        "cached",
        "first",
        "last",
        "begin",
        "end",
        "of",
        "think",
        "accept",
        "accepted",
        "each",
        "one",
    }
)
_TURNS = frozenset({"forward", "backward", "first", "second", "last", "one", "two", "single", "per", "each"})
_PATH_ENDINGS = frozenset(
    {
        "file",
        "path",
        "dir",
        "env",
        "directory",
        "name",
        "sock",
        "type",
        "length",
        "py",
        "yml",
        "yaml",
        "json",
        "txt",
        "log",
    }
)


@functools.lru_cache(maxsize=4096)
def secret_name(name: str) -> str:
    """What a variable, option or header of this name holds: "" (nothing secret), "sure", "token" or "header".

    "token" is secret unless its value is a number: ``token: 812`` counts tokens of text, ``pass: 3`` passes.
    """
    flat = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    words = [word for word in re.split(r"[_.\-]+", flat.lower()) if word]
    if not words or words[-1] in _PATH_ENDINGS:
        return ""
    if "".join(words) in _HEADERS:
        return "header"
    if _sure(words):
        return "sure"
    if (
        words == ["ticket"]
        or _is_pass(words, name)
        or (words[-1] == "token" and not _TEXT_TOKENS.intersection(words[-2:-1]))
    ):
        return "token"
    return "sure" if name == name.upper() and len(words) > 1 and words[-1] in _ENV_LAST else ""


def _is_pass(words: list[str], name: str) -> bool:
    """Whether it is a password's name, such as ansible_ssh_pass, and not that of a test or a turn."""
    return words[-1] == "pass" and (name.islower() if len(words) == 1 else words[-2] not in _TURNS)


def _sure(words: list[str]) -> bool:
    pairs = zip(words, words[1:])  # noqa: B905, RUF007 - newer than 3.9
    return words[-1].endswith(_SURE_ENDS) or not _SURE.isdisjoint(words) or not _SURE_PAIRS.isdisjoint(pairs)
