"""Filters over pivot.wirings.wiring: thin adapters, no decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError

from pivot.wirings import wiring


def pivot_layer_inputs(layers: Sequence[int], convention: str) -> list[int]:
    """A drafter contract's layers as layer inputs."""
    try:
        return list(wiring.as_inputs(layers, convention))
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name → function, as Ansible asks for them."""
        return {
            "pivot_layer_inputs": pivot_layer_inputs,
        }
