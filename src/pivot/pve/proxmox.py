"""Wanted container against actual configuration: what differs, key by key and sub-key by sub-key.

Pure functions; the session that talks to the API is `pivot.pve.proxmox_api`. Behaviour was read from recordings of
Proxmox VE 9.2.11.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pivot.findings import Finding, Severity
from pivot.pve.proxmox_values import (
    DEFAULTS,
    equal,
    family,
    new_volume,
    parse_properties,
    spelt,
    switched_on,
    to_send,
    volume,
    words,
)

# set when a container is created, refused or harmful afterwards (PUT rootfs answers 200 and corrupts the container)
CREATE_ONLY = frozenset({"ostemplate", "rootfs", "ssh-public-keys", "unprivileged", "password", "pool", "storage"})
SECRET = frozenset({"password", "ssh-public-keys"})
# changes of these only take effect in a stopped container
COLD_FAMILIES = frozenset({"dev", "features", "mp"})
# a running container takes these at once (pve-container, vmconfig_hotplug_pending); all others wait for its next start
HOT_FAMILIES = frozenset(
    {"cores", "cpulimit", "cpuunits", "description", "hookscript", "hostname", "lock", "memory", "net", "onboot"}
    | {"protection", "startup", "swap", "tags"}
)
GPU = re.compile(r"/dev/nvidia\d+$|/dev/dri/renderD\d+$")
SHARED_TAG = "gpu-shared"
# releases whose API this was written for; all that is recorded is 9.2.11
OLDEST, TOO_NEW = (8, 2), (10, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What has to be sent so that a container becomes the wanted one. before and after show it to people."""

    set: dict[str, str]
    delete: tuple[str, ...]
    before: dict[str, str]
    after: dict[str, str]
    findings: tuple[Finding, ...] = ()

    @property
    def changes(self) -> bool:
        """Whether anything has to be sent."""
        return bool(self.set or self.delete)

    @property
    def needs_stop(self) -> bool:
        """Whether a running container has to be stopped for it (a running one refuses new devices with 400)."""
        return any(family(key) in COLD_FAMILIES for key in (*self.set, *self.delete))

    @property
    def keys(self) -> tuple[str, ...]:
        """Everything that is touched."""
        return (*self.set, *self.delete)

    @property
    def waiting(self) -> frozenset[str]:
        """What a running container would let wait for its next start."""
        return frozenset(key for key in self.keys if family(key) not in HOT_FAMILIES)

    def only(self, keys: Iterable[str]) -> Plan:
        """The part of the plan that touches these keys."""
        wanted = set(keys)
        return dataclasses.replace(
            self,
            set={key: value for key, value in self.set.items() if key in wanted},
            delete=tuple(key for key in self.delete if key in wanted),
            findings=(),
        )


def plan(subject: str, wanted: Mapping[str, str], actual: Mapping[str, Any], remove: Sequence[str] = ()) -> Plan:
    """Compare; keys that are not wanted are left alone, except devices: their whole family is managed.

    subject: how findings name the container. wanted and actual: configuration keys as Proxmox names them.
    remove: keys that shall not be there.
    """
    current = {key: str(value) for key, value in actual.items() if key != "lxc" and value is not None}
    managed = {key: value for key, value in wanted.items() if key not in CREATE_ONLY}
    differing = {k: to_send(k, v, current.get(k, "")) for k, v in managed.items() if not _satisfied(k, v, current)}
    changed = {k: v for k, v in differing.items() if v}
    surplus = {k for k in current if k not in wanted and (family(k) == "dev" or k in remove)}
    emptied = differing.keys() - changed.keys()  # an empty value is refused, or taken for another change
    deleted = tuple(sorted(surplus | (emptied & current.keys())))
    touched = (*changed, *deleted)
    return Plan(
        set=changed,
        delete=deleted,
        before={key: current[key].rstrip("\n") for key in touched if key in current},
        after={key: value.rstrip("\n") for key, value in changed.items()},
        findings=(
            *_unprivileged(subject, wanted, current),
            *_volumes(subject, changed, current),
            *_root_file_system(subject, wanted, current),
            *_unnamed(subject, wanted, current, remove),
        ),
    )


def to_create(wanted: Mapping[str, str]) -> dict[str, str]:
    """What is sent for a new container: all that says something."""
    sent = {key: to_send(key, value) for key, value in wanted.items()}
    return {key: value for key, value in sent.items() if value}


