"""One start of a server, from its messages: the phases that it went through, and why it failed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from pivot.logs.log_lines import PREFIX

READY = "The server is fired up and ready to roll"
BEGIN = "Load weight begin"
END = re.compile(r"Load weight end\b.*?\btype=(\w+)")
CAPTURE = re.compile(r"Capture [\w \-]*?\b(begin|end)\b")
_ERROR = re.compile(r"^(?:\[[^\]]*\] )?([A-Za-z_.]*(?:Error|Exception)\b: .*|.*error: .*)$")
# what every start prints on the way down, whatever the cause
FOLLOW_UP = ("SIGQUIT", "Child process", "EOFError", "scheduler died during initialization", "Initialization failed")


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """A part of a start: what it was and how many seconds it took."""

    name: str
    seconds: float


def phases(lines: Sequence[tuple[float, str]]) -> list[Phase]:
    """Phases of one start from its journal: (unix time, message) pairs, the first being the start itself.

    Every milestone ends a phase, so that the seconds add up to the whole start. Of several ranks, which all print
    the same milestones, the first that is seen counts.
    """
    found: list[Phase] = []
    if not lines:
        return found
    last = lines[0][0]
    leader: str | None = None

    def end(name: str, now: float) -> None:
        nonlocal last
        found.append(Phase(name, round(now - last, 1)))
        last = now

    for now, message in lines:
        loaded, capture = END.search(message), CAPTURE.search(message)
        if READY in message:
            end("warm-up", now)
            break
        if not (loaded or capture or BEGIN in message):
            continue
        prefix = PREFIX.match(message)
        rank = prefix.group(4).strip() if prefix else ""
        leader = rank if leader is None else leader
        if rank != leader:
            continue
        if loaded:
            end(f"weights of {loaded.group(1)}", now)
        elif capture:
            end("CUDA graphs" if capture.group(1) == "end" else "memory pools", now)
        else:
            end("imports" if not found else "memory pools", now)
    return found


def cause(messages: Sequence[str]) -> str | None:
    """The message that explains a failed start: the first error that is not the consequence of another."""
    for message in messages:
        match = _ERROR.match(message.strip())
        if match and not any(word in message for word in FOLLOW_UP):
            return match.group(1)
    return None
