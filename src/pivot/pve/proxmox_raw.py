"""Raw ``lxc.*`` lines of a container's configuration: what differs, and what is wrong with wanted ones.

Pure functions. The API shows these lines and never sets them: the role's ``raw_lines.py`` writes them on the node.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pivot.findings import Finding, Severity

Line = tuple[str, str]
"""Key and value."""
VARIABLE = "proxmox_container_lxc"
# what pve-container reads (is_valid_lxc_conf_key); it drops every other line when it next writes the file
FREE = ("lxc.cgroup2.", "lxc.prlimit.", "lxc.net.")
KEYS = frozenset(
    f"lxc.{name}"
    for name in (
        *("apparmor.profile", "apparmor.allow_incomplete", "apparmor.allow_nesting", "apparmor.raw"),
        *("selinux.context", "seccomp.profile", "seccomp.notify.proxy", "seccomp.notify.cookie"),
        *("include", "arch", "uts.name", "signal.halt", "signal.reboot", "signal.stop", "init.cmd", "init.cwd"),
        *("pty.max", "console.logfile", "console.path", "tty.max", "devtty.dir", "autodev", "kmsg"),
        *("mount.fstab", "mount.entry", "mount.auto", "rootfs.mount", "cap.drop", "cap.keep", "idmap"),
        *("hook.autodev", "hook.pre-start", "hook.pre-mount", "hook.mount", "hook.start", "hook.stop"),
        *("hook.post-stop", "hook.clone", "hook.destroy", "hook.version", "log.level", "log.file"),
        *("start.auto", "start.delay", "start.order", "group"),
        *("environment", "environment.runtime", "environment.hooks", "sysctl.fs.mqueue"),
        *(f"sysctl.kernel.{name}" for name in ("msgmax", "msgmnb", "msgmni", "sem")),
        *(f"sysctl.kernel.{name}" for name in ("shmall", "shmmax", "shmmni", "shm_rmid_forced")),
    )
)
# of these each line stands for itself; a line of any other key takes the place of the one before
EACH = re.compile(
    r"lxc\.(mount\.(entry|auto)|cgroup2?\.devices\.(allow|deny)|cap\.(drop|keep)|hook\..*|environment.*|idmap|include"
    r"|group|apparmor\.raw|net\.\d+\.ipv[46]\.address)"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Edits:
    """Lines to take away and lines to add, which is all that differs."""

    remove: tuple[Line, ...] = ()
    add: tuple[Line, ...] = ()

    @property
    def changes(self) -> bool:
        """Whether anything differs."""
        return bool(self.remove or self.add)

    @property
    def keys(self) -> list[str]:
        """Keys of all lines that are touched, each once."""
        return list(dict.fromkeys(key for key, _ in (*self.remove, *self.add)))

    def as_dict(self) -> dict[str, list[list[str]]]:
        """For the node."""
        return {"remove": [list(line) for line in self.remove], "add": [list(line) for line in self.add]}


def parsed(given: Iterable[Mapping[str, Any]]) -> tuple[Line, ...]:
    """Lines as the inventory says them, ``[{lxc.prlimit.memlock: unlimited}]``, in order."""
    return tuple((str(key).strip(), _text(value)) for item in given for key, value in item.items())


def _text(value: object) -> str:
    """A value as LXC reads it, also where YAML has made a switch or nothing of what was written."""
    if value is None:
        return ""
    return str(int(value) if isinstance(value, bool) else value).strip()


def shown(lines: Iterable[Line]) -> str:
    """Lines as Proxmox writes them."""
    return "\n".join(f"{key}: {value}" for key, value in lines)


def edits(wanted: Sequence[Line], actual: Iterable[Sequence[Any]], remove: Sequence[str] = ()) -> Edits:
    """What has to be done so that the wanted lines stand there. Lines that nobody named are kept.

    actual: as the API shows them; remove: keys (lxc.idmap) or whole lines (``lxc.idmap: u 0 …``) to take away.
    """
    there = [(str(key), str(value)) for key, value in actual]
    replaced = {key for key, _ in wanted if not EACH.fullmatch(key)}
    unwanted = {" ".join(item.split()) for item in remove}
    gone = [
        (key, value)
        for key, value in there
        if (key, value) not in wanted
        and (key in replaced or key in unwanted or " ".join(f"{key}: {value}".split()) in unwanted)
    ]
    return Edits(tuple(gone), tuple(line for line in wanted if line not in there))


def findings(subject: str, wanted: Iterable[Line]) -> list[Finding]:
    """What Proxmox would not read, or drop when it next writes the file."""
    lines = list(wanted)
    wrong = [problem for line in lines for problem in _wrong(*line)]
    often = Counter(key for key, _ in lines if not EACH.fullmatch(key))
    wrong += [(f"{key} is given {count} times", "keep one of them") for key, count in often.items() if count > 1]
    return [Finding("PVE-RAW-LINE", Severity.ERROR, subject, f"{VARIABLE}: {text}", fix) for text, fix in wrong]


def _wrong(key: str, value: str) -> Iterator[tuple[str, str]]:
    if key in ("lxc.rootfs.path", "lxc.rootfs.options"):
        yield (
            f"{key} is Proxmox's own",
            "leave it out; proxmox_container_storage and _rootfs_gib say where the root lies",
        )
    elif key.startswith("lxc.cgroup."):
        yield f"{key} is a rule of the first cgroup hierarchy, and does nothing", "write lxc.cgroup2. as its beginning"
    elif not re.fullmatch(r"lxc\.[a-z0-9_.-]+", key) or not (key in KEYS or key.startswith(FREE)):
        close = difflib.get_close_matches(key, [*KEYS, "lxc.prlimit.memlock", "lxc.cgroup2.devices.allow"], n=1)
        known = (
            f"did you mean {close[0]}?" if close else f"it knows {', '.join(f'{name}*' for name in FREE)} and others"
        )
        yield f"Proxmox knows no raw key {key[:60]}, and would drop the line", known
    if not value or re.search(r"[\x00-\x1f\x7f]", value):
        yield f"the value of {key[:60]} is empty, or no single line", "write the value in one line"


def deployed(subject: str, values: Mapping[str, Any]) -> list[Finding]:
    """What is wrong with the lines of a host's variables; another type is found where types are."""
    given = values.get(VARIABLE)
    if not isinstance(given, list) or not all(isinstance(item, Mapping) for item in given):
        return []
    return findings(subject, parsed(given))


