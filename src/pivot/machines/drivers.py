"""The NVIDIA driver: module and libraries of one version, the flavour that the cards need, what may move them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pivot.findings import Finding, Severity

# by name, or by number where lspci's list is older than the card: GB100 29.., GB202 2b.., GB203 2c.., GB206 and GB207
# 2d.., GB205 2f.., GB110 31..
BLACKWELL = re.compile(r"\bGB[12]\d\d|\b10de:(?:29|2[bcdf]|31)[0-9a-f]{2}\b")


def driver_version(text: str) -> str:
    """The version in ``/proc/driver/nvidia/version``, a library's name or a package version; "" if there is none."""
    match = re.search(r"(?<!\d)(?<!\d\.)(\d{3}\.\d{2,3}(?:\.\d{2})?)(?!\.?\d)", text)
    return match.group(1) if match else ""


def driver_findings(
    module: str, libraries: Sequence[str], host: str, pinned: str = "", place: str = "container"
) -> list[Finding]:
    """The driver libraries of a place must equal the node's loaded module, to the last number.

    module: text of ``/proc/driver/nvidia/version``; libraries: names such as ``libcuda.so.580.95.05``; pinned: the
    version that both should have, if one is; place: container, or node, which may do without libraries.
    """
    loaded = driver_version(module)
    if not loaded:
        text = "no NVIDIA kernel module is loaded on the node" + (f": {module.strip()!r}" if module.strip() else "")
        fix = "install the open kernel modules on the node and load them"
        return [Finding("HOST-DRIVER-MODULE", Severity.ERROR, host, text, fix)]
    versions = sorted({version for version in map(driver_version, libraries) if version})
    if not versions and place == "container":
        text = f"the container has no driver libraries; the node's module is {loaded}"
        fix = f"gpu_runtime_driver_file: the installer of exactly {loaded}, which this role then runs in the container"
        return [Finding("HOST-DRIVER-LIBRARIES", Severity.ERROR, host, text, fix)]
    found = []
    for version in versions:
        if version == loaded:
            continue
        text = f"the {place}'s driver libraries are {version}, the node's kernel module is {loaded}: " + (
            _moved(version, loaded, pinned, place)
        )
        fix = f"bring both to {pinned or loaded} and hold the packages; never install an unpinned driver to mend this"
        found.append(Finding("HOST-DRIVER-MISMATCH", Severity.ERROR, host, text, fix))
    if pinned and not found and loaded != pinned:
        text = f"node and container agree on driver {loaded}, the pin says {pinned}"
        found.append(Finding("HOST-DRIVER-PIN", Severity.WARNING, host, text, "change the driver, or the pin"))
    return found


def _moved(version: str, loaded: str, pinned: str, place: str) -> str:
    """Which side left the common version."""
    if place == "node":
        return "its packages were changed since the module was loaded"
    if pinned == loaded:
        return "the container moved"
    if pinned == version:
        return "the node moved, or still runs the module from before its update (reboot)"
    newer_inside = _numbers(version) > _numbers(loaded)
    return "the container is ahead (updated alone?)" if newer_inside else "the node is ahead (updated alone?)"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def module_findings(license_text: str, module: str, gpus: Sequence[str], host: str) -> list[Finding]:
    """Blackwell works with the open kernel modules only.

    license_text: of ``modinfo nvidia``; module: text of ``/proc/driver/nvidia/version``; gpus: lines of lspci, with or
    without numbers (``[10de:2bb5]``: the names of new cards are not in every list).
    """
    blackwell = [line for line in gpus if BLACKWELL.search(line)]
    closed = bool(license_text) and "GPL" not in license_text
    loaded = bool(driver_version(module)) and "Open Kernel Module" not in module
    if not blackwell or not (closed or loaded):
        return []
    said = f"license: {license_text.strip()}" if closed else f"{module.strip().splitlines()[0]!r}"
    text = (
        f"the nvidia module is the proprietary one ({said}), but {blackwell[0].strip()!r}"
        " is a Blackwell card, which needs the open modules"
    )
    fix = "install the open flavour of the same version (nvidia-open, or the .run file with -m=kernel-open), reboot"
    return [Finding("HOST-MODULE-FLAVOUR", Severity.ERROR, host, text, fix, "NVIDIA driver README 580, kernel_open")]


