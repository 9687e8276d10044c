"""NCCL's variables: names and values against what NVIDIA documents, and against each other.

Pure but for the table itself, ``data/nccl.yml``, which says where each fact is from. NCCL says nothing about a name it
does not know, and reads a word where it wants a number as 0: what is wrong here shows nowhere else.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pivot.findings import Finding, Severity

ERROR, WARNING = Severity.ERROR, Severity.WARNING
WHERE = "sglang_server_environment"
DATA = Path(__file__).parents[1] / "data/nccl.yml"
PROFILES = Path(__file__).parents[1] / "data/nccl_profiles.yml"
MANUAL = "NCCL's manual, environment variables"
# what the old integers of a level mean today; the manual warns that the numbers changed
LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")
# strtoll with base 0
INTEGER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]{1,16}|[0-9]{1,18})")
Wrong = tuple[str, Severity, str, str]
"""A finding's code, severity, message and fix."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The NCCL part of one host's launch.

    environment: all of the server's variables, only NCCL_ ones are looked at; reasons: names whose reason is recorded
    (`commented`); version: of the NCCL that will run, ``2.30.7``, None when not known; custom_all_reduce: whether
    SGLang's own all-reduce is left on.
    """

    subject: str
    environment: Mapping[str, Any]
    reasons: frozenset[str] = frozenset()
    version: str | None = None
    custom_all_reduce: bool = False

    @property
    def given(self) -> dict[str, str]:
        """NCCL's own variables, as texts; other types are found where types are looked at."""
        return {
            name: value
            for name, value in self.environment.items()
            if isinstance(name, str) and name.startswith("NCCL_") and isinstance(value, str)
        }


@functools.cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """The known variables by name."""
    known: dict[str, dict[str, Any]] = yaml.safe_load(DATA.read_text(encoding="utf-8"))["variables"]
    return known


@functools.cache
def profiles() -> Mapping[str, Mapping[str, Any]]:
    """The sets of variables by name, each with for, board, reported and variables."""
    known: dict[str, dict[str, Any]] = yaml.safe_load(PROFILES.read_text(encoding="utf-8"))["profiles"]
    return known


def environment(profile: object, own: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that a server gets: those of its profile, overruled by its own; null there takes one away.

    profile: a name, ``none`` for no profile; an unknown name is found where values are looked at.
    """
    begin = {name: variable["value"] for name, variable in _profile(profile).items()}
    return {name: value for name, value in {**begin, **own}.items() if not (value is None and name in begin)}


def profile_reasons(profile: object, own: Mapping[str, Any]) -> frozenset[str]:
    """The variables that the profile sets with a reason and the host's own do not overrule."""
    return frozenset(name for name, variable in _profile(profile).items() if variable.get("reason") and name not in own)


def _profile(name: object) -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = profiles().get(str(name), {}).get("variables", {}) if name else {}
    return found


def check(settings: Settings) -> list[Finding]:
    """Everything wrong with the names, the values and the relations of a host's NCCL variables."""
    wrong = [*_names(settings), *(item for rule in RULES for item in rule(settings))]
    return [Finding(code, severity, settings.subject, text, fix, MANUAL) for code, severity, text, fix in wrong]


def commented(texts: Iterable[str]) -> frozenset[str]:
    """NCCL's variables that have a reason wherever these YAML files set them.

    A reason is a comment behind the value, or one above the unbroken run of NCCL_ lines that the variable is part of.
    A line that was commented out is none.
    """
    with_reason: set[str] = set()
    without: set[str] = set()
    for text in texts:
        covered = False
        for line in text.splitlines():
            words = line.strip()
            if words.startswith("#"):
                said = words.lstrip("# ")
                covered = len(said) >= 3 and not re.match(r"NCCL_\w+\s*[:=]", said)
            elif match := re.match(r"(NCCL_\w+)\s*:", words):
                behind = re.search(r"\s#\s*\w{3,}", words)
                (with_reason if covered or behind else without).add(match[1])
            else:
                covered = False
    return frozenset(with_reason - without)


def locked_version(lock: str) -> str | None:
    """The NCCL that an engine's lock brings, ``2.30.7``, None when it brings none."""
    match = re.search(r"^nvidia-nccl-cu[0-9]+==([0-9]+(?:\.[0-9]+)*)", lock, re.MULTILINE)
    return match[1] if match else None


# --- names and values


def _names(settings: Settings) -> Iterator[Wrong]:
    for name, value in sorted(settings.given.items()):
        known = table().get(name)
        if known is None:
            close = difflib.get_close_matches(name, list(table()), n=1, cutoff=0.85)
            # NCCL reads more than NVIDIA documents: only what can hardly be anything else stops a run
            severity = ERROR if close and alike(name, close[0]) else WARNING
            message = f"{WHERE}.{name} is no variable that NVIDIA documents, and NCCL ignores what it does not know"
            fix = f"did you mean {close[0]}?" if close else "correct the name, or remove it unless your NCCL reads it"
            yield "NCCL-UNKNOWN", severity, message, fix
            continue
        yield from _age(name, value, known, settings.version)
        yield from _value(name, value, known)


def alike(name: str, known: str) -> bool:
    """Whether a name has the known one's words, each with a slip at most: NET for PCI is another variable."""
    words, right = name.split("_"), known.split("_")
    return len(words) == len(right) and all(
        difflib.SequenceMatcher(None, word, other).ratio() >= 0.6 for word, other in zip(words, right, strict=True)
    )


def _age(name: str, value: str, known: Mapping[str, Any], version: str | None) -> Iterator[Wrong]:
    """Variables and values that the NCCL of the lock reads no more, or not yet."""
    if "until" in known:
        message = f"{WHERE}.{name} is read by no NCCL since {known['until']}"
        yield "NCCL-AGE", WARNING, message, "remove it"
        return
    late = (known.get("values_since") or {}).get(value.upper())
    since = late or known.get("since")
    if since and version and _order(version) < _order(since):
        what = f"{WHERE}.{name} {value}" if late else f"{WHERE}.{name}"
        message = f"{what} needs NCCL {since}, but the engine's lock brings {version}"
        yield "NCCL-AGE", WARNING, message, f"remove it, or lock NCCL {since} or later"


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _value(name: str, value: str, known: Mapping[str, Any]) -> Iterator[Wrong]:
    kind, where = known["kind"], f"{WHERE}.{name}"
    if kind == "switch":
        yield from _integer(where, value, {"one_of": [0, 1]})
    elif kind == "integer":
        yield from _integer(where, value, known)
    elif kind == "number":
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value) or float(value) <= 0:
            message = f"{where} is {_short(value)}, and NCCL would take 1 instead"
            yield "NCCL-VALUE", ERROR, message, "write a number above 0"
    elif kind == "level":
        yield from _level(where, value, known["one_of"])
    elif kind == "choice":
        yield from _choice(where, value, known["one_of"], exact=known.get("exact", False))
    elif kind == "items":
        for item in dict.fromkeys(value.split(",")) if value else ():
            yield from _choice(where, item.removeprefix("^"), known["one_of"])
    elif kind == "selection":
        yield from _selection(where, value, known["one_of"])


