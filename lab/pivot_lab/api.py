"""The Proxmox VE API of the lab: fakepve's model, held closer to recordings of the real API, over real containers.

What is overridden here is one of: a difference between fakepve and the recordings, the place where a worker task
does something real, or a call that the lab cannot do for real and refuses.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
import time
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web
from fakepve import lxc as fake_lxc
from fakepve import server as fake_server
from fakepve.lxc import FakeCt, split_props
from fakepve.model import PveError, TaskError
from fakepve.server import FakePve

from pivot_lab.errors import LabError
from pivot_lab.layout import NODE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from pivot_lab.guests import Guests

    Values = dict[str, Any]
    Say = Callable[[str], None]

VERSION = {"version": "9.2.11", "release": "9.2", "repoid": "local"}
DEPLOY_PRIVILEGES = (
    "Datastore.AllocateSpace", "Datastore.Audit", "Pool.Audit", "SDN.Use", "Sys.Audit", "VM.Allocate", "VM.Audit",
    "VM.Config.CPU", "VM.Config.Disk", "VM.Config.Memory", "VM.Config.Network", "VM.Config.Options", "VM.PowerMgmt",
)  # fmt: skip
STALE_SECONDS = 10.0  # how long /cluster/resources shows a new container's placeholder on a real cluster
_DEVICE = re.compile(r"dev\d+")
_NET = re.compile(r"net\d+")
_UPID = re.compile(r"UPID:[\w-]+(:[0-9A-F]{8,9}){2}:[0-9A-F]{8}:[^:\s]+:[^:\s]*:[^:\s]+:")
_SSH_KEY = re.compile(
    r"(?:[^#\s]\S*\s+)?(ssh-(rsa|dss|ed25519)|ecdsa-sha2-nistp\d+|sk-(ssh-ed25519|ecdsa-sha2-nistp256)@openssh\.com)"
    r"\s+[A-Za-z0-9+/]+=*(\s.*)?"
)
LOG = logging.getLogger("pivot_lab.api")


class Backend(Protocol):
    """Who makes the containers; calls block and raise LabError with a sentence."""

    def has_device(self, path: str) -> bool:
        """Whether the node has this device."""

    def check(self, config: Values) -> None:
        """Raise a LabError for a configuration that cannot be made real."""

    def create(self, vmid: int, config: Values, template: str, ssh_keys: str, say: Say) -> None:
        """Make a container; nothing may stay when it fails."""

    def start(self, vmid: int, config: Values) -> int:
        """Start a container and return its init's pid."""

    def shutdown(self, vmid: int, timeout: int) -> bool:
        """Ask a container to power off; False if it still runs after `timeout` seconds."""

    def kill(self, vmid: int) -> None:
        """End a container at once."""

    def destroy(self, vmid: int) -> None:
        """Remove everything of a stopped container."""

    def pid(self, vmid: int) -> int | None:
        """The pid of a running container's init."""

    def limit(self, vmid: int, config: Values) -> None:
        """Apply memory and CPU limits to a running container."""


def bad(**fields: str) -> PveError:
    """PVE's answer to parameters that do not pass their check."""
    return PveError(400, "Parameter verification failed.", fields)


def check_device_format(key: str, value: str) -> None:
    """Raise PVE's error for a `devN` value without a path or with one outside /dev (fakepve accepts both)."""
    first, props = split_props(value)
    path = first if first is not None else props.get("path")
    if path is None:
        raise PveError(500, "Path has to be defined")
    if not re.fullmatch(r"/dev/[^/]\S*", path):
        why = f"{key}.path: invalid format - {path} is not a valid device path"
        raise bad(**{key: f"invalid format - format error\n{why}\n\n"})


def device_path(value: str) -> str:
    """The path in a `devN` value."""
    first, props = split_props(value)
    return str(first if first is not None else props["path"])


def check_ssh_keys(text: str) -> None:
    """Raise PVE's error where a line is no public key (fakepve accepts anything)."""
    for line in text.splitlines():
        if line.strip() and not line.startswith("#") and not _SSH_KEY.fullmatch(line.strip()):
            raise PveError(500, "SSH public key validation error")


