"""The container's code under faults of the API, one at a time, over https against the stand-in.

After each: no second container, nothing of anybody else's touched, and a plain re-run converges. What the real API says
where no recording shows it (595, no quorum, a full storage) is composed from its sources and forum reports.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from fakepve.model import TaskError

from pivot import proxmox_api
from pivot.proxmox_api import Access, ApiError, Container, Session
from pivot.proxmox_ensure import Outcome, Request, ensure

from .standin import PASSWORD, TEMPLATE, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOCKED = "can't lock file '/run/lock/lxc/pve-config-101.lock' - got timeout"
WANTED = {
    "hostname": "llm01", "ostemplate": f"local:vztmpl/{TEMPLATE}", "rootfs": "ct:8", "memory": "2048", "swap": "0",
    "cores": "2", "net0": "name=eth0,bridge=vmbr0,ip=dhcp", "features": "nesting=1,keyctl=1", "unprivileged": "1",
    "onboot": "1", "tags": "pivot;gpu", "description": "Managed by Pivot", "startup": "order=2,up=5",
    "nameserver": "192.0.2.1 192.0.2.2", "mp0": "ct:4,mp=/models,backup=0", "mp1": "/srv/data,mp=/data,ro=1",
    "dev0": "/dev/nvidia0,mode=0666", "dev1": "/dev/nvidiactl,gid=44", "hookscript": "local:snippets/gpu.sh",
}  # fmt: skip
NEIGHBOUR = {
    "vmid": 107,
    "hostname": "db01",
    "memory": 1024,
    "ostemplate": f"local:vztmpl/{TEMPLATE}",
    "rootfs": "ct:1",
}


class Faults:
    """What goes wrong on the way: the n-th call that matches is answered otherwise, before or after its work."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.method, self.path, self.left = "", "", 0
        self.fault: Callable[[web.Request, Any], Any] | None = None
        self.calls: list[tuple[str, str, dict[str, Any]]] = []

    def plan(self, method: str, path: str, fault: Callable[[web.Request, Any], Any], times: int = 1) -> None:
        self.method, self.path, self.fault, self.left = method, path, fault, times

    @web.middleware
    async def middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        body = dict(await request.post()) if request.method in ("POST", "PUT") else dict(request.query)
        self.calls.append((request.method, request.path.removeprefix("/api2/json"), body))
        if self.left and self.fault and request.method == self.method and request.path.endswith(self.path):
            self.left -= 1
            response: web.StreamResponse = await self.fault(request, handler)
            return response
        ordinary: web.StreamResponse = await handler(request)
        return ordinary

    def changing(self) -> list[tuple[str, str, dict[str, Any]]]:
        """The calls that may have changed something, logins left out."""
        return [call for call in self.calls if call[0] != "GET" and "/access/" not in call[1]]


def answered(status: int, reason: str) -> Callable[[web.Request, Any], Any]:
    """A refusal in place of the call's work."""

    async def fault(request: web.Request, handler: Any) -> web.Response:
        return web.json_response({"data": None, "message": reason}, status=status, reason=reason)

    return fault


def worked_but(status: int, reason: str) -> Callable[[web.Request, Any], Any]:
    """The call does its work, and the answer says otherwise."""

    async def fault(request: web.Request, handler: Any) -> web.Response:
        await handler(request)
        return web.json_response({"data": None, "message": reason}, status=status, reason=reason)

    return fault


