"""What one line of a server's log tells: each fault in every form of a log, and the lines that only look like it.

The keys are those of the field's list of known faults.
"""

# ruff: noqa: E501 - lines as they are logged

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pivot.logs.diagnosis import Diagnosis

from .server_bundle import FAILED, at, codes, crash, decode, look, start, unit

ERROR = "RuntimeError: captured 2 of 3 aux hidden states"


def failed(tmp_path: Path, text: str, **files: Any) -> Diagnosis:
    """A start that ended with this text instead of its usual error."""
    return look(tmp_path, crash(5).replace(ERROR, text), properties=FAILED, **files)


def serves(tmp_path: Path, **files: Any) -> Diagnosis:
    """A server that is well but for the files that are given."""
    return look(tmp_path, start() + decode(29, count=4), **files)


# --- what one line tells: fault, code, line, and lines that look like it

TOLD = [
    (
        "H-02 uvm moved",
        "DIAG-DEVICES",
        "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment",
        "RuntimeError: unknown error of the tokenizer",
    ),
    (
        "H-02 by number",
        "DIAG-DEVICES",
        "torch.AcceleratorError: cuInit failed with error 999",
        "RuntimeError: request 999 of 1000 failed with error 99",
    ),
    (
        "H-02 by device",
        "DIAG-DEVICES",
        "OSError: [Errno 1] Operation not permitted: '/dev/nvidia-uvm'",
        "OSError: [Errno 1] Operation not permitted: '/dev/null'",
    ),
    (
        "H-05 no GPU",
        "DIAG-DEVICES",
        "RuntimeError: No CUDA GPUs are available",
        "RuntimeError: 8 CUDA GPUs are visible, tp-size asks for 16",
    ),
    (
        "H-08 mismatch",
        "DIAG-DRIVER",
        "pynvml.NVMLError_LibRmVersionMismatch: Driver/library version mismatch",
        "ImportError: tokenizer version mismatch",
    ),
    (
        "H-12 by fallocate",
        "DIAG-SHM-FULL",
        "NCCL WARN Call to posix_fallocate failed : No space left on device",
        "ValueError: /dev/shm has 64 GiB",
    ),
    (
        "H-12 bus error",
        "DIAG-SHM-FULL",
        "Fatal Python error: Bus error",
        "ValueError: a bus has 16 lanes",
    ),
    (
        "H-13 denied",
        "DIAG-SHM-DENIED",
        "PermissionError: [Errno 13] Permission denied: '/dev/shm/sem.loky'",
        "ValueError: nothing is refused",
    ),
    (
        "H-15 memlock",
        "DIAG-MEMLOCK",
        "RuntimeError: cudaHostRegister failed: invalid argument",
        "Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit",
    ),
    (
        "H-17 namespace",
        "DIAG-SANDBOX",
        "sglang.service: Failed at step NAMESPACE spawning /opt/sglang/bin/python: Permission denied",
        "sglang.service: Main process exited, code=exited, status=1/FAILURE",
    ),
    (
        "H-18 unmapped owner",
        "DIAG-DENIED",
        "PermissionError: [Errno 13] Permission denied: '/models/.locks/x.lock'",
        "ValueError: permission of a user to ask is not checked",
    ),
    (
        "H-20 py-spy",
        "DIAG-PTRACE",
        "Error: py-spy failed to suspend the process: Operation not permitted",
        "py-spy dump for PID 12:",
    ),
    (
        "H-21 compat",
        "DIAG-DRIVER",
        "RuntimeError: unsupported display driver / cuda driver combination",
        "RuntimeError: unsupported option of a display",
    ),
    (
        "N-09 graph file",
        "DIAG-NCCL-GRAPH",
        "h:1:2 [0] NCCL WARN Could not open XML graph file /etc/nccl.xml : No such file or directory",
        "h:1:2 [0] NCCL INFO NCCL_GRAPH_FILE set by environment to /etc/nccl.xml",
    ),
    (
        "N-10 graph file eats memory",
        "DIAG-GPU-MEMORY",
        "NCCL WARN Failed to CUDA calloc 10485760 bytes",
        "ValueError: calloc of 10 bytes",
    ),
    (
        "N-13 one-shot",
        "DIAG-ONE-SHOT",
        "RuntimeError: pcie_allreduce.cu:321: invalid argument",
        "[10:00:00] custom all-reduce over PCIe is off",
    ),
    (
        "S-01 sm120",
        "DIAG-ARCHITECTURE",
        "RuntimeError: TllmGenFmhaRunner: Unsupported architecture",
        "Cannot detect CUDA architecture.",
    ),
    (
        "S-03 DeepGEMM",
        "DIAG-DEEPGEMM",
        "AttributeError: 'ImportError' object has no attribute 'get_num_sms'",
        "DeepGEMM is not used on this GPU",
    ),
    (
        "S-04 NaN",
        "DIAG-NAN",
        "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
        "ValueError: a probability is between 0 and 1",
    ),
    (
        "S-12 barrier",
        "DIAG-RENDEZVOUS",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 7/8 clients joined.",
        "ValueError: 8 clients of the API are too many",
    ),
    (
        "E-04 no capture",
        "DIAG-NO-CAPTURE",
        "AttributeError: 'KimiK25ForConditionalGeneration' object has no attribute 'set_eagle3_layers_to_capture'",
        "AttributeError: 'KimiK25ForConditionalGeneration' object has no attribute 'layers'",
    ),
    (
        "E-08 beyond the drafter's positions",
        "DIAG-CUDA",
        "RuntimeError: CUDA error: device-side assert triggered",
        "RuntimeError: an assert in a test",
    ),
    (
        "E-09 quantisation",
        "DIAG-DRAFT-QUANT",
        "ValueError: Cannot find the config file for awq",
        "ValueError: cannot find the tokenizer",
    ),
    (
        "S-09 no room for a KV cache",
        "DIAG-KV-ROOM",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: 0.7",
        "RuntimeError: Not enough memory of the past",
    ),
    (
        "H-12 by torch",
        "DIAG-SHM-FULL",
        "RuntimeError: unable to open shared memory object </torch_1_2> in read-write mode: No space left on device (28)",
        "ValueError: </torch_1_2> is no address",
    ),
    (
        "H-12 cut",
        "DIAG-SHM-FULL",
        "llm9:77:91 [5] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-oGhG1w to 3303",
        "llm9:77:91 [5] NCCL INFO extended /dev/shm/nccl-oGhG1w to 3303",
    ),
    (
        "H-02 another wording",
        "DIAG-DEVICES",
        "torch.AcceleratorError: CUDA error: unknown error",
        "ValueError: unknown error of CUDA",
    ),
    (
        "H-05 too few",
        "DIAG-DEVICES",
        "RuntimeError: CUDA error: invalid device ordinal",
        "ValueError: an ordinal of a device",
    ),
    (
        "H-05 fabric",
        "DIAG-DEVICES",
        "RuntimeError: CUDA error 802: system not yet initialized",
        "ValueError: not initialized yet",
    ),
    (
        "H-08 too old",
        "DIAG-DRIVER",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 12080).",
        "ValueError: the driver on a system is old",
    ),
    ("H-16 of Python", "DIAG-HOST-MEMORY", "MemoryError", "ValueError: OutOfMemoryErrors are none here"),
    (
        "N-01 no peers",
        "DIAG-P2P",
        "RuntimeError: CUDA error: peer access is not supported between these two devices",
        "ValueError: peers have access",
    ),
    (
        "S-01 asked for",
        "DIAG-ARCHITECTURE",
        "ValueError: FlashAttention v3 Backend requires SM>=80 and SM<=90. Please use `--attention-backend flashinfer`.",
        "[10:00:00] FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs.",
    ),
    (
        "S-01 other cards",
        "DIAG-ARCHITECTURE",
        "ValueError: CuteDSL MLA backend is only supported on Blackwell GPUs (SM100). Please use a different backend.",
        "[10:00:00] SBO is only supported on Blackwell",
    ),
    (
        "S-01 compiler",
        "DIAG-ARCHITECTURE",
        "RuntimeError: nvcc fatal   : Unsupported gpu architecture 'compute_120a'",
        "ValueError: a gpu architecture",
    ),
    (
        "S-02 of the unit",
        "DIAG-JIT-CACHE",
        "FileNotFoundError: [Errno 2] No such file or directory: '/var/cache/sglang/flashinfer/0.6/x.so'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/var/cache/apt/x'",
    ),
    (
        "no ninja",
        "DIAG-COMPILER",
        "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/models/ninja.json'",
    ),
    (
        "no nvcc",
        "DIAG-COMPILER",
        "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'",
        "RuntimeError: nvcc fatal",
    ),
    (
        "no c++",
        "DIAG-COMPILER",
        "RuntimeError: /bin/sh: 1: c++: not found",
        "RuntimeError: c++: error",
    ),
    (
        "S-12 nobody there",
        "DIAG-RENDEZVOUS",
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (127.0.0.1, 29500).",
        "ValueError: a client has timed out",
    ),
    (
        "S-09 driver's wording",
        "DIAG-GPU-MEMORY",
        "RuntimeError: CUDA driver error: out of memory",
        "ValueError: the driver's memory",
    ),
    (
        "E-12 no type",
        "DIAG-MODEL-TYPE",
        "ValueError: Unrecognized model in /models/drafter. Should have a `model_type` key in its config.json",
        "ValueError: Unrecognized modelling",
    ),
    (
        "E-12 config class",
        "DIAG-MODEL-TYPE",
        '  File "/x/transformers/models/auto/configuration_auto.py", line 1012, in __getitem__',
        "KeyError: 'prompt'",
    ),
    (
        "E-12 in words",
        "DIAG-MODEL-TYPE",
        "ValueError: The checkpoint you are trying to load has model type `kimi_k2` but Transformers does not recognize this architecture.",
        "ValueError: the architecture of this is fine",
    ),
    (
        "E-13 no draft path",
        "DIAG-TARGET-TWICE",
        "AttributeError: 'KimiK25ForConditionalGeneration' object has no attribute 'set_embed'",
        "AttributeError: 'KimiK25ForConditionalGeneration' object has no attribute 'embed'",
    ),
    (
        "E-14 logprobs",
        "DIAG-LOGPROBS",
        "AttributeError: 'LogitsProcessorOutput' object has no attribute 'aux_pruned_states'",
        "AttributeError: 'LogitsProcessorOutput' object has no attribute 'states'",
    ),
    (
        "O-07 killed at the stop",
        "DIAG-STOP-TIMEOUT",
        "sglang.service: State 'stop-sigterm' timed out. Killing.",
        "sglang.service: Consumed 3min of CPU time.",
    ),
    (
        "O-08 unbalanced",
        "DIAG-LEFTOVERS",
        "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
        "ValueError: the load of the ranks is balanced",
    ),
    (
        "O-15 not whole",
        "DIAG-WEIGHTS-DAMAGED",
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
        "[10:00:00] Using safetensors of 64 files",
    ),
    (
        "O-16 a value that is none",
        "DIAG-ENV-VALUE",
        "UserWarning: Invalid value for SGLANG_ENABLE_SPEC_V2: 'on' is not a valid boolean value, using default \"True\"",
        "UserWarning: invalid values are ignored",
    ),
]