def check_nameservers(text: str) -> None:
    """Raise PVE's error for a nameserver that is no address (fakepve accepts anything)."""
    for item in re.split(r"[\s,;]+", text.strip()):
        try:
            ipaddress.ip_address(item)
        except ValueError:
            if item != "host":
                raise bad(nameserver="invalid format - value does not look like a valid IP address\n") from None


def link_local(hwaddr: str) -> str:
    """The IPv6 link-local address (EUI-64) of a hardware address."""
    octets = bytearray(bytes.fromhex(hwaddr.replace(":", "")))
    octets[0] ^= 2
    return str(ipaddress.IPv6Address(b"\xfe\x80" + bytes(6) + octets[:3] + b"\xff\xfe" + octets[3:]))


def _normalise(key: str, value: Any) -> Any:
    """fakepve's spelling of values, except for features, which Proxmox keeps in the order they were sent."""
    if key == "features":
        return ",".join(f"{k}={fake_lxc._boolean(x)}" for k, x in split_props(value)[1].items())
    return _fake_normalise(key, value)


_fake_normalise = fake_lxc.normalise
fake_lxc.normalise = _normalise  # fakepve calls it as a function of its module, so no subclass can override it


class LabPve(FakePve):
    """One node over a backend that makes real containers."""

    def __init__(self, backend: Backend, guests: Guests, *, password: str, port: int, host: str = "127.0.0.1") -> None:
        super().__init__(password=password, host=host, port=port)
        self.backend, self.guests_file = backend, guests
        self.time_scale = 1.0  # 0 would run a whole task before its POST answers
        self.stale_seconds = STALE_SECONDS
        self._creating: dict[int, Values] = {}
        self._created: dict[int, float] = {}
        self._workers: set[asyncio.Task[None]] = set()
        self._say: dict[int, Say] = {}
        self.cts = guests.load()
        for pool in {guest.pool for guest in self.cts if guest.pool}:
            self.pools.setdefault(pool, set()).update(g.vmid for g in self.cts if g.pool == pool)
        for guest in self.cts:
            self._see(guest, backend.pid(guest.vmid))
        guests.save(self.cts)

    # ------------------------------------------------------------ what is real about a container

    @staticmethod
    def _see(guest: FakeCt, pid: int | None) -> None:
        """Give the model the power state that the machine shows."""
        if pid is None:
            guest.status, guest.pid, guest.started_at = "stopped", None, None
            return
        if guest.pid != pid:
            guest.started_at = time.time()
        guest.status, guest.pid = "running", pid

    async def refresh(self) -> None:
        """Notice containers that ended or came up again by themselves, and raw lines that the node was given."""
        self.guests_file.look(self.cts)
        for guest in list(self.cts):
            if guest.status != "running" or guest.lock_holder is not None:
                continue
            pid = await asyncio.to_thread(self.backend.pid, guest.vmid)
            if guest.lock_holder is None:
                self._see(guest, pid)

    async def _real(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a blocking call of the backend; what it could not do ends the worker task with that sentence."""
        try:
            return await asyncio.to_thread(function, *args)
        except (LabError, OSError) as error:
            raise TaskError(str(error)) from error

    # ------------------------------------------------------------ worker tasks

    async def task(  # noqa: PLR0913, PLR0917  # fakepve's signature
        self,
        node: str,
        ttype: str,
        tid: Any,
        user: str,
        body: Callable[[], Awaitable[str | None]],
        vm: FakeCt | None = None,
        lock: bool = True,
        log: Sequence[str] = (),
    ) -> str:
        """Start a worker task. Unlike fakepve's it counts warnings, survives any exception and saves the guests."""
        upid, pid, start = self._upid(node, ttype, tid, user)
        record: Values = {
            "upid": upid, "node": node, "pid": pid, "pstart": pid * 7, "starttime": start, "type": ttype,
            "id": str(tid), "user": user, "status": "running", "log": list(log),
        }  # fmt: skip
        self.tasks[upid] = record
        self.tasklog.append(record)
        worker = asyncio.create_task(self._work(record, body, vm, lock=lock))
        self._workers.add(worker)
        worker.add_done_callback(self._workers.discard)
        return str(upid)

    async def _work(
        self, record: Values, body: Callable[[], Awaitable[str | None]], vm: FakeCt | None, *, lock: bool
    ) -> None:
        """Carry out a worker task to its end, whatever happens in it."""
        lines: list[str] = record["log"]
        status = "unexpected status"  # what Proxmox shows for a worker that was ended from outside
        try:
            note = await (body() if vm is None else self._work_on(record, body, vm, lock=lock))
            if note:
                lines.append(note)
            warnings = sum(line.startswith("WARN:") for line in lines)
            status = f"WARNINGS: {warnings}" if warnings else "OK"
        except TaskError as error:
            status = str(error)
            lines.append(status)
        except Exception as error:  # a task that never ends is worse; the log has the cause
            status = f"{type(error).__name__}: {error}"
            LOG.exception("worker task %s", record["upid"])
        finally:
            record.update(status="stopped", exitstatus=status, endtime=int(time.time()))
            lines.append("TASK " + (status if status == "OK" or status.startswith("WARN") else "ERROR: " + status))
            self.guests_file.save(self.cts)

    async def _work_on(
        self, record: Values, body: Callable[[], Awaitable[str | None]], vm: FakeCt, *, lock: bool
    ) -> str | None:
        """Run a task's body with the container's lock, if it wants it, and with a way to the task's log."""
        if lock:
            await self.acquire(vm, record["upid"])
        self._say[vm.vmid] = record["log"].append
        try:
            return await body()
        finally:
            self._say.pop(vm.vmid, None)
            if lock:
                self.release(vm, record["upid"])

    async def finish_tasks(self, timeout: float) -> bool:  # noqa: ASYNC109  # the answer is whether it was enough
        """Wait for running worker tasks; whether all of them ended in time."""
        if self._workers:
            await asyncio.wait(set(self._workers), timeout=timeout)
        return not self._workers

    async def _ct_task(self, ct: FakeCt, ttype: str, user: str, body: Any, **kwargs: Any) -> str:
        """Do the real thing first, then let fakepve's body change the model."""

        async def stop() -> Any:
            self._task_lock(ct, allow=("mounted",))
            await self._real(self.backend.kill, ct.vmid)
            return await body()

        async def destroy() -> Any:
            self._check_protection(ct, f"can't remove CT {ct.vmid}")
            self._task_lock(ct)
            if ct.status == "running":
                await self._real(self.backend.kill, ct.vmid)
            await self._real(self.backend.destroy, ct.vmid)
            self._created.pop(ct.vmid, None)
            return await body()

        if ttype == "vzdestroy" and ct.status == "running":
            kwargs["log"] = ["trying to acquire lock...", " OK", *kwargs.get("log", ())]
        wrapped = {"vzstop": stop, "vzdestroy": destroy}.get(ttype, body)
        upid: str = await super()._ct_task(ct, ttype, user, wrapped, **kwargs)
        return upid

    # ------------------------------------------------------------ create

    async def _lxc_create(self, user: str, v: Values) -> str:
        vmid = int(v["vmid"])
        self._check_values(user, v)
        if v.get("ssh-public-keys"):
            check_ssh_keys(v["ssh-public-keys"])
        if v.get("restore"):
            raise PveError(501, "the lab cannot restore backups: it has none")
        if self.ct(vmid) is not None:  # before the request is remembered, so that it touches no create under way
            self._check_vmid_unused(vmid)
        self._creating[vmid] = v
        try:
            upid: str = await super()._lxc_create(user, v)
        except BaseException:
            self._creating.pop(vmid, None)
            raise
        return upid

    def _check_values(self, user: str, v: Values) -> None:
        """What the real API refuses and fakepve lets pass, for create and update."""
        devices = sorted(key for key in v if _DEVICE.fullmatch(key))
        for key in devices:
            check_device_format(key, v[key])
        if v.get("nameserver"):
            check_nameservers(v["nameserver"])
        if user == "root@pam":  # everyone else is refused for want of permission, which comes first
            for key in devices:
                if not self.backend.has_device(device_path(v[key])):
                    raise PveError(500, f"Device {device_path(v[key])} does not exist")
            if v.get("hookscript") and not self.volume_exists(v["hookscript"]):
                raise PveError(500, f"script '{v['hookscript']}' does not exist")
        try:
            self.backend.check(v)
        except LabError as error:
            raise PveError(500, str(error)) from error

    async def ceph_io(self, vm: FakeCt, keys: list[str] | None = None) -> None:
        """fakepve awaits this in a create once the configuration is final: here the real container is made."""
        request = self._creating.pop(vm.vmid, None)
        if request is None:
            return
        template = str(request["ostemplate"])
        if ":" not in template:
            raise TaskError(f"can't find file '{template}'")
        vm.lock = "create"
        say = self._say[vm.vmid]
        say(f"extracting archive '{self._volume_path('local', template.partition(':')[2], 'vztmpl')}'")
        keys_text = str(request.get("ssh-public-keys") or "")
        await self._real(self.backend.create, vm.vmid, dict(vm.config), template, keys_text, say)
        vm.lock = None
        self._created[vm.vmid] = time.monotonic()
        self.guests_file.save(self.cts)

    # ------------------------------------------------------------ power

    async def _start_steps(self, ct: FakeCt, user: str, skiplock: bool = False) -> None:
        await super()._start_steps(ct, user, skiplock)  # checks, pending configuration; sets the model to running
        try:
            ct.pid = await self._real(self.backend.start, ct.vmid, dict(ct.config))
        except BaseException:
            ct.status, ct.pid, ct.started_at = "stopped", None, None
            raise

    async def _ct_powerdown(self, ct: FakeCt, timeout: int, force: bool) -> None:  # noqa: ASYNC109  # fakepve's
        if not await self._real(self.backend.shutdown, ct.vmid, int(timeout)):
            if not force:
                raise TaskError("container did not stop")
            await self._real(self.backend.kill, ct.vmid)
        await super()._ct_powerdown(ct, timeout, force)

    # ------------------------------------------------------------ configuration

    async def _lxc_config_get(self, user: str, v: Values) -> Values:
        data: Values = await super()._lxc_config_get(user, v)
        return self._readable(data)

    @staticmethod
    def _readable(data: Values) -> Values:
        """Proxmox stores a description as comment lines, each with its newline."""
        if data.get("description"):
            data["description"] = data["description"].rstrip("\n") + "\n"
        return data

    async def _lxc_pending(self, user: str, v: Values) -> list[Values]:
        data: list[Values] = [item for item in await super()._lxc_pending(user, v) if item["key"] != "lxc"]
        for item in data:
            if item["key"] == "description" and "value" in item:
                item["value"] = str(item["value"]).rstrip("\n") + "\n"
        return [*data, {"key": "digest", "value": self._find_ct(v["node"], v["vmid"]).digest()}]

    async def _lxc_config_put(self, user: str, v: Values) -> None:
        self._check_values(user, v)
        ct = self._find_ct(v["node"], v["vmid"])
        hot = [key for key in v if _DEVICE.fullmatch(key) and key not in ct.config]
        if ct.status == "running" and user == "root@pam" and hot:
            raise bad(**{hot[0]: f"unable to hotplug {hot[0]}: the lab gives devices to a container when it starts\n"})
        before = dict(ct.config)
        await super()._lxc_config_put(user, v)
        self.guests_file.save(self.cts)
        changed = {key for key in ("memory", "swap", "cores") if ct.config.get(key) != before.get(key)}
        if ct.status == "running" and changed:
            try:
                await asyncio.to_thread(self.backend.limit, ct.vmid, dict(ct.config))
            except LabError as error:
                raise bad(**dict.fromkeys(sorted(changed), f"unable to hotplug: {error}\n")) from error

    def _apply(self, ct: FakeCt, selection: Any = None, running: bool = False) -> None:
        """A running container keeps its interfaces until it starts again: network changes stay pending."""
        if not running:
            super()._apply(ct, selection, running)
            return
        held = {key: value for key, value in ct.pending.items() if _NET.fullmatch(key)}
        for key in held:
            del ct.pending[key]
        super()._apply(ct, selection, running)
        ct.pending.update(held)

    def ct_resources(self, user: str, kind: str | None = None) -> list[Values]:
        """The containers in /cluster/resources; a new one shows placeholders for a while, as on a real cluster."""
        data: list[Values] = super().ct_resources(user, kind)
        for item in data:
            age = time.monotonic() - self._created.get(item["vmid"], float("-inf"))
            if age < self.stale_seconds:
                item.update(name=f"CT{item['vmid']}", maxmem=512 * 1024**2, maxdisk=4 * 1024**3)
            item.setdefault("memhost", item["mem"])
        return data

    def _realise(self, vmid: int, key: str, value: str, *rest: Any) -> str:
        """A mount point with its path before its other options, as Proxmox writes it."""
        first, *options = str(super()._realise(vmid, key, value, *rest)).split(",")
        return ",".join([first, *sorted(options, key=lambda option: (not option.startswith("mp="), option))])

    def _item(self, name: str, volname: str, vol: Values) -> Values:
        item: Values = super()._item(name, volname, vol)
        if item["content"] in {"rootdir", "images"}:
            item = {"parent": None, "used": 0} | item
        return item

    async def _lxc_interfaces(self, user: str, v: Values) -> list[Values] | None:
        """As fakepve's, with the link-local address that the kernel derives from a hardware address."""
        data: list[Values] | None = await super()._lxc_interfaces(user, v)
        for item in data or []:
            if item["name"] != "lo" and item["hwaddr"]:
                address = link_local(item["hwaddr"])
                item["inet6"] = f"{address}/64"
                item["ip-addresses"].append({"ip-address": address, "ip-address-type": "inet6", "prefix": "64"})
        return data

    # ------------------------------------------------------------ refused: these would be a model only

    async def _refuse(self, user: str, v: Values) -> Any:
        raise PveError(
            501, "the lab cannot do this for real (suspend, snapshot, clone, template, migrate and resize are refused)"
        )

    _lxc_suspend = _lxc_resume = _lxc_clone = _lxc_template = _lxc_migrate = _lxc_migrate_check = _refuse
    _lxc_resize = _lxc_snapshot = _lxc_snapshot_delete = _lxc_rollback = _lxc_snapshot_config_put = _refuse

    # ------------------------------------------------------------ the wire

    def _lxc_handler(self, fn: Callable[[str, Values], Awaitable[Any]]) -> Any:
        """As fakepve's, but a repeated `tags` parameter is a list of tags."""

        async def handler(request: web.Request) -> web.Response:
            user = request[fake_server.USER]
            match = self.resolve(request, fake_server.API)
            values = await fake_server.params(request)
            if isinstance(values.get("tags"), list):
                values["tags"] = ";".join(values["tags"])
            data = await self.answer(request, match, values, user, lambda _match, checked: fn(user, checked))
            return web.json_response({"data": data})

        return handler

    async def answer(self, request: web.Request, match: Any, params: Values, user: str, call: Any = None) -> Any:
        """fakepve's checks and answer, with the real API's wording."""
        if match is None:
            path = request.path.removeprefix(fake_server.API)
            raise PveError(501, f"Method '{request.method} {path}' not implemented")
        try:
            return await super().answer(request, match, params, user, call)
        except PveError as error:
            raise self._reworded(error) from None

    @staticmethod
    def _reworded(error: PveError) -> PveError:
        """An error with the texts that the recordings show."""
        message = error.message.replace(fake_server.API + "/", "/", 1)
        message = message.replace("Name or service not known", "Temporary failure in name resolution")
        fields = dict(error.errors or {})
        for key, text in fields.items():
            unknown = re.fullmatch(r"invalid format - invalid key in comma-separated list property: (\S+)\n", text)
            if unknown:
                why = "property is not defined in schema and the schema does not allow additional properties"
                fields[key] = f"invalid format - format error\n{key}.{unknown[1]}: {why}\n"
        return PveError(error.status, message, fields or None)

    def _authenticate(self, request: web.Request) -> str | None:
        try:
            user: str | None = super()._authenticate(request)
        except PveError as error:
            raise PveError(401, self._unauthenticated(request, error.message)) from None
        return user

    @staticmethod
    def _unauthenticated(request: web.Request, message: str) -> str:
        if request.headers.get("Authorization"):
            return "Authentication failed!"
        if not request.cookies.get("PVEAuthCookie"):
            return "No ticket"
        return message

    async def _version(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"data": VERSION})

    def _get_task(self, request: web.Request) -> Values:
        upid = request.match_info["upid"]
        if not _UPID.fullmatch(upid):
            raise bad(upid="unable to parse worker upid")
        if upid not in self.tasks:
            raise bad(upid="no such task")
        task: Values = super()._get_task(request)
        return task

    def _task_view(self, task: Values, listing: bool = False) -> Values:
        """As fakepve's, but the user of a token is shown without the token, which has its own field."""
        view: Values = super()._task_view(task, listing)
        view["user"] = view["user"].partition("!")[0]
        return view

    async def _task_list(self, request: web.Request) -> web.Response:
        response = await super()._task_list(request)
        body = json.loads(response.text)
        return web.json_response(body | {"total": len(body["data"])})

    async def _task_log(self, request: web.Request) -> web.Response:
        response = await super()._task_log(request)
        body = json.loads(response.text)
        return web.json_response(body | {"total": len(self._get_task(request)["log"])})

    def _build_app(self) -> web.Application:
        app: web.Application = super()._build_app()
        app.middlewares.insert(0, self._outermost)
        return app

    @web.middleware
    async def _outermost(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Look at the machine first; answer a 401 with an empty body and the reason in the status line."""
        if "/lxc" in request.path or "/cluster/resources" in request.path:
            await self.refresh()
        response: web.StreamResponse = await handler(request)
        if response.status == 401:
            return web.Response(status=401, reason=response.reason, text="")
        if response.status == 501 and isinstance(response, web.Response) and response.text:
            body = json.loads(response.text)
            return web.json_response(
                body | {"message": body["message"].rstrip("\n")}, status=501, reason=response.reason
            )
        LOG.info("%s %s %d %s", request.method, request.path, response.status, response.reason)
        return response


def make(  # one call site; every argument is a fact of the lab
    backend: Backend,
    guests: Guests,
    *,
    password: str,
    token: tuple[str, str],
    port: int,
    template: tuple[str, Path],
) -> LabPve:
    """The lab's API: node pve1, storages `local` and `ct`, a template volume, root@pam, a deploy token and its ACL."""
    pve = LabPve(backend, guests, password=password, port=port)
    tokenid, value = token
    volume, path = template
    gib = 1024**3
    pve.nodes = {NODE: {"online": True}}
    pve.apitokens = {tokenid: value}
    pve.users = {}
    pve.acl = {}
    pve.grant(tokenid, "/", *DEPLOY_PRIVILEGES)
    pve.storages = {
        "local": {"type": "dir", "active": 1, "content": "iso,vztmpl,snippets,backup", "files": set(),
                  "path": "/var/lib/vz", "avail": 50 * gib, "volumes": {
                      f"vztmpl/{volume}": {"content": "vztmpl", "format": "tzst", "size": path.stat().st_size,
                                           "ctime": int(path.stat().st_mtime)}}},
        "ct": {"type": "dir", "active": 1, "content": "images,rootdir", "files": set(), "path": "/var/lib/ct",
               "avail": 100 * gib},
    }  # fmt: skip
    return pve


# fakepve looks these up at import time of its own modules; a version that lacks one would fail late and unclearly
for _name in ("_lxc_create", "_start_steps", "_ct_powerdown", "_ct_task", "_lxc_config_put", "_apply", "_upid"):
    if not hasattr(FakePve, _name):
        raise LabError(f"fakepve has no {_name}: the lab needs fakepve 0.5.0, as its lock file says")
