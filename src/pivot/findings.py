"""Findings: what every check returns, and how people read them."""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

LONGEST = 4000  # letters


class Severity(enum.StrEnum):
    """How much a finding matters: an ERROR stops the run, a WARNING and an INFO are only printed."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One observation of a check.

    code: stable, upper case with dashes, e.g. ``ENGINE-GAP``; subject: the thing looked at, e.g. a host or a
    variable; message: what is wrong and where it was set; fix: what would be right, as a command or a value. Whatever
    of other people's files is quoted in them is made `plain`.
    """

    code: str
    severity: Severity
    subject: str
    message: str
    fix: str
    reference: str = ""

    def __post_init__(self) -> None:
        """Make the texts plain."""
        for name in ("subject", "message", "fix", "reference"):
            object.__setattr__(self, name, plain(getattr(self, name)))

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


def plain(text: str) -> str:
    """A text that a terminal can print: control characters and halves of characters as escapes, and not without end."""
    if len(text) > LONGEST:
        kept = LONGEST - 30  # what is added is shorter
        text = f"{text[:kept]} … ({len(text) - kept} more letters)"
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Only the findings that stop a run."""
    return [finding for finding in findings if finding.severity is Severity.ERROR]


def waive(
    subject: str, findings: Iterable[Finding], waivers: object, known: Callable[[], Collection[str]]
) -> list[Finding]:
    """The findings, those that the inventory accepts as INFO with the reason; then what is wrong with the waivers.

    waivers: the variable pivot_waivers, code → reason; known: gives all codes, asked only when something is waived.
    """
    if not waivers:
        return list(findings)
    if not isinstance(waivers, Mapping):
        message = "pivot_waivers is no mapping of a code to a reason"
        return [*findings, Finding("WAIVER-FORM", Severity.ERROR, subject, message, "write {CODE: reason}")]
    wrong, reasons, codes = [], {}, known()
    for code, reason in waivers.items():
        where = f"pivot_waivers.{code!s:.40}"
        if code not in codes:
            close = difflib.get_close_matches(str(code)[:40], codes, n=1)
            fix = f"did you mean {close[0]}?" if close else "docs/faults.md has all codes"
            wrong.append(Finding("WAIVER-UNKNOWN", Severity.ERROR, subject, f"{where} is no code of a finding", fix))
        elif not isinstance(reason, str) or not reason.strip():
            fix = "write why it is accepted, or remove it"
            wrong.append(Finding("WAIVER-REASON", Severity.ERROR, subject, f"{where} has no reason", fix))
        else:
            reasons[code] = " ".join(reason.split())
    return [*(_waived(finding, reasons.get(finding.code)) for finding in findings), *wrong]


def _waived(finding: Finding, reason: str | None) -> Finding:
    if reason is None or finding.severity is Severity.INFO:
        return finding
    message = f"{finding.message} (accepted by pivot_waivers: {reason})"
    return dataclasses.replace(finding, severity=Severity.INFO, message=message)


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
