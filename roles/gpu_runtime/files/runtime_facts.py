"""Facts of a container's inside, read-only. Sent in one piece with `pivot.machines.asking`
(see `pivot.program`). Standard library, Python 3.9.

Argument: a JSON object {"devices": paths that have to be there, "cuda": whether the driver matters, "programs": names}.
"""

import glob
import json
import os
import re
import resource
import shutil
import sys

from pivot.machines.asking import read, run

SHM = "/dev/shm"  # noqa: S108 - looked at, never written to
DEBIAN = "/usr/lib/x86_64-linux-gnu"
LIBRARIES = (DEBIAN, DEBIAN + "/nvidia/current", "/usr/lib64", "/usr/lib", "/usr/local/lib", "/usr/lib/wsl/lib")
PACKAGES = ("nvidia-*", "libnvidia-*", "libcuda1", "cuda-drivers*")
CGROUP = "/sys/fs/cgroup/"
PROGRAMS = "/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def shared_memory() -> dict[str, object]:
    """Size, free bytes and mode of /dev/shm, and NCCL's segments there that no process maps."""
    if not os.path.isdir(SHM):
        return {"bytes": 0, "free": 0, "mode": "0", "left_behind": []}
    space = os.statvfs(SHM)
    used = set()
    for path in glob.glob("/proc/[0-9]*/maps"):
        used.update(re.findall(SHM + r"/\S+", read(path)))
    return {
        "bytes": space.f_blocks * space.f_frsize,
        "free": space.f_bavail * space.f_frsize,
        "mode": format(os.stat(SHM).st_mode & 0o7777, "o"),
        "left_behind": sorted(name for name in glob.glob(SHM + "/nccl-*") if name not in used),
    }


def memory() -> dict[str, int]:
    """Bytes of memory: what the container sees, and limits of its own control group (-1: none)."""
    total = re.search(r"^MemTotal:\s+(\d+) kB", read("/proc/meminfo"), re.MULTILINE)
    limits = {name: read(CGROUP + "memory." + name).strip() for name in ("max", "high")}
    return {
        "total": int(total.group(1)) * 1024 if total else 0,
        **{name: int(text) if text.isdigit() else -1 for name, text in limits.items()},
    }


def smi() -> dict[str, object]:
    """The cards that the container's own nvidia-smi lists, or why it does not."""
    status, text, complaint = run("nvidia-smi", "-L")
    said = ((text if status else "") + complaint).strip()
    listed = [line for line in text.splitlines() if line.startswith("GPU ")] if status == 0 else []
    there = shutil.which("nvidia-smi") is not None
    return {"there": there, "status": status, "cards": listed, "complaint": said.splitlines()[0] if said else ""}


def packages() -> dict[str, object]:
    """Driver packages, which of them are held, pins of apt, and whether updates are installed by themselves."""
    # it fails when one pattern matches nothing, and prints the others all the same; apt's own tools write caches
    listed = run("dpkg-query", "--show", "--showformat=${db:Status-Abbrev}|${Package}|${Version}\n", *PACKAGES)[1]
    rows = [line.split("|") for line in listed.splitlines() if line.startswith(("ii", "hi"))]
    pins = [line for path in sorted(glob.glob("/etc/apt/preferences.d/*")) for line in read(path).splitlines()]
    return {
        "installed": {row[1]: row[2] for row in rows},
        "held": [row[1] for row in rows if row[0].startswith("h")],
        "pins": [line for line in pins if re.match("(?:Package|Pin|Pin-Priority):", line)],
        "unattended": run("apt-config", "dump", "APT::Periodic::Unattended-Upgrade")[1].strip(),
        "timer": run("systemctl", "is-enabled", "apt-daily-upgrade.timer")[1].strip(),
    }


def driver() -> dict[str, object]:
    """The driver's user space: libraries, what the loader finds first, nvidia-smi, its installer and packages."""
    libraries = [glob.glob(place + "/lib" + name + ".so.*.*") for place in LIBRARIES for name in ("cuda", "nvidia-ml")]
    return {
        "libraries": sorted({os.path.basename(path) for found in libraries for path in found}),
        "loader": [line.strip() for line in run("ldconfig", "-p")[1].splitlines() if "libcuda.so" in line],
        "smi": smi(),
        "uninstaller": os.path.exists("/usr/bin/nvidia-uninstall"),
        "preferences": os.path.exists("/etc/apt/preferences.d/pivot-nvidia"),
        "packages": packages(),
    }


def main() -> None:
    """Print the facts as one JSON object."""
    asked = json.loads(sys.argv[1])
    facts = {
        "stat": run("stat", "-c", "%n|%F|%t:%T|%a|%u", *asked["devices"])[1].splitlines() if asked["devices"] else [],
        "drivers": read("/proc/devices"),
        "shm": shared_memory(),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],
        "memory": memory(),
        "module": read("/proc/driver/nvidia/version"),
        "programs": [name for name in asked["programs"] if shutil.which(name, path=PROGRAMS)],
        **(driver() if asked["cuda"] else {"libraries": []}),
    }
    json.dump(facts, sys.stdout)


main()
