"""Faults that the field reported, each as a bundle shows it: seen where it is, silent where something looks like it.

The keys are those of the field's list of known faults. What only preflight, or nobody, can see is not here.
"""

# ruff: noqa: E501 - lines as they are logged

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pivot.logs.diagnosis import Diagnosis, State, diagnose
from pivot.logs.evidence import read

from .test_diagnosis import FAILED, SCHEDULER, SERVER, at, codes, crash, decode, look, start, unit

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


# --- what the kernel, of the container or of the node, tells


@pytest.mark.parametrize("name", ["system/kernel.log", "node/kernel.log"])
@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        ("H-08", "DIAG-DRIVER", "NVRM: API mismatch: the client has the version 580.105.08, but this kernel module 580.95.05"),
        ("H-09", "DIAG-MODULES", "NVRM: installed in this system requires use of the NVIDIA open kernel modules."),
        ("H-09", "DIAG-MODULES", "NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x22:0x56:884)"),
        ("H-09 Xid", "DIAG-GPU-LOST", "NVRM: Xid (PCI:0000:c1:00): 169, GPU initialisation"),
        ("H-10 GSP", "DIAG-GPU-LOST", "NVRM: Xid (PCI:0000:a1:00): 120, GSP task timeout @ pc:0x1"),
        ("H-10 bus", "DIAG-GPU-LOST", "NVRM: GPU at PCI:0000:a1:00: GPU has fallen off the bus."),
        ("H-10 link", "DIAG-PCIE-LINK", "pcieport 0000:a0:01.1: AER: Uncorrectable (Fatal) error received from 0000:a1:00.0"),
        ("H-10 link down", "DIAG-PCIE-LINK", "pcieport 0000:a0:01.1: pciehp: Slot(3): Surprise Link Down"),
        ("H-16", "DIAG-HOST-MEMORY", "Memory cgroup out of memory: Killed process 4242 (sglang::schedul) total-vm:1kB"),
    ],
)  # fmt: skip
def test_what_the_kernel_tells(tmp_path: Path, fault: str, code: str, line: str, name: str) -> None:
    found = serves(tmp_path, **{name: f"[ 812.1] usb 1-1: new device\n[ 900.4] {line}\n"})
    assert codes(found) == [code]
    assert [(one.file, one.line) for one in found.suspects[0].evidence] == [(name, 2)]


def test_a_kernel_log_alone_b13(tmp_path: Path) -> None:
    file = tmp_path / "dmesg.txt"
    file.write_text("[ 812.1] NVRM: Xid (PCI:0000:b1:00): 62, 00000000 00000000 (GSP halt)\n")
    found = diagnose(read(file))
    assert (found.verdict.state, codes(found)) == (State.UNKNOWN, ["DIAG-GPU-LOST"])
    file.write_text(start() + "[ 812.1] NVRM: Xid (PCI:0000:b1:00): 62, in a server's log it is a quotation\n")
    assert codes(diagnose(read(file))) == []


def test_what_the_kernel_says_all_the_time_is_silent(tmp_path: Path) -> None:
    lines = (
        "nvidia: module license 'Dual MIT/GPL' taints kernel.",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05",
        "pcieport 0000:a0:01.1: AER: Correctable error received: 0000:a1:00.0",
        "NVRM: Xid (PCI:0000:21:00): 31, pid=4242, name=other",
        'audit: apparmor="DENIED" operation="mount" profile="lxc-101_</var/lib/lxc>"',
    )
    kernel = "".join(f"[ 9.{number}] {line}\n" for number, line in enumerate(lines))
    assert codes(serves(tmp_path, **{"node/kernel.log": kernel})) == []


def test_devices_that_came_after_the_container_h04(tmp_path: Path) -> None:
    line = "2026-11-29T09:00:01+0000 pve1 pve-container[9]: lxc-pve-prestart-hook: Could not get mode or device ID of /dev/nvidia-uvm\n"
    found = serves(tmp_path, **{"node/container.log": line})
    assert (found.verdict.state, codes(found)) == (State.SERVING, ["DIAG-DEVICE-LATE"])
    (tmp_path / "well").mkdir()
    line = "2026-11-29T09:00:01+0000 pve1 systemd[1]: Started pve-container@101.service - PVE LXC Container: 101.\n"
    assert codes(serves(tmp_path / "well", **{"node/container.log": line})) == []


