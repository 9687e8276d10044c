"""Wanted container against actual configuration: what differs, key by key and sub-key by sub-key.

Pure functions; the session that talks to the API is `pivot.proxmox_api`. Behaviour was read from recordings of
Proxmox VE 9.2.11.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pivot.findings import Finding, Severity

# set when a container is created, refused or harmful afterwards (PUT rootfs answers 200 and corrupts the container)
CREATE_ONLY = frozenset({"ostemplate", "rootfs", "ssh-public-keys", "unprivileged", "password", "pool", "storage"})
SECRET = frozenset({"password", "ssh-public-keys"})
# what Proxmox does where a key is absent
DEFAULTS = {
    "memory": "512",
    "swap": "512",
    "onboot": "0",
    "protection": "0",
    "features": "",
    "tags": "",
    "description": "",
}
# the same for the fields of property strings
FIELD_DEFAULTS: dict[str, dict[str, str]] = {
    "dev": {"mode": "0660", "uid": "0", "gid": "0", "deny-write": "0"},
    "features": {"nesting": "0", "keyctl": "0", "fuse": "0", "mknod": "0", "force_rw_sys": "0", "mount": ""},
    "mp": {"backup": "0", "ro": "0", "shared": "0", "quota": "0", "replicate": "1", "acl": "0", "mountoptions": ""},
    "net": {"firewall": "0", "link_down": "0"},
}
# the first field of these values may stand without its key
DEFAULT_FIELD = {"dev": "path", "mp": "volume", "rootfs": "volume", "startup": "order"}
# fields that the server adds by itself when a wanted value has none
SERVER_FIELDS = {"net": frozenset({"hwaddr", "type"}), "mp": frozenset({"size"})}
# changes of these only take effect in a stopped container
COLD_FAMILIES = frozenset({"dev", "features", "mp"})
GPU = re.compile(r"/dev/nvidia\d+$|/dev/dri/renderD\d+$")
SHARED_TAG = "gpu-shared"
_FAMILY = re.compile(r"^(dev|mp|net)\d+$")
_BOOLEAN = {"yes": "1", "true": "1", "on": "1", "no": "0", "false": "0", "off": "0"}
_SIZE = {"": 1.0, "K": 2.0**-20, "M": 2.0**-10, "G": 1.0, "T": 2.0**10}


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

    def only(self, keys: Iterable[str]) -> Plan:
        """The part of the plan that touches these keys."""
        wanted = set(keys)
        return dataclasses.replace(
            self,
            set={key: value for key, value in self.set.items() if key in wanted},
            delete=tuple(key for key in self.delete if key in wanted),
            findings=(),
        )


def family(key: str) -> str:
    """``dev0`` → ``dev``; keys without a number are their own family."""
    match = _FAMILY.match(key)
    return match.group(1) if match else key


def parse_properties(key: str, value: str) -> dict[str, str]:
    """A property string as a mapping, e.g. ``/dev/nvidia0,mode=0666`` of dev0 → {path: …, mode: …}."""
    fields: dict[str, str] = {}
    for index, part in enumerate(str(value).split(",")):
        name, separator, text = part.partition("=")
        if not separator:
            default = DEFAULT_FIELD.get(family(key)) if index == 0 else None
            fields[default or name] = part if default else ""
        else:
            fields[name.strip()] = text.strip()
    return fields


def normalised(key: str, value: str) -> dict[str, str]:
    """A property string as a mapping without the fields that say what holds anyhow."""
    kind = family(key)
    fields = parse_properties(key, value)
    defaults = FIELD_DEFAULTS.get(kind, {})
    fields = {name: _BOOLEAN.get(text.lower(), text) for name, text in fields.items()}
    if "hwaddr" in fields:
        fields["hwaddr"] = fields["hwaddr"].upper()
    return {name: text for name, text in fields.items() if defaults.get(name) != text and name}


def static_address(config: Mapping[str, str]) -> str | None:
    """The address that a wanted configuration gives its first interface; None for DHCP or none."""
    address = parse_properties("net0", config.get("net0", "")).get("ip", "").partition("/")[0]
    return address if address and address not in ("dhcp", "manual") else None


def size_gib(text: str) -> float | None:
    """``700G`` or ``8`` (GiB) as GiB, None when it is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text)
    return float(match.group(1)) * _SIZE[match.group(2)] if match else None


