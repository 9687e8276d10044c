"""Files that launch settings name: an input has to be there, in the container, where the service can read it.

Pure: the names are worked out here, a host says what is there (`roles/sglang_server/files/server_state.py`), and the
findings come before any restart. What a path means inside the unit's sandbox is part of it.
"""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pivot.findings import Finding, Severity
from pivot.serving.launch import ARGV_ONLY, RESERVED

ERROR, WARNING = Severity.ERROR, Severity.WARNING
# texts that begin with a slash and are paths of addresses, not of files
NO_FILES = frozenset({"fastapi-root-path", "uvicorn-access-log-exclude-prefixes"})
# flags whose files and directories the server makes itself
WRITTEN = frozenset(
    {
        "crash-dump-folder", "debug-tensor-dump-output-folder", "download-dir", "export-metrics-to-file-dir",
        "file-storage-path", "log-requests-target", "modelopt-checkpoint-save-path", "modelopt-export-path",
        "ple-offload-dir", "spec-trace-dir",
    }
)  # fmt: skip
# flags that take a name or a file
TEMPLATES = frozenset({"chat-template", "completion-template"})
# variables that name a file to read, beside those that end in _FILE; with a slash in them, plugins are files too
READ = frozenset({"LD_PRELOAD"})
PLUGINS = frozenset(
    {"NCCL_NET_PLUGIN", "NCCL_GIN_PLUGIN", "NCCL_RMA_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN"}
)
# parts of a variable's name that say that its file is written
OUTPUT = frozenset({"DEBUG", "DUMP", "LOG", "TEMP", "PIPE", "OUTPUT", "COREDUMP", "PROFILER", "CRASH"})
# what is served, and by what: whether it is there at all is asked before, with the playbook that brings it
SERVED = ("sglang_server_model_path", "sglang_server_drafter_path", "sglang_server_python")
# what the unit hides from the service: ProtectHome= and PrivateTmp=
HIDDEN = ("/root", "/home", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - compared, not used
# what it may write with ProtectSystem=strict, beside its own directories
WRITABLE = ("/tmp", "/var/tmp", "/dev")  # noqa: S108 - compared, not used


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """A path of the settings. where: the variable or flag; written: the server makes it."""

    where: str
    path: str
    written: bool


def named(
    flags: Mapping[str, Any], environment: Mapping[str, Any], directory: str, served: Mapping[str, Any]
) -> list[Named]:
    """The paths that flags and variables name. directory: the service's own, which relative paths are taken from;
    served: variables of the host, of which only those of SERVED are looked at."""
    found = [
        Named(name, path, False)
        for name in SERVED
        if isinstance(path := served.get(name), str) and path.startswith("/")
    ]
    found += [
        Named(f"sglang_server_launch.{name}", posixpath.join(directory, path), name in WRITTEN)
        for name, value in flags.items()
        if name not in RESERVED and name not in NO_FILES
        for path in _paths(name, value)
    ]
    for name, value in environment.items():
        if not isinstance(name, str) or not isinstance(value, str):
            continue
        where, words = f"sglang_server_environment.{name}", set(name.split("_"))
        if name.endswith(("_FILE", "_DIR")) and words & OUTPUT:
            found += [Named(where, value, True)] if value.startswith("/") else []
        elif name.endswith("_FILE") or name in READ or (name in PLUGINS and "/" in value):
            found += [Named(where, posixpath.join(directory, path), False) for path in value.split(":") if path]
    return found


def _paths(name: str, value: object) -> Iterator[str]:
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, str):
            continue
        text = item.partition("=")[2] if name in ARGV_ONLY and "=" in item else item
        relative = name in TEMPLATES and ("/" in text or text.endswith((".jinja", ".json")))
        if text.startswith(("/", "./")) or relative:
            yield text


def beforehand(
    subject: str, flags: Mapping[str, Any], environment: Mapping[str, Any], values: Mapping[str, Any]
) -> list[Finding]:
    """What the unit would hide or keep read-only, wherever it runs; what is there only a host can say. values: the
    host's variables."""
    name = str(values.get("sglang_server_name") or "sglang")
    wanted = named(flags, environment, f"/var/lib/{name}", values)
    return check(subject, wanted, {item.path: {"kind": "file", "readable": True} for item in wanted}, name)


def check(subject: str, wanted: Sequence[Named], seen: Mapping[str, Mapping[str, Any]], name: str) -> list[Finding]:
    """What is not there or cannot be reached. seen: what a host said of each path, kind and readable; name: the unit's.

    kind: file, directory, other or missing; readable: by the service's user, None when that user is not there yet.
    """
    own = tuple(f"{place}/{name}" for place in ("/var/lib", "/var/cache", "/run"))
    found = []
    for item in wanted:
        facts = seen.get(item.path, {})
        if item.written:
            if not _below(item.path, (*own, *WRITABLE)):
                message = f"{item.where} would have {item.path} written, which the unit's sandbox keeps read-only"
                fix = f"write it below /var/lib/{name}, or give the unit a drop-in with ReadWritePaths="
                found.append(Finding("LAUNCH-WRITE", WARNING, subject, message, fix))
        elif _below(item.path, HIDDEN):
            message = f"{item.where} names {item.path}, which the unit's sandbox hides from the service"
            place = "/models or /opt" if item.where in SERVED else "/etc/sglang"
            fix = f"put it elsewhere, for example below {place}, and name it there"
            found.append(Finding("LAUNCH-FILE", ERROR, subject, message, fix))
        elif facts.get("kind", "missing") == "missing" and item.where == "sglang_server_firewall":
            message = f"{item.where} needs {item.path}, which is not there in the container"
            fix = "apt-get install nftables there, or set sglang_server_firewall: false"
            found.append(Finding("LAUNCH-FILE", ERROR, subject, message, fix))
        elif facts.get("kind", "missing") == "missing" and item.where in SERVED:
            continue
        elif facts.get("kind", "missing") == "missing":
            message = f"{item.where} names {item.path}, which is not there in the container"
            found.append(Finding("LAUNCH-FILE", ERROR, subject, message, "put it there, or correct the path"))
        elif facts.get("readable") is False:
            message = f"{item.where} names {item.path}, which the service's user cannot read"
            fix = f"chmod and chown it, and the directories above: namei -l {item.path}"
            found.append(Finding("LAUNCH-FILE", ERROR, subject, message, fix))
    return found


def _below(path: str, directories: Sequence[str]) -> bool:
    whole = posixpath.normpath(path)
    return any(whole == place or whole.startswith(f"{place}/") for place in directories)
