"""The container `pve1` that stands for the Proxmox node: sshd, stand-in device nodes, a small `pct`."""

from __future__ import annotations

import os
import stat
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from pivot_lab import template
from pivot_lab.containers import Bind, Containers, Device, Identity, Nic, Spec, put
from pivot_lab.credentials import ensure_ssh_key
from pivot_lab.layout import ID_BASE, NODE, NODE_HOST, IPv4Network, Layout, host
from pivot_lab.system import read_json, write, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

# Stand-ins with the numbers that NVIDIA's driver uses; no driver is behind them, opening one gives ENXIO.
STAND_INS = (
    Device("/dev/nvidia0", "c", 195, 0, 0o666),
    Device("/dev/nvidiactl", "c", 195, 255, 0o666),
    Device("/dev/nvidia-uvm", "c", 511, 0, 0o666),
)
# What every Linux node has and a test may pass through.
COMMON = ("null", "zero", "full", "random", "urandom", "tty")
CONFIGS_TARGET = "/etc/pve/lxc"
SOCKET_TARGET = "/var/lib/pivot-lab-node"  # not below /run, which systemd covers with its own tmpfs
MOTD = """This is the container that stands for the Proxmox node in Pivot's lab. It is no Proxmox VE.
/dev/nvidia0, /dev/nvidiactl and /dev/nvidia-uvm are stand-ins without a driver behind them.
`pct` answers list, status, config, set and exec from the lab's API; everything else is refused.
/etc/pve/lxc holds the containers' files. It is no pmxcfs: that they are only written in place comes from their owner.
"""


def prepare(layout: Layout) -> None:
    """Make what the API needs of the node: its stand-in device nodes and the directory of pct's socket."""
    layout.node_socket.parent.mkdir(parents=True, exist_ok=True)
    os.chown(layout.node_socket.parent, ID_BASE, ID_BASE)
    layout.node_socket.parent.chmod(0o700)
    layout.node_configs.mkdir(parents=True, exist_ok=True)
    for directory in (layout.node_configs.parent, layout.node_configs):
        directory.chmod(0o755)
    layout.node_devices.mkdir(parents=True, exist_ok=True)
    layout.node_devices.chmod(0o755)
    for device in STAND_INS:
        path = layout.node_devices / device.path.removeprefix("/dev/")
        if not path.exists():
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(device.major, device.minor))
            path.chmod(device.mode)
            os.chown(path, ID_BASE, ID_BASE)
    write(
        layout.node_devices / "README",
        "Device nodes that the lab's node shows. They are stand-ins: no driver is behind them.\n",
    )


def find_device(layout: Layout, path: str) -> tuple[str, int, int] | None:
    """Kind, major and minor of a device of the node (`/dev/…`), or None where the node has none."""
    name = path.removeprefix("/dev/")
    if name == path or ".." in name.split("/"):
        return None
    source = layout.node_devices / name
    if not source.exists():
        if name not in COMMON:
            return None
        source = Path("/dev", name)
    info = source.stat()
    if not (stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode)):
        return None
    return "c" if stat.S_ISCHR(info.st_mode) else "b", os.major(info.st_rdev), os.minor(info.st_rdev)


def ensure(layout: Layout, subnet: IPv4Network, say: Callable[[str], None]) -> None:
    """Make and start the node unless it runs; an incomplete one from an interrupted lab is made again."""
    containers = Containers(layout)
    settings = containers.home(NODE) / "node.json"
    wanted = {"tree": str(template.tree(layout)), "key": ensure_ssh_key(layout), "client": _client(), "motd": MOTD}
    if containers.home(NODE).exists() and read_json(settings) != wanted:
        containers.destroy(NODE)
    if not containers.home(NODE).exists():
        identity = Identity(wanted["key"])
        containers.create(NODE, [template.unpack(layout)], NODE, identity, lambda _line: None)
        put(containers.rootfs(NODE), "usr/sbin/pct", _client(), 0o755)
        put(containers.rootfs(NODE), "etc/motd", MOTD)
        write_json(containers.home(NODE) / "keys.json", dict(identity.host_keys))
        write_json(settings, wanted)
    address = host(subnet, NODE_HOST)
    if containers.pid(NODE) is None:
        say(f"starting the node {NODE} on {address}")
        nic = Nic("eth0", f"BC:24:11:{layout.lab_id[0:2]}:{layout.lab_id[2:4]}:{layout.lab_id[4:6]}".upper(),
                  f"{address}/{subnet.prefixlen}")  # fmt: skip
        binds = (Bind(layout.node_socket.parent, SOCKET_TARGET), Bind(layout.node_configs, CONFIGS_TARGET))
        containers.start(NODE, Spec(NODE, (nic,), devices=STAND_INS, binds=binds))
        containers.wait_for_ssh(NODE, address)
    _learn_host_keys(layout, address, read_json(containers.home(NODE) / "keys.json"))


def _client() -> str:
    return resources.files("pivot_lab").joinpath("files/pct").read_text()


def _learn_host_keys(layout: Layout, address: str, keys: dict[str, str]) -> None:
    """Put the node's host keys, known since they were made, into known_hosts; others' lines stay."""
    path = layout.known_hosts
    lines = path.read_text().splitlines() if path.exists() else []
    mine = [f"{address} {' '.join(line.split()[:2])}" for line in keys.values()]
    kept = [line for line in lines if not line.startswith(address + " ")]
    if sorted(lines) != sorted(kept + mine):
        write(path, "\n".join(kept + mine) + "\n")
