"""What a bundle is made of: `table` is the one place that says what is collected of a host, `node_table` of its node.

A role or an inventory adds rows with ``log_bundle_extra_items``, see `added`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MIB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One row of the table.

    name: file of the bundle, or directory where one item becomes several files; kind: how the host collects it;
    what: command, paths or globs; limit: bytes taken per file; sensitivity: "plain", "secrets" (masked) or "prompts"
    (listed, or copied when asked for); purpose: what it is needed for; required: absence is worth a warning and a
    failure an error; tail: only the end is wanted, a cut is no fault.
    """

    name: str
    kind: str
    what: tuple[str, ...]
    limit: int
    sensitivity: str
    purpose: str
    required: bool = False
    tail: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What a table is made for.

    unit: systemd unit with its suffix; config_paths, probe_records, nccl_logs, flight_records, dumps: files,
    directories or globs; listed_paths: looked at, never copied; copy_dumps: whether dumps are; log_limit: bytes of
    the current log; python: the engine's interpreter ("": that of the running process); url: of the server ("": from
    the launch configuration); extra: rows that a role or an inventory adds, see `added`.
    """

    unit: str
    config_paths: Sequence[str]
    probe_records: Sequence[str]
    listed_paths: Sequence[str]
    log_limit: int
    nccl_logs: Sequence[str] = ()
    flight_records: Sequence[str] = ()
    dumps: Sequence[str] = ()
    copy_dumps: bool = False
    state_paths: Sequence[str] = ()
    python: str = ""
    url: str = ""
    extra: Sequence[Mapping[str, Any]] = ()


SMI = "nvidia-smi"
DRIVER = (
    *("/proc/driver/nvidia/version", "/proc/driver/nvidia/params"),
    "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm",
)
COMPUTE = "pid,process_name,used_gpu_memory,gpu_uuid"


def table(**options: Any) -> list[dict[str, Any]]:
    """What is collected of a host, most important first: when the total limit is reached, the rest is left out.

    options: those of `Options`. Plain dicts, for a host's JSON.
    """
    given = Options(**options)
    unit, url = given.unit, given.url
    group = f"/sys/fs/cgroup/system.slice/{unit}/memory.*"
    rows = [
        _command("unit.txt", ("systemctl", "cat", "--no-pager", unit), "as written", required=True),
        _command("unit-properties.txt", ("systemctl", "show", unit), "as systemd sees it", required=True),
        Item(
            "unit-status.txt",
            "status",
            ("systemctl", "status", "--no-pager", "--full", "--lines=0", unit),
            MIB,
            "secrets",
            "state and processes",
        ),
        Item("process", "process", (unit,), MIB, "secrets", "what really runs", True),
        Item("processes.json", "processes", (unit,), MIB, "secrets", "which process computes, waits or is stopped"),
        Item("answers.json", "answers", (url,), MIB, "secrets", "what the server answers, and how fast"),
        Item("config", "files", tuple(given.config_paths), MIB, "secrets", "the configuration as rendered", True),
        Item("server_info.json", "answer", (url, "/server_info"), 4 * MIB, "secrets", "what the server made of it"),
        Item("metrics.txt", "answer", (url, "/metrics"), 4 * MIB, "plain", "requests, acceptance and speed since boot"),
        Item("packages.json", "packages", (given.python,), MIB, "plain", "the engine's distributions"),
        Item(
            "state", "files", tuple(given.state_paths), MIB, "plain", "release, verified weights, what the start read"
        ),
        *_system(group),
        Item(
            "system/listing.txt",
            "list",
            tuple(dict.fromkeys([*given.listed_paths, *given.dumps])),
            MIB,
            "prompts",
            "core files, dumps and shared memory, not copied",
        ),
        Item("server.log", "journal", (unit, "current"), given.log_limit, "secrets", "the current run", True),
        Item(
            "server-before.log", "journal", (unit, "before"), given.log_limit // 4, "secrets", "earlier runs", tail=True
        ),
        Item("nccl", "nccl", tuple(given.nccl_logs), given.log_limit // 4, "secrets", "each rank's NCCL"),
        Item("flight", "flight", tuple(given.flight_records), 16 * MIB, "plain", "collectives before a time-out"),
        Item("probe", "files", tuple(given.probe_records), given.log_limit, "plain", "what reached the drafter"),
    ]
    rows += [added(row, given.log_limit) for row in given.extra]
    if given.copy_dumps:
        rows.append(Item("dumps", "dumps", tuple(given.dumps), 1 << 50, "prompts", "a crash, to be replayed"))
    return [dataclasses.asdict(row) for row in rows]


def _command(name: str, argv: tuple[str, ...], purpose: str, *, required: bool = False, kind: str = "command") -> Item:
    return Item(name, kind, argv, MIB, "secrets" if name.startswith("unit") else "plain", purpose, required)


def _system(group: str) -> list[Item]:
    """Rows about container and node."""
    files = ("/usr/lib/os-release", "/proc/meminfo", "/proc/cpuinfo", "/proc/cmdline", "/proc/devices")
    cgroups = ("/sys/fs/cgroup/memory.*", group)
    libraries = (
        *("/usr/lib/x86_64-linux-gnu/libcuda.so*", "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so*"),
        "/usr/local/cuda*/compat/libcuda.so*",
    )
    return [
        _command("system/uname.txt", ("uname", "-a"), "kernel", required=True),
        _command("system/df.txt", ("df", "-h", "-T"), "full volumes, /dev/shm"),
        _command("system/ip.txt", ("ip", "address"), "addresses"),
        _command("system/sockets.txt", ("ss", "-ltnp"), "who listens where"),
        _command("system/devices.txt", ("ls", "-lR", "/dev"), "device nodes"),
        _command("system/gpus.txt", (SMI, "-q"), "GPUs: driver, memory, errors, links", kind="tool"),
        _command("system/topology.txt", (SMI, "topo", "-m"), "paths between GPUs", kind="tool"),
        _command(
            "system/gpu-processes.txt",
            (SMI, f"--query-compute-apps={COMPUTE}", "--format=csv"),
            "who holds memory of the GPUs",
            kind="tool",
        ),
        Item("system/libraries.txt", "list", libraries, MIB, "plain", "the container's driver"),
        Item("system", "files", (*files, *DRIVER, *cgroups), MIB, "plain", "memory, limits and driver"),
        Item("system/kernel.log", "kernel", (), 4 * MIB, "plain", "Xid, OOM killer, driver", tail=True),
    ]


def node_table(container: str, facts: str) -> list[dict[str, Any]]:
    """What is collected of a Proxmox node.

    container: its id there, "" for none; facts: text of the script that gathers a node's facts.
    """
    journal = ("journalctl", "--quiet", "--no-pager", "--utc", "--output=short-iso-precise", "--boot")
    unit = f"--unit=pve-container@{container}.service"
    asked = json.dumps({"devices": [], "vmid": int(container) if container.isdigit() else None})
    rows = [
        Item(
            "node/facts.json", "script", ("node_facts.py", facts, asked), MIB, "plain", "driver, devices, maps of ids"
        ),
        Item("node", "files", ("/proc/cmdline", "/proc/devices", *DRIVER), MIB, "plain", "boot options, driver"),
        _command("node/gpus.txt", (SMI, "-q"), "GPUs as the node sees them", kind="tool"),
        Item("node/pci.txt", "tool", ("lspci", "-vvv"), 8 * MIB, "plain", "links, ACS, BAR1"),
        Item("node/kernel.log", "kernel", (), 4 * MIB, "plain", "Xid, OOM killer, driver, links", tail=True),
    ]
    if container:
        rows += [
            Item(
                "node/container.conf", "command", ("pct", "config", container), MIB, "secrets", "what it is given", True
            ),
            Item("node/container.log", "tool", (*journal, unit), MIB, "plain", "its starts", tail=True),
        ]
    return [dataclasses.asdict(row) for row in rows]


ADDED = {"name", "kind", "what", "limit_mib", "sensitivity", "purpose", "required", "tail"}


def added(row: Mapping[str, Any], log_limit: int) -> Item:
    """A row that a role or an inventory adds; ValueError says what is wrong with it.

    Its kind is "files" (paths and globs) or "command" (an argument list); only its name, kind and what are needed.
    """
    where = f"the row {dict(row)!r:.120} of log_bundle_extra_items"
    unknown, missing = set(row) - ADDED, {"name", "kind", "what"} - set(row)
    if unknown or missing:
        raise ValueError(f"{where} {f'has no {min(missing)}' if missing else f'has an unknown {min(unknown)}'}")
    name, what = str(row["name"]), row["what"]
    if row["kind"] not in ("files", "command") or not isinstance(what, Sequence) or isinstance(what, str):
        raise ValueError(f"{where} needs the kind files or command, and a list as what")
    if name.startswith("/") or ".." in name.split("/") or not name:
        raise ValueError(f"{where} needs a relative name")
    sensitivity = str(row.get("sensitivity", "secrets"))
    if sensitivity not in ("plain", "secrets"):
        raise ValueError(f"{where} has the sensitivity {sensitivity}: plain or secrets is right")
    return Item(
        name,
        str(row["kind"]),
        tuple(str(part) for part in what),
        int(row["limit_mib"]) * MIB if "limit_mib" in row else log_limit,
        sensitivity,
        str(row.get("purpose", "added by the inventory")),
        bool(row.get("required", False)),
        bool(row.get("tail", False)),
    )


def describe(rows: Iterable[Mapping[str, Any]], where: str) -> str:
    """What a run without check mode would collect, as lines for a person."""
    lines = [f"would collect into {where}:"]
    for row in rows:
        what = " ".join(str(part) for part in row["what"][: 1 if row["kind"] == "script" else None] if part)
        lines.append(f"  {row['name']:<22} {row['purpose']}: {row['kind']} {what} (at most {row['limit'] // 1024} KiB)")
    return "\n".join(lines)
