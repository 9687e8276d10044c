"""How far a long piece of work is, as a line for the person who waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def gigabytes(count: float) -> str:
    """Bytes for people: MB below a gigabyte."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def left(seconds: float) -> str:
    """A duration for people: ``40 s``, ``12 min`` or ``1 h 19 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def line(host: str, told: Mapping[str, Any]) -> str:
    """One line: what is being done, bytes, rate, time left.

    told: phase, done and total in bytes, rate in bytes a second, as weights_job.py and pivot.checkpoints.weights_send
    write them.
    """
    done, total, rate = told["done"], told["total"], told["rate"]
    parts = [f"{host}: {told['phase']}"]
    if total:
        parts.append(f"{gigabytes(min(done, total))} of {gigabytes(total)}")
    if total and rate > 0:
        parts += [f"{gigabytes(rate)}/s", f"{left(max(0, total - done) / rate)} left"]
    return ", ".join(parts)