def test_xids_from_before_the_last_boot_are_past_b13(tmp_path: Path) -> None:
    kernel = (
        "2026-11-28T10:00:00+0000 pve1 kernel: NVRM: Xid (PCI:0000:a1:00): 79, GPU has fallen off the bus.\n"
        "2026-11-29T09:00:00+0000 pve1 kernel: Linux version 6.17.4-2-pve (build@proxmox) (gcc) #1 SMP\n"
    )
    assert codes(serves(tmp_path, **{"node/kernel.log": kernel})) == []
    after = (
        kernel + "2026-11-29T10:01:00+0000 pve1 kernel: NVRM: Xid (PCI:0000:a1:00): 79, GPU has fallen off the bus.\n"
    )
    (tmp_path / "after").mkdir()
    found = serves(tmp_path / "after", **{"node/kernel.log": after})
    assert [(one.line) for one in found.suspects[0].evidence][:1] == [3]


# --- what files about the machine tell

DEVICES = """/dev:
total 0
crw-rw-rw- 1 root root      1,   3 Nov 29 09:00 null
crw-rw-rw- 1 root root    195,   0 Nov 29 09:00 nvidia0
crw-rw-rw- 1 root root    195, 255 Nov 29 09:00 nvidiactl
crw-rw-rw- 1 root root    510,   0 Nov 29 09:00 nvidia-uvm

/dev/nvidia-caps:
total 0
cr-------- 1 root root    236,   1 Nov 29 09:00 nvidia-cap1
"""
MAJORS = "Character devices:\n  1 mem\n195 nvidia\n236 nvidia-caps\n510 nvidia-uvm\n\nBlock devices:\n  8 sd\n"


def test_device_nodes_as_they_should_be(tmp_path: Path) -> None:
    assert codes(serves(tmp_path, **{"system/devices.txt": DEVICES, "system/proc/devices": MAJORS})) == []


def test_a_major_that_has_moved_h02(tmp_path: Path) -> None:
    files = {"system/devices.txt": DEVICES, "system/proc/devices": MAJORS.replace("510 nvidia-uvm", "508 nvidia-uvm")}
    found = serves(tmp_path, **files)
    assert codes(found) == ["DIAG-DEVICES"]
    assert "/dev/nvidia-uvm has the major 510, the driver has 508" in found.suspects[0].finding.message
    assert [one.line for one in found.suspects[0].evidence] == [6]


def test_a_file_where_a_device_should_be_h05(tmp_path: Path) -> None:
    files = {"system/devices.txt": DEVICES.replace("crw-rw-rw- 1 root root    510,   0", "-rw-r--r-- 1 root root 0")}
    found = serves(tmp_path, **files)
    assert codes(found) == ["DIAG-DEVICES"]
    assert "/dev/nvidia-uvm is a regular file" in found.suspects[0].finding.message


def card(name: str, bar1: int, lanes: str = "16x") -> str:
    return f"""GPU 00000000:{name}:00.0
    Product Name                          : NVIDIA RTX PRO 6000 Blackwell Server Edition
    PCI
        GPU Link Info
            PCIe Generation
                Max                       : 5
                Current                   : 1
            Link Width
                Max                       : 16x
                Current                   : {lanes}
    FB Memory Usage
        Total                             : 97887 MiB
        Used                              : 0 MiB
    BAR1 Memory Usage
        Total                             : {bar1} MiB
        Used                              : 1 MiB
"""


def test_cards_as_they_should_be(tmp_path: Path) -> None:
    assert codes(serves(tmp_path, **{"system/gpus.txt": card("01", 131072) + card("21", 131072)})) == []


def test_a_small_window_into_the_cards_h11(tmp_path: Path) -> None:
    found = serves(tmp_path, **{"system/gpus.txt": card("01", 256) + card("21", 256)})
    assert (found.verdict.state, codes(found)) == (State.SERVING, ["DIAG-BAR1"])
    assert found.suspects[0].finding.message == "2 GPUs show 256 MiB of their 97887 MiB through BAR1"
    assert [one.line for one in found.suspects[0].evidence] == [15, 31]


def test_a_slot_with_few_lanes_h23(tmp_path: Path) -> None:
    found = serves(tmp_path, **{"system/gpus.txt": card("01", 131072) + card("21", 131072, "8x")})
    assert codes(found) == ["DIAG-PCIE-WIDTH"]
    assert "00000000:21:00.0 x8 of x16" in found.suspects[0].finding.message


def test_closed_modules_h09(tmp_path: Path) -> None:
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Mon Sep 1 2025\n"
    kernel = "[ 9.1] NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x22:0x56:884)\n"
    found = serves(tmp_path, **{"system/proc/driver/nvidia/version": version, "system/kernel.log": kernel})
    assert codes(found) == ["DIAG-MODULES"]
    assert [one.file for one in found.suspects[0].evidence] == [
        "system/kernel.log",
        "system/proc/driver/nvidia/version",
    ]


