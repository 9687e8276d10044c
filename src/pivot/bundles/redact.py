"""Masking of secrets in text.

This module also travels to hosts as part of one script (see `pivot.bundles.bundle.collector`), so it uses nothing but
the standard library and runs on Python 3.9. Two things are masked: values that the caller knows to be secret, in every
spelling they take on in practice, and whatever stands where secrets stand (``api_key=…``, ``Authorization: …``).
"""

from __future__ import annotations

import base64
import collections
import json
import re
import shlex
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pivot.bundles.secret_names import secret_name
from pivot.bundles.secret_shapes import REQUEST, SHAPES, ordinary

MASK = "<redacted>"
PROMPT = "<text of a request left out>"
MIN_KNOWN = 3  # a shorter value says nothing, and masking it would blacken every text
STANDS_ALONE = 8  # known values below this length are masked only where they are a word of their own
LONG_LINE = 4096  # from here on a writer may have cut the line (journald: 48 KiB), inside a secret too

_SIGN = re.compile(r"=>|->|:=|[:=]")
_COLOURS = r"(?:\x1b\[[0-9;]*m)*"
# a line of a unit or a script that goes on in the next one; systemd passes over comments between
_CONTINUED = r"\\\r?\n(?:[ \t]*[\#;][^\n]*\n)*"
_PAIR = re.compile(
    rf"""(?<!\#)(?P<dash>--)?[\d.-]*(?P<name>[A-Za-z_][\w.-]*)
        (?P<sep>{_COLOURS}["'\\]*\]?{_COLOURS}[ \t]*(?:{_SIGN.pattern})[ \t]*{_COLOURS}
            (?:{_CONTINUED}[ \t]*)?(?:[bu](?=["']))?(?=\S)
        |:[ \t]*\r?\n(?:[ \t]+(?:-[ \t]+)?|-[ \t]+)(?=\S)(?!\S+:(?:\s|\Z))  # name:, and lines of its own
        |["'\\]*,[ \t]*b?(?=["'\\])                                   # ("name", "value")
        |(?:["']|\\(?!\r?\n))*,?(?:{_CONTINUED}|[\s\0])+(?=\S))        # --name value
    """,
    re.VERBOSE,
)
# one of these stands in every name that says secret; "token" is looked for apart, because logs count tokens of text
_CORES = ("key", "secret", "pass", "credential", "auth", "cookie", "pwd", "dsn", "ticket")
_BEHIND_TOKEN = frozenset("/)s")  # token/s, (token), tokens: no name that says secret goes on so
_KEPT = re.compile(r"(?:None|null|none|True|False|true|false|~)?(?=[\s,;)}\]\"']|\Z)")
_BLOCK_SCALAR = re.compile(r"[|>][+-]?\d?[+-]?[ \t]*\n(?P<body>(?:[ \t]+\S[^\n]*(?:\n|\Z))+)")
_NUMBER = re.compile(r"-?[\d.,]+(?:e-?\d+)?(?=[\s,;)}\]\"'/%]|\Z)")
_LOG_PREFIX = re.compile(r"\S+ \S+ \S+\[\d+\]: ")


def spellings(secret: str) -> list[str]:
    """Every spelling of a known secret that is searched for, longest first; empty when it is too short to be one.

    Plain, URL-quoted, inside JSON (also twice), Python, YAML and shell quotes, hexadecimal, and base64 on its own
    as well as inside a longer base64 text at each of the three alignments.
    """
    secret = secret.strip("\n")
    if len(secret) < MIN_KNOWN:
        return []
    quoted = urllib.parse.quote(secret, safe="")
    ascii_json = json.dumps(secret)[1:-1]
    found = {
        secret,
        quoted,
        urllib.parse.quote(secret),
        urllib.parse.quote_plus(secret),
        re.sub(r"%[0-9A-F]{2}", lambda match: match.group().lower(), quoted),
        ascii_json,
        json.dumps(secret, ensure_ascii=False)[1:-1],
        json.dumps(ascii_json)[1:-1],
        repr(secret)[1:-1],
        secret.replace("\\", "\\\\").replace("'", "\\'"),
        secret.replace("'", "''"),
        shlex.quote(secret).strip("'"),
    }
    if len(secret) >= STANDS_ALONE:
        raw = secret.encode("utf-8", "surrogateescape")
        found.update((raw.hex(), raw.hex().upper()))
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            found.add(encode(raw).decode().rstrip("="))
            for shift in range(3):
                text = encode(b"\0" * shift + raw).decode().rstrip("=")
                found.add(text[(0, 2, 3)[shift] : len(text) - bool((shift + len(raw)) % 3)])
    found.update(line.strip() for line in secret.splitlines() if len(line.strip()) >= 16)
    return sorted((text for text in found if len(text) >= MIN_KNOWN), key=len, reverse=True)


