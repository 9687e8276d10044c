"""Follows the job that works on a host's weights in a unit of its own, through lost connections."""

import json
import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from pivot.checkpoints import progress

PAUSES = (2, 5, 10, 30)  # seconds between two lines; the last one stays
PATIENCE = 900  # seconds without a connection


class ActionModule(ActionBase):
    """Arguments: script (weights_state.py), watch (its arguments as a mapping)."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Changed when something was published; failed with the job's sentence. `told` is what the job said last."""
        super().run(tmp, task_vars)
        host = (task_vars or {}).get("inventory_hostname", "host")
        pauses, lost = list(PAUSES), 0.0
        while True:
            try:
                told = self._ask(pauses[0], task_vars)
                lost = 0.0
            except AnsibleConnectionFailure as error:
                lost = lost or time.monotonic()
                if time.monotonic() - lost > PATIENCE:
                    text = f"no connection for {PATIENCE // 60} minutes; the job goes on without it: run again later"
                    return {"failed": True, "msg": f"{text} ({error})"}
                Display().display(f"{host}: the connection is lost, the job goes on; trying again")
                time.sleep(pauses[0])
                continue
            if not told.get("alive"):
                return verdict(told)
            Display().display(progress.line(host, told))
            pauses = pauses[1:] or pauses

    def _ask(self, seconds: int, task_vars: dict[str, Any] | None) -> dict[str, Any]:
        """What the job says after so many seconds, or when it has ended."""
        argument = json.dumps({**self._task.args["watch"], "action": "watch", "seconds": seconds})
        done = self._execute_module(
            module_name="ansible.legacy.command",
            module_args={"argv": ["python3", "-I", "-", argument], "stdin": self._task.args["script"]},
            task_vars=task_vars or {},
        )
        if done.get("rc") != 0:
            return {"ended": "failed", "error": str(done.get("stderr") or done.get("msg") or "it cannot be asked")}
        return dict(json.loads(done["stdout"]))


def verdict(told: dict[str, Any]) -> dict[str, Any]:
    """The result of a job that has ended."""
    if told.get("ended") == "ok":
        return {"changed": bool(told["published"]), "told": told}
    failed = {release: names for release, names in (told.get("failed") or {}).items() if names}
    lines = [f"{release}: {name} {what}" for release, names in failed.items() for name, what in names.items()]
    if lines:
        text = f"not published, files did not arrive as pinned: {'; '.join(lines)}. Wrong ones were removed: compare "
        return {"failed": True, "msg": f"{text}the source with the manifest, then run again", "told": told}
    unit = f"journalctl -u {told['unit']}" if told.get("unit") else "systemctl status"
    text = f"the job ended without a word (killed, or the host was restarted; {unit}): run again, it continues"
    return {"failed": True, "msg": told.get("error") or text, "told": told}