def _satisfied(key: str, value: str, current: Mapping[str, str]) -> bool:
    """Whether a wanted value holds already; an absent key means Proxmox's default."""
    actual = current.get(key, DEFAULTS.get(key))
    return actual is not None and equal(key, value, actual)


def _unprivileged(subject: str, wanted: Mapping[str, str], current: Mapping[str, str]) -> list[Finding]:
    """An existing container stays as privileged as it was made."""
    is_now = str(int(switched_on(current.get("unprivileged"))))
    if switched_on(wanted.get("unprivileged", is_now)) == switched_on(is_now):
        return []
    return [
        Finding(
            "PVE-UNPRIVILEGED",
            Severity.ERROR,
            subject,
            f"the container exists with unprivileged={is_now}, the inventory wants {wanted['unprivileged']}; Proxmox "
            "cannot change that on an existing container",
            "correct proxmox_container_unprivileged, or back up and recreate the container",
        )
    ]


def _volumes(subject: str, changed: Mapping[str, str], current: Mapping[str, str]) -> list[Finding]:
    """A mount point that would get a new, empty volume in place of the one it has."""
    found = []
    for key, value in changed.items():
        asked, there = new_volume(key, value), volume(key, current.get(key, ""))
        if family(key) != "mp" or asked is None or there is None:
            continue
        size = "" if there[1] is None else f" with {there[1]:g} GiB"
        found.append(
            Finding(
                "PVE-VOLUME",
                Severity.ERROR,
                subject,
                f"{key} is a volume on {there[0]}{size}, the inventory asks for {asked[1]:g} GiB on {asked[0]}: "
                "Proxmox would put a new, empty one in its place",
                "correct proxmox_container_mounts, or bring the volume there on the node first (pct resize, which only "
                "grows; pct move-volume)",
            )
        )
    return found


def _root_file_system(subject: str, wanted: Mapping[str, str], current: Mapping[str, str]) -> list[Finding]:
    """The root file system is made once; what the inventory says of it later is only compared."""
    asked, there = new_volume("rootfs", wanted.get("rootfs", "")), volume("rootfs", current.get("rootfs", ""))
    if asked is None or there is None or there[1] is None or asked[1] == there[1]:
        return []
    return [
        Finding(
            "PVE-ROOTFS-SIZE",
            Severity.WARNING,
            subject,
            f"the root file system has {there[1]:g} GiB, the inventory says {asked[1]:g}; it is left as it is",
            "grow it on the node (pct resize VMID rootfs SIZE), or correct proxmox_container_rootfs_gib",
        )
    ]


def _unnamed(
    subject: str, wanted: Mapping[str, str], current: Mapping[str, str], remove: Sequence[str]
) -> list[Finding]:
    """Network interfaces and mounts that nobody asked for may be somebody's: they are named, not removed."""
    extra = [key for key in current if family(key) in ("net", "mp") and key not in wanted and key not in remove]
    if not extra:
        return []
    names = ", ".join(sorted(extra))
    return [
        Finding(
            "PVE-UNNAMED",
            Severity.WARNING,
            subject,
            f"the container has {names}, which the inventory does not name; left as they are",
            "name them (proxmox_container_mounts, proxmox_container_nets), or list them in proxmox_container_remove",
        )
    ]


# --- what only root@pam may set


def root_only(wanted: Mapping[str, str], actual: Mapping[str, Any] | None) -> list[str]:
    """Keys of a wanted configuration whose change Proxmox leaves to root@pam with a password ticket (or pct).

    actual: None for a container that is to be created. Features count where a flag other than nesting changes, also
    to nothing, and all of a privileged container; a bind mount and a mounted device have a path for a volume.
    """
    return [key for key, value in wanted.items() if _needs_root(key, value, actual, wanted)]


def root_only_of_plan(plan: Plan, actual: Mapping[str, Any]) -> list[str]:
    """The keys that a plan touches and only root@pam may, also by removing them."""
    return [*root_only(plan.set, actual), *(key for key in plan.delete if _needs_root(key, "", actual, {}))]


def _needs_root(key: str, after: str, actual: Mapping[str, Any] | None, wanted: Mapping[str, str]) -> bool:
    kind, before = family(key), str((actual or {}).get(key, ""))
    if kind == "features":
        unprivileged = switched_on((wanted if actual is None else actual).get("unprivileged"))
        return not unprivileged or _beyond_nesting(before) != _beyond_nesting(after)
    if kind == "mp":
        return _path_mount(key, before) or _path_mount(key, after)
    return kind in ("dev", "hookscript")