def answered(subject: str, answer: Mapping[str, Any]) -> list[Finding]:
    """What the node said about a container's file, as findings. answer: of ``raw_lines.py``."""
    word, detail = str(answer.get("problem", "")), [str(item) for item in answer.get("detail", [])]
    if not word:
        return []
    code, message, fix = _PROBLEMS[word]
    return [Finding(code, Severity.ERROR, subject, message.format(*detail), fix)]


_PROBLEMS = {
    "missing": (
        "PVE-NO-CONTAINER",
        "the node has no such container: there is no {}",
        "check proxmox_container_vmid and proxmox_container_node_host",
    ),
    "locked": (
        "PVE-LOCKED",
        "another task holds the container's lock ({})",
        "wait for that task (the node's task list names it), then run the play again",
    ),
    "refused": (
        "PVE-RAW-WRITE",
        "the node did not let raw lines be written: {}",
        "without a quorum /etc/pve is read-only (pvecm status); nothing was changed",
    ),
    "broken": (
        "PVE-RAW-WRITE",
        "the write of raw lines broke off on the node: {}; both texts are in {}",
        "mend what the node says (pvecm status) and run the play again, which finishes it",
    ),
    "unverified": (
        "PVE-RAW-WRITE",
        "the container's file is not what was written: somebody else wrote it at the same time; both texts are in {}",
        "compare them with the file on the node, correct it there, remove that copy, and run the play again",
    ),
    "interrupted": (
        "PVE-RAW-WRITE",
        "an earlier write was killed and somebody changed the container's file since; both texts are in {}",
        "compare them with the file on the node, correct it there, remove that copy, and run the play again",
    ),
}
