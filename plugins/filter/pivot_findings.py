"""Thin adapter: `pivot.findings` for lists of dictionaries, as Ansible carries them."""

from collections.abc import Callable, Sequence
from typing import Any

from pivot import findings
from pivot.findings import Finding


def render(items: Sequence[dict[str, str]]) -> str:
    """Findings as text for people."""
    return findings.render([Finding.from_dict(item) for item in items])


def errors(items: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Only the findings that stop a run."""
    return [finding.as_dict() for finding in findings.errors([Finding.from_dict(item) for item in items])]


class FilterModule:
    """Filters about findings."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names as the roles use them."""
        return {"pivot_findings_render": render, "pivot_findings_errors": errors}
