"""Everything wrong with a host's settings, in one list; decisions are those of `pivot`."""

from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

from pivot import launch, pins
from pivot.findings import errors, render


class ActionModule(ActionBase):
    """Arguments: pins, root, inventory, launch, environment. Runs on the controller and touches nothing."""

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Failed when a finding is an error; `findings` holds all of them."""
        super().run(tmp, task_vars)
        given = self._task.args
        subject = (task_vars or {})["inventory_hostname"]
        found = [
            *pins.check(given["pins"], Path(given["root"]), Path(given["inventory"])),
            *launch.check(subject, given["launch"], given["environment"]),
        ]
        return {
            "changed": False,
            "failed": bool(errors(found)),
            "msg": render(found) or "nothing to object to",
            "findings": [finding.as_dict() for finding in found],
        }
