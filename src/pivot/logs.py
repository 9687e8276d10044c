"""Server logs → phases of a start, and the line that names why one failed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

READY = "The server is fired up and ready to roll"
_BEGIN = "Load weight begin"
_END = re.compile(r"Load weight end\b.*?\btype=(\w+)")
_CAPTURE = re.compile(r"Capture (?:\w+ )*(?:CUDA|cuda) graph (?:\w+ )*(begin|end)")
_ERROR = re.compile(r"^(?:\[[^\]]*\] )?([A-Za-z_.]*(?:Error|Exception)\b: .*|.*error: .*)$")
# what every start prints on the way down, whatever the cause
_FOLLOW_UP = ("SIGQUIT", "Child process", "EOFError")


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """A part of a start: what it was and how many seconds it took."""

    name: str
    seconds: float


def phases(lines: Sequence[tuple[float, str]]) -> list[Phase]:
    """Phases of one start from its journal: (unix time, message) pairs, the first being the start itself.

    Every milestone ends a phase, so that the seconds add up to the whole start.
    """
    found: list[Phase] = []
    if not lines:
        return found
    last = lines[0][0]

    def end(name: str, now: float) -> None:
        nonlocal last
        found.append(Phase(name, round(now - last, 1)))
        last = now

    for now, message in lines:
        loaded, capture = _END.search(message), _CAPTURE.search(message)
        if _BEGIN in message:
            end("imports" if not found else "memory pools", now)
        elif loaded:
            end(f"weights of {loaded.group(1)}", now)
        elif capture:
            end("CUDA graphs" if capture.group(1) == "end" else "memory pools", now)
        elif READY in message:
            end("warm-up", now)
            break
    return found


def cause(messages: Sequence[str]) -> str | None:
    """The message that explains a failed start: the first error that is not the consequence of another."""
    for message in messages:
        match = _ERROR.match(message.strip())
        if match and not any(word in message for word in _FOLLOW_UP):
            return match.group(1)
    return None
