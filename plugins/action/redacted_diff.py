"""Shows a difference that a later task writes, so that check mode and --diff never print a secret."""

from typing import Any

from ansible.plugins.action import ActionBase

from pivot.report import masked_diff


class ActionModule(ActionBase):
    """before and after are texts; what their names do not say is secret is masked already. path names the file."""

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Changed when the texts differ, or when the file is missing."""
        super().run(tmp, task_vars)
        before, after = str(self._task.args.get("before") or ""), str(self._task.args["after"])
        diff = masked_diff(str(self._task.args["path"]), before, after)
        return {"changed": before != after, "diff": [diff]}