# the same line as it may arrive
def journal(text: str) -> str:
    return at(5, text, 2)


FORMS: dict[str, Callable[[str], str]] = {
    "journal": journal,
    "coloured": lambda text: at(5, f"\x1b[31m{text}\x1b[0m", 2),
    "windows": lambda text: at(5, text, 2).replace("\n", "\r\n"),
    "another rank and host": lambda text: (
        f"2026-03-01T23:59:58+01:00 llm-7.example sglang[99]: [2026-03-01 23:59:58 DP1 TP3] {text}\n"
    ),
    "behind a progress bar": lambda text: at(5, f"Loading:  50%|##  | 1/2\r{text}", 2),
    "behind a line of megabytes": lambda text: "x" * (2 << 20) + "\n" + at(5, text, 2),
    "torch's prefix": lambda text: at(5, f"[rank3]: {text}", 2) if text[0].isalpha() else journal(text),
    "without a newline": lambda text: at(5, text, 2).rstrip("\n"),
}


@pytest.mark.parametrize("how", FORMS)
@pytest.mark.parametrize(("fault", "code", "line", "alike"), TOLD, ids=[row[0] for row in TOLD])
def test_a_line_tells_it_in_every_form(tmp_path: Path, fault: str, code: str, line: str, alike: str, how: str) -> None:
    log = unit(5, "Starting sglang.service - SGLang server (h)...") + at(5, "server_args=ServerArgs()", 1)
    found = look(tmp_path, log + FORMS[how](line), properties=FAILED)
    (suspect,) = [suspect for suspect in found.suspects if suspect.finding.code == code]
    number = 4 if "megabytes" in how else 3
    assert [(one.file, one.line) for one in suspect.evidence] == [("server.log", number)]
    assert line.strip()[:60] in suspect.evidence[0].text
    assert suspect.finding.fix


