"""Findings: what every check returns, and how people read them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence


class Severity(enum.StrEnum):
    """How much a finding matters: an ERROR stops the run, a WARNING and an INFO are only printed."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One observation of a check.

    code: stable, upper case with dashes, e.g. ``ENGINE-GAP``; subject: the thing looked at, e.g. a host or a
    variable; message: what is wrong and where it was set; fix: what would be right, as a command or a value.
    """

    code: str
    severity: Severity
    subject: str
    message: str
    fix: str
    reference: str = ""

    def as_dict(self) -> dict[str, str]:
        """The finding as plain strings, for JSON and for Ansible results."""
        return {key: str(value) for key, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, data: dict[str, str]) -> Finding:
        """The inverse of `as_dict`; a KeyError or ValueError names the field that is missing or unknown."""
        return cls(
            code=data["code"],
            severity=Severity(data["severity"]),
            subject=data["subject"],
            message=data["message"],
            fix=data["fix"],
            reference=data.get("reference", ""),
        )


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Only the findings that stop a run."""
    return [finding for finding in findings if finding.severity is Severity.ERROR]


def render(findings: Sequence[Finding]) -> str:
    """Findings as text for a terminal, errors first, in the order they were found."""
    order = list(Severity)
    lines: list[str] = []
    for finding in sorted(findings, key=lambda item: order.index(item.severity)):
        lines.append(f"{finding.severity.upper():<7} {finding.code}  {finding.subject}: {finding.message}")
        if finding.fix:
            lines.append(f"        fix: {finding.fix}")
        if finding.reference:
            lines.append(f"        see: {finding.reference}")
    return "\n".join(lines)
