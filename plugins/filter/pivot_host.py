"""Thin adapter: judgements of `pivot.machines.host` as filters."""

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from pivot.machines import device_nodes, driver_files, host


def node(facts: Mapping[str, Any], options: Mapping[str, Any], name: str) -> list[dict[str, str]]:
    """Findings about a node."""
    try:
        return [finding.as_dict() for finding in host.node(facts, options, name)]
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from error


def runtime(facts: Mapping[str, Any], options: Mapping[str, Any], name: str) -> list[dict[str, str]]:
    """Findings about the inside of a container."""
    try:
        return [finding.as_dict() for finding in host.runtime(facts, options, name)]
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """Filters about machines."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names as the roles use them."""
        return {
            "pivot_host_node": node,
            "pivot_host_runtime": runtime,
            "pivot_host_device_paths": device_nodes.device_paths,
            "pivot_host_driver_plan": driver_files.plan,
        }
