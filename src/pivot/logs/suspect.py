"""What a suspect is: a finding whose fix is the next command, with the lines that support it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pivot.findings import Finding, Severity
from pivot.logs.evidence import Facts
from pivot.logs.log_lines import Evidence, Note

SHOWN_LINES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Suspect:
    """A finding whose fix is the next command, and the lines that support it."""

    finding: Finding
    evidence: tuple[Evidence, ...]


def suspect(
    code: str,
    severity: Severity,
    facts: Facts,
    message: str,
    fix: str,
    *,
    evidence: Iterable[Note | Evidence | None] = (),
) -> Suspect:
    """A suspect about the host of a bundle. evidence: notes count with their first and last line."""
    lines = [line for each in evidence for line in _lines(each)]
    return Suspect(Finding(code, severity, facts.host, message, fix), tuple(lines[:SHOWN_LINES]))


def _lines(of: Note | Evidence | None) -> tuple[Evidence, ...]:
    if isinstance(of, Note):
        return (of.first,) if of.count == 1 else (of.first, of.last)
    return () if of is None else (of,)
