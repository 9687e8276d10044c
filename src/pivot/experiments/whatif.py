"""What-if without a restart: the judgement on what was predicted against what was served.

The evaluator (``roles/debug_probes/files/whatif``, on the host) predicts the accept length of a drafter for every
candidate (`pivot.experiments.whatif_candidates`); the figures are compared in `pivot.experiments.whatif_figures`, and
what they mean is in `pivot.experiments.whatif_findings`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pivot.drafters.layers import numbers
from pivot.experiments.whatif_figures import Figures, Look, Question, Row, known, rows_of, served_figures, wiring_row
from pivot.experiments.whatif_findings import FEWEST, blamed, compared, serving
from pivot.findings import Finding

FORMAT = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Judgement:
    """The answer. reference: the row that what was served is compared with; base: the row at which the drafter's
    parts are judged; findings: of serving first, then of the choice of layers, then of the drafter."""

    served: Figures | None
    reference: Row | None
    base: Row | None
    rows: tuple[Row, ...]
    left_out: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def tells(self) -> bool:
        """Whether there are enough prompts for it to clear anybody."""
        return compared(self.served, self.reference) >= FEWEST

    def by_family(self, *families: str) -> list[Finding]:
        """The findings whose code begins so."""
        return [finding for finding in self.findings if finding.code.startswith(families)]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for Ansible."""
        return {
            "format": FORMAT,
            "served": None if self.served is None else _figures(self.served),
            "reference": None if self.reference is None else self.reference.name,
            "base": None if self.base is None else self.base.name,
            "rows": [
                {"name": row.name, "layers": list(row.layers), "repair": dict(row.repair), **_figures(row.figures)}
                for row in self.rows
            ],
            "left_out": [{"name": name, "reason": reason} for name, reason in self.left_out],
            "notes": list(self.notes),
            "findings": [finding.as_dict() for finding in self.findings],
            "text": self.text(),
        }

    def text(self, most: int = 12) -> str:
        """The table for a terminal: what was served, then wirings and repairs, best first."""
        lines = [f"{'layer inputs':<14} {'predicted':>9} {'+-':>5}  {'by position':<18} what it is"]
        if self.served:
            lines.append(f"{'':<14} {self.served.length:>9.2f} {'':>5}  {_shares(self.served):<18} SERVED")
        parts = [
            ("", [row for row in self.rows if row.is_wiring]),
            ("parts of the drafter, and what it is fed:", [row for row in self.rows if not row.is_wiring]),
        ]
        for title, rows in parts:
            shown = sorted(rows, key=lambda row: -row.figures.length)
            kept = shown[:most] + [row for row in shown[most:] if row in (self.reference, self.base)]
            lines += [title] if title and kept else []
            lines += [self._line(row) for row in kept]
            if len(shown) > len(kept):
                lines.append(f"… and {len(shown) - len(kept)} more")
        lines += [f"note: {note}" for note in self.notes[:most]]
        return "\n".join(line for line in lines if line)

    def _line(self, row: Row) -> str:
        spread = ""
        if self.base is not None and row is not self.base:
            chance = row.figures.against(self.base.figures).margin
            spread = f"{chance:.2f}" if math.isfinite(chance) else ""
        return (
            f"{numbers(row.layers):<14} {row.figures.length:>9.2f} {spread:>5}  {_shares(row.figures):<18} {row.name}"
        )


def _figures(figures: Figures) -> dict[str, Any]:
    return {
        "length": figures.length,
        "per_position": list(figures.per_position),
        "by_prompt": dict(figures.by_prompt),
    }


def _shares(figures: Figures) -> str:
    return " ".join(f"{share:.2f}" for share in figures.per_position)


def judge(question: Question) -> Judgement:
    """All findings about predicted against served, worst suspects first within each part."""
    rows = rows_of(question.evaluation)
    served = served_figures(question.asked)
    wired = known(question.served)
    contract = tuple(question.contract) if question.contract else None
    base = wiring_row(rows, contract) or wiring_row(rows, wired) or (rows[0] if rows else None)
    reference = wiring_row(rows, wired) or base
    look = Look(question, rows, served, wired, contract, reference, base)
    found = [*serving(look), *blamed(look)]
    return Judgement(
        served,
        reference,
        base,
        tuple(rows),
        tuple((item["name"], item["reason"]) for item in question.evaluation.get("left_out", [])),
        tuple(question.evaluation.get("notes", [])),
        tuple(found),
    )
