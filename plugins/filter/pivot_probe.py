"""Filters over pivot.experiments.probe: thin adapters, no decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

from pivot import findings, transfer
from pivot.experiments import experiment, probe


def payload(directory: str) -> dict[str, str]:
    """The probe's source directory → relative path: content, as it lies on a host."""
    try:
        return probe.payload(Path(directory))
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from error


def targets(directory: str) -> list[str]:
    """What the probe needs of an engine."""
    return probe.targets(Path(directory))


def plan(
    facts: Mapping[str, Any], wanted: Mapping[str, Any], state: str, package: Mapping[str, str], host: str
) -> dict[str, Any]:
    """What to do for `state` enabled or disabled, as plain values (`Plan.as_dict`)."""
    asked = probe.Wanted.from_mapping(wanted)
    made = probe.plan_on(facts, asked, package, host) if state == "enabled" else probe.plan_off(facts, asked)
    return made.as_dict()


def switched(result: Mapping[str, Any], host: str) -> str:
    """What else than the probe the restart brought in, rendered, and how often the service was started."""
    found = findings.render(probe.switched_findings(result, host))
    return found + ("\n" if found else "") + f"the probe is in{probe.starts_text(result)}"


def restored(result: Mapping[str, Any], host: str) -> str:
    """What the restore's proof found, rendered; or, when everything is as before, what was compared."""
    return findings.render(probe.restore_findings(result, host)) or probe.restore_text(result)


def failure(result: Mapping[str, Any]) -> str:
    """One sentence about a task that failed."""
    return probe.failure_text(result)


def from_host(connection: Mapping[str, Any], source: str, destination: str) -> list[str]:
    """The rsync call that brings this session's records to the controller; files of states stay on the host."""
    try:
        return transfer.rsync_from(source, destination, connection, probe.RSYNC)
    except transfer.TransferError as error:
        raise AnsibleFilterError(str(error)) from error


def _experiment(values: Mapping[str, Any]) -> experiment.Experiment:
    contract = values["contract"]
    return experiment.Experiment(
        **{
            **values,
            "records": Path(values["records"]),
            "contract": None if contract is None else sorted(int(layer) for layer in contract),
        }
    )


def question(values: Mapping[str, Any], places: Mapping[str, Any]) -> dict[str, Any] | None:
    """What to ask the evaluator; places: tensors, drafter, target (on the host) and others."""
    return experiment.question(_experiment(values), **places)


def answer(values: Mapping[str, Any]) -> dict[str, Any]:
    """The diagnosis as plain values, and the wiring's own lines as wiring_text."""
    made = experiment.answer(_experiment(values))
    return {**made.as_dict(), "wiring_text": made.wiring.text(), "slices": [str(piece) for piece in made.wiring.slices]}


def summary(answered: Mapping[str, Any]) -> dict[str, str]:
    """What the end of a run says about an answer."""
    return {
        "first suspect": answered["headline"],
        "reached the drafter": "; ".join(answered["slices"]),
    }


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name → function, as Ansible asks for them."""
        filters: tuple[Callable[..., Any], ...] = (payload, targets, plan, switched, restored)
        filters = (*filters, failure, question, answer, summary)
        named = {f"pivot_probe_{function.__name__}": function for function in filters}
        return {**named, "pivot_probe_transfer": from_host}
