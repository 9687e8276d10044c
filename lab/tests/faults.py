"""What goes wrong on the way to the stand-in, and runs of the container's code against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from pivot.pve.proxmox_api import Access, Container, Session
from pivot.pve.proxmox_ensure import Outcome, Request, ensure

from .standin import PASSWORD, TEMPLATE, Server

if TYPE_CHECKING:
    from collections.abc import Callable

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
        self.method, self.path, self.left, self.after = "", "", 0, 0
        self.fault: Callable[[web.Request, Any], Any] | None = None
        self.calls: list[tuple[str, str, dict[str, Any]]] = []

    def plan(self, method: str, path: str, fault: Callable[[web.Request, Any], Any], times: int = 1) -> None:
        self.method, self.path, self.fault, self.left = method, path, fault, times

    def plan_nth(self, number: int, fault: Callable[[web.Request, Any], Any]) -> None:
        """One fault at a call that is known by its number alone, from 0; the login counts."""
        self.plan("", "", fault)
        self.after = number

    def meant(self, request: web.Request) -> bool:
        """Whether the fault is for this call."""
        if self.left and self.after:
            self.after -= 1
            return False
        return bool(self.left) and self.method in ("", request.method) and request.path.endswith(self.path)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        body = dict(await request.post()) if request.method in ("POST", "PUT") else dict(request.query)
        self.calls.append((request.method, request.path.removeprefix("/api2/json"), body))
        if self.fault and self.meant(request):
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


def run(server: Server, wanted: dict[str, str] | None = None, *, check: bool = False, **request: Any) -> Outcome:
    """One run of the module's code, as root@pam."""
    layout = server.layout
    access = Access("127.0.0.1", server.pve.port, "root@pam", str(layout.ca), password=PASSWORD)
    container = Container(Session(access, "llm01"), "pve1", 101)
    container.task_seconds = 60
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