def _volume_equal(wanted: dict[str, str], actual: dict[str, str]) -> bool:
    """``fast:700`` asks for a new volume of 700 GiB on fast: an existing one of that size satisfies it."""
    storage, _, rest = wanted.get("volume", "").partition(":")
    asked = size_gib(rest)
    sizeless = {"volume"} if "size" in wanted and asked is None else {"volume", "size"}
    others = [{k: v for k, v in fields.items() if k not in sizeless} for fields in (wanted, actual)]
    if others[0] != others[1]:
        return False
    if asked is None:
        return wanted.get("volume") == actual.get("volume")
    same_storage = actual.get("volume", "").partition(":")[0] == storage
    return same_storage and size_gib(actual.get("size", "")) == asked


def equal(key: str, wanted: str, actual: str) -> bool:
    """Whether the server's value already says what is wanted, whatever its order and its own additions."""
    if key == "description":
        return wanted.rstrip("\n") == actual.rstrip("\n")
    if key == "tags":
        return _words(wanted) == _words(actual)
    if key == "nameserver":
        return re.split(r"[\s,;]+", wanted.strip()) == re.split(r"[\s,;]+", actual.strip())
    kind = family(key)
    if kind not in ("dev", "features", "mp", "net", "startup"):
        return wanted == actual
    left, right = normalised(key, wanted), normalised(key, actual)
    if kind == "mp":
        return _volume_equal(left, right)
    for field in SERVER_FIELDS.get(kind, frozenset()) - left.keys():
        right.pop(field, None)
    return left == right


def _words(text: str) -> set[str]:
    return {word for word in re.split(r"[;,\s]+", text) if word}


def plan(subject: str, wanted: Mapping[str, str], actual: Mapping[str, Any], remove: Sequence[str] = ()) -> Plan:
    """Compare; keys that are not wanted are left alone, except devices: their whole family is managed.

    subject: how findings name the container. wanted and actual: configuration keys as Proxmox names them.
    remove: keys that shall not be there.
    """
    current = {key: str(value) for key, value in actual.items() if key != "lxc"}
    managed = {key: value for key, value in wanted.items() if key not in CREATE_ONLY}
    differing = {k: v for k, v in managed.items() if not _satisfied(k, v, current)}
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
        findings=(*_unprivileged(subject, wanted, current), *_unnamed(subject, wanted, current, remove)),
    )


def _satisfied(key: str, value: str, current: Mapping[str, str]) -> bool:
    """Whether a wanted value holds already; an absent key means Proxmox's default."""
    actual = current.get(key, DEFAULTS.get(key))
    return actual is not None and equal(key, value, actual)


def _unprivileged(subject: str, wanted: Mapping[str, str], current: Mapping[str, str]) -> list[Finding]:
    """An existing container stays as privileged as it was made."""
    is_now = current.get("unprivileged", "0")
    if wanted.get("unprivileged", is_now) == is_now:
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
    to nothing; a bind mount and a mounted device have a path for a volume.
    """
    current = {key: str(value) for key, value in (actual or {}).items() if key != "lxc"}
    return [key for key, value in wanted.items() if _needs_root(key, current.get(key, ""), value)]


def root_only_of_plan(plan: Plan, actual: Mapping[str, Any] | None) -> list[str]:
    """The keys that a plan touches and only root@pam may, also by removing them."""
    current = {key: str(value) for key, value in (actual or {}).items() if key != "lxc"}
    return [*root_only(plan.set, actual), *(key for key in plan.delete if _needs_root(key, current.get(key, ""), ""))]


def _needs_root(key: str, before: str, after: str) -> bool:
    kind = family(key)
    if kind == "features":
        return _beyond_nesting(before) != _beyond_nesting(after)
    if kind == "mp":
        return _path_mount(key, before) or _path_mount(key, after)
    return kind in ("dev", "hookscript")


def _beyond_nesting(value: str) -> dict[str, str]:
    return {name: text for name, text in normalised("features", value).items() if name != "nesting"}


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
    return SHARED_TAG in _words(str(config.get("tags", "")))


def gpu_findings(subject: str, wanted: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Cards that another container of the node has too, unless both say that they share. others: vmid → config."""
    found = []
    for vmid, config in sorted(others.items()):
        common = sorted(gpus(wanted) & gpus(config))
        if not common or (shares_gpus(wanted) and shares_gpus(config)):
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


def pct_arguments(plan: Plan) -> list[str]:
    """A plan as arguments of ``pct set VMID``."""
    arguments = [part for key, value in plan.set.items() for part in (f"--{key}", value)]
    return [*arguments, *(["--delete", ",".join(plan.delete)] if plan.delete else [])]
