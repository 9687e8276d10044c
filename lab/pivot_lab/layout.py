"""Every name and path of one lab, derived from the path of its clone, so that labs never collide."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pivot_lab.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Iterable

MACHINE_ROOT = Path("/var/lib/pivot-lab")
NODE = "pve1"
NODE_HOST = 2  # the node's address in the lab's subnet
GUESTS = {"infer1": 11, "infer2": 12}  # addresses the lab's inventory gives to guests of the API
SCRATCH_HOSTS = range(128, 255)  # addresses of scratch containers; the API's guests stay below
ID_BASE = 100000  # first uid and gid that an unprivileged container's root maps to, as on Proxmox
ID_COUNT = 65536
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")

IPv4Network = ipaddress.IPv4Network


def check_name(name: str, what: str) -> str:
    """Return a scratch container's or layer's name, or raise a LabError: it becomes a host name and a path."""
    if not _NAME.fullmatch(name):
        raise LabError(
            f"{what} {name!r} is no usable name: give 1 to 40 of a-z, 0-9 and '-', not starting or ending with '-'"
        )
    return name


@dataclass(frozen=True)
class Layout:
    """Names and paths of the lab that belongs to the clone at `root`; `cache` may be shared between labs."""

    root: Path
    cache: Path

    @classmethod
    def of(cls, root: Path, cache: Path | None = None) -> Layout:
        """Return the layout for a clone's path (made absolute, links resolved)."""
        resolved = root.resolve()
        return cls(resolved, (cache or resolved / ".cache").resolve())

    @property
    def lab_id(self) -> str:
        """8 hex digits of the sha256 of the clone's path."""
        return hashlib.sha256(str(self.root).encode()).hexdigest()[:8]

    @property
    def bridge(self) -> str:
        """The bridge's interface name (10 characters; Linux allows 15)."""
        return "pv" + self.lab_id

    @property
    def table(self) -> str:
        """The nftables table that keeps the lab's traffic inside."""
        return "pivot_lab_" + self.lab_id

    @property
    def dot(self) -> Path:
        """The clone's own state: secrets, keys, certificates, logs."""
        return self.root / ".lab"

    @property
    def machine(self) -> Path:
        """The machine's state: trees, overlays, device nodes (containers must be able to reach it)."""
        return MACHINE_ROOT / self.lab_id

    @property
    def containers(self) -> Path:
        """LXC's own path (`lxc-* -P`)."""
        return self.machine / "lxc"

    @property
    def layers(self) -> Path:
        """Saved layers of scratch containers."""
        return self.machine / "layers"

    @property
    def trees(self) -> Path:
        """Unpacked templates, shifted to the containers' ids; the lowest layer of every container."""
        return self.machine / "trees"

    @property
    def node_devices(self) -> Path:
        """The node's stand-in device nodes."""
        return self.machine / "node-dev"

    @property
    def node_socket(self) -> Path:
        """The unix socket on which the API daemon answers the node's `pct`."""
        return self.machine / "node-run" / "api.sock"

    @property
    def node_configs(self) -> Path:
        """The files that the node has below /etc/pve/lxc."""
        return self.machine / "node-pve" / "lxc"

    @property
    def guests(self) -> Path:
        """What the API knows about its containers, kept over restarts of the daemon."""
        return self.machine / "guests.json"

    @property
    def secrets(self) -> Path:
        """Passwords and tokens of this lab (0600)."""
        return self.dot / "secrets.json"

    @property
    def vault_password(self) -> Path:
        """The password that encrypts vault.yml (0600)."""
        return self.dot / "vault-password"

    @property
    def ssh_key(self) -> Path:
        """The controller's private key for the node and for scratch containers (0600)."""
        return self.dot / "ssh" / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """Host keys of the node; provisioning adds those of the API's guests."""
        return self.dot / "ssh" / "known_hosts"

    @property
    def ca(self) -> Path:
        """Certificate of the authority that signed the API's certificate."""
        return self.dot / "tls" / "ca.pem"

    @property
    def certificate(self) -> Path:
        """The API's certificate."""
        return self.dot / "tls" / "server.pem"

    @property
    def certificate_key(self) -> Path:
        """The API's private key (0600)."""
        return self.dot / "tls" / "server.key"

    @property
    def api_log(self) -> Path:
        """Output of the API daemon."""
        return self.dot / "api.log"

    @property
    def inventory_vars(self) -> Path:
        """The generated, unencrypted inventory file."""
        return self.root / "inventory" / "lab" / "group_vars" / "all" / "lab.yml"

    @property
    def inventory_vault(self) -> Path:
        """The generated, encrypted inventory file."""
        return self.inventory_vars.with_name("vault.yml")

    def container(self, key: str) -> str:
        """LXC's name for a container; with the lab's id, because cgroups are named after it machine-wide."""
        return f"{self.lab_id}-{key}"

    def veth(self, key: str) -> str:
        """The host side interface of a container (15 characters)."""
        return f"v{self.lab_id}{hashlib.sha256(key.encode()).hexdigest()[:6]}"

    def port_candidates(self) -> Iterable[int]:
        """Ports for the API in order of preference, 20000 to 29999 (below the kernel's ephemeral ports)."""
        start = int(self.lab_id, 16)
        return (20000 + (start + 7 * attempt) % 10000 for attempt in range(200))

    def subnet_candidates(self) -> Iterable[IPv4Network]:
        """Networks /24 inside 10.64.0.0/10 in order of preference."""
        start = int(hashlib.sha256(self.lab_id.encode()).hexdigest()[:8], 16)
        for attempt in range(200):
            number = (start + 37 * attempt) % (64 * 256)
            yield ipaddress.ip_network(f"10.{64 + number // 256}.{number % 256}.0/24")  # type: ignore[misc]  # IPv4


def choose_subnet(candidates: Iterable[IPv4Network], used: Iterable[IPv4Network]) -> IPv4Network:
    """Return the first candidate that overlaps nothing in use, or raise a LabError."""
    taken = list(used)
    for candidate in candidates:
        if not any(candidate.overlaps(network) for network in taken):
            return candidate
    raise LabError("no free /24 network was found in 10.64.0.0/10: this machine routes all of it elsewhere")


def host(subnet: IPv4Network, number: int) -> str:
    """The address with this number in the subnet (`1` is the bridge itself)."""
    return str(subnet.network_address + number)
