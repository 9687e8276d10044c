"""Real unprivileged LXC containers on overlays over one shifted template. No knowledge of the API here."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pivot_lab.errors import LabError
from pivot_lab.layout import ID_BASE, ID_COUNT, Layout
from pivot_lab.system import ENVIRONMENT, mounted, mounts_below, read_json, remove_tree, run, write, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Say = Callable[[str], None]

HOST_KEY_TYPES = ("rsa", "ecdsa", "ed25519")
Cgroup = Literal["v1", "v2"]


@dataclass(frozen=True)
class Nic:
    """A network interface in a container; `address` is CIDR or None."""

    name: str
    hwaddr: str
    address: str | None


@dataclass(frozen=True)
class Device:
    """A device node that a container gets; uid and gid are the container's own ids."""

    path: str
    kind: Literal["c", "b"]
    major: int
    minor: int
    mode: int = 0o660
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True)
class Bind:
    """A directory of this machine that a container sees."""

    source: Path
    target: str
    readonly: bool = False


@dataclass(frozen=True)
class Spec:
    """What a container starts with. `memory` and `swap` in MiB, `cores` in CPUs."""

    hostname: str
    nics: tuple[Nic, ...]
    memory: int | None = None
    swap: int | None = None
    cores: float | None = None
    devices: tuple[Device, ...] = ()
    binds: tuple[Bind, ...] = ()
    raw: tuple[tuple[str, str], ...] = ()  # further lines of LXC's own configuration


@dataclass
class Identity:
    """Who may log in, which host keys to make, and the public ones that a new container got (type → line)."""

    authorized_keys: str
    key_types: tuple[str, ...] = HOST_KEY_TYPES
    host_keys: dict[str, str] = field(default_factory=dict)


@cache
def cgroup_controllers() -> dict[str, Cgroup]:
    """Which of memory and cpu this kernel can limit, and through which cgroup version."""
    found: dict[str, Cgroup] = {}
    unified = Path("/sys/fs/cgroup/cgroup.controllers")
    v2 = unified.read_text().split() if unified.exists() else []
    for controller in ("memory", "cpu"):
        if controller in v2:
            found[controller] = "v2"
        elif Path("/sys/fs/cgroup", controller, "cgroup.procs").exists():
            found[controller] = "v1"
    return found


def limits(spec: Spec, controllers: dict[str, Cgroup]) -> list[tuple[str, str]]:
    """LXC configuration keys and values that limit memory and CPU time, as far as the kernel can."""
    out: list[tuple[str, str]] = []
    if spec.memory is not None:
        size = spec.memory * 1024 * 1024
        if controllers.get("memory") == "v2":
            out.append(("lxc.cgroup2.memory.max", str(size)))
            if spec.swap is not None:
                out.append(("lxc.cgroup2.memory.swap.max", str(spec.swap * 1024 * 1024)))
        elif controllers.get("memory") == "v1":
            out.append(("lxc.cgroup.memory.limit_in_bytes", str(size)))
    if spec.cores is not None:
        quota = int(spec.cores * 100_000)
        if controllers.get("cpu") == "v2":
            out.append(("lxc.cgroup2.cpu.max", f"{quota} 100000"))
        elif controllers.get("cpu") == "v1":
            out.append(("lxc.cgroup.cpu.cfs_quota_us", str(quota)))
    return out


def render(layout: Layout, key: str, spec: Spec, controllers: dict[str, Cgroup]) -> str:
    """The LXC configuration file of a container."""
    home = layout.containers / layout.container(key)
    lines = [
        ("lxc.include", "/usr/share/lxc/config/common.conf"),
        ("lxc.include", "/usr/share/lxc/config/userns.conf"),
        ("lxc.uts.name", spec.hostname),
        ("lxc.rootfs.path", f"dir:{home}/rootfs"),
        ("lxc.idmap", f"u 0 {ID_BASE} {ID_COUNT}"),
        ("lxc.idmap", f"g 0 {ID_BASE} {ID_COUNT}"),
        # The user namespace is what confines it; a profile of the host would forbid systemd's own sandboxes.
        ("lxc.apparmor.profile", "unconfined"),
        *limits(spec, controllers),
    ]
    for number, nic in enumerate(spec.nics):
        prefix = f"lxc.net.{number}."
        lines += [
            (prefix + "type", "veth"),
            (prefix + "link", layout.bridge),
            (prefix + "veth.pair", layout.veth(f"{key}.{number}")),
            (prefix + "name", nic.name),
            (prefix + "hwaddr", nic.hwaddr),
            (prefix + "flags", "up"),
        ]
        if nic.address:
            lines.append((prefix + "ipv4.address", nic.address))
    for device in spec.devices:
        name = device.path.removeprefix("/dev/")
        lines.append(("lxc.mount.entry", f"{home}/dev/{name} dev/{name} none bind,create=file 0 0"))
    for bind in spec.binds:
        options = "bind,create=dir" + (",ro" if bind.readonly else "")
        lines.append(("lxc.mount.entry", f"{bind.source} {bind.target.lstrip('/')} none {options} 0 0"))
    return "".join(f"{name} = {value}\n" for name, value in [*lines, *spec.raw])


