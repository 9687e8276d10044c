"""The stand-in in a thread of its own, over containers that are only remembered, and a client of it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
import urllib.parse
from typing import TYPE_CHECKING, Any

from pivot_lab import api, credentials, guests
from pivot_lab.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

TEMPLATE = "debian-13-standard_13.1-2_amd64.tar.zst"
PASSWORD, TOKEN = "made-up", "t-deploy"


class Dummy:
    """A backend without containers: remembers power states, and warns where the recorded template did."""

    def __init__(self) -> None:
        self.running: dict[int, int] = {}

    def has_device(self, path: str) -> bool:
        return path in {"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/null"}

    def check(self, config: dict[str, Any]) -> None:
        pass

    def create(
        self, vmid: int, config: dict[str, Any], template: str, ssh_keys: str, say: Callable[[str], None]
    ) -> None:
        if "nesting=1" not in config.get("features", ""):
            say("WARN: Systemd 257 detected. You may need to enable nesting.")

    def start(self, vmid: int, config: dict[str, Any]) -> int:
        self.running[vmid] = 4000 + vmid
        return self.running[vmid]

    def shutdown(self, vmid: int, timeout: int) -> bool:
        self.running.pop(vmid, None)
        return True

    def kill(self, vmid: int) -> None:
        self.running.pop(vmid, None)

    def destroy(self, vmid: int) -> None:
        assert vmid not in self.running, "a running container must be killed before it is destroyed"

    def pid(self, vmid: int) -> int | None:
        return self.running.get(vmid)

    def limit(self, vmid: int, config: dict[str, Any]) -> None:
        pass


class Server:
    """The stand-in in a thread of its own, and a client that logs in the four ways the recordings did.

    middlewares: of aiohttp, put before the stand-in's own; password: root's; token: of deploy@pve!ci.
    """

    faults: Any = None

    def __init__(
        self, directory: Path, middlewares: Sequence[Any] = (), password: str = PASSWORD, token: str = TOKEN
    ) -> None:
        layout = Layout.of(directory)
        credentials.ensure_directories(layout)
        credentials.ensure_certificates(layout)
        self.layout = layout
        archive = directory / "template"
        archive.write_bytes(b"not unpacked here")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.backend = Dummy()
        self.guests = guests.Guests(directory / "guests.json", directory / "pve/lxc")
        self.pve = api.make(
            self.backend,
            self.guests,
            password=password,
            token=("deploy@pve!ci", token),
            port=port,
            template=(TEMPLATE, archive),
        )
        self.pve.apitokens["root@pam!ci"] = "t-root"
        self.pve.pools = {"inference": set()}
        self.pve.pool_info = {"inference": {"comment": None, "storage": set()}}
        self.pve.storages["local"]["volumes"]["snippets/gpu.sh"] = {"content": "snippets", "size": 1, "ctime": 1}
        self.pve.storages["local"]["content"] = "backup,snippets,vztmpl,iso"
        build = self.pve._build_app

        def app() -> Any:
            made = build()
            made.middlewares[:0] = middlewares
            return made

        self.pve._build_app = app
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.wait(self.pve.start(str(layout.certificate), str(layout.certificate_key)))
        self.context = credentials.trusting(layout)
        self.logins: dict[str, dict[str, str]] = {"none": {}}
        ticket = self.call("none", "POST", "/access/ticket", {"username": "root@pam", "password": password})[2]["data"]
        cookie = {"Cookie": "PVEAuthCookie=" + ticket["ticket"]}
        self.logins.update(
            ticket=cookie | {"CSRFPreventionToken": ticket["CSRFPreventionToken"]},
            nocsrf=cookie,
            root={"Authorization": "PVEAPIToken=root@pam!ci=t-root"},
            deploy={"Authorization": f"PVEAPIToken=deploy@pve!ci={token}"},
            badtok={"Authorization": "PVEAPIToken=deploy@pve!ci=wrong"},
        )

    def wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def call(self, auth: str, method: str, path: str, body: Any = None) -> tuple[int, str, Any]:
        """Status, reason and decoded body of one call."""
        link = http.client.HTTPSConnection("127.0.0.1", self.pve.port, context=self.context, timeout=30)
        headers = dict(self.logins[auth])
        data = None
        url = "/api2/json" + path
        if body and method == "GET":
            url += "?" + urllib.parse.urlencode(body, doseq=True)
        elif body is not None:
            data = urllib.parse.urlencode(body, doseq=True)
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        link.request(method, url, data, headers)
        response = link.getresponse()
        text = response.read().decode()
        link.close()
        return response.status, response.reason, json.loads(text) if text else {"_raw": ""}

    def finish(self, upid: str) -> str:
        """The exit status of a worker task, waited for."""
        for _ in range(600):
            task = self.call("ticket", "GET", f"/nodes/pve1/tasks/{upid}/status")[2]["data"]
            if task["status"] == "stopped":
                return str(task["exitstatus"])
            time.sleep(0.02)
        raise AssertionError(f"the task {upid} did not end")

    def close(self) -> None:
        self.wait(self.pve.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