def test_another_libcuda_comes_first_h21(tmp_path: Path) -> None:
    libraries = (
        "9 2026-11-29T09:00:00Z /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05\n"
        "9 2026-11-29T09:00:00Z /usr/local/cuda-13.0/compat/libcuda.so.580.82.07\n"
    )
    files = {"system/libraries.txt": libraries, "system/proc/driver/nvidia/version": "Open Kernel Module 580.95.05 x\n"}
    assert codes(serves(tmp_path, **files)) == []
    (tmp_path / "b2").mkdir()
    found = failed(tmp_path / "b2", "RuntimeError: forward compatibility was attempted on non supported HW", **files)
    assert codes(found)[0] == "DIAG-DRIVER"
    assert "a compat directory of CUDA holds another libcuda" in found.suspects[0].finding.message


def test_a_memory_limit_that_slows_a_load_h16(tmp_path: Path) -> None:
    log = unit(25, "Starting sglang.service - SGLang server (h)...") + at(26, "Load weight begin. avail mem=94.80 GB")
    events = {"system/sys/fs/cgroup/memory.events": "low 0\nhigh 48211\noom 0\noom_kill 0\n"}
    found = look(tmp_path, log, properties={**FAILED, "ActiveState": "activating"}, **events)
    assert codes(found) == ["DIAG-MEMORY-HIGH"]
    (tmp_path / "served").mkdir()
    assert (
        codes(serves(tmp_path / "served", **events)) == []
    )  # the weights' pages have met the limit once, and it serves


@pytest.mark.parametrize(
    ("line", "fires"),
    [
        ("tmpfs 65536K 65100K 436K 100% /dev/shm", True),
        ("tmpfs tmpfs 64M 64M 0 100% /dev/shm", True),
        ("tmpfs tmpfs 252G 1.2G 251G 1% /dev/shm", False),
    ],
)
def test_how_full_shared_memory_is_h12(tmp_path: Path, line: str, fires: bool) -> None:
    assert codes(serves(tmp_path, **{"system/df.txt": line + "\n"})) == (["DIAG-SHM-FULL"] if fires else [])


# --- processes and ranks


def test_a_scheduler_that_nobody_missed_o02(tmp_path: Path) -> None:
    found = serves(tmp_path, **{"processes.json": [SERVER, {**SCHEDULER, "state": "Z"}]})
    assert (found.verdict.state, codes(found)) == (State.BAD, ["DIAG-PROCESS-DEAD"])


def test_a_zombie_of_something_else(tmp_path: Path) -> None:
    zombie = {**SCHEDULER, "pid": 99, "name": "sh", "state": "Z"}
    assert codes(serves(tmp_path, **{"processes.json": [SERVER, SCHEDULER, zombie]})) == []


def test_a_detokenizer_that_is_the_victim_o03(tmp_path: Path) -> None:
    words = "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds."
    answers = [
        {"path": path, "status": None, "seconds": 22.0, "error": "timed out"} for path in ("/health", "/server_info")
    ]
    found = look(tmp_path, start() + decode(12) + at(20, words), **{"answers.json": answers})
    assert (found.verdict.state, codes(found)) == (State.HUNG, ["DIAG-MUTE"])
    assert found.suspects[0].finding.fix.startswith("py-spy dump")


def test_p2p_off_for_nccl_alone_n03(tmp_path: Path) -> None:
    launch, environment = "tp-size: 8\n", {"NCCL_P2P_DISABLE": "1"}
    files: dict[str, Any] = {"config/etc/sglang/launch.yaml": launch, "process/environment.json": environment}
    assert codes(serves(tmp_path, **files)) == ["DIAG-P2P-HALF"]
    for number, more in enumerate(("disable-custom-all-reduce: true\n", "tp-size: 1\n")):
        (tmp_path / str(number)).mkdir()
        assert codes(serves(tmp_path / str(number), **{**files, "config/etc/sglang/launch.yaml": launch + more})) == []


def recorder(*states: tuple[int, str, str]) -> dict[str, Any]:
    names = ("collective_seq_id", "profiling_name", "state")
    return {
        "version": "2.9",
        "entries": [{**dict(zip(names, state, strict=True)), "process_group": ["0", "tp"]} for state in states],
    }


def test_ranks_that_went_different_ways_e20(tmp_path: Path) -> None:
    there = recorder((11, "nccl:all_reduce", "completed"), (12, "nccl:all_gather", "started"))
    late = recorder((11, "nccl:all_reduce", "completed"))
    other = recorder((11, "nccl:all_reduce", "completed"), (12, "nccl:all_reduce", "scheduled"))
    files = {f"flight/tmp/nccl_trace_rank_{rank}.json": there for rank in range(6)}
    found = look(
        tmp_path,
        start() + decode(12),
        **files,
        **{"flight/tmp/nccl_trace_rank_6.json": late, "flight/tmp/nccl_trace_rank_7.json": other},
    )
    (suspect,) = [one for one in found.suspects if one.finding.code == "DIAG-RANKS-DIVERGE"]
    assert suspect.finding.message.startswith("rank 6, 7 did not come")
    assert "nccl:all_reduce 11 is completed" in suspect.evidence[0].text


