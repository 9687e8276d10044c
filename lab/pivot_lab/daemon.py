"""The API daemon: one process of its own session per lab, found again through its pid file."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import json
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from pivot_lab import template
from pivot_lab.credentials import TOKEN, trusting
from pivot_lab.errors import LabError
from pivot_lab.layout import ID_BASE
from pivot_lab.system import read_json, start_time, write_json

if TYPE_CHECKING:
    from pathlib import Path

    from pivot_lab.layout import Layout

_PATIENCE = 30.0  # seconds until a started daemon must answer, and a stopped one be gone
_TASKS_END = 25.0  # seconds that running worker tasks get at the end


def _pidfile(layout: Layout) -> Path:
    return layout.machine / "api.json"


def running(layout: Layout) -> int | None:
    """The pid of this lab's daemon, or None; a reused pid is told apart by its start time."""
    state = read_json(_pidfile(layout))
    pid = state.get("pid")
    return pid if isinstance(pid, int) and start_time(pid) == state.get("started") else None


def answers(layout: Layout, port: int, seconds: float = 5) -> bool:
    """Whether the API answers over TLS with this lab's certificate (401: nobody is logged in here)."""
    direct = urllib.request.build_opener(  # a proxy of the environment is not for loopback
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=trusting(layout)),
    )
    try:
        with direct.open(f"https://127.0.0.1:{port}/api2/json/version", timeout=seconds):
            return False  # an API that answers without a login is not ours
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False


def start(layout: Layout, port: int) -> None:
    """Start the daemon in the background and wait until it answers."""
    command = [sys.executable, "-m", "pivot_lab", "--root", str(layout.root), "--cache", str(layout.cache), "daemon"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ANSIBLE_")} | {"PYTHONUNBUFFERED": "1"}
    with layout.api_log.open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=environment, start_new_session=True
        )
    write_json(_pidfile(layout), {"pid": process.pid, "started": start_time(process.pid)})  # before any interruption
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise LabError(f"the API daemon ended with status {process.returncode} at its start; see {layout.api_log}")
        if answers(layout, port):
            return
        time.sleep(0.1)
    process.kill()
    raise LabError(f"the API daemon did not answer on port {port} within {_PATIENCE:.0f} s; see {layout.api_log}")


def stop(layout: Layout) -> None:
    """End the daemon, if it runs: politely, then by force."""
    pid = running(layout)
    if pid is None:
        return
    began = start_time(pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            if start_time(pid) != began:
                _pidfile(layout).unlink(missing_ok=True)
                return
            time.sleep(0.05)
    raise LabError(f"the API daemon (process {pid}) cannot be ended")


async def _serve(layout: Layout) -> None:
    from pivot_lab import api, backend, guests, pct  # noqa: PLC0415  # fakepve and aiohttp: only the daemon needs them

    state = read_json(layout.dot / "state.json")
    subnet = ipaddress.IPv4Network(state["subnet"])
    secrets = read_json(layout.secrets)
    lxc = backend.LxcBackend(layout, subnet)
    pve = api.make(
        lxc, guests.Guests(layout.guests, layout.node_configs), password=secrets["vault_proxmox_password"],
        token=(TOKEN, secrets["vault_proxmox_token_value"]), port=state["port"],
        template=(template.VOLUME, template.archive(layout)),
    )  # fmt: skip
    for key in lxc.remove_unknown({guest.vmid for guest in pve.cts}):
        logging.warning("removed %s: its creation had been interrupted", key)
    layout.node_socket.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(
        functools.partial(pct.serve, pve, lxc.containers), path=str(layout.node_socket)
    )
    os.chown(layout.node_socket, ID_BASE, ID_BASE)
    await pve.start(str(layout.certificate), str(layout.certificate_key))
    logging.info("the API listens on %s", pve.url)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()
    server.close()
    if not await pve.finish_tasks(_TASKS_END):
        logging.warning("worker tasks were still running; what they left is removed at the next start")
    await pve.stop()


def main(layout: Layout) -> int:
    """Run the daemon in the foreground until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    try:
        asyncio.run(_serve(layout))
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise LabError(f"the API daemon cannot run: {type(error).__name__}: {error}") from None
    return 0