def broken_off(request: web.Request) -> web.Response:
    """Nothing of this answer arrives."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def reset(request: web.Request, handler: Any) -> web.Response:
    """The connection breaks before anything was done."""
    return broken_off(request)


async def worked_and_reset(request: web.Request, handler: Any) -> web.Response:
    """The connection breaks after everything was done."""
    await handler(request)
    return broken_off(request)


async def expired(request: web.Request, handler: Any) -> web.Response:
    """The ticket is two hours old."""
    return web.Response(status=401, reason="permission denied - invalid PVE ticket", text="")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    faults = Faults()
    made = Server(tmp_path_factory.mktemp("faults"), middlewares=[faults.middleware])
    made.faults = faults
    made.finish(made.call("ticket", "POST", "/nodes/pve1/lxc", NEIGHBOUR)[2]["data"])
    yield made
    made.close()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxmox_api, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(proxmox_api, "SHOW_SECONDS", 0.3)
    monkeypatch.setattr(proxmox_api, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(proxmox_api, "PATIENCE_SECONDS", 1.0)


@pytest.fixture
def faults(server: Server) -> Iterator[Faults]:
    """No container of ours, no fault planned; the neighbour as it was before and after."""
    server.faults.clear()
    before = server.call("ticket", "GET", "/nodes/pve1/lxc/107/config")
    yield server.faults
    server.faults.clear()
    assert server.call("ticket", "GET", "/nodes/pve1/lxc/107/config") == before
    guest = server.pve.ct(101)
    if guest is not None:
        if guest.status == "running":
            server.finish(server.call("ticket", "POST", "/nodes/pve1/lxc/101/status/stop", {})[2]["data"])
        server.call("ticket", "PUT", "/nodes/pve1/lxc/101/config", {"protection": 0})
        server.finish(server.call("ticket", "DELETE", "/nodes/pve1/lxc/101")[2]["data"])


def run(server: Server, wanted: dict[str, str] | None = None, *, check: bool = False, **request: Any) -> Outcome:
    """One run of the module's code, as root@pam."""
    layout = server.layout
    access = Access("127.0.0.1", server.pve.port, "root@pam", str(layout.ca), password=PASSWORD)
    container = Container(Session(access, "llm01"), "pve1", 101)
    container.task_seconds = 5
    return ensure(container, Request(wanted=wanted or WANTED, allow_restart=True, **request), check=check)


def settled(server: Server, wanted: dict[str, str] | None = None) -> None:
    """A plain re-run converges, a further one changes nothing, and there are two containers."""
    server.faults.left = 0
    assert not run(server, wanted).refused
    assert not run(server, wanted).changed
    assert sorted((guest.vmid, guest.name, guest.status) for guest in server.pve.cts) == [
        (101, "llm01", "running"),
        (107, "db01", "stopped"),
    ]


# the call, what goes wrong, how often, and the code that a person reads, none where the run survives it
CREATE, START, CONFIG = "/nodes/pve1/lxc", "/lxc/101/status/start", "/lxc/101/config"
SURVIVED = [
    ("POST", CREATE, answered(500, LOCKED), 1),
    ("POST", CREATE, worked_but(500, LOCKED), 1),
    ("POST", CREATE, answered(595, "No route to host"), 2),
    ("POST", CREATE, worked_but(596, "Connection timed out"), 1),
    ("POST", CREATE, worked_but(502, "Bad Gateway"), 1),
    ("POST", CREATE, reset, 1),
    ("POST", CREATE, worked_and_reset, 1),
    ("POST", CREATE, expired, 1),
    ("POST", START, answered(500, LOCKED), 1),
    ("POST", START, worked_and_reset, 1),
    ("POST", START, reset, 1),
    ("GET", CONFIG, answered(599, "Too many redirections"), 1),
    ("GET", "/status", reset, 1),
    ("GET", "/status", answered(595, "No route to host"), 2),
]


@pytest.mark.parametrize(("method", "path", "fault", "times"), SURVIVED)
def test_a_creation_survives_what_passes(
    server: Server, faults: Faults, method: str, path: str, fault: Any, times: int
) -> None:
    faults.plan(method, path, fault, times)
    outcome = run(server)
    assert (outcome.created, outcome.started, faults.left) == (True, True, 0)
    assert len(server.pve.cts) == 2
    settled(server)


