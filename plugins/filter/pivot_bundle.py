"""Thin adapter: decisions of `pivot.bundles.bundle` and `pivot.bundles.bundle_table` as filters."""

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from pivot.bundles import bundle, bundle_table


def rows(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The table of what is collected, for one host's options."""
    try:
        return bundle_table.table(**options)
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from error


def room(home: str, hosts: int) -> int:
    """Bytes that one of several bundles may take below a directory of the controller."""
    try:
        return bundle.room(home, hosts)
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from error


def transfer(connection: Mapping[str, Any], source: str, destination: str) -> list[str]:
    """The rsync command line that brings a host's directory to the controller."""
    try:
        return bundle.transfer(connection, source, destination)
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """Filters about bundles."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names as the role uses them."""
        return {
            "pivot_bundle_room": room,
            "pivot_bundle_rows": rows,
            "pivot_bundle_node_rows": bundle_table.node_table,
            "pivot_bundle_describe": bundle_table.describe,
            "pivot_bundle_no_node": bundle.no_node,
            "pivot_bundle_owner": bundle.owner,
            "pivot_bundle_transfer": transfer,
        }