class Redactor:
    """Masks secrets in text; `masked` counts what was masked so far, `report` says of which names or kinds."""

    def __init__(self, secrets: Iterable[str] = (), *, prompts: bool = True) -> None:
        """secrets: values known to be secret; the empty ones and those too short to mean anything are left out.

        prompts: whether texts of requests may stay.
        """
        self.masked = 0
        self.report: collections.Counter[str] = collections.Counter()
        self._prompts = prompts
        self._long: list[str] = []
        self._short: list[re.Pattern[str]] = []
        self._known: set[str] = set()
        self.learn(secrets)

    def learn(self, secrets: Iterable[str]) -> None:
        """Take more values as known."""
        self._known.update(secret for secret in secrets if secret and secret != MASK)
        forms = sorted({form for secret in self._known for form in spellings(secret)}, key=len, reverse=True)
        self._long = [form for form in forms if len(form) >= STANDS_ALONE]
        self._short = [
            re.compile(r"(?<![A-Za-z0-9])" + re.escape(form) + r"(?![A-Za-z0-9])")
            for form in forms
            if len(form) < STANDS_ALONE
        ]

    def text(self, text: str, *, cut_start: bool = False, cut_end: bool = False) -> str:
        """The text with every secret masked. Masking a masked text changes nothing.

        cut_start, cut_end: a size limit cut the text there, perhaps inside a secret: the word at that end is masked.
        """
        for form in self._long:
            if form in text:
                self._count(text.count(form), "known value")
                text = text.replace(form, MASK)
        for pattern in self._short:
            text = self._sub(pattern, MASK, text, "known value")
        text = self._broken_lines(text)
        pieces, done = [], 0
        for begin, end in ordinary(text):
            pieces += [self._recognised(text[done:begin]), text[begin:end]]
            done = end
        text = "".join([*pieces, self._recognised(text[done:])])
        if cut_start:
            text = self._sub(re.compile(r"\A[^\s\"'<>]+"), MASK, text, "cut word")
        if cut_end:
            # searched backwards: a pattern would try every position of a long word
            last = max(text.rfind(border) for border in " \t\n\r\"'<>=:") + 1
            self._count(last < len(text), "cut word")
            text = text[:last] + MASK if last < len(text) else text
        return text

    def _recognised(self, text: str) -> str:
        """A text with what stands where secrets stand, or has a secret's own shape, masked."""
        if not text:
            return text
        # whether anything is there at all is asked of the words alone: a long log has the same ones again and again
        words = " ".join(set(text.split()))
        if _is_named(words):
            text = self._pairs(text)
        if not self._prompts and (": obj=" in text or "request." in text):
            text = self._sub(REQUEST, f"\\g<1>{PROMPT}", text, "text of a request")
        for hints, pattern, replacement in SHAPES:
            if any(hint in (text if " " in hint else words) for hint in hints):
                shape = re.compile(pattern, re.MULTILINE)
                text = self._sub(shape, replacement.format(MASK), text, f"looks like {hints[0].strip()}…")
        return text

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The variables with secret values masked: whole where the name says so, else like any text."""
        result = {}
        for name, value in environment.items():
            kind = secret_name(name)
            if value and kind and not (kind == "token" and _NUMBER.fullmatch(value)):
                self._count(value != MASK, name)
                result[name] = MASK
            else:
                result[name] = self._of(name, value)
        return result

    def _of(self, name: str, value: str) -> str:
        """A value's text; what stands behind a proxy's name may be a login without anything else to know it by."""
        if not name.lower().endswith("proxy"):
            return self.text(value)
        return self.text(f"{name}={value}").removeprefix(f"{name}=")

    def data(self, value: object) -> object:
        """What JSON can hold, its texts masked, and what stands under a name that says secret; it stays JSON."""
        if isinstance(value, Mapping):
            named = str(value.get("name", ""))  # {"name": "HF_TOKEN", "value": …}
            return {
                str(name): self._named(named if name == "value" and named else str(name), inner)
                for name, inner in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.data(inner) for inner in value]
        return self.text(value) if isinstance(value, str) else value

    def _named(self, name: str, value: object) -> object:
        kind = secret_name(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        counts = kind == "token" and (number or _NUMBER.fullmatch(str(value)) is not None)
        if kind and value and (number or isinstance(value, str)) and not counts:
            self._count(value != MASK, name)
            return MASK
        return self._of(name, value) if isinstance(value, str) else self.data(value)

    def arguments(self, argv: Sequence[str]) -> list[str]:
        """A command line, argument by argument: ``--api-key VALUE`` and ``--api-key=VALUE`` are masked."""
        result: list[str] = []
        for position, argument in enumerate(argv):
            before = argv[position - 1] if position else ""
            asked = before.startswith("-") and "=" not in before and secret_name(before.lstrip("-"))
            name, equals, _ = argument.partition("=")
            if asked and not argument.startswith("--"):
                self._count(1, before.lstrip("-"))
                result.append(MASK)
            elif name.startswith("-") and equals and secret_name(name.lstrip("-")):
                self._count(1, name.lstrip("-"))
                result.append(f"{name}={MASK}")
            else:
                result.append(self._of(before if before.startswith("-") else "", argument))
        return result

    def _count(self, count: int, what: str) -> None:
        """Put down what was masked; the names of secrets are kept short, and few."""
        if count:
            self.masked += count
            name = what[:40]
            self.report[name if name in self.report or len(self.report) < 100 else "others"] += count

    def _sub(self, pattern: re.Pattern[str], replacement: str, text: str, what: str) -> str:
        changed, count = pattern.subn(replacement, text)
        if changed != text:
            self._count(count, what)
        return changed

    def _broken_lines(self, text: str) -> str:
        """Mask the two halves of a known secret that a writer's line limit has cut in two."""
        if not self._long or not _has_long_line(text):
            return text
        lines = text.split("\n")
        for number in range(len(lines) - 1):
            if len(lines[number]) < LONG_LINE:
                continue
            for form in self._long:
                taken = next((n for n in range(len(form) - 1, 2, -1) if lines[number].endswith(form[:n])), 0)
                prefix = _LOG_PREFIX.match(lines[number + 1])
                start = prefix.end() if prefix else 0
                if taken and lines[number + 1].startswith(form[taken:], start):
                    lines[number] = lines[number][:-taken] + MASK
                    after = lines[number + 1]
                    lines[number + 1] = after[:start] + MASK + after[start + len(form) - taken :]
                    self._count(1, "known value")
                    break
        return "\n".join(lines)

    def _pairs(self, text: str) -> str:
        """Mask the values of names that say secret, in the notation they stand in."""
        pieces: list[str] = []
        done = 0
        for begin, end, name in _named_spans(text):
            pieces += [text[done:begin], MASK]
            self._count(text[begin:end] != MASK, name)
            done = end
        return "".join([*pieces, text[done:]]) if pieces else text