REFUSED = [
    ("POST", CREATE, answered(500, "cluster not ready - no quorum?"), 99, "PVE-NO-QUORUM"),
    ("POST", CREATE, answered(595, "No route to host"), 99, "PVE-NODE-OFFLINE"),
    ("POST", CREATE, answered(500, "internal error"), 99, "PVE-REFUSED"),
    (
        "POST",
        CREATE,
        answered(403, "Permission check failed (/storage/ct, Datastore.AllocateSpace)"),
        99,
        "PVE-FORBIDDEN",
    ),
    ("POST", START, answered(500, LOCKED), 99, "PVE-LOCKED"),
    ("GET", "/status", reset, 99, "PVE-UNREACHABLE"),
]


@pytest.mark.parametrize(("method", "path", "fault", "times", "code"), REFUSED)
def test_a_creation_that_cannot_be_says_so_and_a_re_run_converges(
    server: Server, faults: Faults, method: str, path: str, fault: Any, times: int, code: str
) -> None:
    faults.plan(method, path, fault, times)
    with pytest.raises(ApiError) as caught:
        run(server)
    assert caught.value.finding.code == code
    settled(server)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("unable to create CT 101 - write failed: No space left on device", "PVE-STORAGE-FULL"),
        ("unable to create CT 101 - volume 'local:vztmpl/x' does not exist", "PVE-TEMPLATE"),
        ("command 'tar' failed: exit code 2", "PVE-TASK-FAILED"),
    ],
)
def test_a_failed_creation_task_leaves_nothing(
    server: Server, faults: Faults, monkeypatch: pytest.MonkeyPatch, text: str, code: str
) -> None:
    def refuse(*_: Any) -> None:
        raise TaskError(text)

    with monkeypatch.context() as patched:
        patched.setattr(server.backend, "create", refuse)
        with pytest.raises(ApiError) as caught:
            run(server)
    assert caught.value.finding.code == code
    assert server.pve.ct(101) is None
    settled(server)


def test_a_task_that_warns_is_a_success_that_says_so(server: Server, faults: Faults) -> None:
    wanted = {key: value for key, value in WANTED.items() if key != "features"}
    outcome = run(server, wanted)
    assert [finding.code for finding in outcome.findings] == ["PVE-TASK-WARNING"]
    assert "nesting" in outcome.findings[0].message
    settled(server, wanted)


def test_an_endless_task_ends_the_run_and_not_the_container(
    server: Server, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = server.backend.create

    def slow(*given: Any) -> None:
        time.sleep(1.5)
        create(*given)

    with monkeypatch.context() as patched:
        patched.setattr(server.backend, "create", slow)
        access = Access("127.0.0.1", server.pve.port, "root@pam", str(server.layout.ca), password=PASSWORD)
        container = Container(Session(access, "llm01"), "pve1", 101)
        container.task_seconds = 0.3
        with pytest.raises(ApiError) as caught:
            ensure(container, Request(wanted=WANTED), check=False)
        assert caught.value.finding.code == "PVE-TIMEOUT"
        settled(server)  # it waits for the task that still works


def test_stale_resources_are_never_asked(server: Server, faults: Faults) -> None:
    run(server)
    assert [path for _, path, _ in faults.calls if "/cluster/resources" in path] == []


# --- changes of one that runs


def test_the_full_set_of_keys_is_settled_after_one_run(server: Server, faults: Faults) -> None:
    assert run(server).created
    settled(server)


CHANGES = {
    "memory": "4096", "swap": "256", "cores": "3", "net0": "name=eth0,bridge=vmbr0,ip=dhcp,firewall=1",
    "features": "nesting=1", "onboot": "0", "tags": "pivot", "description": "Other\nlines", "startup": "order=3",
    "nameserver": "192.0.2.9", "mp0": "ct:4,mp=/models,backup=1", "mp1": "/srv/other,mp=/data,ro=1",
    "dev0": "/dev/nvidia0,mode=0660", "hookscript": "", "protection": "1", "searchdomain": "example.org",
}  # fmt: skip


def test_every_single_change_is_one_put_with_that_key_alone_and_check_mode_foretells_it(
    server: Server, faults: Faults
) -> None:
    run(server)
    wanted = dict(WANTED)
    for key, value in CHANGES.items():
        wanted[key] = value
        foretold = run(server, wanted, check=True)
        faults.clear()
        done = run(server, wanted)
        (put,) = [body for method, _, body in faults.calls if method == "PUT"]
        assert put.keys() - {"digest"} == ({key} if value else {"delete"}), key
        assert "digest" in put
        for name in ("changed", "started", "before", "after"):
            assert getattr(foretold, name) == getattr(done, name), (key, name)
        # whether anything else can be changed in the running container, only the node knows
        cold = key in ("features", "mp0", "mp1", "dev0")
        assert (foretold.restarted, done.restarted or not cold) == (cold, True), key
        assert not run(server, wanted).changed, key


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        (answered(500, LOCKED), 1), (worked_but(500, LOCKED), 1), (reset, 1), (worked_and_reset, 1), (expired, 1),
        (worked_but(596, "Connection timed out"), 1), (answered(595, "No route to host"), 2),
    ],
)  # fmt: skip
def test_a_change_survives_what_passes(server: Server, faults: Faults, fault: Any, times: int) -> None:
    run(server)
    faults.plan("PUT", CONFIG, fault, times)
    wanted = {**WANTED, "memory": "4096"}
    assert run(server, wanted).changed
    assert faults.left == 0
    settled(server, wanted)


