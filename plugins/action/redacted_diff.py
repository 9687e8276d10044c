"""Shows a difference that a later task writes, so that check mode and --diff never print a secret."""

from typing import Any

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """before and after are texts whose secrets are already masked; path names the file."""

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Changed when the texts differ, or when the file is missing."""
        super().run(tmp, task_vars)
        before, after = str(self._task.args.get("before") or ""), str(self._task.args["after"])
        path = str(self._task.args["path"])
        header = {"before_header": f"{path} (as it is)", "after_header": f"{path} (as wanted)"}
        return {"changed": before != after, "diff": [{**header, "before": before, "after": after}]}
