"""Facts of a Proxmox node, read-only. Standard library, Python 3.9. Argument: JSON list of device paths that matter."""

import glob
import json
import os
import subprocess
import sys
from pathlib import Path


def output(*argv: str) -> str:
    """What a command prints; empty when it is not there or fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False, errors="replace")
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 or argv[0] == "stat" else ""


def read(path: str) -> str:
    """A file's text; empty when there is none."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def main() -> None:
    """Print the facts as one JSON object."""
    wanted = json.loads(sys.argv[1])
    paths = sorted({*wanted, *glob.glob("/dev/nvidia*"), *glob.glob("/dev/nvidia-caps/*")} - {"/dev/nvidia-caps"})
    facts = {
        "kernel": os.uname().release,
        "pve": output("pveversion").strip(),
        "stat": output("stat", "-c", "%n|%F|%t:%T|%a|%u", *paths).splitlines() if paths else [],
        "drivers": read("/proc/devices"),
        "module": read("/proc/driver/nvidia/version"),
        "license": output("modinfo", "-F", "license", "nvidia").strip(),
        "gpus": output("lspci", "-d", "10de:").splitlines(),
        "subids": {name: read("/etc/" + name).splitlines() for name in ("subuid", "subgid")},
    }
    json.dump(facts, sys.stdout)


main()