def _integer(where: str, text: str, known: Mapping[str, Any]) -> Iterator[Wrong]:
    value = text.strip()  # white space is a finding of its own, and nothing to strtoll
    allowed, least, most = known.get("one_of"), known.get("min"), known.get("max")
    if allowed:
        right = f"write {' or '.join(map(str, allowed))}"
    elif least is not None and most is not None:
        right = f"write a whole number from {least} to {most}"
    else:
        right = "write a whole number" if least is None else f"write a whole number, {least} or more"
    if not INTEGER.fullmatch(value):
        begin = re.match(r"[+-]?[0-9]*", value)
        digits = begin[0].strip("+-") if begin else ""
        read = "as its default" if len(digits) > 18 else f"as {int(digits or 0)}"
        message = f"{where} is {_short(value)}, which NCCL silently reads {read}"
        yield "NCCL-VALUE", ERROR, message, right
        return
    number = _parsed(value)
    if allowed and number not in allowed:
        yield "NCCL-VALUE", ERROR, f"{where} is {number}, which has no documented meaning", right
    elif (least is not None and number < least) or (most is not None and number > most):
        yield "NCCL-VALUE", WARNING, f"{where} is {number}, outside of what NVIDIA documents", right


def _parsed(value: str) -> int:
    """As strtoll reads it with base 0: 0x is hexadecimal, a leading 0 is octal."""
    digits = value.lstrip("+-").lower()
    base = 16 if digits.startswith("0x") else 8 if len(digits) > 1 and digits[0] == "0" else 10
    try:
        number = int(digits, base)
    except ValueError:  # 08: strtoll stops at the 8
        number = 0
    return -number if value.startswith("-") else number


def _level(where: str, value: str, names: list[str]) -> Iterator[Wrong]:
    if re.fullmatch(r"[0-9]{1,9}", value):
        name = LEVELS[min(int(value), len(LEVELS) - 1)]
        message = f"{where} is the number {value}, and what such numbers mean has changed between versions of NCCL"
        yield "NCCL-LEVEL", WARNING, message, f"write the name: {name} is what NCCL reads today"
    else:
        yield from _choice(where, value, names, exact=True)


def _choice(where: str, value: str, names: list[str], *, exact: bool = False) -> Iterator[Wrong]:
    """exact: NCCL compares letter by letter here, elsewhere without case."""
    meant = next((name for name in names if name.lower() == value.strip().lower()), None)
    if meant is not None:
        if exact and meant != value.strip():
            message = f"{where} is {_short(value)}, which NCCL silently ignores"
            yield "NCCL-VALUE", ERROR, message, f"NCCL reads it only in capitals: write {meant}"
        return
    close = difflib.get_close_matches(value.lower(), [name.lower() for name in names], n=1)
    right = f"write one of {', '.join(names)}"
    meant = next(name for name in names if name.lower() == close[0]) if close else ""
    fix = f"did you mean {meant}? {right}" if close else right
    yield "NCCL-VALUE", ERROR, f"{where} has {_short(value)}, which NCCL does not know", fix


