"""Shows a difference that a later task writes, so that check mode and --diff never print a secret."""

from typing import Any

from ansible.plugins.action import ActionBase

from pivot.report import masked_diff


class ActionModule(ActionBase):
    """before and after are texts; what their names do not say is secret is masked already. path names the file.

    differs: whether the file does, where before came with its secrets masked; else the texts are compared.
    """

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Changed when the files differ, or when the file is missing."""
        super().run(tmp, task_vars)
        before, after = str(self._task.args.get("before") or ""), str(self._task.args["after"])
        differs = bool(self._task.args.get("differs", before != after))
        diff = masked_diff(str(self._task.args["path"]), before, after if differs else before)
        return {"changed": differs, "diff": [diff]}
