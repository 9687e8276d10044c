"""What the machine must offer, and the one thing the lab changes in its settings: root's subordinate ids."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pivot_lab.errors import LabError
from pivot_lab.layout import ID_BASE, ID_COUNT, MACHINE_ROOT
from pivot_lab.system import locked, read_json, run, say, write, write_json

TOOLS = {
    "ip": "iproute2", "lxc-start": "lxc", "lxc-usernsexec": "lxc", "mount": "mount", "newuidmap": "uidmap",
    "nft": "nftables", "ssh-keygen": "openssh-client", "tar": "tar", "zstd": "zstd",
}  # fmt: skip
SUBID_FILES = (Path("/etc/subuid"), Path("/etc/subgid"))
MACHINE_STATE = MACHINE_ROOT / "machine.json"
MACHINE_LOCK = MACHINE_ROOT / "lock"


def require_root() -> None:
    """Raise a LabError unless this is root: containers, bridges and mounts need it."""
    if os.geteuid() != 0:
        raise LabError("the lab makes containers, a bridge and mounts: run it as root")


def require_tools() -> None:
    """Raise a LabError that names the Debian packages of the missing programs."""
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if missing:
        raise LabError(f"programs of these Debian packages are missing: {' '.join(missing)}; install them with apt-get")


def _module(name: str) -> None:
    """Load a kernel module where modules exist; whether it worked shows in the check that follows."""
    if shutil.which("modprobe"):
        run(["modprobe", "-q", name], ok=range(256))


def require_kernel() -> None:
    """Raise a LabError that names what this kernel lacks."""
    _module("overlay")
    if not any(line.split()[-1] == "overlay" for line in Path("/proc/filesystems").read_text().splitlines()):
        raise LabError("this kernel has no overlayfs, which every container of the lab stands on")
    namespaces = Path("/proc/sys/user/max_user_namespaces")
    if not Path("/proc/self/ns/user").exists() or (namespaces.exists() and namespaces.read_text().strip() == "0"):
        raise LabError(
            "this kernel allows no user namespaces (user.max_user_namespaces), so no unprivileged containers"
        )
    probe = f"pvx{os.getpid()}"
    for kind, extra in (("bridge", []), ("veth", ["peer", "name", probe + "p"])):
        try:
            run(["ip", "link", "add", "name", probe, "type", kind, *extra])
        except LabError as error:
            raise LabError(f"this kernel makes no {kind} interface, which the lab's network needs ({error})") from None
        run(["ip", "link", "del", probe])


def _wanted_line() -> str:
    return f"root:{ID_BASE}:{ID_COUNT}"


def grants_range(text: str) -> bool:
    """Whether a subuid or subgid file's text grants root the containers' whole range."""
    for line in text.splitlines():
        fields = line.strip().split(":")
        if len(fields) != 3 or fields[0] not in ("root", "0") or not (fields[1] + fields[2]).isdigit():
            continue
        first, count = int(fields[1]), int(fields[2])
        if first <= ID_BASE and first + count >= ID_BASE + ID_COUNT:
            return True
    return False


def grant_ids() -> None:
    """Grant root the subordinate ids of unprivileged containers, and remember which file got the line."""
    with locked(MACHINE_LOCK):
        state = read_json(MACHINE_STATE)
        for path in SUBID_FILES:
            text = path.read_text() if path.exists() else ""
            if grants_range(text):
                continue
            say(f"granting root the ids {ID_BASE} to {ID_BASE + ID_COUNT - 1} in {path} (removed with the last lab)")
            write(path, text + ("" if text.endswith("\n") or not text else "\n") + _wanted_line() + "\n")
            state["subids"] = sorted({*state.get("subids", []), str(path)})
            write_json(MACHINE_STATE, state)


def revoke_ids_if_last() -> None:
    """Undo `grant_ids` and remove the machine's directory when no lab is left on this machine."""
    if not MACHINE_ROOT.exists():
        return
    with locked(MACHINE_LOCK):
        if any(entry.is_dir() for entry in MACHINE_ROOT.iterdir()):
            return
        for name in read_json(MACHINE_STATE).get("subids", []):
            lines = Path(name).read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.strip() != _wanted_line()]
            write(Path(name), "".join(kept))
        MACHINE_STATE.unlink(missing_ok=True)
        MACHINE_LOCK.unlink()
        MACHINE_ROOT.rmdir()
