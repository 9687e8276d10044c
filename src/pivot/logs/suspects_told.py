"""Suspects that one kind of line tells by itself: which line, what it means and the next command, as tables."""

from __future__ import annotations

from collections.abc import Iterator

from pivot.findings import Severity
from pivot.logs.evidence import Facts
from pivot.logs.log_kinds import SHM
from pivot.logs.suspect import Suspect, suspect

Row = tuple[str, str, Severity, str, str]  # kind of `pivot.logs.log_kinds`, code, severity, message, next command

MACHINE: tuple[Row, ...] = (
    (
        "shm-name",
        "DIAG-SHM-NAME",
        Severity.ERROR,
        "ranks disagree about host memory: one attaches to a segment without a name, or cuMem's falls back",
        "set NCCL_CUMEM_HOST_ENABLE=0 for all ranks in sglang_server_environment, then deploy",
    ),
    (
        "shm-denied",
        "DIAG-SHM-DENIED",
        Severity.ERROR,
        f"{SHM} refuses the server",
        f"stat {SHM} (mode 1777 is right)",
    ),
    (
        "sandbox",
        "DIAG-SANDBOX",
        Severity.ERROR,
        "systemd cannot make the unit's sandbox here",
        "pct config ID on the node: features needs nesting=1; then restart the container",
    ),
    (
        "memlock",
        "DIAG-MEMLOCK",
        Severity.ERROR,
        "memory cannot be locked: the container's limit for it is low, and a unit cannot raise it",
        "grep 'locked memory' /proc/PID/limits; on the node lxc.prlimit.memlock: unlimited, then restart the container",
    ),
    (
        "denied",
        "DIAG-DENIED",
        Severity.ERROR,
        "the service's user may not read or write a path",
        "stat the path and its directories; owner 65534 is a user of the node that the container does not map",
    ),
)