def _selection(where: str, value: str, names: list[str]) -> Iterator[Wrong]:
    for listed in _lists(value):
        for item in dict.fromkeys(listed.removeprefix("^").split(",")):
            yield from _choice(where, item, names)


def _lists(value: str) -> list[str]:
    """The lists of ``ring;allreduce:^tree``, without the functions they are for."""
    return [part.rpartition(":")[2] for part in value.split(";")]


def _short(value: str) -> str:
    return reprlib.repr(value)


# --- relations


def _number(settings: Settings, name: str) -> int | None:
    value = settings.given.get(name, "")
    return _parsed(value) if INTEGER.fullmatch(value) else None


def _channels(settings: Settings) -> Iterator[Wrong]:
    for low, high in (
        ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
        ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS"),
        ("NCCL_MIN_P2P_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS"),
    ):
        least, most = _number(settings, low), _number(settings, high)
        if least is not None and most is not None and least > most:
            message = f"{low} is {least} and {high} is {most}: no number of channels is both"
            yield "NCCL-CHANNELS", ERROR, message, f"write {high}: {least} or more, or lower {low}"


def _sockets(settings: Settings) -> Iterator[Wrong]:
    threads, each = _number(settings, "NCCL_SOCKET_NTHREADS") or 1, _number(settings, "NCCL_NSOCKS_PERTHREAD") or 1
    if threads * each > 64:
        message = f"NCCL_SOCKET_NTHREADS {threads} times NCCL_NSOCKS_PERTHREAD {each} is {threads * each}, more than 64"
        yield "NCCL-SOCKETS", ERROR, message, "lower one of them: the product may be 64 at most"


def _peers(settings: Settings) -> Iterator[Wrong]:
    """Peer access switched off by its level alone; NCCL_P2P_DISABLE is compared with the flags in launch_rules."""
    level = settings.given.get("NCCL_P2P_LEVEL", "")
    if _number(settings, "NCCL_P2P_DISABLE") and level and level not in ("LOC", "0"):
        message = f"NCCL_P2P_DISABLE is on, so NCCL_P2P_LEVEL {level} has no effect"
        yield "NCCL-P2P", WARNING, message, "keep the one that is meant"
    elif level in ("LOC", "0") and settings.custom_all_reduce:
        message = "NCCL_P2P_LEVEL is LOC, so peers are never used, but SGLang's own all-reduce would still use them"
        yield "NCCL-P2P", ERROR, f"{message}, and hang or compute wrong data", "write disable-custom-all-reduce: true"


def _log_file(settings: Settings) -> Iterator[Wrong]:
    """The file is made only from WARN on, and each process needs one of its own."""
    path = settings.given.get("NCCL_DEBUG_FILE")
    if not path:
        return
    if settings.given.get("NCCL_DEBUG", "").upper() in ("", "VERSION"):
        message = "NCCL_DEBUG_FILE is set, but no file is made unless NCCL_DEBUG is WARN or more"
        yield "NCCL-DEBUG-FILE", WARNING, message, "write NCCL_DEBUG: WARN, or remove NCCL_DEBUG_FILE"
    if path.startswith("~"):
        yield "NCCL-DEBUG-FILE", ERROR, "NCCL_DEBUG_FILE begins with ~, which NCCL takes literally", "write the path"
    if "%p" not in path and not path.startswith("/dev/std"):
        message = f"NCCL_DEBUG_FILE {_short(path)} has no %p: all ranks overwrite one file"
        yield "NCCL-DEBUG-FILE", WARNING, message, "put %h and %p into the name"


def _protocol(settings: Settings) -> Iterator[Wrong]:
    lists = _lists(settings.given.get("NCCL_PROTO", ""))
    if any("ll128" in listed.lower().split(",") for listed in lists if not listed.startswith("^")):
        message = "NCCL_PROTO asks for LL128, which corrupts data on platforms that do not support it"
        yield "NCCL-LL128", WARNING, message, "leave LL128 to NCCL: remove it from NCCL_PROTO"


def _without_reason(settings: Settings) -> Iterator[Wrong]:
    known = table()
    names = [
        name
        for name in sorted(settings.given)
        if known.get(name, {}).get("debugging") and "until" not in known[name] and name not in settings.reasons
    ]
    if names:
        message = f"NVIDIA counts {', '.join(names)} among what is for debugging and not for production"
        fix = "remove it, or write the reason as a comment above the line that sets it"
        yield "NCCL-DEBUGGING", WARNING, message, fix


RULES: tuple[Callable[[Settings], Iterator[Wrong]], ...] = (
    _channels,
    _sockets,
    _peers,
    _log_file,
    _protocol,
    _without_reason,
)