def reboot_findings(facts: Mapping[str, Any], host: str) -> list[Finding]:
    """What waits for a reboot of the node, with the reason; nobody does it here."""
    reasons = []
    loaded, installed = driver_version(facts["module"]), driver_version(facts["module_file"])
    if loaded and installed and loaded != installed:
        reasons.append(f"the nvidia module {installed} is installed, {loaded} is loaded")
    option = hmm_option(facts["modprobe"])
    if facts["hmm"] and option is not None and facts["hmm"] != option:
        reasons.append(f"uvm_disable_hmm={int(option == 'Y')} is configured, the loaded nvidia_uvm has {facts['hmm']}")
    if not reasons:
        return []
    text = f"a reboot is needed, at a time that you choose: {'; '.join(reasons)}"
    fix = "stop the containers with cards, then reboot the node; nothing here does"
    return [Finding("HOST-REBOOT", Severity.WARNING, host, text, fix)]


def hmm_option(lines: Sequence[str]) -> str | None:
    """uvm_disable_hmm as modprobe's files have it, as the module shows it (Y or N); None where they say nothing."""
    values = [match[1] for line in lines if (match := re.search(r"\buvm_disable_hmm=(\w+)", line))]
    return None if not values else "Y" if values[-1] in ("1", "Y", "y") else "N"


def hmm_findings(facts: Mapping[str, Any], cards: int, host: str) -> list[Finding]:
    """Heterogeneous memory management with several cards, unless a configured change only waits for a reboot."""
    if cards < 2 or facts["hmm"] != "N" or hmm_option(facts["modprobe"]) == "Y":
        return []
    text = (
        "nvidia_uvm runs with heterogeneous memory management (uvm_disable_hmm is N): cards that write to each other"
        " were reported to lock up with it"
    )
    fix = "proxmox_host_uvm_disable_hmm: present writes the option; it counts after a reboot"
    reference = "local-inference-lab/rtx6kpro, optimization/nccl-tuning.md"
    return [Finding("HOST-HMM", Severity.WARNING, host, text, fix, reference)]


def kernel_findings(facts: Mapping[str, Any], host: str) -> list[Finding]:
    """Whether the kernel of the next boot has an nvidia module: the pinned one, else the newest that is installed."""
    kernels = facts["kernels"]
    if not kernels.get(facts["kernel"]):
        return []  # the running one has none where it is looked for, so this says nothing about another
    pinned = facts["pinned_kernel"]
    following = pinned if pinned in kernels else max(kernels, key=_numbers)
    if kernels[following]:
        return []
    text = f"the next boot starts kernel {following}, for which there is no nvidia module: the cards would be gone"
    fix = f"dkms autoinstall -k {following} (with its headers), or proxmox-boot-tool kernel pin {facts['kernel']}"
    return [Finding("HOST-DRIVER-KERNEL", Severity.WARNING, host, text, fix, "jammsen/proxmox-setup-scripts issue 7")]


def update_findings(packages: Mapping[str, Any], host: str) -> list[Finding]:
    """Driver packages that the next upgrade would move, and whether one comes by itself."""
    free = sorted(set(packages["installed"]) - set(packages["held"]))
    if not free or pinned_away(packages["pins"]):
        return []
    alone = re.search(r'Unattended-Upgrade "[1-9]', packages["unattended"]) and packages["timer"] == "enabled"
    when = "unattended-upgrades would move them by itself" if alone else "the next apt upgrade would move them"
    text = (
        f"driver packages are not held ({', '.join(free[:4])}{' …' if len(free) > 4 else ''}): {when}, and node and"
        " container would differ"
    )
    return [Finding("HOST-DRIVER-UPDATES", Severity.WARNING, host, text, f"apt-mark hold {' '.join(free)}")]


def pinned_away(lines: Sequence[str]) -> bool:
    """Whether preferences of apt keep NVIDIA's packages at a version, or away (a priority over 1000, or below 0)."""
    about = False
    for line in lines:
        name, _, value = line.partition(":")
        if name == "Package":
            about = "nvidia" in value
        elif name == "Pin-Priority" and about and not 0 <= int(value) <= 1000:
            return True
    return False


def compat_findings(loader: Sequence[str], host: str) -> list[Finding]:
    """The libcuda that programs load has to be the driver's. loader: lines of ``ldconfig -p`` about it, in order."""
    first = next((line.rpartition("=> ")[2].strip() for line in loader if "libcuda.so.1" in line), "")
    if "/compat/" not in first:
        return []
    text = f"programs load {first}, a compatibility library, before the driver's own"
    fix = "remove that directory from /etc/ld.so.conf.d, then ldconfig"
    return [Finding("HOST-DRIVER-COMPAT", Severity.WARNING, host, text, fix, "local-inference-lab/rtx6kpro")]
