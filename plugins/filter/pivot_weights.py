"""Thin adapter: decisions of `pivot.weights` as filters."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError

from pivot import weights
from pivot.transfer import TransferError


def inspection(models: Sequence[Mapping[str, Any]], root: str, verify: str) -> str:
    """The argument of the gather task: what the host is asked about."""
    try:
        wanted = weights.want(models)
        return weights.host_arguments("inspect", root, [item.for_host() for item in wanted], verify=verify)
    except (weights.WeightsError, TransferError) as error:
        raise AnsibleFilterError(str(error)) from error


def plan(
    report: Mapping[str, Any], models: Sequence[Mapping[str, Any]], connection: Mapping[str, Any]
) -> dict[str, Any]:
    """What follows from the host's report: findings, a summary, and the arguments of each further task."""
    try:
        made = weights.plan(weights.want(models), report)
        publish, settle = made.of(weights.Action.PUBLISH), made.of(weights.Action.SETTLE)
        root = report["root"]
        return {
            "findings": [finding.as_dict() for finding in made.findings],
            "summary": [step.summary() for step in made.steps],
            "prepare": weights.host_arguments("prepare", root, [step.for_host() for step in publish]),
            "publish": weights.host_arguments("publish", root, [step.for_host() for step in publish]),
            "settle": weights.host_arguments("settle", root, [step.for_host() for step in settle]),
            "publishes": len(publish),
            "settles": len(settle),
            "sends": [
                {
                    "label": step.summary(),
                    "argv": weights.rsync_command(step.wanted.source, step.incoming, connection),
                    "names": "\n".join(step.send),
                }
                for step in publish
                if step.send
            ],
        }
    except (weights.WeightsError, TransferError) as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """Filters about model files."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names as the role uses them."""
        return {"pivot_weights_inspection": inspection, "pivot_weights_plan": plan}
