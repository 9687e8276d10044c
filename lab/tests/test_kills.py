"""The module killed with its whole process group at random points; then a plain re-run converges.

A point is a call of the API: before it works, after it worked and before it answers, or while the module goes on. Three
seeds, thirty with PIVOT_SOAK. What the node still does for a killed run goes on, as on a real one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .faults import WANTED, Faults, run, settled
from .standin import PASSWORD

if TYPE_CHECKING:
    from aiohttp import web

    from .standin import Server

MODULE = Path(__file__).parents[2] / "plugins/modules/proxmox_container.py"
SEEDS = range(30 if os.environ.get("PIVOT_SOAK") else 3)
MORE = {**WANTED, "memory": "4096", "description": "Changed"}
DEVICES = {**WANTED, "dev0": "/dev/nvidia0,mode=0660", "dev1": "/dev/nvidiactl", "features": "nesting=1"}
# what is asked of a container in a state, and how it was brought there: wanted and state of the run before
RUNS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "create": (None, {"wanted": WANTED}),
    "update": ({"wanted": WANTED}, {"wanted": MORE}),
    "update and restart": ({"wanted": WANTED}, {"wanted": DEVICES}),
    "start": ({"wanted": WANTED, "state": "stopped"}, {"wanted": WANTED}),
    "stop": ({"wanted": WANTED}, {"wanted": WANTED, "state": "stopped"}),
    "remove": ({"wanted": WANTED}, {"wanted": WANTED, "state": "absent", "confirm": "101 llm01"}),
}

ENDED: list[bool] = []  # of every run of this file, whether it was killed


def arguments(server: Server, wanted: dict[str, str], **more: Any) -> str:
    """What Ansible gives the module."""
    api = {"api_host": "127.0.0.1", "api_port": server.pve.port, "api_user": "root@pam", "api_password": PASSWORD}
    given = {**api, "api_ca": str(server.layout.ca), "node": "pve1", "vmid": 101, "config": wanted, **more}
    return json.dumps({"ANSIBLE_MODULE_ARGS": {"allow_restart": True, **given}})


def killed(server: Server, faults: Faults, wanted: dict[str, str], chance: random.Random, **more: Any) -> bool:
    """Start the module and kill its group at a random call; whether it was killed before it ended by itself."""
    process = subprocess.Popen(
        [sys.executable, MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip

    def kill() -> None:
        if process.returncode is None:  # it was not waited for yet, so the group is still its own
            os.killpg(process.pid, signal.SIGKILL)

    when = chance.choice(("before", "worked", "later"))

    async def fault(request: web.Request, handler: Any) -> Any:
        if when == "before":
            kill()
            return await handler(request)  # what was sent is carried out all the same
        response = await handler(request)
        if when == "worked":
            kill()
        else:
            asyncio.get_running_loop().call_later(chance.random() * 0.05, kill)
        return response

    run(server, wanted, check=True, **more)
    known = len(faults.calls)  # without changes; these follow
    faults.clear()
    faults.plan_nth(chance.randrange(known + 4), fault)
    output, errors = process.communicate(arguments(server, wanted, **more), timeout=60)
    assert PASSWORD not in output + errors
    return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_run_leaves_what_a_plain_one_brings_to_its_end(server: Server, faults: Faults, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  # a seed that is told, no secret
    for name in chance.sample(sorted(RUNS), 3):
        before, asked = RUNS[name]
        if before is None:
            run(server, WANTED, state="absent", confirm="101 llm01")
        else:
            run(server, before["wanted"], state=before.get("state", "started"))
        faults.clear()
        ENDED.append(killed(server, faults, chance=chance, **asked))
        faults.clear()
        assert sorted(guest.vmid for guest in server.pve.cts) in ([101, 107], [107]), name
        if asked.get("state") in ("stopped", "absent"):
            outcome = run(server, **asked)
            assert not outcome.refused, (name, outcome)
            assert not run(server, **asked).changed, name
        else:
            settled(server, asked["wanted"])


def test_most_of_them_were_killed_before_they_ended() -> None:
    assert sum(ENDED) * 2 > len(ENDED) > 0
