"""The API's containers on disk: what the daemon starts with again, and the node's files below /etc/pve/lxc.

Those files are what Proxmox would write. Raw ``lxc.*`` lines and sections of snapshots, which the API cannot set here,
are read back from them. On a real node pmxcfs takes no other mode, no other owner and no file put into place; the
stand-in for that: they and their directory belong to this machine's root, which the node's root is not.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fakepve.lxc import FakeCt

from pivot_lab.layout import NODE
from pivot_lab.system import write

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).translate({ord("%"): None, ord(":"): None})
_SECTION = re.compile(r"\[(?!pve:pending\]).*\]\s*")
_RAW = re.compile(r"(lxc\.[a-z0-9_.-]+)(?::|\s*=)\s*(.*?)\s*")


def render(config: dict[str, Any], pending: dict[str, Any], tail: str = "") -> str:
    """A container's file as pve-container writes it. tail: sections of snapshots, kept as they are."""
    waiting = {key: value for key, value in pending.items() if value is not None}
    gone = ",".join(sorted(pending.keys() - waiting.keys()))
    text = _section(config)
    if pending:
        text += "\n[pve:pending]\n" + _section(waiting | ({"delete": gone} if gone else {}))
    return text + (f"\n{tail}" if tail else "")


def _section(values: dict[str, Any]) -> str:
    description = str(values.get("description") or "").rstrip("\n")
    lines = [f"#{quote(line, safe=_PRINTABLE)}" for line in description.split("\n") if description]
    lines += [f"{key}: {values[key]}" for key in sorted(values) if key not in ("description", "lxc")]
    lines += [f"{key}: {value}" for key, value in values.get("lxc", ())]
    return "".join(f"{line}\n" for line in lines)


def read_back(text: str) -> tuple[list[list[str]], str]:
    """The raw lines above the first section of a file, and its sections of snapshots."""
    lines = text.split("\n")
    end = next((number for number, line in enumerate(lines) if line.startswith("[")), len(lines))
    tail = next((number for number, line in enumerate(lines) if _SECTION.fullmatch(line)), len(lines))
    raw = [list(match.groups()) for line in lines[:end] if (match := _RAW.fullmatch(line))]
    return raw, "\n".join(lines[tail:])


class Guests:
    """Where the containers are kept. configs: the node's directory of files."""

    def __init__(self, path: Path, configs: Path) -> None:
        self._path, self._configs = path, configs
        self._written = ""

    def load(self) -> list[FakeCt]:
        """Containers that were complete when last saved, all shown as stopped."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return []
        out = []
        for item in json.loads(text)["guests"]:
            guest = FakeCt(item["vmid"], node=NODE, config=item["config"], pending=item["pending"], defaults=False)
            guest.pool = item["pool"]
            out.append(guest)
        return out

    def file(self, vmid: int) -> Path:
        """A container's file."""
        return self._configs / f"{vmid}.conf"

    def look(self, guests: Iterable[FakeCt]) -> None:
        """Give the model the raw lines that stand in the files now; those of the node write them there."""
        for guest in guests:
            raw, _ = self._kept(guest)
            if raw:
                guest.config["lxc"] = raw
            else:
                guest.config.pop("lxc", None)

    def _kept(self, guest: FakeCt) -> tuple[list[list[str]], str]:
        try:
            return read_back(self.file(guest.vmid).read_text(errors="surrogateescape"))
        except FileNotFoundError:
            return [], ""

    def save(self, guests: list[FakeCt]) -> None:
        """Write what changed; containers that are still being made are no guests yet."""
        self.look(guests)
        complete = [guest for guest in guests if guest.lock != "create"]
        data = [
            {"vmid": guest.vmid, "config": guest.config, "pending": guest.pending, "pool": guest.pool}
            for guest in complete
        ]
        text = json.dumps({"format": 1, "guests": data}, indent=1, sort_keys=True) + "\n"
        if text != self._written:
            write(self._path, text, 0o600)  # a description may hold anything
            self._written = text
        self._publish(complete)

    def _publish(self, guests: list[FakeCt]) -> None:
        self._configs.mkdir(parents=True, exist_ok=True)
        self._configs.chmod(0o755)
        for guest in guests:
            text = render(guest.config, guest.pending, self._kept(guest)[1])
            path = self.file(guest.vmid)
            if not path.exists() or path.read_text(errors="surrogateescape") != text:
                write(path, text, 0o666)
        known = {self.file(guest.vmid) for guest in guests}
        for path in self._configs.glob("*.conf"):
            if path not in known:
                path.unlink()