def _has_long_line(text: str) -> bool:
    """Whether a line has LONG_LINE characters or more: it covers one of these pieces wholly. A shorter one may too."""
    piece = LONG_LINE // 2
    return any(text.find("\n", start, start + piece) < 0 for start in range(0, len(text) - piece, piece))


def secret_spans(text: str) -> Iterator[tuple[int, int]]:
    """Where the values of names that say secret begin and end, in order."""
    return ((begin, end) for begin, end, _ in _named_spans(text))


def _named_spans(text: str) -> Iterator[tuple[int, int, str]]:
    done = 0
    for hit in _core_positions(text):
        start = _name_start(text, hit)
        match = _PAIR.match(text, start) if start >= done else None
        kind = secret_name(match.group("name")) if match else ""
        if not match or not kind:
            continue
        separator = match.group("sep")
        signed = match.group("dash") or _SIGN.search(separator) or (separator == "\t" and kind == "sure")
        signed = signed or ("," in separator and text[max(0, start - 2) : start] in ("('", '("'))
        if not signed and (kind != "header" or not separator.strip(" \t\"'\\bu")):
            continue
        begin, end = value_span(text, match, kind)
        if end > begin:
            yield begin, end, match.group("name")
            done = end


def secret_values(text: str) -> list[str]:
    """The values themselves, to be looked for elsewhere too, e.g. an API key of a configuration file in a log."""
    values = []
    for begin, end in secret_spans(text):
        raw = text[begin:end].strip()
        values.append(raw)
        if "\\" in raw:
            try:
                values.append(json.loads(f'"{raw}"'))
            except ValueError:  # not JSON's way of escaping: the raw spelling is all there is
                continue
        elif "''" in raw:
            values.append(raw.replace("''", "'"))
    return [value for value in values if len(value) >= 6 and value != MASK]


def _is_named(words: str) -> bool:
    """Whether a word stands there that a secret's name contains."""
    lowered = words.lower()
    return "token" in lowered or any(core in lowered for core in _CORES)


