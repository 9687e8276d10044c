#!/usr/bin/env python3
"""Speed of bundles: masking and parsing in MB/s of one core with peak memory, and the transfer against ``tar | zstd``.

Arguments: --mib of log for masking and parsing; --transfer MIB brings that much from the lab's container infer1 (the
lab has to be up: make deploy). Prints figures; ends non-zero when one is below what is promised.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from pivot.bundles import bundle, bundle_table
from pivot.bundles.redact import Redactor
from pivot.logs.gpu_logs import NcclLog
from pivot.logs.server_log import ServerLog
from pivot.program import program

ROOT = Path(__file__).resolve().parents[1]
LEAST_MBPS = 30.0
LEAST_SHARE = 0.9
SECRETS = [f"made-up-secret-{number}" for number in range(4)]
JOURNAL = "2026-11-29T10:{0:02d}:{1:02d}.123456+0000 infer1 sglang[123]: [2026-11-29 10:{0:02d}:{1:02d} TP0] "
SERVING = (
    "Decode batch, #running-req: {2}, #token: {3}, token usage: 0.0{2}, accept len: 3.{2}, accept rate: 0.7{2}, "
    "cuda graph: True, gen throughput (token/s): 8{2}.{3}, #queue-req: 0\n",
    "Prefill batch, #new-seq: 1, #new-token: {3}, #cached-token: {2}, token usage: 0.00, #running-req: 0, "
    "#queue-req: 0, #pending-token: 0, cuda graph: False, input throughput (token/s): {3}.41\n",
    'INFO:     127.0.0.1:5{3} - "POST /v1/chat/completions HTTP/1.1" 200 OK\n',
    'INFO:     127.0.0.1:5{3} - "GET /metrics HTTP/1.1" 200 OK\n',
)


def server_log(path: Path, mib: int) -> None:
    """A day's log: three starts as SGLang 0.5.23 logs them, and serving between them."""
    start = (ROOT / "tests/unit/data/logs/healthy-0.5.23.log").read_text(encoding="utf-8")
    with path.open("w", encoding="utf-8") as sink:
        for part in range(3):
            sink.write(start)
            first = 0
            while sink.tell() < (part + 1) * mib * (1 << 20) // 3:
                numbers = range(first, first + 4000)
                words = (
                    (n // 60 % 60, n % 60, n % 10, 1000 + n * 37 % 8999, SERVING[n % len(SERVING)]) for n in numbers
                )
                sink.write("".join((JOURNAL + line).format(*rest) for *rest, line in words))
                first += 4000


def nccl_log(path: Path, mib: int) -> None:
    """What NCCL_DEBUG=INFO writes for eight ranks."""
    line = "llm01:2200:23{0:02d} [{0}] NCCL INFO Channel {1:02d}/0 : {0}[{0}] -> {2}[{2}] via P2P/CUMEM\n"
    block = "".join(line.format(n % 8, n % 32, (n + 1) % 8) for n in range(4096))
    with path.open("w", encoding="utf-8") as sink:
        while sink.tell() < mib * (1 << 20):
            sink.write(block)


def odd_log(path: Path, mib: int) -> None:
    """Lines that no rule passes over: tracebacks, NCCL's settings, requests and their answers."""
    lines = (
        '2026-11-29T10:{0:02d}:{1:02d}.123456+0000 h sglang[123]:   File "/x/schedule.py", line {2}, in run_batch\n',
        "llm01:2200:23{0:02d} [{2}] NCCL INFO NCCL_P2P_LEVEL set by environment to SYS, comm 0x7f3a{1:02d} rank {2}\n",
        'INFO:     127.0.0.1:5{1} - "GET /model_info?full={2} HTTP/1.1" 404 Not Found\n',
        "[2026-11-29 10:{0:02d}:{1:02d}] max_total_num_tokens={1}, chunked_prefill_size={2}, context_len=1024\n",
    )
    block = "".join(lines[n % len(lines)].format(n // 60 % 60, n % 60, n % 10) for n in range(4096))
    with path.open("w", encoding="utf-8") as sink:
        while sink.tell() < mib * (1 << 20):
            sink.write(block)


def masked(path: Path) -> None:
    """As a host does it, with four known secrets: the collector itself, on one file."""
    with tempfile.TemporaryDirectory() as scratch:
        options = {"config_paths": [], "listed_paths": [], "probe_records": [str(path)], "log_limit": 1 << 40}
        rows = [row for row in bundle_table.table(unit="none.service", **options) if row["name"] == "probe"]
        request = {"rows": rows, "unit": "none.service", "total_limit": 1 << 40, "directories": [scratch], "owner": "b"}
        collector = program(ROOT / "roles/log_bundle/files/collect")
        collector = collector.replace(".redactor = Redactor(", f".redactor = Redactor({SECRETS!r}, ", 1)
        argv = [sys.executable, "-I", "-", json.dumps(request)]
        done = subprocess.run(argv, input=collector, text=True, capture_output=True, check=True)
        (entry,) = json.loads(done.stdout)["entries"]
        if entry["bytes"] != path.stat().st_size:
            raise SystemExit(f"the collector took {entry['bytes']} of {path.stat().st_size} bytes")


def redacted(path: Path) -> None:
    """Masking alone, in the blocks that the collector makes."""
    redactor = Redactor(SECRETS)
    with path.open("rb") as stream:
        while block := stream.read(1 << 18):
            redactor.text(block.decode("utf-8", "surrogateescape"))


def parsed(path: Path) -> None:
    """A server's log."""
    with path.open("rb") as stream:
        log = ServerLog("server.log").read(stream)
    if log.starts != 3:
        raise SystemExit(f"{log.starts} starts were read, 3 are there")


def nccl_parsed(path: Path) -> None:
    """NCCL's log."""
    with path.open("rb") as stream:
        log = NcclLog().read(stream)
    if len(log.ranks) != 8:
        raise SystemExit(f"{len(log.ranks)} ranks were read, 8 are there")


def measured(job: Callable[[Path], None], path: Path) -> tuple[float, float]:
    """Megabytes per second of CPU time, and the peak memory in MiB, of a process that does nothing else."""
    argv = [sys.executable, __file__, "--child", job.__name__, str(path)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    seconds, peak = json.loads(done.stdout)
    return path.stat().st_size / 1e6 / seconds, peak


def child(name: str, path: str) -> None:
    """Run one job and print its CPU seconds, children's included, and its peak memory."""
    jobs: dict[str, Callable[[Path], None]] = {job.__name__: job for job in (masked, redacted, parsed, nccl_parsed)}
    before = time.process_time()  # what importing took is not counted
    jobs[name](Path(path))
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = time.process_time() - before + usages[1].ru_utime + usages[1].ru_stime
    print(json.dumps([seconds, max(usage.ru_maxrss for usage in usages) / 1024]))


def transfers(mib: int, scratch: Path) -> float:
    """Seconds of ``tar | zstd`` over ssh divided by those of the role's rsync, for the same logs of the lab's host."""
    variables = yaml.safe_load((ROOT / "inventory/lab/group_vars/all/lab.yml").read_text(encoding="utf-8"))
    connection = {
        "inventory_hostname": "infer1",
        "ansible_host": variables["lab_addresses"]["infer1"],
        "ansible_user": "root",
        "ansible_ssh_private_key_file": variables["lab_ssh_key"],
        "ansible_ssh_common_args": f"-o UserKnownHostsFile={variables['lab_known_hosts']}",
    }
    call = bundle.transfer(connection, "/var/tmp/bench-logs", str(scratch / "rsync"))  # noqa: S108 - of the lab's host
    ssh = [*shlex.split(call[call.index("--rsh") + 1]), f"root@{connection['ansible_host']}"]
    sample = scratch / "sample.log"
    server_log(sample, 64)
    subprocess.run([*ssh, "mkdir -p /var/tmp/bench-logs"], check=True)
    try:
        with sample.open("rb") as source:
            subprocess.run([*ssh, "cat > /var/tmp/bench-logs/0.log"], stdin=source, check=True)
        copies = f"cd /var/tmp/bench-logs; for n in $(seq 1 {max(0, mib // 64 - 1)}); do cp 0.log $n.log; done; sync"
        subprocess.run([*ssh, copies], check=True)
        if subprocess.run([*ssh, "command -v zstd"], capture_output=True, check=False).returncode:
            tool = shutil.which("zstd") or sys.exit("there is no zstd here to compare with")
            with Path(tool).open("rb") as source:
                subprocess.run(
                    [*ssh, "cat > /var/tmp/bench-zstd; chmod 755 /var/tmp/bench-zstd"], stdin=source, check=True
                )
        pack = "PATH=$PATH:/var/tmp; z=$(command -v zstd || command -v bench-zstd); "
        pack += "cd /var/tmp/bench-logs; tar -c . | $z -q"
        seconds: dict[str, list[float]] = {"tar | zstd": [], "rsync": []}
        for number in range(2):  # by turns, the first of each warms caches up
            (scratch / "rsync").mkdir()
            (scratch / "tar").mkdir()
            begin = time.monotonic()
            subprocess.run(call, check=True)
            seconds["rsync"].append(time.monotonic() - begin)
            line = f"{shlex.join([*ssh, pack])} | zstd -q -d | tar -x -C {shlex.quote(str(scratch / 'tar'))}"
            begin = time.monotonic()
            subprocess.run(["bash", "-o", "pipefail", "-c", line], check=True)
            seconds["tar | zstd"].append(time.monotonic() - begin)
            taken = [sum(f.stat().st_size for f in (scratch / name).glob("*.log")) for name in ("rsync", "tar")]
            if taken[0] != taken[1] or not taken[0]:
                raise SystemExit(f"rsync brought {taken[0]} bytes, tar {taken[1]}")
            for name in ("rsync", "tar"):
                shutil.rmtree(scratch / name)
            print(f"  round {number + 1}: " + ", ".join(f"{name} {times[-1]:.1f} s" for name, times in seconds.items()))
    finally:
        subprocess.run([*ssh, "rm -rf /var/tmp/bench-logs /var/tmp/bench-zstd"], check=True)
    return min(seconds["tar | zstd"]) / min(seconds["rsync"])


def main() -> int:
    """Measure, print, and say whether it is enough."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--transfer", type=int, metavar="MIB", help="also compare the transfer of so much")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(*given.child)
        return 0
    good = True
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        server_log(scratch / "server.log", given.mib)
        nccl_log(scratch / "nccl.log", given.mib)
        odd_log(scratch / "odd.log", given.mib // 4)
        jobs: list[tuple[str, Any, str]] = [
            ("masking, the collector as a whole", masked, "server.log"),
            ("masking alone", redacted, "server.log"),
            ("masking what is never passed over", redacted, "odd.log"),
            ("parsing a server's log", parsed, "server.log"),
            ("parsing NCCL's log", nccl_parsed, "nccl.log"),
        ]
        for words, job, name in jobs:
            rate, peak = measured(job, scratch / name)
            good = good and rate >= LEAST_MBPS
            size = (scratch / name).stat().st_size >> 20
            print(f"{words:<36}{rate:7.1f} MB/s of CPU time, peak {peak:6.1f} MiB, {size} MiB of log")
        if given.transfer:
            share = transfers(given.transfer, scratch)
            good = good and share >= LEAST_SHARE
            print(f"transfer of {given.transfer} MiB: {share:.2f} of the speed of tar | zstd over ssh")
    print("as promised" if good else f"below the promise of {LEAST_MBPS:.0f} MB/s each and {LEAST_SHARE} of tar | zstd")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
