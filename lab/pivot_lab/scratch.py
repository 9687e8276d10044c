"""Scratch containers for tests: cloned from the template or a saved layer, unknown to the API."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from pivot_lab import template
from pivot_lab.containers import Containers, Identity, Nic, Spec
from pivot_lab.credentials import ensure_ssh_key
from pivot_lab.errors import LabError
from pivot_lab.layout import ID_BASE, SCRATCH_HOSTS, IPv4Network, Layout, check_name, host
from pivot_lab.system import locked, read_json, remove_tree, run, write, write_json

_WAITING = "another pivot-lab holds the list of scratch containers; waiting for it"


def mac() -> str:
    """A new hardware address with the prefix that Proxmox uses."""
    return "BC:24:11:" + ":".join(f"{byte:02X}" for byte in secrets.token_bytes(3))


def next_free(last: int, taken: set[int]) -> int:
    """The next free host number after the last one given out: an address rests before its next container gets it."""
    count = len(SCRATCH_HOSTS)
    start = last - SCRATCH_HOSTS[0] + 1
    for offset in range(count):
        number = SCRATCH_HOSTS[(start + offset) % count]
        if number not in taken:
            return number
    raise LabError(f"all {count} scratch addresses are in use: see `pivot-lab scratch list`")


class Scratch:
    """Scratch containers and layers of one lab; safe for concurrent callers."""

    def __init__(self, layout: Layout, subnet: IPv4Network) -> None:
        self.layout, self.subnet = layout, subnet
        self.containers = Containers(layout)
        self._registry = layout.machine / "scratch.json"
        self._lock = layout.machine / "scratch.lock"

    def known_hosts(self, name: str) -> Path:
        """The known_hosts file that holds one container's keys."""
        return self.layout.dot / "scratch" / f"{name}.known_hosts"

    def _reserve(self, name: str) -> str:
        with locked(self._lock, _WAITING):
            registry = read_json(self._registry)
            addresses = registry.get("addresses", {})
            if name in addresses:
                raise LabError(f"the scratch container {name!r} already exists: `pivot-lab scratch down {name}`")
            number = next_free(registry.get("last", SCRATCH_HOSTS[-1]), set(addresses.values()))
            write_json(self._registry, {"addresses": addresses | {name: number}, "last": number})
        return host(self.subnet, number)

    def _release(self, name: str) -> None:
        with locked(self._lock, _WAITING):
            registry = read_json(self._registry)
            if registry.get("addresses", {}).pop(name, None) is not None:
                write_json(self._registry, registry)

    def lowers(self, layer: str | None) -> list[Path]:
        """Overlay layers for a clone, topmost first."""
        tree = template.unpack(self.layout)
        if layer is None:
            return [tree]
        home = self.layout.layers / check_name(layer, "layer")
        lowers = [Path(lower) for lower in read_json(home / "layer.json").get("lowers", [])]
        if not lowers:
            known = ", ".join(sorted(self.layers())) or "none"
            raise LabError(f"there is no layer {layer!r} (saved: {known}): `pivot-lab layer save NAME {layer}`")
        if lowers[-1] != tree:
            raise LabError(f"the layer {layer!r} stands on an older template: drop it and save it again")
        return [home / "tree", *lowers]

    def up(self, name: str, layer: str | None, memory: int | None) -> dict[str, Any]:
        """Make and start a container (about 2 s) and describe how to reach it; nothing stays when it fails."""
        check_name(name, "scratch container")
        lowers = self.lowers(layer)
        address = self._reserve(name)
        key = "s-" + name
        try:
            identity = Identity(ensure_ssh_key(self.layout), ("ed25519",))  # an RSA key alone costs a second
            nics = (Nic("eth0", mac(), f"{address}/{self.subnet.prefixlen}"),)
            if key in self.containers.keys():  # noqa: SIM118  # a method, not a mapping: an interrupted clone
                self.containers.destroy(key)
            self.containers.create(key, lowers, name, identity, lambda _line: None)
            self.containers.start(key, Spec(name, nics, memory=memory))
            hosts = "".join(f"{address} {' '.join(line.split()[:2])}\n" for line in identity.host_keys.values())
            write(self.known_hosts(name), hosts)
            self.containers.wait_for_ssh(key, address)
        except BaseException:
            self.down(name)
            raise
        return self.describe(name, address)

    def describe(self, name: str, address: str) -> dict[str, Any]:
        """What a caller needs to reach a container."""
        return {
            "name": name, "address": address, "user": "root", "ssh_key": str(self.layout.ssh_key),
            "known_hosts": str(self.known_hosts(name)), "rootfs": str(self.containers.rootfs("s-" + name)),
        }  # fmt: skip

    def list(self) -> list[dict[str, Any]]:
        """All scratch containers."""
        addresses = read_json(self._registry).get("addresses", {})
        return [self.describe(name, host(self.subnet, number)) for name, number in sorted(addresses.items())]

    def down(self, name: str) -> None:
        """Remove a container; nothing happens where there is none."""
        check_name(name, "scratch container")
        self.containers.destroy("s-" + name)
        self.known_hosts(name).unlink(missing_ok=True)
        if self.layout.machine.exists():
            self._release(name)

    def layers(self) -> dict[str, dict[str, Any]]:
        """Saved layers by name."""
        if not self.layout.layers.exists():
            return {}
        found = ((path.name, read_json(path / "layer.json")) for path in self.layout.layers.iterdir())
        return {name: data for name, data in found if data}

    def tree(self, layer: str) -> Path:
        """Where a saved layer lies."""
        return self.lowers(layer)[0]

    def save(self, name: str, layer: str) -> Path:
        """Stop a container and keep what it changed as a layer for further clones; the container is gone then."""
        check_name(name, "scratch container")
        home = self.layout.layers / check_name(layer, "layer")
        key = "s-" + name
        if home.exists():
            raise LabError(f"the layer {layer!r} already exists: `pivot-lab layer drop {layer}`")
        if not self.containers.complete(key):
            raise LabError(f"there is no scratch container {name!r} to save")
        lowers = read_json(self.containers.home(key) / "container.json")["lowers"]
        if not self.containers.shutdown(key, 30):
            raise LabError(f"the scratch container {name!r} did not stop within 30 s")
        self.containers.unmount(key)
        home.mkdir(parents=True)
        (self.containers.home(key) / "upper").rename(home / "tree")
        write_json(home / "layer.json", {"lowers": lowers})
        self.down(name)
        return home / "tree"

    def copy(self, key: str, directory: str, layer: str) -> Path:
        """Keep one directory that a container added as a layer over the template; the container stays.

        Its files are linked, not copied: one that is written in place, not replaced, changes in the layer too.
        """
        home = self.layout.layers / check_name(layer, "layer")
        if home.exists():
            raise LabError(f"the layer {layer!r} already exists: `pivot-lab layer drop {layer}`")
        inside = Path(directory.strip("/"))
        source = self.containers.home(key) / "upper" / inside
        if not source.is_dir():
            raise LabError(f"the container {key!r} has added no directory {directory}: see `pivot-lab status`")
        making = self.layout.machine / f"making-{layer}"
        remove_tree(making)
        target = making / "tree" / inside
        target.parent.mkdir(parents=True)
        for parent in target.parents[: len(inside.parts)]:
            parent.chmod(0o755)
            os.chown(parent, ID_BASE, ID_BASE)
        run(["cp", "--archive", "--link", source, target])
        write_json(making / "layer.json", {"lowers": [str(template.unpack(self.layout))]})
        home.parent.mkdir(exist_ok=True)
        making.rename(home)  # a layer is whole or absent
        return home / "tree"

    def drop(self, layer: str) -> None:
        """Remove a layer, unless something stands on it."""
        home = self.layout.layers / check_name(layer, "layer")
        tree = str(home / "tree")
        for key in self.containers.keys():  # noqa: SIM118  # a method, not a mapping
            if tree in read_json(self.containers.home(key) / "container.json").get("lowers", []):
                raise LabError(f"the layer {layer!r} is used by the container {key}: remove that first")
        for name, data in self.layers().items():
            if tree in data["lowers"]:
                raise LabError(f"the layer {layer!r} is used by the layer {name!r}: drop that first")
        remove_tree(home)
