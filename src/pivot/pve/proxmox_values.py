"""Values of a container's configuration as Proxmox writes them: read, compared, and completed before they are sent.

Pure functions. What Proxmox adds, reorders or leaves out by itself is no difference. Behaviour was read from recordings
of Proxmox VE 9.2.11 and from the sources of pve-container.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# what Proxmox does where a key is absent
DEFAULTS = {
    "memory": "512",
    "swap": "512",
    "onboot": "0",
    "protection": "0",
    "unprivileged": "0",
    "cpulimit": "0",
    "console": "1",
    "tty": "2",
    "cmode": "tty",
    "features": "",
    "tags": "",
    "description": "",
}
# the same for the fields of property strings
FIELD_DEFAULTS: dict[str, dict[str, str]] = {
    "dev": {"mode": "0660", "uid": "0", "gid": "0", "deny-write": "0"},
    "features": {"nesting": "0", "keyctl": "0", "fuse": "0", "mknod": "0", "force_rw_sys": "0", "mount": ""},
    "mp": {"backup": "0", "ro": "0", "shared": "0", "quota": "0", "replicate": "1", "acl": "0", "mountoptions": ""},
    "net": {"firewall": "0", "link_down": "0", "host-managed": "0"},
}
# one field of these values may stand without its key
DEFAULT_FIELD = {"dev": "path", "mp": "volume", "rootfs": "volume", "startup": "order"}
# fields that the server adds by itself when a wanted value has none
SERVER_FIELDS = {"net": frozenset({"hwaddr", "type"}), "mp": frozenset({"size"})}
# fields that are lists whose order says nothing
UNORDERED = frozenset({"mount", "mountoptions", "trunks"})
# values that are numbers, switches, and lists whose order counts
NUMBERS = frozenset({"cores", "cpulimit", "cpuunits", "memory", "swap", "tty"})
SWITCHES = frozenset({"console", "onboot", "protection", "unprivileged"})
ORDERED = frozenset({"nameserver", "searchdomain"})
PROPERTY_STRINGS = frozenset({"dev", "features", "mp", "net", "startup"})
_FAMILY = re.compile(r"^(dev|mp|net)\d+$")
_BOOLEAN = {"yes": "1", "true": "1", "on": "1", "no": "0", "false": "0", "off": "0"}
_SIZE = {"": 1.0, "K": 2.0**-20, "M": 2.0**-10, "G": 1.0, "T": 2.0**10}


def family(key: str) -> str:
    """``dev0`` → ``dev``; keys without a number are their own family."""
    match = _FAMILY.match(key)
    return match.group(1) if match else key


def words(text: str) -> list[str]:
    """The items of a list as Proxmox takes them: separated by spaces, commas or semicolons."""
    return [word for word in re.split(r"[;,\s]+", text) if word]


def parse_properties(key: str, value: str) -> dict[str, str]:
    """A property string as a mapping, e.g. ``/dev/nvidia0,mode=0666`` of dev0 → {path: …, mode: …}."""
    fields: dict[str, str] = {}
    for part in str(value).split(","):
        name, separator, text = (piece.strip() for piece in part.partition("="))
        default = DEFAULT_FIELD.get(family(key))
        if separator:
            fields[name] = text
        elif name and default:
            fields.setdefault(default, name)
        elif name:
            fields[name] = ""
    return fields


def tidied(value: str) -> str:
    """A property string without the spaces that reading it passes over, and Proxmox refuses."""
    fields = (part.partition("=") for part in value.split(",") if part.strip())
    return ",".join("".join(piece.strip() for piece in field) for field in fields)


def spelt(key: str, value: str) -> dict[str, str]:
    """A property string as a mapping, its values in one spelling."""
    fields = {name: _BOOLEAN.get(text.lower(), text) for name, text in parse_properties(key, value).items()}
    return fields | ({"hwaddr": fields["hwaddr"].upper()} if "hwaddr" in fields else {})


def normalised(key: str, value: str) -> dict[str, str]:
    """A property string as a mapping without the fields that say what holds anyhow."""
    fields, defaults = spelt(key, value), FIELD_DEFAULTS.get(family(key), {})
    fields |= {name: ";".join(sorted(words(fields[name]))) for name in UNORDERED & fields.keys()}
    return {name: text for name, text in fields.items() if defaults.get(name) != text}


def switched_on(value: object) -> bool:
    """Whether a switch is on, however it is written: 1, 1.0, "1", true, on or yes."""
    text = str(value).lower()
    return _number(_BOOLEAN.get(text, text)) == 1


def static_address(config: Mapping[str, str]) -> str | None:
    """The address that a wanted configuration gives its first interface; None for DHCP or none."""
    address = parse_properties("net0", config.get("net0", "")).get("ip", "").partition("/")[0]
    return address if address and address not in ("dhcp", "manual") else None


def size_gib(text: str) -> float | None:
    """``700G`` or ``8`` (GiB) as GiB, cut to whole MiB as Proxmox does; None when it is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text)
    return int(float(match.group(1)) * _SIZE[match.group(2)] * 1024) / 1024 if match else None