ENGINE: tuple[Row, ...] = (
    (
        "gpu-memory",
        "DIAG-GPU-MEMORY",
        Severity.ERROR,
        "a GPU has run out of memory",
        "lower mem-fraction-static, cuda-graph-max-bs or context-length (pivot check shows the budget)",
    ),
    (
        "kv-room",
        "DIAG-KV-ROOM",
        Severity.ERROR,
        "what mem-fraction-static grants is used up by the weights: nothing is left for the KV cache",
        "raise mem-fraction-static (pivot check shows the budget), or spread the weights over more GPUs",
    ),
    (
        "kv-memory",
        "DIAG-KV-MEMORY",
        Severity.WARNING,
        "requests do not fit the KV cache",
        "lower max-running-requests or context-length, or raise mem-fraction-static",
    ),
    (
        "compiler",
        "DIAG-COMPILER",
        Severity.ERROR,
        "kernels are compiled at run time, and what compiles them is not found",
        "in the container: install g++ and the CUDA toolkit of the engine's torch; ninja is in the release's bin",
    ),
    (
        "jit",
        "DIAG-JIT-CACHE",
        Severity.ERROR,
        "a compiled kernel does not fit this engine: a cache of another version, or a build that failed",
        "move the caches of flashinfer, triton and tvm-ffi away (/var/cache/sglang), then start again",
    ),
    (
        "no-kernel",
        "DIAG-ARCHITECTURE",
        Severity.ERROR,
        "a kernel is not built for this GPU",
        "pivot check names the attention backends that the card can run",
    ),
    (
        "deepgemm",
        "DIAG-DEEPGEMM",
        Severity.ERROR,
        "DeepGEMM is asked for, and this GPU or engine has none",
        "set SGLANG_ENABLE_JIT_DEEPGEMM=0 in sglang_server_environment, then deploy",
    ),
    (
        "one-shot",
        "DIAG-ONE-SHOT",
        Severity.ERROR,
        "the one-shot all-reduce over PCIe failed: it cannot go with expandable segments, or over this topology",
        "set disable-custom-all-reduce, or take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF",
    ),
    (
        "graph-file",
        "DIAG-NCCL-GRAPH",
        Severity.ERROR,
        "NCCL cannot use the topology file that it is given",
        "NCCL_GRAPH_FILE has to exist in the container and to name as many GPUs as there are ranks",
    ),
    (
        "damaged",
        "DIAG-WEIGHTS-DAMAGED",
        Severity.ERROR,
        "a file of weights is damaged or not whole",
        "ansible-playbook deploy.yml --tags weights compares every file with its pinned hash",
    ),
    (
        "model-type",
        "DIAG-MODEL-TYPE",
        Severity.ERROR,
        "this engine does not know the class of a model's configuration, the target's or the drafter's",
        "pivot check says which versions of SGLang know it; pin one of them",
    ),
    (
        "no-capture",
        "DIAG-NO-CAPTURE",
        Severity.ERROR,
        "this engine's class of the target hands no layers to an EAGLE-3 drafter",
        "pin a version of SGLang whose class has set_eagle3_layers_to_capture: pivot check knows which",
    ),
    (
        "draft-quant",
        "DIAG-DRAFT-QUANT",
        Severity.ERROR,
        "the drafter is loaded with the target's quantisation",
        "set speculative-draft-model-quantization: unquant in sglang_server_launch, then deploy",
    ),
    (
        "logprobs",
        "DIAG-LOGPROBS",
        Severity.ERROR,
        "a request for logprobs ends this version's speculation",
        "ask without logprobs, or pin a version of SGLang that has it mended",
    ),
    (
        "nan",
        "DIAG-NAN",
        Severity.ERROR,
        "the model computes values that are no numbers: wrong data between GPUs, or a kernel at fault",
        "try NCCL_P2P_DISABLE=1 with disable-custom-all-reduce, then another quantised GEMM backend",
    ),
    (
        "cuda",
        "DIAG-CUDA",
        Severity.ERROR,
        "a kernel failed on a GPU; where it shows is seldom where it happened",
        "CUDA_LAUNCH_BLOCKING=1 for one run; a device-side assert is an index, such as a position beyond the drafter's",
    ),
    (
        "rendezvous",
        "DIAG-RENDEZVOUS",
        Severity.ERROR,
        "a rank did not come to where all ranks meet",
        "find the rank that is missing: its last line, or its state in processes.json, says what it waits for",
    ),
)

# what does not make a server bad
ASIDE: tuple[Row, ...] = (
    (
        "env-value",
        "DIAG-ENV-VALUE",
        Severity.WARNING,
        "SGLang could not read a variable's value and took its default",
        "write true or false, without blanks: pivot check names the variable",
    ),
    (
        "ptrace",
        "DIAG-PTRACE",
        Severity.WARNING,
        "stacks could not be dumped: the node's kernel refuses to look into processes",
        "py-spy on the node itself, or kernel.yama.ptrace_scope=0 there for as long as it takes",
    ),
    (
        "stop-timeout",
        "DIAG-STOP-TIMEOUT",
        Severity.WARNING,
        "the server did not end in time and was killed, which can leave GPUs unwell",
        "raise sglang_server_stop_seconds; nvidia-smi before the next start",
    ),
)


def machine(facts: Facts) -> Iterator[Suspect]:
    """What lines say about container and node."""
    return _told(facts, MACHINE)


def engine(facts: Facts) -> Iterator[Suspect]:
    """What lines say about the engine, its kernels and its models."""
    return _told(facts, ENGINE)


def aside(facts: Facts) -> Iterator[Suspect]:
    """What is worth a word and no fault."""
    return _told(facts, ASIDE)


def _told(facts: Facts, rows: tuple[Row, ...]) -> Iterator[Suspect]:
    for kind, code, severity, message, fix in rows:
        if note := facts.note(kind):
            yield suspect(code, severity, facts, message, fix, evidence=[note])
