"""The driver of node and container: versions, flavour, what waits for a reboot, and what would move it."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from pivot.findings import Severity
from pivot.machines import driver_files, drivers

FIELD = Path(__file__).parents[1] / "data/field-cases"
NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Wed Sep 10 2025"
BLACKWELL = "01:00.0 3D controller: NVIDIA Corporation GB202GL [RTX PRO 6000 Blackwell Server Edition] (rev a1)"
UNNAMED = "0000:01:00.0 3D controller [0302]: NVIDIA Corporation Device [10de:2bb5] (rev a1)"
# the list of a Debian that is older than the cards has no names for them
CONSUMER = "0000:02:00.0 VGA compatible controller [0300]: NVIDIA Corporation Device [10de:2b85] (rev a1)"
B200 = "0000:1b:00.0 3D controller [0302]: NVIDIA Corporation Device [10de:2901] (rev a1)"
H100 = "0000:4e:00.0 3D controller [0302]: NVIDIA Corporation GH100 [H100 PCIe] [10de:2331] (rev a1)"
L40S = "0000:61:00.0 3D controller [0302]: NVIDIA Corporation AD102GL [L40S] [10de:26b9] (rev a1)"
SOUND = "0000:61:00.1 Audio device [0403]: NVIDIA Corporation Device [10de:22e8] (rev a1)"
AMPERE = "01:00.0 3D controller: NVIDIA Corporation GA100 [A100]"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (NVRM, "580.95.05"),
        ("libcuda.so.580.105.08", "580.105.08"),
        ("libcuda.so.1", ""),
        ("575.57-1", "575.57"),
        ("1:570.86.10-0ubuntu1", "570.86.10"),
        ("libnvidia-ml.so.550.163.01", "550.163.01"),
        ("535.104.05-0debian1", "535.104.05"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  595.71.05  Tue", "595.71.05"),
        ("", ""),
    ],
)
def test_driver_version(text: str, version: str) -> None:
    assert drivers.driver_version(text) == version


def test_driver_of_container_and_node_b11() -> None:
    text = (FIELD / "B11-versions.txt").read_text()
    module = next(line for line in text.splitlines() if line.startswith("host:/proc/"))
    library = next(line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("ct:libcuda"))
    (finding,) = drivers.driver_findings(module, [library], "h")
    assert (finding.code, finding.severity) == ("HOST-DRIVER-MISMATCH", Severity.ERROR)
    assert "580.105.08" in finding.message
    assert "580.95.05" in finding.message
    assert "the container is ahead" in finding.message
    assert "never install an unpinned driver" in finding.fix


def test_the_file_of_b12() -> None:
    said = dict(line.split(": ", 1) for line in (FIELD / "B12-modinfo.txt").read_text().splitlines())
    (finding,) = drivers.module_findings(said["license"], "", [said["lspci"]], "h")
    assert (finding.code, finding.severity) == ("HOST-MODULE-FLAVOUR", Severity.ERROR)
    assert "license: NVIDIA" in finding.message
    assert drivers.module_findings("Dual MIT/GPL", "", [said["lspci"]], "h") == []


@pytest.mark.parametrize(
    ("inside", "pinned", "code", "words"),
    [
        ("580.95.05", "", None, ""),
        ("580.95.05", "580.95.05", None, ""),
        ("580.105.08", "580.95.05", "HOST-DRIVER-MISMATCH", "the container moved"),
        ("580.105.08", "580.105.08", "HOST-DRIVER-MISMATCH", "the node moved"),
        ("575.57.08", "", "HOST-DRIVER-MISMATCH", "the node is ahead"),
        ("580.95.05", "595.71.05", "HOST-DRIVER-PIN", "595.71.05"),
    ],
)
def test_which_side_moved(inside: str, pinned: str, code: str | None, words: str) -> None:
    found = drivers.driver_findings(NVRM, [f"libcuda.so.{inside}"], "h", pinned)
    assert [finding.code for finding in found] == ([code] if code else [])
    assert all(words in finding.message for finding in found)


def test_no_module_and_no_libraries() -> None:
    assert [finding.code for finding in drivers.driver_findings("", [], "h")] == ["HOST-DRIVER-MODULE"]
    assert [finding.code for finding in drivers.driver_findings(NVRM, ["libcuda.so.1"], "h")] == [
        "HOST-DRIVER-LIBRARIES"
    ]


def test_libraries_of_the_node_itself() -> None:
    (finding,) = drivers.driver_findings(NVRM, ["libcuda.so.580.105.08"], "n", place="node")
    assert finding.code == "HOST-DRIVER-MISMATCH"
    assert "changed since the module was loaded" in finding.message
    assert drivers.driver_findings(NVRM, [], "n", place="node") == []


@pytest.mark.parametrize(
    ("license_text", "module", "gpus", "fires"),
    [
        ("NVIDIA", "", [BLACKWELL], True),
        ("NVIDIA", CLOSED, [UNNAMED], True),
        ("Dual MIT/GPL", CLOSED, [BLACKWELL], True),  # installed, and not yet loaded
        ("", CLOSED, [BLACKWELL], True),
        ("Dual MIT/GPL", NVRM, [BLACKWELL, UNNAMED], False),
        ("Dual MIT/GPL", "", [BLACKWELL], False),
        ("NVIDIA", CLOSED, [AMPERE], False),
        ("NVIDIA", CLOSED, [H100, L40S, SOUND], False),
        ("NVIDIA", CLOSED, [H100, UNNAMED], True),
        ("NVIDIA", CLOSED, [CONSUMER], True),
        ("NVIDIA", CLOSED, [B200], True),
        ("", "", [BLACKWELL], False),
        ("NVIDIA", CLOSED, [], False),
    ],
)
def test_module_flavour_b12(license_text: str, module: str, gpus: list[str], fires: bool) -> None:
    found = drivers.module_findings(license_text, module, gpus, "h")
    assert [finding.code for finding in found] == (["HOST-MODULE-FLAVOUR"] if fires else [])


QUIET: dict[str, Any] = {"module": NVRM, "module_file": "580.95.05", "modprobe": [], "hmm": "N"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"module_file": ""}, ""),
        ({"hmm": "Y", "modprobe": ["options nvidia_uvm uvm_disable_hmm=1"]}, ""),
        ({"module_file": "595.71.05"}, "595.71.05 is installed, 580.95.05 is loaded"),
        ({"modprobe": ["options nvidia_uvm uvm_disable_hmm=1"]}, "uvm_disable_hmm=1 is configured"),
        ({"hmm": "Y", "modprobe": ["options nvidia_uvm uvm_disable_hmm=0"]}, "uvm_disable_hmm=0 is configured"),
    ],
)
def test_what_waits_for_a_reboot(changes: dict[str, Any], words: str) -> None:
    found = drivers.reboot_findings(QUIET | changes, "n")
    assert [finding.code for finding in found] == (["HOST-REBOOT"] if words else [])
    assert all(words in finding.message and "nothing here does" in finding.fix for finding in found)


@pytest.mark.parametrize(
    ("hmm", "modprobe", "cards", "fires"),
    [
        ("Y", [], 8, False),
        ("N", [], 1, False),
        ("N", ["options nvidia-uvm uvm_disable_hmm=1"], 8, False),
        ("", [], 8, False),
        ("N", [], 8, True),
        ("N", ["options nvidia_uvm uvm_disable_hmm=1", "options nvidia_uvm uvm_disable_hmm=0"], 2, True),
    ],
)
def test_heterogeneous_memory(hmm: str, modprobe: list[str], cards: int, fires: bool) -> None:
    found = drivers.hmm_findings({"hmm": hmm, "modprobe": modprobe}, cards, "n")
    assert [finding.code for finding in found] == (["HOST-HMM"] if fires else [])


@pytest.mark.parametrize(
    ("kernels", "pinned", "fires"),
    [
        ({"6.17.4-2-pve": True}, "", False),
        ({"6.17.4-2-pve": True, "6.8.12-9-pve": False}, "", False),  # an older one
        ({"6.17.4-2-pve": True, "6.17.10-1-pve": False}, "", True),  # 10 is newer than 4
        ({"6.17.4-2-pve": True, "6.17.10-1-pve": False}, "6.17.4-2-pve", False),
        ({"6.17.4-2-pve": True, "6.8.12-9-pve": False}, "6.8.12-9-pve", True),
        ({"6.17.4-2-pve": False, "6.17.10-1-pve": False}, "", False),
    ],
)
def test_the_kernel_of_the_next_boot(kernels: dict[str, bool], pinned: str, fires: bool) -> None:
    facts = {"kernel": "6.17.4-2-pve", "kernels": kernels, "pinned_kernel": pinned}
    assert [f.code for f in drivers.kernel_findings(facts, "n")] == (["HOST-DRIVER-KERNEL"] if fires else [])


LOOSE: dict[str, Any] = {"installed": {"libcuda1": "580"}, "held": [], "pins": [], "unattended": "", "timer": ""}
ALONE = {"unattended": 'APT::Periodic::Unattended-Upgrade "1";', "timer": "enabled"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"installed": {}}, ""),
        ({"held": ["libcuda1"]}, ""),
        ({"pins": ["Package: *nvidia* libcuda*", "Pin: version 590.48.01*", "Pin-Priority: 1001"]}, ""),
        ({"pins": ["Package: nvidia-*", "Pin: version *", "Pin-Priority: -1"]}, ""),
        ({}, "the next apt upgrade"),
        (ALONE, "by itself"),
        ({**ALONE, "timer": "disabled"}, "the next apt upgrade"),
        ({"pins": ["Package: nodejs", "Pin: origin x", "Pin-Priority: 1001"]}, "the next apt upgrade"),
        ({"pins": ["Package: nvidia-*", "Pin: origin x", "Pin-Priority: 600"]}, "the next apt upgrade"),
    ],
)
def test_updates_that_would_move_the_driver(changes: dict[str, Any], words: str) -> None:
    found = drivers.update_findings(LOOSE | changes, "n")
    assert [finding.code for finding in found] == (["HOST-DRIVER-UPDATES"] if words else [])
    assert all(words in finding.message for finding in found)


def test_the_library_that_programs_load() -> None:
    right = "libcuda.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libcuda.so.1"
    compat = "libcuda.so.1 (libc6,x86-64) => /usr/local/cuda/compat/libcuda.so.1"
    assert drivers.compat_findings([right, compat], "h") == []
    assert drivers.compat_findings([], "h") == []
    assert [finding.code for finding in drivers.compat_findings([compat, right], "h")] == ["HOST-DRIVER-COMPAT"]


# --- what is installed


def inside(**changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "module": NVRM,
        "libraries": [],
        "uninstaller": False,
        "preferences": False,
        "smi": {"there": True},
        "packages": {"installed": {}, "pins": []},
    }
    return facts | changes


PINNED = ["libcuda.so.580.95.05", "libnvidia-ml.so.580.95.05"]
HELD = {"installed": {}, "pins": ["Package: nvidia-*", "Pin: version *", "Pin-Priority: -1"]}


@pytest.fixture
def asked(tmp_path: Path) -> dict[str, Any]:
    installer = tmp_path / "NVIDIA-Linux-x86_64-580.95.05.run"
    installer.write_text("a stand-in")
    sha256 = hashlib.sha256(b"a stand-in").hexdigest()
    return {
        "accelerator": "cuda",
        "driver": "580.95.05",
        "file": str(installer),
        "sha256": sha256,
        "state": "present",
    }


@pytest.mark.parametrize(
    ("facts", "options", "action", "hold"),
    [
        (inside(), {}, "install", True),
        (inside(module=""), {}, "install", True),  # nothing to compare with
        (inside(libraries=["libcuda.so.580.82.07", "libnvidia-ml.so.580.82.07"]), {}, "install", True),
        (inside(libraries=PINNED[:1]), {}, "install", True),  # an installer that was killed
        (inside(libraries=PINNED, smi={"there": False}), {}, "install", True),
        (inside(libraries=[*PINNED, "libcuda.so.580.82.07"]), {}, "install", True),
        (inside(libraries=PINNED), {}, "none", True),
        (inside(libraries=PINNED, packages=HELD), {}, "none", False),
        (inside(libraries=PINNED, packages=HELD), {"file": "/no/such/file-580.95.05.run"}, "none", False),
        (inside(), {"accelerator": "cpu"}, "none", False),
        (inside(), {"file": ""}, "none", False),
        (inside(), {"state": "absent"}, "none", False),
        (inside(uninstaller=True), {"state": "absent"}, "remove", False),
        (inside(preferences=True), {"state": "absent"}, "remove", False),
    ],
)
def test_what_is_to_be_done(
    asked: dict[str, Any], facts: dict[str, Any], options: dict[str, Any], action: str, hold: bool
) -> None:
    assert driver_files.plan(facts, asked | options, "h") == {"action": action, "hold": hold, "findings": []}


@pytest.mark.parametrize(
    ("facts", "options", "code", "words"),
    [
        (inside(), {"driver": ""}, "HOST-DRIVER-UNPINNED", "gpu_runtime_driver"),
        (inside(module=NVRM.replace("95.05", "105.08")), {}, "HOST-DRIVER-NODE", "the node's module is 580.105.08"),
        (inside(packages={"installed": {"libcuda1": "580"}, "pins": []}), {}, "HOST-DRIVER-PACKAGES", "libcuda1"),
        (inside(), {"file": "/no/such/NVIDIA-580.95.05.run"}, "HOST-DRIVER-FILE", "is no file of this controller"),
        (inside(), {"sha256": ""}, "HOST-DRIVER-FILE", "has no pinned checksum"),
        (inside(), {"sha256": "0" * 64}, "HOST-DRIVER-FILE", f"the pin says {'0' * 64}"),
        (inside(module=""), {"driver": "580.105.08"}, "HOST-DRIVER-FILE", "does not carry the pinned version"),
    ],
)
def test_what_is_refused(
    asked: dict[str, Any], facts: dict[str, Any], options: dict[str, Any], code: str, words: str
) -> None:
    found = driver_files.plan(facts, asked | options, "h")
    assert (found["action"], found["hold"]) == ("none", False)
    (finding,) = found["findings"]
    assert (finding["code"], finding["severity"]) == (code, Severity.ERROR)
    assert words in finding["message"]
