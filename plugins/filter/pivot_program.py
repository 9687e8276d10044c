"""Thin adapter: `pivot.sent` as a filter."""

from collections.abc import Callable, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError

from pivot import sent


def program(script: str, modules: Sequence[str]) -> str:
    """A script for a host's Python in one piece with modules of this project that it imports."""
    try:
        return sent.program(script, modules)
    except (OSError, UnicodeDecodeError) as error:
        raise AnsibleFilterError(f"the host's program cannot be put together: {error}") from error


class FilterModule:
    """One filter."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Its name as roles use it."""
        return {"pivot_program": program}
