"""Sends weights from the controller, or follows an earlier run's sender, which is `pivot.checkpoints.weights_send`."""

import time
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from pivot.checkpoints import progress, weights_send

PAUSES = (2, 5, 10, 30)  # seconds between two lines; the last one stays


class ActionModule(ActionBase):
    """Arguments: host and root, which name the sender; sends, what to send: empty follows what is at work, if any."""

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Changed when something was sent; failed with the sender's sentence, unless it was an earlier run's."""
        super().run(tmp, task_vars)
        given = self._task.args
        place, sends = weights_send.place_of(given["host"], given["root"]), given.get("sends") or []
        if not sends and not weights_send.alive(place):
            return {"changed": False}
        try:
            if sends:
                weights_send.begin(place, sends)
        except OSError as error:
            return {"failed": True, "msg": str(error)}
        told = follow(place, (task_vars or {}).get("inventory_hostname", given["host"]))
        if told.get("ended") != "ok" and sends:
            return {"failed": True, "msg": told.get("error") or "the sender was killed: run again, it continues"}
        return {"changed": True, "msg": told.get("error") or "sent"}


def follow(place: Any, host: str) -> dict[str, Any]:
    """Print how far a sender is until it ends; what it said last."""
    pauses, due = list(PAUSES), time.monotonic() + PAUSES[0]
    while weights_send.alive(place):
        time.sleep(0.1)
        if time.monotonic() > due:
            Display().display(progress.line(host, weights_send.told(place)))
            pauses = pauses[1:] or pauses
            due = time.monotonic() + pauses[0]
    return weights_send.told(place)
