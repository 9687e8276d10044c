"""The container's code under faults of the API, one at a time, over https against the stand-in.

After each: no second container, nothing of anybody else's touched, and a plain re-run converges. What the real API says
where no recording shows it (595, no quorum, a full storage) is composed from its sources and forum reports.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from fakepve.model import TaskError

from pivot.pve import proxmox_api
from pivot.pve.proxmox_api import Access, ApiError, Container, Session
from pivot.pve.proxmox_ensure import Request, ensure

from .faults import WANTED, Faults, answered, expired, reset, run, settled, worked_and_reset, worked_but
from .standin import PASSWORD

if TYPE_CHECKING:
    from collections.abc import Callable

    from .standin import Server

LOCKED = "can't lock file '/run/lock/lxc/pve-config-101.lock' - got timeout"

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
    ("POST", CREATE, answered(500, "cluster not ready - no quorum?"), "PVE-NO-QUORUM"),
    ("POST", CREATE, answered(595, "No route to host"), "PVE-NODE-OFFLINE"),
    ("POST", CREATE, answered(500, "internal error"), "PVE-REFUSED"),
    (
        "POST",
        CREATE,
        answered(403, "Permission check failed (/storage/ct, Datastore.AllocateSpace)"),
        "PVE-FORBIDDEN",
    ),
    ("POST", START, answered(500, LOCKED), "PVE-LOCKED"),
    ("GET", "/status", reset, "PVE-UNREACHABLE"),
]


@pytest.mark.parametrize(("method", "path", "fault", "code"), REFUSED)
def test_a_creation_that_cannot_be_says_so_and_a_re_run_converges(
    server: Server, faults: Faults, monkeypatch: pytest.MonkeyPatch, method: str, path: str, fault: Any, code: str
) -> None:
    faults.plan(method, path, fault, times=99)
    with monkeypatch.context() as patched, pytest.raises(ApiError) as caught:
        patched.setattr(proxmox_api, "PATIENCE_SECONDS", 1.0)  # it is waited out
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
    create, seen = server.backend.create, threading.Event()

    def slow(*given: Any) -> None:
        seen.wait(60)
        create(*given)

    with monkeypatch.context() as patched:
        patched.setattr(server.backend, "create", slow)
        access = Access("127.0.0.1", server.pve.port, "root@pam", str(server.layout.ca), password=PASSWORD)
        container = Container(Session(access, "llm01"), "pve1", 101)
        container.task_seconds = 0.3
        with pytest.raises(ApiError) as caught:
            ensure(container, Request(wanted=WANTED), check=False)
        seen.set()
        assert caught.value.finding.code == "PVE-TIMEOUT"
        settled(server)  # it waits for the task that still works


def test_stale_resources_are_never_asked(server: Server, faults: Faults) -> None:
    run(server)
    assert [path for _, path, _ in faults.calls if "/cluster/resources" in path] == []


# --- changes of one that runs


def test_the_full_set_of_keys_is_settled_after_one_run(server: Server, faults: Faults) -> None:
    assert run(server).created
    settled(server)


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


def page(status: int, text: str) -> Callable[[web.Request, Any], Any]:
    """What a proxy, or another service, says in the API's place."""

    async def fault(request: web.Request, handler: Any) -> web.Response:
        return web.Response(status=status, text=text, content_type="text/html")

    return fault


STRANGE = [("GET", "/version"), ("POST", "/access/ticket"), ("POST", CREATE), ("GET", CONFIG)]


@pytest.mark.parametrize(("method", "path"), STRANGE)
@pytest.mark.parametrize("text", ["<html>Sign in</html>", "{}", "[]", "null", ""])
def test_what_is_no_answer_of_the_api_is_one_sentence(
    server: Server, faults: Faults, method: str, path: str, text: str
) -> None:
    faults.plan(method, path, page(200, text), 99)
    with pytest.raises(ApiError) as caught:
        run(server)
    assert caught.value.finding.code == "PVE-ANSWER"
    settled(server)


@pytest.mark.parametrize(("method", "path"), STRANGE)
def test_a_proxys_page_without_its_node_is_waited_for(server: Server, faults: Faults, method: str, path: str) -> None:
    faults.plan(method, path, page(502, "<html>Bad Gateway</html>"), 1)
    assert run(server).created
    assert faults.left == 0
    settled(server)