def new_volume(key: str, value: str) -> tuple[str, float] | None:
    """Storage and GiB where a value asks Proxmox to make a volume (``fast:700,…``), None where it names one."""
    storage, _, rest = parse_properties(key, value).get("volume", "").partition(":")
    size = size_gib(rest)
    return None if size is None else (storage, size)


def volume(key: str, value: str) -> tuple[str, float | None] | None:
    """Storage and GiB (None where it is not said) of an existing volume; None for a path of the node, for nothing, and
    for one that shall still be made, which stays pending where that failed."""
    fields = parse_properties(key, value)
    storage, separator, _ = fields.get("volume", "").partition(":")
    if not separator or storage.startswith("/") or new_volume(key, value):
        return None
    return storage, size_gib(fields.get("size", ""))


def equal(key: str, wanted: str, actual: str) -> bool:
    """Whether the server's value already says what is wanted, whatever its order and its own additions."""
    if key == "description":
        return wanted.rstrip("\n") == actual.rstrip("\n")
    if key == "tags":  # kept in lower case, unless the datacenter's tag style says otherwise
        return {tag.lower() for tag in words(wanted)} == {tag.lower() for tag in words(actual)}
    if key in ORDERED:
        return words(wanted) == words(actual)
    if key in NUMBERS:
        return _number(wanted) == _number(actual)
    if key in SWITCHES:
        return switched_on(wanted) == switched_on(actual)
    return _fields_equal(key, wanted, actual) if family(key) in PROPERTY_STRINGS else wanted == actual


def _fields_equal(key: str, wanted: str, actual: str) -> bool:
    kind = family(key)
    left, right = normalised(key, wanted), normalised(key, actual)
    if kind == "mp":
        return _mounts_equal(left, right)
    for field in SERVER_FIELDS.get(kind, frozenset()) - left.keys():
        right.pop(field, None)
    return left == right


def _number(text: str) -> float | str:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text


def _mounts_equal(wanted: dict[str, str], actual: dict[str, str]) -> bool:
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


def to_send(key: str, wanted: str, actual: str = "") -> str:
    """A wanted value as it has to be sent, so that Proxmox makes nothing new that there is already.

    A network interface without hwaddr would be given another one, and ``fast:700`` another, empty volume. A feature
    that is off is left out: to say so counts as a change that only root@pam may make. actual: empty where none is.
    """
    kind = family(key)
    if kind == "features":
        says = normalised(key, wanted)
        return ",".join(f"{name}={text}" for name, text in spelt(key, wanted).items() if name in says)
    if kind in PROPERTY_STRINGS:
        wanted = tidied(wanted)
    if kind == "net" and "hwaddr" not in parse_properties(key, wanted):
        address = parse_properties(key, actual).get("hwaddr")
        return f"{wanted},hwaddr={address}" if address else wanted
    if kind not in ("mp", "rootfs") or (asked := new_volume(key, wanted)) is None:
        return wanted
    fields = parse_properties(key, wanted)
    given = fields.pop("volume")
    if asked == volume(key, actual):
        there = parse_properties(key, actual)
        given, fields["size"] = there["volume"], there["size"]
    elif not given[-1].isdigit():  # Proxmox takes a size with a unit for the name of a volume
        given = f"{asked[0]}:{asked[1]:.12g}"
    return ",".join([given, *(f"{name}={text}" for name, text in fields.items())])
