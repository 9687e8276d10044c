"""What a line of a log can say, whoever wrote it: SGLang, torch, NCCL, systemd or the kernel.

The wording is that of SGLang 0.5.9 to 0.5.23, NCCL 2.x, systemd and the NVIDIA driver.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SHM = "/dev/shm"  # noqa: S108 - a text that is looked for


def _kind(hints: str, pattern: str) -> tuple[tuple[str, ...], re.Pattern[str]]:
    """Texts of which one has to be in a line (plain searches are quick), and what the line looks like then."""
    return tuple(hints.split("|")), re.compile(pattern)


# kind → what a line of it looks like; a line counts for every kind that it matches
NOTES: Mapping[str, tuple[tuple[str, ...], re.Pattern[str]]] = {
    "watchdog": _kind(
        "atchdog timeout", r"(?:(\w+) )?[Ww]atchdog timeout \(self\.watchdog_timeout=([\d.]+)(?!.*soft=T)"
    ),
    "watchdog-soft": _kind("soft=True", r"(?:(\w+) )?[Ww]atchdog timeout \(self\.watchdog_timeout=([\d.]+), .*soft=T"),
    "gpu-memory": _kind(
        "OutOfMemory|CUDA out of mem|CUDA error: out|Not enough memory|CUDA calloc|CUDA host alloc|CUDA malloc"
        "|ALLOC_FAILED|cudaErrorMemory|Cuda failure",
        r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|Not enough memory\. Please try"
        r"|to CUDA (?:host )?\w+|CUBLAS_\w+ALLOC_FAILED|cudaErrorMemoryAllocation|Cuda failure '?\d* ?'?out of memory",
    ),
    "kv-memory": _kind(
        "out of memory. Try|runs out of mem|KV cache pool is full",
        r"(?:Prefill|Decode) out of memory|alloc_\w+ runs out of memory|KV cache pool is full\. Retract",
    ),
    "host-memory": _kind(
        "Killed process|oom-kill|OOM killer|bad_alloc|Cannot allocate mem",
        r"Out of memory: Killed process|oom-kill|by the OOM killer|std::bad_alloc|Cannot allocate memory",
    ),
    "unbalanced": _kind("capacity is unbalanced", r"memory capacity is unbalanced"),
    "shm-full": _kind(
        f"{SHM}|Bus error|SIGBUS",
        rf"{SHM}\S*.*(?:No space left|\(28\)|errno 28)|(?:No space left|Errno 28).*{SHM}|Bus error|SIGBUS",
    ),
    "shm-name": _kind("shared memory segment", r"(?:attaching to|creating) shared memory segment (.*?) ?\(size 0\)"),
    "shm-denied": _kind(f"{SHM}|shm_open", rf"(?:{SHM}|shm_open).*[Pp]ermission denied"),
    "volume-full": _kind(
        "No space left|Errno 28|Disk quota|ENOSPC", r"No space left on device|Errno 28\b|Disk quota exceeded|ENOSPC"
    ),
    "driver": _kind(
        "ersion mismatch|API mismatch|CUDA driver version|forward compatibility|unsupported display driver",
        r"[Dd]river/library version mismatch|API mismatch|CUDA driver version is insufficient"
        r"|forward compatibility was attempted|unsupported display driver / cuda driver combination",
    ),
    "cuda": _kind(
        "CUDA error|cudaError|Cuda failure|CUDA initialization|illegal memory|device-side assert",
        r"CUDA error: (?!out of memory)|cudaError(?!MemoryAllocation)\w+|Cuda failure (?!.*out of memory)"
        r"|CUDA initialization:|illegal memory access|device-side assert",
    ),
    "no-kernel": _kind(
        "kernel image|rchitecture|not supported on ",
        r"no kernel image is available|[Uu]nsupported architecture|is not supported on (?:SM|sm_?)\d+",
    ),
    "jit": _kind(
        "ninja|building extension|undefined symbol|ELF|.cache/|.so: cannot",
        r"ninja: build stopped|[Ee]rror building extension|undefined symbol: |(?:invalid|bad) ELF"
        r"|\.cache/\S*(?:flashinfer|triton|tvm-ffi|torch_extensions|inductor)\S*.*(?:rror|No such file|cannot open)"
        r"|(?:flashinfer|triton|tvm.ffi|torch_extensions|inductor)\S*/\S+\.so: cannot open",
    ),
    "peer": _kind(
        "peer access|P2P is |p2p access|cudaIpc|allreduce is disabled",
        r"peer access (?:is not|between)|P2P is (?:disabled|not supported)|p2p access|cudaIpc\w+.*(?:fail|rror)"
        r"|[Cc]ustom allreduce is disabled because",
    ),
    "port": _kind(
        "lready in use|lready occupied|not available", r"already (?:in use|occupied)|port \d+ is not available"
    ),
    "dead": _kind(
        "crashed with exit|scheduler is dead|scheduler died|terminated with|prematurely with",
        r"Subprocess (\S+) \(pid=\d+\) crashed with exit code (-?\d+)"
        r"|Rank (\d+) scheduler (?:is dead|died during initialization(?: \(exit code: (-?\d+)\))?)"
        r"|Scheduler or DataParallelController (\d+) terminated with (-?\d+)|exited prematurely with code (-?\d+)",
    ),
    "hit": _kind("hit an exception", r"(\w+) hit an exception"),
    "quit": _kind("sigquit|SIGQUIT", r"[Rr]eceived sigquit|SIGQUIT received|Triggering SIGQUIT"),
    "asked": _kind("SIGTERM received|Gracefully exit", r"SIGTERM received|Gracefully exiting"),
    "health-failed": _kind("Health check failed", r"Health check failed\. Server couldn't get a response"),
    "warmup-failed": _kind("warmup error", r"Initialization failed\. warmup error"),
    "collective": _kind(
        "collective operation timeout",
        r"Watchdog caught collective operation timeout: WorkNCCL\((?:[^)]*OpType=(\w+))?",
    ),
    "unexpected-weight": _kind(
        "unexpected weight|not initialized", r"skipping unexpected weight|[Ss]ome weights? .*not initialized"
    ),
    "simulated": _kind("SGLANG_SIMULATE", r"SGLANG_SIMULATE_ACC\w*"),
    "suppressed": _kind("Suppressed ", r"Suppressed (\d+) messages from"),
    "missed": _kind("issed ", r"[Mm]issed (\d+) (?:kernel )?messages"),
    "exited": _kind("process exited, code", r"[Mm]ain process exited, code=(\w+), status=(\S+)"),
    "failed": _kind("Failed with result", r"Failed with result '([\w-]+)'"),
    "gave-up": _kind("repeated too quickly|start-limit-hit", r"repeated too quickly|start-limit-hit"),
    "start-timeout": _kind(
        "operation timed out|no token was generated",
        # by systemd, or by the guard of Pivot's unit
        r"[Ss]tart(?:-post)? operation timed out|no token was generated within [\d.]+ s",
    ),
    "restart": _kind("restart counter", r"Scheduled restart job, restart counter is at (\d+)"),
    "left-behind": _kind("left-over process", r"[Ff]ound left-over process (\d+)"),
}
