"""The API's containers made real: Proxmox configuration in, LXC containers out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fakepve.lxc import split_props

from pivot_lab import template
from pivot_lab.containers import Containers, Device, Identity, Nic, Spec
from pivot_lab.errors import LabError
from pivot_lab.node import find_device
from pivot_lab.system import start_time

if TYPE_CHECKING:
    import ipaddress

    from pivot_lab.containers import Say
    from pivot_lab.layout import Layout

    Values = dict[str, Any]


def nics(config: Values) -> tuple[Nic, ...]:
    """The interfaces of a configuration, in the order of their numbers."""
    found = []
    for key in sorted((k for k in config if k.startswith("net")), key=lambda k: int(k[3:])):
        props = split_props(config[key])[1]
        address = props.get("ip", "")
        found.append(Nic(props["name"], props["hwaddr"], address if "/" in address else None))
    return tuple(found)


def devices(config: Values, layout: Layout) -> tuple[Device, ...]:
    """The device nodes of a configuration; a LabError where the node lost one since it was checked."""
    found = []
    for key in sorted((k for k in config if k.startswith("dev")), key=lambda k: int(k[3:])):
        first, props = split_props(config[key])
        path = first if first is not None else props["path"]
        node = find_device(layout, path)
        if node is None:
            raise LabError(f"Device {path} does not exist")
        mode, uid, gid = int(props.get("mode", "0660"), 8), int(props.get("uid", 0)), int(props.get("gid", 0))
        found.append(Device(path, "c" if node[0] == "c" else "b", node[1], node[2], mode, uid, gid))
    return tuple(found)


def raw_lines(config: Values) -> tuple[tuple[str, str], ...]:
    """The raw lines of a configuration; only those that stay in the container, since nobody here guards the machine."""
    for key, _ in config.get("lxc", ()):
        if not key.startswith(("lxc.prlimit.", "lxc.environment")):
            raise LabError(f"the lab's containers take lxc.prlimit.* and lxc.environment of raw lines: leave out {key}")
    return tuple((key, value) for key, value in config.get("lxc", ()))


def key_of(vmid: int) -> str:
    """The lab's key for a container of the API."""
    return f"ct{vmid}"


class LxcBackend:
    """`api.Backend` over the lab's containers."""

    def __init__(self, layout: Layout, subnet: ipaddress.IPv4Network) -> None:
        self.layout, self.subnet = layout, subnet
        self.containers = Containers(layout)
        self._seen: dict[int, tuple[int, str]] = {}  # vmid → pid and start time of a running init

    def has_device(self, path: str) -> bool:
        """Whether the node has this device."""
        return find_device(self.layout, path) is not None

    def check(self, config: Values) -> None:
        """Refuse what these containers could only pretend."""
        for key, value in config.items():
            if key.startswith("mp") and key[2:].isdigit():
                raise LabError(f"the lab's containers have no mount points: leave out {key}")
            if key.startswith("net") and key[3:].isdigit():
                self._check_net(key, str(value))
        if str(config.get("unprivileged", 1)) == "0":
            raise LabError("the lab's containers are unprivileged: set unprivileged=1")

    def _check_net(self, key: str, value: str) -> None:
        props = split_props(value)[1]
        if props.get("bridge") != self.layout.bridge:
            raise LabError(f"bridge '{props.get('bridge')}' does not exist: this lab has {self.layout.bridge} only")
        if props.get("gw"):
            raise LabError(f"{key}: the lab's network has no way out, so no gateway: leave out gw")
        if props.get("ip", "") == "dhcp":
            raise LabError(f"{key}: the lab has no DHCP server: give a static address in {self.subnet}")

    def spec(self, config: Values) -> Spec:
        """What a container starts with."""
        cores = config.get("cores")
        return Spec(
            hostname=str(config["hostname"]), nics=nics(config), memory=int(config.get("memory") or 512),
            swap=int(config.get("swap", 512)), cores=float(cores) if cores else None,
            devices=devices(config, self.layout), raw=raw_lines(config),
        )  # fmt: skip

    def create(self, vmid: int, config: Values, template_volume: str, ssh_keys: str, say: Say) -> None:
        """Clone the template; a leftover of an interrupted create is removed first."""
        if template_volume.partition("/")[2] != template.VOLUME:
            raise LabError(f"volume '{template_volume}' cannot be unpacked: the lab has {template.VOLUME} only")
        key = key_of(vmid)
        if self.containers.home(key).exists():
            self.containers.destroy(key)
        identity = Identity(ssh_keys)
        self.containers.create(key, [template.unpack(self.layout)], str(config["hostname"]), identity, say)

    def start(self, vmid: int, config: Values) -> int:
        """Start a container and return its init's pid."""
        return self.containers.start(key_of(vmid), self.spec(config))

    def shutdown(self, vmid: int, timeout: int) -> bool:
        """Ask a container to power off; False if it still runs after `timeout` seconds."""
        return self.containers.shutdown(key_of(vmid), timeout)

    def kill(self, vmid: int) -> None:
        """End a container at once."""
        self.containers.kill(key_of(vmid))

    def destroy(self, vmid: int) -> None:
        """Remove everything of a container."""
        self.containers.destroy(key_of(vmid))

    def pid(self, vmid: int) -> int | None:
        """The pid of a running container's init; asks LXC only where the last known one is gone."""
        known = self._seen.get(vmid)
        if known is not None and start_time(known[0]) == known[1]:
            return known[0]
        self._seen.pop(vmid, None)
        pid = self.containers.pid(key_of(vmid))
        began = start_time(pid) if pid is not None else None
        if pid is None or began is None:
            return None
        self._seen[vmid] = (pid, began)
        return pid

    def limit(self, vmid: int, config: Values) -> None:
        """Apply memory and CPU limits to a running container."""
        self.containers.limit(key_of(vmid), self.spec(config))

    def remove_unknown(self, vmids: set[int]) -> list[str]:
        """Destroy containers that no guest of the API stands for (a create was interrupted); their keys."""
        unknown = [key for key in self.containers.keys() if key.startswith("ct") and int(key[2:]) not in vmids]  # noqa: SIM118
        for key in unknown:
            self.containers.destroy(key)
        return unknown
