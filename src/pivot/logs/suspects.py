"""What may be behind a server's state: suspects in order, each with the lines that support it and the next command.

Causes that explain others stand first: a full volume before the exception it made, a stopped process before silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pivot.logs import suspects_ends, suspects_machine, suspects_ranks, suspects_served, suspects_told
from pivot.logs.evidence import Facts
from pivot.logs.suspect import Suspect

CHECKS: tuple[Callable[[Facts], Iterator[Suspect]], ...] = (
    *suspects_machine.CHECKS,
    suspects_told.machine,
    suspects_ranks.processes,
    suspects_told.engine,
    suspects_served.target_twice,
    *suspects_ranks.CHECKS,
    *suspects_ends.CHECKS,
    *suspects_served.CHECKS,
    suspects_told.aside,
)


def suspects(facts: Facts) -> list[Suspect]:
    """All suspects, the likeliest cause first."""
    return [suspect for check in CHECKS for suspect in check(facts)]