def _beyond_nesting(value: str) -> dict[str, str]:
    """Other flags as they are written, since Proxmox compares that: one of 0 that goes away is a change to it."""
    return {name: text for name, text in spelt("features", value).items() if name != "nesting"}


def _path_mount(key: str, value: str) -> bool:
    return parse_properties(key, value).get("volume", "").startswith("/")


# --- GPUs of other containers


def gpus(config: Mapping[str, Any]) -> set[str]:
    """Device nodes of cards that a configuration gives its container, by devN and by raw mount entries."""
    paths = {parse_properties(k, str(v)).get("path", "") for k, v in config.items() if family(k) == "dev"}
    for item in config.get("lxc", ()):
        key, value = (str(part) for part in item)
        if key == "lxc.mount.entry" and value.split():
            paths.add(value.split()[0])
    return {path for path in paths if GPU.match(path)}


def shares_gpus(config: Mapping[str, Any]) -> bool:
    """Whether a container says by its tags that others may have its cards too."""
    return SHARED_TAG in words(str(config.get("tags", "")))


def gpu_findings(subject: str, wanted: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Cards that another container of the node has too, unless both say that they share. others: vmid → config."""
    found = []
    for vmid, config in sorted(others.items()):
        common = sorted(gpus(wanted) & gpus(config))
        template = switched_on(config.get("template"))  # never starts
        if not common or template or (shares_gpus(wanted) and shares_gpus(config)):
            continue
        found.append(
            Finding(
                "PVE-GPU-TAKEN",
                Severity.ERROR,
                subject,
                f"{', '.join(common)} belong to container {vmid} ({config.get('hostname', 'without a name')}) already",
                "give each container cards of its own, or say in both that they share them (tag gpu-shared; "
                "proxmox_container_gpu_shared: true)",
            )
        )
    return found


def owner_finding(subject: str, vmid: int, hostname: str, actual: Mapping[str, Any]) -> Finding | None:
    """A container of that id with another name is somebody else's and is never touched."""
    name = str(actual.get("hostname", ""))
    if name == hostname:
        return None
    return Finding(
        "PVE-VMID-TAKEN",
        Severity.ERROR,
        subject,
        f"vmid {vmid} belongs to the container '{name}', the inventory expects '{hostname}' there",
        "give proxmox_container_vmid a free id (pvesh get /cluster/nextid), or correct proxmox_container_hostname",
    )


def release_finding(subject: str, version: str) -> Finding | None:
    """A release of Proxmox VE that this was not written for. version: as GET /version says it, e.g. 9.2.11."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and OLDEST <= (int(numbers[1]), int(numbers[2])) < TOO_NEW:
        return None
    return Finding(
        "PVE-RELEASE",
        Severity.WARNING,
        subject,
        f"the node runs Proxmox VE {version[:40] or 'of an unknown release'}; this was written for 8.2 to 9.x",
        "watch what the run changes (--check --diff first); before 8.2 no container takes devices by dev0, dev1, …",
    )


def pending_keys(pending: list[dict[str, Any]]) -> list[str]:
    """The keys of GET …/pending that wait for a restart."""
    return sorted(str(item["key"]) for item in pending if "pending" in item or item.get("delete"))


def device_keys(devices: list[str]) -> dict[str, str]:
    """Devices in order as configuration keys: dev0, dev1, …"""
    return {f"dev{index}": device for index, device in enumerate(devices)}


def mount_keys(mounts: list[str]) -> dict[str, str]:
    """Mount points in order as configuration keys: mp0, mp1, …"""
    return {f"mp{index}": mount for index, mount in enumerate(mounts)}


def interface_keys(interfaces: list[str]) -> dict[str, str]:
    """Network interfaces after the first as configuration keys: net1, net2, …"""
    return {f"net{index}": interface for index, interface in enumerate(interfaces, start=1)}


def pct_arguments(plan: Plan, digest: str = "") -> list[str]:
    """A plan as arguments of ``pct set VMID``. digest: of the configuration that it was made for."""
    arguments = [part for key, value in plan.set.items() for part in (f"--{key}", value)]
    arguments += ["--delete", ",".join(plan.delete)] if plan.delete else []
    return [*arguments, *(["--digest", digest] if digest else [])]
