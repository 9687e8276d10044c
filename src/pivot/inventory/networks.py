"""The network interfaces that an inventory gives a container, before any node is asked: as Proxmox takes them, and with
the address at which the container will be looked for.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pivot.findings import Finding, Severity
from pivot.pve.proxmox_values import parse_properties

FIRST, MORE = "proxmox_container_net0", "proxmox_container_nets"
SWITCH = "[01]|yes|no|true|false|on|off"
Wrong = tuple[str, Severity, str, str]
"""A finding's code, severity, message and fix."""


def _address(version: int, *words: str) -> Callable[[str], bool]:
    """Whether a value is one of the words, or an address with the length of its network's prefix."""

    def fits(value: str) -> bool:
        try:
            whole = re.search(r"/[0-9]{1,3}$", value)
            return value in words or bool(whole and ipaddress.ip_interface(value).version == version)
        except ValueError:
            return False

    return fits


def _gateway(version: int) -> Callable[[str], bool]:
    def fits(value: str) -> bool:
        try:
            return ipaddress.ip_address(value).version == version
        except ValueError:
            return False

    return fits


def _number(least: int, most: int) -> Callable[[str], bool]:
    return lambda value: bool(re.fullmatch(r"[0-9]{1,6}", value)) and least <= int(value) <= most


def _like(pattern: str) -> Callable[[str], bool]:
    return lambda value: bool(re.fullmatch(pattern, value, re.IGNORECASE))


# fields of net[n] of a container in Proxmox VE: what they may be, and how that is said
FIELDS: dict[str, tuple[Callable[[str], bool], str]] = {
    "name": (_like(r"[\w.-]{1,15}"), "name=eth0"),
    "bridge": (_like(r"[\w.-]+"), "bridge=vmbr0"),
    "firewall": (_like(SWITCH), "firewall=1 or firewall=0"),
    "gw": (_gateway(4), "an address alone, as gw=192.0.2.1"),
    "gw6": (_gateway(6), "an address alone, as gw6=2001:db8::1"),
    "host-managed": (_like(SWITCH), "host-managed=1 or host-managed=0"),
    "hwaddr": (_like(r"[0-9a-f][02468ace](:[0-9a-f]{2}){5}"), "six pairs of hex digits, the first even"),
    "ip": (_address(4, "dhcp", "manual"), "an address with its prefix, as ip=192.0.2.10/24, or ip=dhcp"),
    "ip6": (_address(6, "dhcp", "auto", "manual"), "an address with its prefix, as ip6=2001:db8::2/64, dhcp or auto"),
    "link_down": (_like(SWITCH), "link_down=1 or link_down=0"),
    "mtu": (_number(64, 65535), "mtu=1500, or another number from 64 to 65535"),
    "rate": (_like(r"[0-9]+(\.[0-9]+)?"), "megabytes a second, as rate=100"),
    "tag": (_number(1, 4094), "the number of a VLAN, 1 to 4094"),
    "trunks": (_like(r"[0-9]{1,4}(-[0-9]{1,4})?(;[0-9]{1,4}(-[0-9]{1,4})?)*"), "VLANs, as trunks=10;20-30"),
    "type": (_like(r"veth"), "type=veth"),
}


def check(subject: str, values: Mapping[str, Any]) -> list[Finding]:
    """What is wrong with the interfaces of a host's variables; a value of another type is found where types are."""
    first, more = values.get(FIRST), values.get(MORE)
    given = [(FIRST, first)] if isinstance(first, str) else []
    given += [(MORE, item) for item in more if isinstance(item, str)] if isinstance(more, list) else []
    wrong = [finding for variable, text in given for finding in _interface(f"{variable}, {text[:80]!r}", text)]
    wrong += _together([parse_properties("net0", text) for _, text in given], values.get("ansible_host"))
    return [Finding(code, severity, subject, message, fix) for code, severity, message, fix in wrong]


def _interface(where: str, text: str) -> Iterator[Wrong]:
    """One interface: its fields, and what they hold."""
    fields = parse_properties("net0", text)
    if "name" not in fields:
        yield "NET-FIELD", Severity.ERROR, f"{where}: the interface has no name", "add name=eth0"
    for name, value in fields.items():
        if name not in FIELDS:
            close = difflib.get_close_matches(name, FIELDS, n=1)
            fix = f"did you mean {close[0]}?" if close else f"Proxmox has {', '.join(FIELDS)}"
            yield "NET-FIELD", Severity.ERROR, f"{where}: {name[:40]} is no field of an interface", fix
        elif not FIELDS[name][0](value):
            yield "NET-VALUE", Severity.ERROR, f"{where}: {name} is {value[:40]!r}", f"write {FIELDS[name][1]}"


def _together(interfaces: list[dict[str, str]], host: object) -> Iterator[Wrong]:
    """Names that come twice, and an address to look for the container at that none of them has."""
    names = [fields["name"] for fields in interfaces if fields.get("name")]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield "NET-TWICE", Severity.ERROR, f"{FIRST} and {MORE} name {name} more than once", "name each interface once"
    addresses = [fields.get("ip", "manual").partition("/")[0] for fields in interfaces]
    if not addresses or not isinstance(host, str) or not _gateway(4)(host) or {"dhcp", "manual"} & {*addresses}:
        return
    if host not in addresses:
        message = f"ansible_host is {host}, and the container gets {', '.join(addresses)}"
        fix = f"write the address of ansible_host in {FIRST}, or waive this where addresses are translated on the way"
        yield "NET-HOST", Severity.WARNING, message, fix
