"""What the node's `pct` gets as an answer: list, status, config, set and exec on the API's state."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fakepve.model import PveError

from pivot_lab.backend import key_of
from pivot_lab.layout import NODE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pivot_lab.api import LabPve
    from pivot_lab.containers import Containers

LOG = logging.getLogger("pivot_lab.pct")
VERBS = ("list", "status", "config", "set", "exec")


@dataclass(frozen=True)
class Answer:
    """A finished command."""

    rc: int
    stdout: bytes = b""
    stderr: bytes = b""


def _fail(text: str, rc: int = 255) -> Answer:
    return Answer(rc, stderr=text.encode() + b"\n")


def _table(pve: LabPve) -> str:
    rows = ["VMID       Status     Lock         Name                "]
    guests = sorted(pve.cts, key=lambda guest: guest.vmid)
    rows += [f"{ct.vmid:<10} {ct.status:<10} {ct.lock or '':<12} {ct.name:<20}" for ct in guests]
    return "\n".join(rows) + "\n"


async def answer(pve: LabPve, containers: Containers, argv: Sequence[str]) -> Answer:
    """Carry out one `pct` command line."""
    if not argv or argv[0] not in VERBS:
        wanted = argv[0] if argv else ""
        return _fail(f"pct: the lab's stand-in knows {', '.join(VERBS)}; '{wanted}' goes through the API")
    await pve.refresh()
    if argv[0] == "list":
        return Answer(0, _table(pve).encode())
    return await _about_one(pve, containers, argv[0], list(argv[1:]))


async def _about_one(pve: LabPve, containers: Containers, verb: str, rest: list[str]) -> Answer:
    if not rest or not rest[0].isdigit():
        return _fail(f"pct: usage: pct {verb} <vmid>" + (" -- <command>" if verb == "exec" else ""))
    try:
        ct = pve._find_ct(NODE, rest[0])
    except PveError as error:
        return _fail(error.message, 2)
    if verb == "status":
        return Answer(0, f"status: {ct.status}\n".encode())
    if verb == "config":
        config: dict[str, Any] = await pve._lxc_config_get("root@pam", {"node": NODE, "vmid": ct.vmid})
        lines = [
            f"{key}: {str(value).rstrip()}" for key, value in sorted(config.items()) if key not in ("digest", "lxc")
        ]
        lines += [f"{key}: {value}" for key, value in config.get("lxc", ())]
        return Answer(0, ("\n".join(lines) + "\n").encode())
    if verb == "set":
        return await _set(pve, ct, rest[1:])
    return await _exec(containers, ct, rest)


async def _set(pve: LabPve, ct: Any, options: list[str]) -> Answer:
    """`pct set` is root's own: it may what root@pam's ticket may."""
    keys = [option.removeprefix("--") for option in options[::2]]
    if not options or len(options) % 2 or any(not option.startswith("--") for option in options[::2]):
        return _fail("pct: usage: pct set <vmid> --<key> <value> ...")
    values: dict[str, Any] = dict(zip(keys, options[1::2], strict=True))
    try:
        await pve._lxc_config_put("root@pam", {"node": NODE, "vmid": ct.vmid, **values})
    except PveError as error:
        details = "".join(f"{key}: {' '.join(text.split())}\n" for key, text in (error.errors or {}).items())
        return _fail(details.rstrip() or error.message.rstrip())
    LOG.info("pct set %d %s", ct.vmid, " ".join(keys))
    return Answer(0)


async def _exec(containers: Containers, ct: Any, rest: list[str]) -> Answer:
    command = rest[2:] if rest[1:2] == ["--"] else rest[1:]
    if not command:
        return _fail("pct: usage: pct exec <vmid> -- <command>")
    if ct.status != "running":
        return _fail(f"container '{ct.vmid}' not running!")
    done = await asyncio.to_thread(containers.execute, key_of(ct.vmid), command)
    return Answer(done.returncode, done.stdout, done.stderr)


async def serve(
    pve: LabPve, containers: Containers, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer one connection: a JSON list in a line, then a JSON object."""
    try:
        line = await reader.readline()
        try:
            argv = [str(part) for part in json.loads(line)]
        except (ValueError, TypeError):
            done = _fail("pct: the request was not a JSON list")
        else:
            done = await answer(pve, containers, argv)
        reply = {
            "rc": done.rc, "stdout": base64.b64encode(done.stdout).decode(),
            "stderr": base64.b64encode(done.stderr).decode(),
        }  # fmt: skip
        writer.write(json.dumps(reply).encode())
        await writer.drain()
    finally:
        writer.close()
