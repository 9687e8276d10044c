"""Configs and headers of models, which others wrote: what in them cannot be used is a finding, never a traceback."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from pivot.findings import Finding, Severity

ERROR = Severity.ERROR
MOST_IDS = 64
LONGEST_DTYPE = 16  # F8_E4M3 has seven letters
MOST_DIMENSIONS = 8
LARGEST = 1 << 31  # no size, count or id of a model is larger


class Findings:
    """Findings of one pair, in the order they are found."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.items: list[Finding] = []

    def add(self, code: str, severity: Severity, message: str, fix: str) -> None:
        """One more; the code without its beginning ``DRAFTER-``."""
        self.items.append(Finding(f"DRAFTER-{code}", severity, self.subject, message, fix))


class Config:
    """One config.json; what has the wrong type is a finding once, and then as if it were missing."""

    def __init__(self, name: str, data: object, found: Findings) -> None:
        self.name, self.found = name, found
        self.data: Mapping[str, Any] = data if isinstance(data, Mapping) else {}
        self._said: set[str] = set()
        if not isinstance(data, Mapping):
            self._wrong("", data, "a JSON object")

    def _wrong(self, key: str, value: object, right: str) -> None:
        if key not in self._said:
            self._said.add(key)
            what = f"{key} in {self.name}" if key else self.name
            message = f"{what} is {short(value)} ({kind_of(value)}), not {right}"
            self.found.add("CONFIG", ERROR, message, f"fetch the pinned revision again, or write {right}")

    def integer(self, key: str) -> int | None:
        """A positive whole number, None when there is none."""
        value = self.data.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < LARGEST:
            self._wrong(key, value, "a positive whole number")
            return None
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object, empty when there is none."""
        value = self.data.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self._wrong(key, value, "a JSON object")
            return {}
        return value

    def text(self, key: str) -> str | None:
        """A text, None when there is none."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, str):
            self._wrong(key, value, "a text")
            return None
        return value

    @property
    def architecture(self) -> str | None:
        """The first of its architectures, which is the one that is served."""
        value = self.data.get("architectures")
        if isinstance(value, list) and value and isinstance(value[0], str):
            return value[0]
        if self.data:
            self._wrong("architectures", value, "a list with the name of a class")
        return None

    @property
    def rope(self) -> tuple[object, Mapping[str, Any]]:
        """theta and the scaling of the rotary embedding, wherever this generation of configs puts them."""
        scaling = {**self.mapping("rope_scaling"), **self.mapping("rope_parameters")}
        theta = self.data.get("rope_theta", scaling.get("rope_theta"))
        kind = scaling.get("rope_type", scaling.get("type"))
        return theta, {} if kind in (None, "default") else scaling


def short(value: object) -> str:
    """A value of somebody else's file, short enough for a sentence."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a number of more digits than Python spells
        return "a huge number"


def kind_of(value: object) -> str:
    """The plain type of a value; Ansible hands on subclasses of its own."""
    kinds = (bool, int, float, str, list, dict)
    return next((kind.__name__ for kind in kinds if isinstance(value, kind)), type(value).__name__)


def read_ids(value: object, where: str, found: Findings) -> list[int] | None:
    """Layer ids as whole numbers, None when there are none or they cannot be used (then a finding says so)."""
    if value is None:
        return None
    right = "write a list of whole numbers, for example [2, 30, 58]"
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MOST_IDS:
        found.add("IDS", ERROR, f"{where} is {short(value)}, not a list of layer numbers", right)
        return None
    wrong = [item for item in value if isinstance(item, bool) or not isinstance(item, int) or abs(item) >= LARGEST]
    if wrong:
        message = f"{where} holds {short(wrong[0])} ({kind_of(wrong[0])}), which is no layer number"
        found.add("IDS", ERROR, message, right)
        return None
    ids = [int(item) for item in value]
    if len(set(ids)) < len(ids):
        twice = next(item for item in ids if ids.count(item) > 1)
        message = f"{where} names {twice} more than once, and a layer is kept once"
        found.add("IDS", ERROR, message, "name each layer once")
        return None
    return ids


def read_tensors(value: object, found: Findings) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """The header as name → dtype and shape, None when it is not known or cannot be used."""
    if value is None:
        return None
    entries: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, entry in value.items() if isinstance(value, Mapping) else [("", value)]:
        dtype = entry.get("dtype") if isinstance(entry, Mapping) else None
        shape = entry.get("shape") if isinstance(entry, Mapping) else None
        sizes = isinstance(shape, list | tuple) and all(type(size) is int and 0 <= size < LARGEST for size in shape)
        named = isinstance(name, str) and isinstance(dtype, str) and len(dtype) <= LONGEST_DTYPE
        sized = isinstance(shape, list | tuple) and len(shape) <= MOST_DIMENSIONS
        if not (named and sized and sizes) or not isinstance(dtype, str) or not isinstance(shape, list | tuple):
            message = f"the header of the drafter's weights has {short(entry)} for {short(name)}, not dtype and shape"
            fix = "fetch the pinned revision again and write its manifest anew: pivot manifest"
            found.add("HEADER", ERROR, message, fix)
            return None
        entries[name] = (dtype.upper(), tuple(shape))
    return entries