def put(rootfs: Path, path: str, text: str, mode: int = 0o644) -> None:
    """Write a file of a container from outside, owned by its root.

    No link is followed on the way: what stands in the container may have been made by its users.
    """
    *parents, name = path.split("/")
    directory = os.open(rootfs, os.O_DIRECTORY | os.O_PATH)
    try:
        for parent in parents:
            with contextlib.suppress(FileExistsError):
                os.mkdir(parent, 0o700 if parent == ".ssh" else 0o755, dir_fd=directory)
                os.chown(parent, ID_BASE, ID_BASE, dir_fd=directory, follow_symlinks=False)
            inner = os.open(parent, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            os.close(directory)
            directory = inner
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=directory)
        with os.fdopen(descriptor, "w") as stream:
            os.fchown(descriptor, ID_BASE, ID_BASE)
            os.fchmod(descriptor, mode)
            stream.write(text)
    except OSError as error:
        raise LabError(f"/{path} of the container at {rootfs} cannot be written: {error.strerror}") from None
    finally:
        os.close(directory)


def make_host_keys(hostname: str, kinds: Sequence[str], say: Say) -> dict[str, tuple[str, str]]:
    """New ssh host keys: type → (private, public)."""

    def make(kind: str) -> tuple[str, str, str]:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "key")
            run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", f"root@{hostname}", "-f", path])
            public = path.with_suffix(".pub").read_text()
            fingerprint = run(["ssh-keygen", "-l", "-f", path]).split()[1]
            return path.read_text(), public, fingerprint

    keys = {}
    with ThreadPoolExecutor(len(kinds)) as pool:
        for kind, (private, public, fingerprint) in zip(kinds, pool.map(make, kinds), strict=True):
            say(f"Creating SSH host key 'ssh_host_{kind}_key' - this may take some time ...")
            say(f"done: {fingerprint} root@{hostname}")
            keys[kind] = (private, public)
    return keys


