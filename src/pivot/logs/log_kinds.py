"""What a line of a log can say, whoever wrote it: SGLang, torch, NCCL, systemd or the kernel.

The wording is that of SGLang 0.5.9 to 0.5.23, NCCL 2.x, systemd and the NVIDIA driver.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

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
        "OutOfMemory|CUDA out of mem|CUDA error: out|CUDA driver error: out|CUDA calloc|CUDA host alloc|CUDA malloc"
        "|ALLOC_FAILED|cudaErrorMemory|Cuda failure",
        r"OutOfMemoryError|CUDA out of memory|CUDA (?:driver )?error: out of memory"
        r"|to CUDA (?:host )?\w+|CUBLAS_\w+ALLOC_FAILED|cudaErrorMemoryAllocation|Cuda failure '?\d* ?'?out of memory",
    ),
    "kv-room": _kind("Not enough memory", r"Not enough memory\. Please try to increase --mem-fraction-static"),
    "kv-memory": _kind(
        "out of memory. Try|runs out of mem|KV cache pool is full",
        r"(?:Prefill|Decode) out of memory|alloc_\w+ runs out of memory|KV cache pool is full\. Retract",
    ),
    "host-memory": _kind(
        "Killed process|oom-kill|OOM killer|bad_alloc|Cannot allocate mem|MemoryError",
        r"Out of memory: Killed process|oom-kill|by the OOM killer|std::bad_alloc|Cannot allocate memory"
        r"|(?<![\w.])MemoryError\b",
    ),
    "unbalanced": _kind("capacity is unbalanced", r"memory capacity is unbalanced"),
    "shm-full": _kind(
        f"{SHM}|</torch_|Bus error|SIGBUS|posix_fallocate",
        rf"{SHM}\S*.*(?:No space left|\(28\)|errno 28)|(?:No space left|Errno 28).*{SHM}|Bus error|SIGBUS"
        rf"|posix_fallocate.*No space left|failed to extend {SHM}|</torch_\d+.*No space left",
    ),
    "shm-name": _kind(
        "shared memory segment|cuMem host",
        r"(?:attaching to|creating) shared memory segment (.*?) ?\(size 0\)|cuMem host alloc\w* (?:do(?:es)? not|fail)",
    ),
    "shm-denied": _kind(f"{SHM}|shm_open", rf"(?:{SHM}|shm_open).*[Pp]ermission denied|[Pp]ermission denied.*{SHM}"),
    "volume-full": _kind(
        "No space left|Errno 28|Disk quota|ENOSPC", r"No space left on device|Errno 28\b|Disk quota exceeded|ENOSPC"
    ),
    "driver": _kind(
        "ersion mismatch|API mismatch|CUDA driver version|driver on your system is too old|forward compatibility"
        "|unsupported display driver",
        r"[Dd]river/library version mismatch|API mismatch|CUDA driver version is insufficient"
        r"|driver on your system is too old|forward compatibility was attempted"
        r"|unsupported display driver / cuda driver combination",
    ),
    "devices": _kind(
        "CUDA unknown error|CUDA error: unknown|device ordinal|initialization error|not yet initialized|error 999"
        "|ERROR_UNKNOWN|cudaErrorUnknown|CUDA GPUs|CUDA-capable|NO_DEVICE|cudaErrorNoDevice"
        "|/dev/nvidia|no NVIDIA driver|the NVIDIA driver|initialize NVML",
        r"CUDA unknown error|CUDA error: (?:unknown error|invalid device ordinal|initialization error)"
        r"|system not yet initialized|\berror 999\b|CUDA_ERROR_UNKNOWN|cudaErrorUnknown|No CUDA GPUs are available"
        r"|no CUDA-capable device|CUDA_ERROR_NO_DEVICE|cudaErrorNoDevice|no NVIDIA driver on your system"
        r"|communicate with the NVIDIA driver|initialize NVML: (?!.*mismatch)"
        r"|/dev/nvidia\S*.*(?:not permitted|denied|No such)|(?:not permitted|denied|No such).*/dev/nvidia",
    ),
    "cuda": _kind(
        "CUDA error|cudaError|Cuda failure|illegal memory|device-side assert",
        r"CUDA error: (?!out of memory|no kernel|unknown error|no CUDA-cap|invalid device|initialization|peer access)"
        r"|cudaError(?!MemoryAllocation|Unknown|NoDevice|NoKernelImage)\w+"
        r"|Cuda failure (?!.*(?:out of memory|mismatch|no CUDA-capable|peer access))|illegal memory access"
        r"|device-side assert",
    ),
    "no-kernel": _kind(
        "kernel image|rchitecture|supported on |requires SM",
        r"no kernel image is available|[Uu]nsupported (?:gpu )?architecture|is not supported on (?:SM|sm_?)\d+"
        # what is no error falls back to another kernel
        r"|Error: .*(?:requires SM ?[>=\d]|only supported on (?:Hopper|Blackwell|SM)|not supported on Blackwell)",
    ),
    "compiler": _kind(
        "ninja|nvcc|c++|g++",
        r"No such file or directory: '(?:\S*/)?(?:ninja|nvcc|c\+\+|g\+\+)'"
        r"|\b(?:ninja|nvcc|c\+\+|g\+\+): (?:command )?not found|Could not find nvcc",
    ),
    "jit": _kind(
        "ninja|building extension|undefined symbol|ELF|cache/|.so: cannot",
        r"ninja: build stopped|[Ee]rror building extension|undefined symbol: |(?:invalid|bad) ELF"
        r"|\bcache/\S*(?:flashinfer|triton|tvm-ffi|torch_extensions|inductor)\S*.*(?:rror|No such file|cannot open)"
        r"|(?:flashinfer|triton|tvm.ffi|torch_extensions|inductor)\S*/\S+\.so: cannot open"
        r"|No such file.*\bcache/\S*(?:flashinfer|triton|tvm-ffi|torch_extensions|inductor)",
    ),
    # that custom allreduce is disabled is ordinary where there are more than two PCIe-only GPUs
    "peer": _kind(
        "peer access|P2P is |p2p access|cudaIpc|lacks GPU P2P",
        r"peer access (?:is not|between)|P2P is (?:disabled|not supported)|p2p access|cudaIpc\w+.*(?:fail|rror)"
        r"|platform lacks GPU P2P",
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
    # the last is uvicorn's, after an interrupt; where it cannot bind, it ends without it
    "asked": _kind(
        "SIGTERM received|Gracefully exit|Finished server",
        r"SIGTERM received|Gracefully exiting|Finished server process",
    ),
    "health-failed": _kind("Health check failed", r"Health check failed\. Server couldn't get a response"),
    "warmup-failed": _kind("warmup error", r"Initialization failed\. warmup error"),
    "collective": _kind(
        "collective operation timeout",
        r"Watchdog caught collective operation timeout: WorkNCCL\((?:[^)]*OpType=(\w+))?",
    ),
    "sandbox": _kind("NAMESPACE|mount namespac", r"/NAMESPACE\b|at step NAMESPACE|set up mount namespac"),
    "denied": _kind(
        "ermission denied|Errno 13|Read-only file",
        r"\bErrno (?:13|30)\b|\bos error 13\b|Read-only file system|: Permission denied$",
    ),
    "memlock": _kind(
        "MEMLOCK|lock memory|pin memory|cudaHostRegister|mlock|ibv_reg_mr",
        r"RLIMIT_MEMLOCK|[Uu]nable to (?:pin|lock) memory|cudaHostRegister.*(?:fail|rror|invalid)"
        r"|\bmlock\w*.*(?:fail|annot)|ibv_reg_mr.*annot allocate",
    ),
    "damaged": _kind(
        "afetensor|Metadata|PytorchStreamReader|.incomplete",
        r"MetadataIncompleteBuffer|Header(?:TooLarge|TooSmall|InvalidUTF8)|InvalidHeader\w*|while deserializing header"
        r"|PytorchStreamReader failed|\.incomplete\b.*(?:rror|No such|not)",
    ),
    "model-type": _kind(
        "this architecture|configuration_auto.py|odel architecture|Unrecognized model",
        r"does not recognize this architecture|configuration_auto\.py\", line \d+, in __getitem__"
        r"|[Mm]odel architectures? .*not supported|Unrecognized model in ",
    ),
    "no-capture": _kind("set_eagle3_layers", r"has no attribute '?set_eagle3_layers_to_capture"),
    "no-drafter": _kind("set_embed|hot_token_id", r"has no attribute '?(?:set_embed|hot_token_id)"),
    "draft-quant": _kind("config file for", r"[Cc]annot find (?:the )?config file for \w+"),
    "logprobs": _kind("aux_pruned_states", r"aux_pruned_states"),
    "nan": _kind("probability tensor|NaN in", r"probability tensor contains either|NaN in the (?:logits|hidden)"),
    "deepgemm": _kind("get_num_sms|eepGEMM|eep_gemm", r"get_num_sms|(?i:deep_?gemm).*(?:Error|rror:|not supported)"),
    "graph-file": _kind("XML ", r"XML graph file|XML (?:Parse|Import)\b"),
    "one-shot": _kind("pcie_allreduce", r"pcie_allreduce\S*\.cu"),
    "rendezvous": _kind(
        "clients joined|DistStoreError|arrier timeout|arrier timed out|waiting for clients|client socket has timed",
        r"\d+/\d+ clients joined|DistStoreError|[Bb]arrier time(?:d )?out|client socket has timed out",
    ),
    "env-value": _kind("Invalid value for ", r"Invalid value for (\w+): .*default"),
    "ptrace": _kind(
        "py-spy|Permission Denied: Try|ptrace",
        r"py-spy.*(?:ermission|not permitted|ailed)|Permission Denied: Try running again|ptrace.*not permitted",
    ),
    "stop-timeout": _kind("timed out", r"State '(?:stop|final)[\w-]*' timed out"),
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
# a line that says the one does not say the other
UNLESS = {"volume-full": {"shm-full"}, "denied": {"shm-denied", "devices"}, "shm-full": {"shm-denied"}}


def kinds_of(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The kinds of a line, each with what its pattern captured."""
    found = {
        kind: tuple(group for group in match.groups() if group)
        for kind, (hints, pattern) in NOTES.items()
        if any(hint in text for hint in hints) and (match := pattern.search(text))
    }
    return ((kind, groups) for kind, groups in found.items() if UNLESS.get(kind, set()).isdisjoint(found))
