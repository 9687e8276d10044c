"""Filters over pivot.wiring and pivot.probe: thin adapters, no decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

from pivot import findings, probe, wiring


def pivot_wiring(directory: str, expected: Sequence[int] | None = None, since: str = "") -> dict[str, Any]:
    """The records in a directory of the controller → the answer as plain values (`Wiring.as_dict`)."""
    return wiring.analyse(wiring.read(Path(directory), since), expected).as_dict()


def pivot_layer_inputs(layers: Sequence[int], convention: str) -> list[int]:
    """A drafter contract's layers as layer inputs."""
    try:
        return list(wiring.as_inputs(layers, convention))
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from error


def pivot_probe_payload(directory: str) -> dict[str, str]:
    """The probe's source directory → relative path: content, as it lies on a host."""
    try:
        return probe.payload(Path(directory))
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from error


def pivot_probe_plan(
    facts: Mapping[str, Any], wanted: Mapping[str, Any], state: str, package: Mapping[str, str]
) -> dict[str, Any]:
    """What to do for `state` enabled or disabled, as plain values (`Plan.as_dict`)."""
    asked = probe.Wanted.from_mapping(wanted)
    plan = probe.plan_on(facts, asked, package) if state == "enabled" else probe.plan_off(facts, asked)
    return plan.as_dict()


def pivot_probe_restored(result: Mapping[str, Any], host: str) -> str:
    """What the restore's proof found, rendered; or, when everything is as before, what was compared."""
    return findings.render(probe.restore_findings(result, host)) or probe.restore_text(result)


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name → function, as Ansible asks for them."""
        return {
            "pivot_wiring": pivot_wiring,
            "pivot_layer_inputs": pivot_layer_inputs,
            "pivot_probe_payload": pivot_probe_payload,
            "pivot_probe_plan": pivot_probe_plan,
            "pivot_probe_restored": pivot_probe_restored,
        }