class Containers:
    """The containers of one lab; a container is known by its key (`pve1`, `ct101`, `s-name`)."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def home(self, key: str) -> Path:
        """A container's directory."""
        return self.layout.containers / self.layout.container(key)

    def rootfs(self, key: str) -> Path:
        """A container's root as this machine sees it while mounted."""
        return self.home(key) / "rootfs"

    def keys(self) -> list[str]:
        """Keys of all containers that exist on disk, complete or not."""
        prefix = self.layout.lab_id + "-"
        if not self.layout.containers.exists():
            return []
        return sorted(
            p.name.removeprefix(prefix) for p in self.layout.containers.iterdir() if p.name.startswith(prefix)
        )

    def complete(self, key: str) -> bool:
        """Whether a container's creation came to its end."""
        return "lowers" in read_json(self.home(key) / "container.json")

    def _lxc(self, tool: str, key: str, *more: str, ok: Sequence[int] = (0,), timeout: float = 120) -> str:
        name = self.layout.container(key)
        return run([tool, "-P", self.layout.containers, "-n", name, *more], ok=ok, timeout=timeout)

    def create(self, key: str, lowers: Sequence[Path], hostname: str, identity: Identity, say: Say) -> None:
        """Make a container over `lowers` (topmost first) with its own identity; leaves nothing when it fails."""
        home = self.home(key)
        if home.exists():
            raise LabError(f"the container {key} already exists in {home}")
        try:
            for part in ("rootfs", "upper", "work", "dev"):
                (home / part).mkdir(parents=True)
            for directory in (home, home / "upper", home / "dev"):
                directory.chmod(0o755)
            os.chown(home / "upper", ID_BASE, ID_BASE)
            self._mount(key, lowers)
            host_keys = make_host_keys(hostname, identity.key_types, say)
            root = self.rootfs(key)
            for kind, (private, public) in host_keys.items():
                put(root, f"etc/ssh/ssh_host_{kind}_key", private, 0o600)
                put(root, f"etc/ssh/ssh_host_{kind}_key.pub", public)
                identity.host_keys[kind] = public.strip()
            put(root, "etc/machine-id", secrets.token_hex(16) + "\n", 0o444)
            if identity.authorized_keys.strip():
                put(root, "root/.ssh/authorized_keys", identity.authorized_keys.strip() + "\n", 0o600)
            write_json(home / "container.json", {"lowers": [str(lower) for lower in lowers]})
        except BaseException:
            self.destroy(key)
            raise

    def _name(self, key: str, spec: Spec) -> None:
        """Hostname and address as Proxmox writes them at each start: a name with a fixed address means that one."""
        own = next((nic.address.partition("/")[0] for nic in spec.nics if nic.address), "127.0.1.1")
        put(self.rootfs(key), "etc/hostname", spec.hostname + "\n")
        put(self.rootfs(key), "etc/hosts", f"127.0.0.1 localhost\n::1 localhost\n{own} {spec.hostname}\n")

    def _mount(self, key: str, lowers: Sequence[Path]) -> None:
        home = self.home(key)
        if mounted(home / "rootfs"):
            return
        # redirect_dir: a directory that came from a lower layer can be renamed in the container
        options = f"lowerdir={':'.join(map(str, lowers))},upperdir={home}/upper,workdir={home}/work,redirect_dir=on"
        run(["mount", "-t", "overlay", "-o", options, "pivot-lab", home / "rootfs"])

    def _devices(self, key: str, devices: Sequence[Device]) -> None:
        """Make a container's own nodes, owned by the ids its users map to, as Proxmox does."""
        directory = self.home(key) / "dev"
        shutil.rmtree(directory)
        directory.mkdir()
        directory.chmod(0o755)
        for device in devices:
            path = directory / device.path.removeprefix("/dev/")
            path.parent.mkdir(parents=True, exist_ok=True)
            kind = stat.S_IFCHR if device.kind == "c" else stat.S_IFBLK
            os.mknod(path, kind | 0o600, os.makedev(device.major, device.minor))
            path.chmod(device.mode)
            os.chown(path, ID_BASE + device.uid, ID_BASE + device.gid)

    def start(self, key: str, spec: Spec) -> int:
        """Start a container and return its init's pid; raises a LabError with the reason from LXC's log."""
        home = self.home(key)
        settings = read_json(home / "container.json")
        if "lowers" not in settings:
            raise LabError(f"the container {key} is incomplete: its creation was interrupted")
        self._mount(key, [Path(lower) for lower in settings["lowers"]])
        self._name(key, spec)
        self._devices(key, spec.devices)
        write(home / "config", render(self.layout, key, spec, cgroup_controllers()))
        log = home / "start.log"
        log.unlink(missing_ok=True)
        try:
            self._lxc("lxc-start", key, "-d", "-o", str(log), "-l", "INFO")
        except LabError:
            text = log.read_text(errors="replace") if log.exists() else ""
            reasons = [line.split(" - ", 1)[-1].strip() for line in text.splitlines() if " ERROR " in line]
            raise LabError(f"the container {key} does not start: {(reasons or ['LXC wrote no reason'])[0]}") from None
        for nic in spec.nics:
            if nic.address:  # this machine may still know the hardware address of an earlier container there
                run(["ip", "neigh", "flush", "dev", self.layout.bridge, "to", nic.address.partition("/")[0]])
        pid = self.pid(key)
        if pid is None:
            raise LabError(f"the container {key} ended as soon as it was started; see {log}")
        return pid

    def pid(self, key: str) -> int | None:
        """The pid of a running container's init, or None."""
        if not (self.home(key) / "config").exists():
            return None
        text = self._lxc("lxc-info", key, "-pH", ok=(0, 1)).strip()
        return int(text) if text.isdigit() and int(text) > 0 else None

    def shutdown(self, key: str, timeout: int) -> bool:
        """Ask a container to power off; False if it still runs after `timeout` seconds."""
        with contextlib.suppress(LabError):
            self._lxc("lxc-stop", key, "--nokill", "-t", str(timeout), ok=(0, 2), timeout=timeout + 30)
        return self.pid(key) is None

    def kill(self, key: str) -> None:
        """End a container at once; nothing happens where it does not run."""
        if (self.home(key) / "config").exists():
            self._lxc("lxc-stop", key, "-k", ok=(0, 1, 2))
        if self.pid(key) is not None:
            raise LabError(f"the container {key} cannot be stopped; see `lxc-info -P {self.layout.containers}`")

    def limit(self, key: str, spec: Spec) -> None:
        """Apply memory and CPU limits to a running container."""
        for name, value in limits(spec, cgroup_controllers()):
            self._lxc("lxc-cgroup", key, name.split(".", 2)[2], value)

    def unmount(self, key: str) -> None:
        """Take a stopped container's overlay off its mount point."""
        for point in mounts_below(self.home(key)):
            run(["umount", "-l", point])

    def destroy(self, key: str) -> None:
        """Stop a container if it runs and remove everything of it."""
        home = self.home(key)
        self.kill(key)
        self.unmount(key)
        if home.exists():
            gone = home.with_name(f".gone-{secrets.token_hex(4)}")
            home.rename(gone)  # its name is free at once, and a half removed tree is no container
            remove_tree(gone)

    def execute(self, key: str, argv: Sequence[str], stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run a command in a running container as its root, with a clean environment."""
        name = self.layout.container(key)
        command = ["lxc-attach", "-P", str(self.layout.containers), "-n", name, "--clear-env", "--", *argv]
        return subprocess.run(command, input=stdin, capture_output=True, cwd="/", env=ENVIRONMENT, check=False)

    def wait_for_ssh(self, key: str, address: str, timeout: float = 60) -> None:
        """Wait until a container's sshd sends its greeting."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((address, 22), timeout=2) as link:
                if link.recv(4) == b"SSH-":
                    return
            if self.pid(key) is None:
                raise LabError(f"the container {key} ended while its sshd was awaited; see {self.home(key)}/start.log")
            time.sleep(0.05)
        raise LabError(f"sshd of the container {key} did not answer on {address} within {timeout:.0f} s")
