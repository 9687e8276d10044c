"""Thin adapter: `pivot.serving.inspect` over what a host printed."""

import json
from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError

from pivot.engines.engine_source import DescriptionError
from pivot.serving import inspect


def pivot_inspect(printed: str, subject: str, contract: object = None) -> dict[str, Any]:
    """The output of inspect_server.py → findings, layers, inventory and all of it as a text."""
    try:
        return inspect.examine(subject, json.loads(printed), contract or None).as_dict()
    except DescriptionError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """Filters about servers that somebody set up."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names as the role uses them."""
        return {"pivot_inspect": pivot_inspect}
