#!/usr/bin/env python3
"""Speed of model_weights against the plain tools, with ratios, in one run.

1. First verification, of 2 GiB in 16 files: the host's job from its start to its end, against `sha256sum` on as many
   processes as there are cores. Both read from the page cache; the slower disk of a real host makes them more alike.
2. Verification again, of 64 sparse files of 8.55 GB (547 GB by their size) that have not changed: one look, as the
   role sends it. What is known of them is filled in BY CONSTRUCTION, with made-up hashes: nobody hashes 547 GB of zeros
   here. That such a record comes from real hashing, and is believed then, is shown on the 2 GiB.
3. Sending 1 GiB over ssh: the sender, with the host's lock, against plain rsync; and the sender's peak memory for a
   quarter and for all of it. To the lab's container infer1 (make deploy), or with --scratch to one of its own.

Ends non-zero when something is slower than what is promised, unless --figures says that they are all that is wanted.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from pivot import transfer
from pivot.checkpoints import weights, weights_send

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "roles/model_weights/files"
MIB = 1 << 20
LEAST_HASH, LEAST_SEND, MOST_SECONDS, MOST_GROWTH = 0.95, 0.9, 1.0, 1.1
ROUNDS = 3
THERE = "/var/tmp/pivot-bench-weights"  # noqa: S108 - in the lab's container


def host_file(name: str) -> ModuleType:
    """One of the role's host files as a module."""
    spec = importlib.util.spec_from_file_location(name, FILES / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fill(place: Path, count: int, size: int) -> dict[str, list[Any]]:
    """`count` files of `size` bytes, all different; name → [size, sha256]."""
    place.mkdir(parents=True)
    block, files = os.urandom(MIB), {}
    for number in range(count):
        digest = hashlib.sha256()
        with (place / f"model-{number:02d}.safetensors").open("wb") as stream:
            for part in range(size // MIB):
                data = number.to_bytes(4, "little") + part.to_bytes(4, "little") + block[8:]
                digest.update(data)
                stream.write(data)
        files[f"model-{number:02d}.safetensors"] = [size, digest.hexdigest()]
    return files


def best(job: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """The best seconds of each of two jobs, which take turns."""
    seconds: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for which, run in enumerate((job, other)):
            begin = time.monotonic()
            run()
            seconds[which].append(time.monotonic() - begin)
    return min(seconds[0]), min(seconds[1])


# ---- verification


def wanted(files: dict[str, list[Any]]) -> dict[str, Any]:
    """A model as the host's files know it."""
    return {"repository": "bench/model", "revision": "r1", "files": files, "paths": []}


def look(root: Path, run: Path, files: dict[str, list[Any]]) -> dict[str, Any]:
    """One look, sent as the role sends it: the release as the host reports it."""
    argument = weights.host_arguments("look", str(root), [wanted(files)], run=str(run))
    line = [sys.executable, "-I", "-", argument]
    done = subprocess.run(
        line, input=(FILES / "weights_state.py").read_text(), capture_output=True, text=True, check=True
    )
    release: dict[str, Any] = json.loads(done.stdout)["models"][0]["release"]
    return release


def verification(scratch: Path) -> bool:
    """The first one, against sha256sum."""
    root, run = scratch / "models", scratch / "run"
    release = root / "bench/model/r1"
    files = fill(release, 16, 128 * MIB)
    run.mkdir()
    spec = {"root": str(root), "by": "bench", "job": "bench", "models": [{**wanted(files), "trees": [str(release)]}]}
    (run / "spec.json").write_text(json.dumps(spec))
    record = release.parent / ".verified-r1.json"

    def ours() -> None:
        record.unlink(missing_ok=True)
        subprocess.run([sys.executable, "-I", FILES / "weights_job.py", run], check=True, stderr=subprocess.DEVNULL)

    def theirs() -> None:
        names = "\0".join(str(release / name) for name in files)
        line = ["xargs", "-0", "-n", "1", "-P", str(len(os.sched_getaffinity(0))), "sha256sum"]
        subprocess.run(line, input=names, text=True, check=True, stdout=subprocess.DEVNULL)

    mine, plain = best(ours, theirs)
    known = look(root, run, files)["files"]
    if {name: digest for name, (_, digest) in known.items()} != {name: pin[1] for name, pin in files.items()}:
        raise RuntimeError("what was hashed is not what is known")
    ratio = plain / mine
    print(
        f"first verification of 2 GiB in 16 files: {2048 / mine:.0f} MiB/s, parallel sha256sum"
        f" {2048 / plain:.0f} MiB/s: {ratio:.2f} of it (least {LEAST_HASH})"
    )
    return ratio >= LEAST_HASH


def again(scratch: Path) -> bool:
    """An unchanged release of 547 GB, known by construction."""
    state = host_file("weights_state")
    root, size = scratch / "sparse", 8_550_000_000
    release = root / "bench/model/r1"
    release.mkdir(parents=True)
    files = {f"model-{number:05d}-of-00064.safetensors": [size, f"{number:064x}"] for number in range(64)}
    for name in files:
        with (release / name).open("wb") as stream:
            stream.truncate(size)
    time.sleep(0.1)
    record = state.Record(release.parent / ".verified-r1.json")
    for name, (_, digest) in files.items():
        record.add((release / name).stat(), digest, time.time_ns())
    record.write([release / name for name in files])
    begin = time.monotonic()
    known = look(root, scratch / "none", files)["files"]
    seconds = time.monotonic() - begin
    if {name: list(entry) for name, entry in known.items()} != files:
        raise RuntimeError("an unchanged file is not known")
    print(
        f"verification again of 64 sparse files of 8.55 GB, unchanged, known by construction: {seconds:.2f} s"
        f" (most {MOST_SECONDS:.0f} s)"
    )
    return seconds < MOST_SECONDS


# ---- sending


@contextlib.contextmanager
def target(scratch: bool) -> Iterator[dict[str, Any]]:
    """How a container is reached, as Ansible's variables."""
    if not scratch:
        lab = yaml.safe_load((ROOT / "inventory/lab/group_vars/all/lab.yml").read_text())
        address, key, known = lab["lab_addresses"]["infer1"], lab["lab_ssh_key"], lab["lab_known_hosts"]
    else:
        made = subprocess.run(
            ["pivot-lab", "scratch", "up", "bench-weights"], cwd=ROOT, capture_output=True, check=True
        )
        container = json.loads(made.stdout)
        address, key, known = container["address"], container["ssh_key"], container["known_hosts"]
    try:
        yield {
            "inventory_hostname": "bench",
            "ansible_host": address,
            "ansible_user": "root",
            "ansible_ssh_private_key_file": key,
            "ansible_ssh_common_args": f"-o UserKnownHostsFile={known}",
        }
    finally:
        if scratch:
            subprocess.run(["pivot-lab", "scratch", "down", "bench-weights"], cwd=ROOT, check=True)


def sending(scratch: Path, connection: dict[str, Any]) -> bool:
    """1 GiB to a container, against rsync; then the sender's memory for a quarter of it."""
    source, place = scratch / "source", scratch / "sender"
    files = fill(source, 4, 256 * MIB)
    place.mkdir()
    shell = transfer.remote_shell(connection)
    ssh = [*shlex.split(shell), f"root@{connection['ansible_host']}"]
    peaks: dict[int, int] = {}

    def empty() -> None:
        subprocess.run([*ssh, f"rm -rf {THERE}/in && mkdir -p {THERE}/in"], check=True)

    def ours(names: list[str] | None = None) -> None:
        empty()
        receive = weights.host_arguments("receive", THERE, [], by="bench", doing="bench")
        receiver = ["python3", "-I", f"{THERE}/weights_state.py", receive]
        argv = weights_send.rsync_command(str(source), f"{THERE}/in", connection, receiver, place / "names")
        sends = [{"key": "bench", "root": THERE, "size": 1, "names": names or list(files), "argv": argv}]
        (place / "spec.json").write_text(json.dumps(sends))
        child = subprocess.Popen([sys.executable, "-m", "pivot.checkpoints.weights_send", str(place)])
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise RuntimeError(weights_send.told(place)["error"])
        peaks[len(names or files)] = used.ru_maxrss

    def theirs() -> None:
        empty()
        line = ["rsync", "--recursive", "--rsh", shell, f"{source}/", f"root@{connection['ansible_host']}:{THERE}/in/"]
        subprocess.run(line, check=True)

    empty()
    code = (FILES / "weights_state.py").read_text()
    subprocess.run([*ssh, f"cat >{THERE}/weights_state.py"], input=code, text=True, check=True)
    try:
        mine, plain = best(ours, theirs)
        ours([next(iter(files))])
    finally:
        subprocess.run([*ssh, f"rm -rf {THERE}"], check=True)
    ratio, growth = plain / mine, peaks[len(files)] / peaks[1]
    print(
        f"sending 1 GiB over ssh: {1024 / mine:.0f} MiB/s, plain rsync {1024 / plain:.0f} MiB/s: {ratio:.2f} of it"
        f" (least {LEAST_SEND})"
    )
    print(
        f"memory of the sender, rsync and ssh included, at its peak: {peaks[1] / 1024:.0f} MiB for 256 MiB,"
        f" {peaks[len(files)] / 1024:.0f} MiB for 1 GiB (most {MOST_GROWTH} times as much)"
    )
    return ratio >= LEAST_SEND and growth <= MOST_GROWTH


def main() -> int:
    """All of it; 1 when something is slower than promised."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scratch", action="store_true", help="send to a scratch container of the lab, not to infer1")
    parser.add_argument("--figures", action="store_true", help="print them and judge none")
    given = parser.parse_args()
    kept = []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:  # room for gigabytes
        scratch = Path(place)
        kept.append(verification(scratch))
        shutil.rmtree(scratch / "models")
        kept.append(again(scratch))
        with target(given.scratch) as connection:
            kept.append(sending(scratch, connection))
    return 0 if given.figures or all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
