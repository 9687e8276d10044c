"""Facts of a container's inside, read-only. Standard library, Python 3.9. Argument: JSON list of device paths."""

import glob
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

SHM = "/dev/shm"  # noqa: S108 - looked at, never written to
LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib", "/usr/lib/wsl/lib")


def read(path: str) -> str:
    """A file's text; empty when there is none."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


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


def main() -> None:
    """Print the facts as one JSON object."""
    wanted = json.loads(sys.argv[1])
    nodes = ["stat", "-c", "%n|%F|%t:%T|%a|%u", *wanted]
    done = subprocess.run(nodes, capture_output=True, text=True, timeout=30, check=False) if wanted else None
    libraries = [glob.glob(f"{place}/lib{name}.so.*.*") for place in LIBRARIES for name in ("cuda", "nvidia-ml")]
    facts = {
        "stat": done.stdout.splitlines() if done else [],
        "drivers": read("/proc/devices"),
        "shm": shared_memory(),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],
        "module": read("/proc/driver/nvidia/version"),
        "libraries": sorted({os.path.basename(path) for found in libraries for path in found}),
    }
    json.dump(facts, sys.stdout)


main()
