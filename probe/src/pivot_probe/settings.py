"""What the environment asks for."""

from __future__ import annotations

import calendar
import dataclasses
import os
import time
from pathlib import Path

DEFAULT_BYTES = 256 * 1024 * 1024
DEFAULT_ROWS = 16
TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclasses.dataclass(frozen=True)
class Settings:
    """directory: existing; max_bytes and tensor_bytes: of all records and tensor files in it; rows: recorded of each
    forward; until: UTC time at which recording ends, seconds since 1970, None for never."""

    directory: Path
    max_bytes: int = DEFAULT_BYTES
    tensor_bytes: int = DEFAULT_BYTES
    rows: int = DEFAULT_ROWS
    until: float | None = None

    @classmethod
    def from_environment(cls) -> Settings | None:
        """Settings from ``PIVOT_PROBE_*``, None without ``PIVOT_PROBE_DIR``; ValueError says what is wrong."""
        name = os.environ.get("PIVOT_PROBE_DIR", "")
        if not name:
            return None
        directory = Path(name)
        if not directory.is_dir():
            raise ValueError(f"PIVOT_PROBE_DIR={name} is no directory")
        return cls(
            directory,
            max_bytes=_whole("PIVOT_PROBE_MAX_BYTES", DEFAULT_BYTES, least=1),
            tensor_bytes=_whole("PIVOT_PROBE_TENSOR_BYTES", DEFAULT_BYTES, least=0),
            rows=_whole("PIVOT_PROBE_ROWS", DEFAULT_ROWS, least=1),
            until=_time("PIVOT_PROBE_UNTIL"),
        )

    @property
    def until_text(self) -> str | None:
        """`until` as the environment spells it."""
        if self.until is None:
            return None
        return time.strftime(TIME, time.gmtime(self.until))


def _whole(name: str, default: int, least: int) -> int:
    """The environment variable as a whole number of at least `least`; ValueError names the variable otherwise."""
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{name}={text} is no whole number of at least {least}")
    return int(text)


def _time(name: str) -> float | None:
    """The environment variable as seconds since 1970, None when unset; ValueError shows how a time is written."""
    text = os.environ.get(name, "")
    if not text:
        return None
    try:
        return float(calendar.timegm(time.strptime(text, TIME)))
    except ValueError:
        raise ValueError(f"{name}={text} is no UTC time such as 2026-11-29T20:00:00Z") from None