def _core_positions(text: str) -> list[int]:
    """Where a word stands that a secret's name contains, in order. Plain searches: logs are long, names are few."""
    lowered = text.lower()
    if len(lowered) != len(text):  # some capitals grow when lowered, and positions would no longer fit
        lowered = re.sub(r"[A-Z]+", lambda found: found.group().lower(), text)
    hits: set[int] = set()
    for core in _CORES:
        position = lowered.find(core)
        while position >= 0:
            hits.add(position)
            position = lowered.find(core, position + len(core))
    position = lowered.find("token")
    while position >= 0:
        # the words that serving logs are full of are passed over: "#new-token: 8", "token usage", "token/s", "tokens"
        before, behind = lowered[position - 1 : position], lowered[position + 5 : position + 6]
        if not (
            behind in _BEHIND_TOKEN
            or before == "#"
            or (before == " " and behind == " " and lowered[position + 6 : position + 7].isalpha())
            or (before == "-" and _counted(lowered, position))
        ):
            hits.add(position)
        position = lowered.find("token", position + 5)
    return sorted(hits)


def _counted(text: str, position: int) -> bool:
    """Whether a name that ends there with a dash began with a ``#``: a number of tokens of text."""
    begin = text.rfind("#", max(0, position - 16), position)
    return begin >= 0 and text[begin + 1 : position].replace("-", "").isalnum()


def _name_start(text: str, position: int) -> int:
    """Where the name (with a leading ``--``) begins that contains this position; a name has at most 64 characters."""
    lowest = max(0, position - 64)
    start = position
    while start > lowest and (text[start - 1] in "_.-" or text[start - 1].isalnum()):
        start -= 1
    if text.startswith("\x1b[", start - 2):  # the letters of a colour are none of the name's
        start = min(position, text.find("m", start, position) + 1 or start)
    return start


def value_span(text: str, match: re.Match[str], kind: str) -> tuple[int, int]:
    """Where the secret value after a name begins and ends; an empty span when there is nothing to mask."""
    start = match.end("sep")
    before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
    own_line = not match.group("dash") and re.fullmatch(r"[\s\-]*(?:export +)?", before) is not None
    if "\n" in match.group("sep") and not re.search(_CONTINUED, match.group("sep")):
        item = rf"|\n{re.escape(before)}-[ \t][^\n]*" if match.group("sep").rstrip(" \t").endswith("\n-") else ""
        deeper = re.compile(rf"[^\n]*(?:\n[ \t]{{{len(before) + 1},}}[^\s][^\n]*{item})*").match(text, start)
        skipped = not own_line or deeper is None or text.startswith(MASK, start)
        return start, start if skipped or deeper is None else deeper.end()
    opening = re.compile(r"(?:[A-Za-z_][\w.]{0,40}\()?(\\*)([\"'])").match(text, start)
    if opening:
        end = _closing(text, opening.end(), len(opening.group(1)), opening.group(2))
        value = text[opening.end() : end]
        empty = not value or (kind == "token" and _NUMBER.fullmatch(value)) or value.startswith(MASK)
        return opening.end(), opening.end() if empty else end
    kept = _KEPT.match(text, start)
    if kept or text.startswith((MASK, "{", "--"), start) or (kind == "token" and _NUMBER.match(text, start)):
        return start, start
    block = _BLOCK_SCALAR.match(text, start)
    if block:
        indent = len(block.group("body")) - len(block.group("body").lstrip(" \t"))
        return block.start("body") + indent, block.end("body") - block.group("body").endswith("\n")
    if text.startswith("[", start):
        found = re.compile(r"\[[^\]\n]*(?:\n[ \t]*[\"'][^\]\n]*)*").match(text, start)
        return start + 1, found.end() if found else start
    if text[match.start() - 1 : match.start()] in ('"', "'") and not match.group("sep").startswith(('"', "'")):
        stop = re.compile(rf"[^\n{text[match.start() - 1]}]*")  # "NAME=value with spaces", quoted as a whole
    elif kind == "header" and not re.search(r"[\"']", before):
        stop = re.compile(r"[^\n\0]*[^\s\0]")
    elif own_line or kind == "header":
        stop = re.compile(r"[^\n\"']*[^\s\"']")
    else:
        stop = re.compile(r"[^\s\0\"'\\]+")
    found = stop.match(text, start)
    return start, found.end() if found else start


def _closing(text: str, start: int, level: int, quote: str) -> int:
    r"""The index of the quote that closes a string opened by `level` backslashes and `quote`.

    Each notation inside another doubles the backslashes: ``"``, ``\"``, ``\\\"``. A string that was cut, or that
    never closes on its line, ends with the line.
    """
    line_end = text.find("\n", start)
    line_end = len(text) if line_end < 0 else line_end
    for found in re.compile(rf"(\\*){quote}").finditer(text, start, line_end):
        slashes = len(found.group(1))
        if slashes < level or (slashes - level) % (2 * (level + 1)):
            continue
        if not level and quote == "'" and text.startswith("''", found.end() - 1):
            return _closing(text, found.end() + 1, level, quote)
        return found.end() - 1 - level
    return line_end
