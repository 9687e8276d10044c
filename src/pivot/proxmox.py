"""Wanted container against actual configuration, and what the Proxmox API's refusals mean.

Pure functions; the session that talks to the API is `pivot.proxmox_api`. Behaviour was read from recordings of
Proxmox VE 9.2.11.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from pivot.findings import Finding, Severity

# set when a container is created, refused or harmful afterwards
CREATE_ONLY = frozenset({"ostemplate", "rootfs", "ssh-public-keys", "unprivileged"})
# the first field of these values may stand without its key
DEFAULT_FIELD = {"dev": "path", "mp": "volume", "rootfs": "volume", "startup": "order"}
# fields that the server adds by itself when a wanted value has none
SERVER_FIELDS = {"net": frozenset({"hwaddr", "type"})}
# changes of these only take effect in a stopped container
COLD_FAMILIES = frozenset({"dev", "features", "mp"})
_FAMILY = re.compile(r"^(dev|mp|net)\d+$")
_SIZE = {"": 1.0, "K": 2.0**-20, "M": 2.0**-10, "G": 1.0, "T": 2.0**10}


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What has to be sent so that a container becomes the wanted one."""

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
    others_equal = {k: v for k, v in wanted.items() if k != "volume"} == {
        k: v for k, v in actual.items() if k not in ("volume", "size")
    }
    if asked is None:
        return others_equal and wanted.get("volume") == actual.get("volume")
    same_storage = actual.get("volume", "").partition(":")[0] == storage
    return others_equal and same_storage and size_gib(actual.get("size", "")) == asked


def equal(key: str, wanted: str, actual: str) -> bool:
    """Whether the server's value already says what is wanted, whatever its order and its own additions."""
    if key == "description":
        return wanted.rstrip("\n") == actual.rstrip("\n")
    if key == "tags":
        return set(re.split(r"[;,\s]+", wanted)) == set(re.split(r"[;,\s]+", actual))
    kind = family(key)
    if kind not in ("dev", "features", "mp", "net", "startup"):
        return wanted == actual
    left, right = parse_properties(key, wanted), parse_properties(key, actual)
    if kind == "mp":
        return _volume_equal(left, right)
    for field in SERVER_FIELDS.get(kind, frozenset()) - left.keys():
        right.pop(field, None)
    return left == right


def plan(subject: str, wanted: Mapping[str, str], actual: Mapping[str, Any]) -> Plan:
    """Compare; keys that are not wanted are left alone, except devices: their whole family is managed.

    subject: how findings name the container. wanted and actual: configuration keys as Proxmox names them.
    """
    current = {key: str(value) for key, value in actual.items() if key != "lxc"}
    managed = {key: value for key, value in wanted.items() if key not in CREATE_ONLY}
    changed = {k: v for k, v in managed.items() if k not in current or not equal(k, v, current[k])}
    surplus = tuple(sorted(k for k in current if family(k) == "dev" and k not in wanted))
    findings = []
    if "unprivileged" in wanted and wanted["unprivileged"] != current.get("unprivileged", "0"):
        findings.append(
            Finding(
                "PVE-UNPRIVILEGED",
                Severity.ERROR,
                subject,
                f"the container exists with unprivileged={current.get('unprivileged', '0')}, the inventory wants "
                f"{wanted['unprivileged']}; Proxmox cannot change that on an existing container",
                "correct proxmox_container_unprivileged, or back up and recreate the container",
            )
        )
    touched = (*changed, *surplus)
    return Plan(
        set=changed,
        delete=surplus,
        before={key: current[key].rstrip("\n") for key in touched if key in current},
        after={key: value.rstrip("\n") for key, value in changed.items()},
        findings=tuple(findings),
    )


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


def explain(subject: str, status: int, reason: str, errors: Mapping[str, str] | None = None) -> Finding:
    """What a refused API call means for the person who runs the play. Nothing sent is ever repeated in it."""
    text = " ".join(reason.split())
    details = "; ".join(f"{key}: {' '.join(str(value).split())}" for key, value in sorted((errors or {}).items()))
    for pattern, code, message, fix in _KNOWN:
        if re.search(pattern, f"{status} {text} {details}"):
            return Finding(code, Severity.ERROR, subject, message.format(text=text, details=details), fix)
    what = f"{text} ({details})" if details else text
    return Finding("PVE-REFUSED", Severity.ERROR, subject, f"Proxmox answered {status}: {what}", "see the message")


_KNOWN = (
    (
        r"configuring device passthrough is only allowed for root@pam",
        "PVE-ROOT-ONLY",
        "Proxmox lets only root@pam with a password ticket pass devices through; no API token may, not even root's",
        "set proxmox_container_api_user: root@pam and proxmox_container_api_password in the vault",
    ),
    (
        r"changing feature flags",
        "PVE-ROOT-ONLY",
        "Proxmox lets only root@pam with a password ticket set features other than nesting, also to an empty value",
        "drop the key from proxmox_container_features, or use root@pam's password",
    ),
    (
        r"mount point type bind is only allowed",
        "PVE-ROOT-ONLY",
        "Proxmox lets only root@pam with a password ticket set bind mounts",
        "use a storage volume, or root@pam's password",
    ),
    (
        r"Device (\S+) does not exist",
        "PVE-DEVICE-MISSING",
        "the node says: {text}",
        "load the driver on the node (nvidia-smi or nvidia-modprobe creates the nodes), or correct "
        "proxmox_container_devices",
    ),
    (
        r"detected modified configuration",
        "PVE-CHANGED-MEANWHILE",
        "somebody changed the container's configuration while this run was comparing it",
        "run the play again",
    ),
    (
        r"invalid privilege '?VM\.Monitor",
        "PVE-PRIVILEGE",
        "VM.Monitor no longer exists in Proxmox VE 9",
        "use Sys.Audit in the role instead",
    ),
    (
        r"^401",
        "PVE-LOGIN",
        "Proxmox does not accept the credentials ({text})",
        "check proxmox_container_api_user and the password or token in the vault",
    ),
    (
        r"^403 Forbidden|^403 Permission check failed",
        "PVE-FORBIDDEN",
        "the account may not do this: {text}",
        "grant it on the path named there (pveum acl modify), or use root@pam's password ticket",
    ),
)


def device_keys(devices: list[str]) -> dict[str, str]:
    """Devices in order as configuration keys: dev0, dev1, …"""
    return {f"dev{index}": device for index, device in enumerate(devices)}
