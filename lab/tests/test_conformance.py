"""The API stand-in against recordings of the real Proxmox VE 9.2.11 API; containers are a dummy's here, no root."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import ssl
import threading
import time
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pivot_lab import api, credentials
from pivot_lab.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RECORDINGS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "recordings-9.2.11.json").read_text())
TEMPLATE = "debian-13-standard_13.1-2_amd64.tar.zst"
PASSWORD = "made-up"

# What still differs, and why it may. A difference that went away must be removed here: the test says so.
DIFFERENCES = {
    "resize": "the lab refuses it: overlays have no size of their own",
    "resize shrink": "refused as above",
    "deploy: its tasks": "the recording node also lists what its recorder had run before",
    "running: dev add": "the real node failed for its own reason (AppArmor); the lab says what it cannot do",
}
# Figures of the recording machine: compared by presence and type only.
VOLATILE = {
    "avail", "total", "used", "used_fraction", "ctime", "size", "pid", "pstart", "starttime", "endtime", "uptime",
    "disk", "maxdisk", "mem", "memhost", "cpu", "netin", "netout", "diskread", "diskwrite", "digest",
}  # fmt: skip


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
    """The stand-in in a thread of its own, and a client that logs in the four ways the recordings did."""

    def __init__(self, directory: Path) -> None:
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
        self.guests = api.Guests(directory / "guests.json")
        self.pve = api.make(
            self.backend,
            self.guests,
            password=PASSWORD,
            token=("deploy@pve!ci", "t-deploy"),
            port=port,
            template=(TEMPLATE, archive),
        )
        self.pve.apitokens["root@pam!ci"] = "t-root"
        self.pve.pools = {"inference": set()}
        self.pve.pool_info = {"inference": {"comment": None, "storage": set()}}
        self.pve.storages["local"]["volumes"]["snippets/gpu.sh"] = {"content": "snippets", "size": 1, "ctime": 1}
        self.pve.storages["local"]["content"] = "backup,snippets,vztmpl,iso"
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.wait(self.pve.start(str(layout.certificate), str(layout.certificate_key)))
        self.context = ssl.create_default_context(cafile=str(layout.ca))
        ticket = self.call("none", "POST", "/access/ticket", {"username": "root@pam", "password": PASSWORD})[2]["data"]
        cookie = {"Cookie": "PVEAuthCookie=" + ticket["ticket"]}
        self.logins.update(
            ticket=cookie | {"CSRFPreventionToken": ticket["CSRFPreventionToken"]},
            nocsrf=cookie,
            root={"Authorization": "PVEAPIToken=root@pam!ci=t-root"},
            deploy={"Authorization": "PVEAPIToken=deploy@pve!ci=t-deploy"},
            badtok={"Authorization": "PVEAPIToken=deploy@pve!ci=wrong"},
        )

    logins: dict[str, dict[str, str]] = {"none": {}}  # noqa: RUF012  # filled once, by the login above

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


def normal(value: Any, key: str = "") -> Any:
    """An answer without what differs by nature: hardware addresses, digests, task ids, measured figures, order."""
    if isinstance(value, dict):
        return {k: normal(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return sorted((normal(v) for v in value), key=lambda v: json.dumps(v, sort_keys=True))
    if key in VOLATILE and value is not None:
        return type(value).__name__ if key not in {"used_fraction", "cpu"} else "number"
    if isinstance(value, str):
        value = re.sub(r"(hwaddr=)([0-9A-F]{2}:){5}[0-9A-F]{2}", r"\1MAC", value)
        value = re.sub(r"^([0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}$", "MAC", value)
        value = re.sub(r"^fe80::[0-9a-f:]+", "LINK-LOCAL", value)
        value = re.sub(r"^(UPID:\w+):[^:]+:[^:]+:[^:]+:", r"\1:P:S:T:", value)
        if re.fullmatch(r"SHA1|[0-9a-f]{40}", value):
            return "SHA1"
    return value


def play(server: Server, recording: dict[str, Any]) -> dict[str, Any]:
    """Send one recorded request and return what the recording would hold for the stand-in."""
    method, path, body = recording["request"]
    status, reason, answer = server.call(recording["auth"], method, path, body)
    got: dict[str, Any] = {"status": status, "reason": reason, "body": normal(answer)}
    upid = answer.get("data") if isinstance(answer, dict) else None
    if isinstance(upid, str) and upid.startswith("UPID:"):
        got["exitstatus"] = server.finish(upid)
        vmid = int(body.get("vmid", 0)) if method == "POST" and path.endswith("/lxc") else 0
        if vmid in {300, 310} and server.pve.ct(vmid) is not None:  # the recording removed these in between
            server.finish(server.call("ticket", "DELETE", f"/nodes/pve1/lxc/{vmid}")[2]["data"])
    if recording["name"] == "resize":  # refused, but the recordings after it stand on its result
        server.pve.ct(301).config["rootfs"] = "ct:301/vm-301-disk-0.raw,size=2G"
    if "config_after" in recording:
        got["config_after"] = normal(server.call("ticket", "GET", path)[2]["data"])
    return got


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """All recordings, played in their order."""
    server = Server(tmp_path_factory.mktemp("pve"))
    yield {recording["name"]: play(server, recording) for recording in RECORDINGS}
    server.close()


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda r: r["name"])
def test_answers_like_the_real_api(recording: dict[str, Any], answers: dict[str, dict[str, Any]]) -> None:
    want = {key: normal(value) for key, value in recording.items() if key not in {"name", "auth", "request"}}
    got = answers[recording["name"]]
    if recording["name"] in DIFFERENCES:
        assert got != want, "this listed difference is gone: take it out of the list"
    else:
        assert got == want


def test_every_listed_difference_is_a_recording() -> None:
    assert set(DIFFERENCES) <= {recording["name"] for recording in RECORDINGS}