def test_ranks_that_wait_together_and_ranks_that_do_not_wait(tmp_path: Path) -> None:
    for number, states in enumerate(([(12, "nccl:all_gather", "started")], [(12, "nccl:all_gather", "completed")], [])):
        files = {f"flight/tmp/nccl_trace_rank_{rank}.json": recorder(*states) for rank in range(4)}
        (tmp_path / str(number)).mkdir()
        found = serves(tmp_path / str(number), **files)
        assert codes(found) == ([] if states else ["DIAG-FLIGHT-EMPTY"])  # O-12


def test_the_watchdog_of_a_first_start_o04(tmp_path: Path) -> None:
    log = start(ready=False) + at(12, "Scheduler watchdog timeout (self.watchdog_timeout=300)")
    found = look(tmp_path, log, properties={**FAILED, "ActiveState": "activating"})
    assert codes(found) == ["DIAG-WATCHDOG"]
    assert "raise watchdog-timeout" in found.suspects[0].finding.fix


def test_the_watchdog_of_a_log_whose_beginning_is_gone(tmp_path: Path) -> None:
    log = decode(9, count=4) + at(12, "Scheduler watchdog timeout (self.watchdog_timeout=300)")
    found = look(tmp_path, log, properties=FAILED)
    assert codes(found) == ["DIAG-WATCHDOG"]
    assert "raise watchdog-timeout" not in found.suspects[0].finding.fix


@pytest.mark.parametrize(
    ("environment", "line", "fires"),
    [
        ({"NCCL_DEBUG_FILE": "/var/log/nccl.%h.%p", "NCCL_DEBUG": "VERSION"}, "", True),
        ({"NCCL_DEBUG_FILE": "/var/log/nccl.%h.%p"}, "", True),
        ({"NCCL_DEBUG_FILE": "/var/log/nccl.%h.%p", "NCCL_DEBUG": "info"}, "", False),
        ({"NCCL_DEBUG_FILE": "/var/log/nccl./root.sglang", "NCCL_DEBUG": "INFO"}, "nccl.%h.%p", True),
        ({"NCCL_DEBUG_FILE": "/var/log/nccl.%h.%p", "NCCL_DEBUG": "INFO"}, "nccl.%%h.%%p", False),
        ({"NCCL_DEBUG": "VERSION"}, "", False),
    ],
)  # fmt: skip
def test_ncclss_own_file_n11_n12(tmp_path: Path, environment: dict[str, str], line: str, fires: bool) -> None:
    text = f'[Service]\nEnvironment="NCCL_DEBUG_FILE=/var/log/{line}"\n' if line else "[Service]\n"
    found = serves(tmp_path, **{"process/environment.json": environment, "unit.txt": text})
    assert (found.verdict.state, codes(found)) == (State.SERVING, ["DIAG-NCCL-SILENT"] if fires else [])


def test_ranks_that_disagree_about_host_memory_h14(tmp_path: Path) -> None:
    line = "h:1:2 [0] NCCL INFO cuMem host allocations do not work. Falling back to POSIX shared memory.\n"
    assert codes(look(tmp_path, crash(5), properties=FAILED, **{"nccl/h.1": line}))[0] == "DIAG-SHM-NAME"


@pytest.mark.parametrize(
    ("launch", "lengths", "fires"),
    [
        ("speculative-num-steps: 3\nspeculative-num-draft-tokens: 4\n", ["3.98", "4.00", "4.00", "3.97"], True),
        ("speculative-num-steps: 4\nspeculative-num-draft-tokens: 24\n", ["5.00"] * 4, True),
        ("speculative-num-steps: 5\nspeculative-num-draft-tokens: 6\n", ["4.00"] * 4, False),
        ("speculative-num-steps: 3\nspeculative-num-draft-tokens: 4\n", ["3.70", "4.00", "3.10", "4.00"], False),
        ("", ["3.00"] * 4, True),
        ("", ["2.50"] * 4, False),
    ],
)
def test_figures_that_are_too_good_e17(tmp_path: Path, launch: str, lengths: list[str], fires: bool) -> None:
    log = start() + "".join(decode(29, length) for length in lengths)
    found = look(tmp_path, log, **{"config/etc/sglang/launch.yaml": launch + "model-path: /m\n"})
    assert codes(found) == (["DIAG-ACCEPT-MAX"] if fires else [])


def test_evidence_never_leaves_the_bundle(tmp_path: Path) -> None:
    found = failed(tmp_path, "torch.OutOfMemoryError: CUDA out of memory.")
    assert str(tmp_path) not in json.dumps(found.as_dict())
