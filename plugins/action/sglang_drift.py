"""Asks a server what it works with, and compares it with what was meant; decisions are `pivot.serving.drift`'s."""

import urllib.error
from typing import Any

from ansible.plugins.action import ActionBase

from pivot.engines import provenance
from pivot.report import as_result
from pivot.serving import drift, health


class ActionModule(ActionBase):
    """Arguments: url, api_key, wanted (files, argv, environment, settings), state (of server_state.py), code (of
    running_code.py, where that was looked at), answers (false: a further machine of a server, which says nothing)."""

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Never changed; failed when a finding is an error."""
        super().run(tmp, task_vars)
        given = self._task.args
        subject = (task_vars or {}).get("inventory_hostname", given["url"])
        info, unanswered = None, []
        try:
            if given.get("answers", True):
                info = health.Client(given["url"], given.get("api_key"), 30).call("/server_info")
        except (urllib.error.URLError, OSError) as error:
            unanswered = [health.unreachable(subject, given["url"], error)]
        found = drift.check(subject, given["wanted"], given["state"], info)
        if given.get("code"):
            probed = drift.probe_is_on(given["state"])
            found += provenance.check(subject, given["code"], meant=given["wanted"]["environment"], probed=probed)
        return as_result([*found, *unanswered], "it runs as the inventory means it, character for character")