def test_a_configuration_that_somebody_changes_meanwhile_is_not_overwritten(server: Server, faults: Faults) -> None:
    run(server)

    async def meanwhile(request: web.Request, handler: Any) -> Any:
        await asyncio.to_thread(server.call, "ticket", "PUT", "/nodes/pve1/lxc/101/config", {"cores": 1})
        return await handler(request)

    faults.plan("PUT", CONFIG, meanwhile)
    wanted = {**WANTED, "memory": "4096"}
    with pytest.raises(ApiError) as caught:
        run(server, wanted)
    assert caught.value.finding.code == "PVE-CHANGED-MEANWHILE"
    assert server.pve.ct(101).config["cores"] == 1
    settled(server, wanted)


def test_a_refused_change_leaves_the_container_running(server: Server, faults: Faults) -> None:
    run(server)
    with pytest.raises(ApiError) as caught:
        run(server, {**WANTED, "dev2": "/dev/nvidia7"})
    assert caught.value.finding.code == "PVE-DEVICE-MISSING"
    assert server.pve.ct(101).status == "running"
    settled(server)


def test_stop_and_absence(server: Server, faults: Faults) -> None:
    run(server)
    faults.plan("POST", "/lxc/101/status/shutdown", worked_and_reset)
    assert run(server, state="stopped").stopped
    assert not run(server, state="stopped").changed
    faults.plan("DELETE", "/lxc/101", worked_and_reset)
    assert run(server, state="absent", confirm="101 llm01").removed
    assert not run(server, state="absent", confirm="101 llm01").changed
    assert [guest.vmid for guest in server.pve.cts] == [107]


def test_the_neighbours_id_is_never_ours(server: Server, faults: Faults) -> None:
    access = Access("127.0.0.1", server.pve.port, "root@pam", str(server.layout.ca), password=PASSWORD)
    container = Container(Session(access, "llm01"), "pve1", 107)
    for state in ("started", "stopped", "absent"):
        outcome = ensure(container, Request(wanted=WANTED, state=state, confirm="107 llm01"), check=False)
        assert [finding.code for finding in outcome.findings] == ["PVE-VMID-TAKEN"]
    assert faults.changing() == []


def test_nothing_that_was_sent_is_told(server: Server, faults: Faults) -> None:
    faults.plan("POST", CREATE, answered(400, "Parameter verification failed."))
    with pytest.raises(ApiError) as caught:
        run(server, {**WANTED, "password": "never-to-be-shown"})
    assert "never-to-be-shown" not in json.dumps(caught.value.finding.as_dict())
    assert PASSWORD not in repr(Access("h", 1, "root@pam", None, password=PASSWORD))