@pytest.mark.parametrize(("fault", "code", "line", "alike"), TOLD, ids=[row[0] for row in TOLD])
def test_what_looks_like_it_is_silent(tmp_path: Path, fault: str, code: str, line: str, alike: str) -> None:
    log = unit(5, "Starting sglang.service - SGLang server (h)...") + at(5, "server_args=ServerArgs()", 1)
    quoted = at(5, f"server_args=ServerArgs(note={line!r})", 3)  # what is quoted did not happen
    assert code not in codes(look(tmp_path, log + journal(alike) + quoted, properties=FAILED))


def test_several_at_once_keep_their_order(tmp_path: Path) -> None:
    lines = [
        "h:1:2 [0] NCCL WARN Error: failed to extend /dev/shm/nccl-Zz9 to 5000000 bytes, error: No space left on device (28)",
        "Failed to initialize NVML: Driver/library version mismatch",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.00 GiB",
    ]
    log = crash(5).replace(f"{ERROR}\n", f"{ERROR}\n" + "".join(map(journal, reversed(lines))))
    found = codes(look(tmp_path, log, properties=FAILED))
    assert found == ["DIAG-SHM-FULL", "DIAG-DRIVER", "DIAG-GPU-MEMORY", "DIAG-EXCEPTION"]


def test_the_rank_that_began_it_is_named_not_those_that_miss_it(tmp_path: Path) -> None:
    gone = "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
    begun = "RuntimeError: shard 7 is damaged"
    for text, why in ((f"{gone}\n{begun}", begun), (gone, gone)):
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        assert failed(tmp_path, text).verdict.why == why


