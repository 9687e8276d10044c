"""The API stand-in against recordings of the real Proxmox VE 9.2.11 API; containers are a dummy's here, no root."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .standin import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDINGS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "recordings-9.2.11.json").read_text())

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
