"""Xids, the NVIDIA driver's error reports in the kernel's log: what each means for the operator (data/xids.yml)."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from pivot.findings import Finding, Severity

# a part of a card (MIG) is named after the card's address
LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([\w:.]+)(?: [^)]*)?\): *(\d{1,5}),? ?(.*)")
_STAMP = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?")
RECOVERY = 154  # its text names the action that the driver asks for, or that none is needed any more
CLOCKS = datetime.timedelta(seconds=60)  # between the time of boot and that of the first lines


@dataclasses.dataclass(frozen=True, slots=True)
class Meaning:
    """A row of the table. kind: application, memory or fatal; action: a sentence for the operator."""

    name: str
    meaning: str
    kind: str
    action: str
    blocks: bool
    source: str


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One Xid of one card. address: as the driver writes it, ``0000:a1:00``."""

    address: str
    number: int
    text: str


@functools.cache
def table() -> dict[int, Meaning]:
    """Known Xids by number; a KeyError names an action or a source that the data do not define."""
    data: dict[str, Any] = yaml.safe_load((Path(__file__).parents[1] / "data/xids.yml").read_text(encoding="utf-8"))
    rows: dict[int, dict[str, Any]] = data["xids"]
    return {
        number: Meaning(
            name=row["name"],
            meaning=row["meaning"],
            kind=row["kind"],
            action=data["actions"][row["action"]],
            blocks=bool(row.get("blocks")),
            source=data["sources"][row["basis"]],
        )
        for number, row in rows.items()
    }


def kind(number: int) -> str:
    """Application, memory or fatal; unknown for a number that is in no row."""
    row = table().get(number)
    return row.kind if row else "unknown"


def is_recovered(number: int, text: str) -> bool:
    """Whether a line says that its card needs no action any more: what it reported before is past."""
    return number == RECOVERY and re.search(r"to (?:0x0 )?\(?None\)?\s*$", text) is not None


def reports(lines: Iterable[str], boot: int) -> list[Report]:
    """Xids since boot, each of a card and number once; what came before a card's recovery was complete is left out.

    boot: seconds since 1970. Lines that carry a date before it are of an earlier boot; seconds in brackets never are.
    """
    began = datetime.datetime.fromtimestamp(boot, datetime.UTC) - CLOCKS
    found: dict[tuple[str, int], Report] = {}
    for line in lines:
        match = LINE.search(line)
        if not match or _date(line, began) < began:
            continue
        address, number = match[1].lower(), int(match[2])
        if is_recovered(number, match[3]):
            found = {key: report for key, report in found.items() if key[0] != address}
        else:
            found[address, number] = Report(address, number, match[3])
    return list(found.values())


def _date(line: str, otherwise: datetime.datetime) -> datetime.datetime:
    stamp = _STAMP.match(line)
    if stamp is None:
        return otherwise
    date = datetime.datetime.fromisoformat(stamp[0])
    return date if date.tzinfo else date.replace(tzinfo=datetime.UTC)


def xid_findings(found: Iterable[Report], spared: Collection[str], host: str) -> Iterator[Finding]:
    """What the Xids of each card mean. spared: addresses of cards that others get; they stop nothing."""
    by_card: dict[str, list[Report]] = {}
    for report in found:
        by_card.setdefault(report.address, []).append(report)
    for address, its in sorted(by_card.items()):
        subject = f"{host}, {address}"
        other = any(card.startswith(address) for card in spared)
        rows = {report: table().get(report.number) for report in its}
        if said := {report: row for report, row in rows.items() if row and row.kind == "fatal"}:
            severity = Severity.WARNING if other else Severity.ERROR
            worst = max(said.values(), key=lambda row: "power" in row.action.split(",")[0])
            text = f"is of no use any more: {_words(said)}"
            yield Finding("HOST-XID-FATAL", severity, subject, text, worst.action, worst.source)
        if said := {report: row for report, row in rows.items() if row and row.kind == "memory"}:
            worst = max(said.values(), key=lambda row: row.blocks)
            severity = Severity.ERROR if worst.blocks and not other else Severity.WARNING
            yield Finding("HOST-XID-MEMORY", severity, subject, f"has {_words(said)}", worst.action, worst.source)
        if said := {report: row for report, row in rows.items() if row and row.kind == "application"}:
            first = next(iter(said.values()))
            text = f"a program failed, not the card: {_words(said)}"
            yield Finding("HOST-XID-APPLICATION", Severity.INFO, subject, text, first.action, first.source)
        if unknown := sorted(report.number for report, row in rows.items() if row is None):
            text = f"reported Xid {', '.join(map(str, unknown))}, which no table here explains"
            fix = "look it up in NVIDIA's catalogue: docs.nvidia.com/deploy/xid-errors"
            yield Finding("HOST-XID-UNKNOWN", Severity.WARNING, subject, text, fix)


def _words(said: dict[Report, Meaning]) -> str:
    said_by_driver = {report: f" ({report.text})" for report in said if report.number == RECOVERY and report.text}
    return "; ".join(
        f"Xid {report.number}, {row.meaning}{said_by_driver.get(report, '')}" for report, row in said.items()
    )