def test_ranks_that_write_into_each_other(tmp_path: Path) -> None:
    mixed = "".join(
        f"2026-11-29T10:05:03.{rank}00000+0000 h sglang[1{rank}]: [2026-11-29 10:05:03 TP{rank}] {text}\n"
        for text in (
            "Scheduler hit an exception: Traceback (most recent call last):",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        )
        for rank in range(8)
    )
    found = look(tmp_path, crash(5).replace(f"{ERROR}\n", f"x\n{mixed}"), properties=FAILED)
    assert codes(found) == ["DIAG-GPU-MEMORY", "DIAG-EXCEPTION"]
    assert ["TP0" in line.text or "TP7" in line.text for line in found.suspects[0].evidence] == [True, True]


def test_a_cause_is_kept_while_the_next_start_is_on_its_way_and_forgotten_when_it_serves(tmp_path: Path) -> None:
    broken = crash(1).replace(ERROR, "torch.OutOfMemoryError: CUDA out of memory.")
    again = look(tmp_path, broken + start(5, ready=False), properties={**FAILED, "ActiveState": "activating"})
    assert codes(again)[0] == "DIAG-GPU-MEMORY"
    (tmp_path / "later").mkdir()
    assert codes(look(tmp_path / "later", broken + start(5) + decode(29, count=4))) == []
