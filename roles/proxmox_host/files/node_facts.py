"""Facts of a Proxmox node with NVIDIA cards, read-only. Sent in one piece with `pivot.machines.asking`
(see `pivot.program`). Standard library, Python 3.9.

Argument: a JSON object {"devices": paths that a container wants, "vmid": its number or null}. Nothing is judged here:
texts go to the controller as they are, cut to the lines that matter there.
"""

import glob
import json
import os
import re
import sys
from xml.etree import ElementTree

from pivot.machines.asking import read, run

PCI = "/sys/bus/pci/devices"
NVIDIA, DISPLAY = "0x10de", "0x03"
DEBIAN = "/usr/lib/x86_64-linux-gnu"
LIBRARIES = (DEBIAN, DEBIAN + "/nvidia/current", "/usr/lib64", "/usr/lib", "/usr/local/lib")
MODPROBE = ("/etc/modprobe.d", "/run/modprobe.d", "/usr/lib/modprobe.d")
UDEV = ("/etc/udev/rules.d", "/usr/lib/udev/rules.d")
# what this project may write, so that nothing is sent when it is there already
WRITTEN = ("/etc/systemd/system/pivot-nvidia-nodes.service", "/etc/modprobe.d/pivot-nvidia-uvm.conf")
PACKAGES = ("nvidia-*", "libnvidia-*", "libcuda1", "cuda-drivers*", "xserver-xorg-video-nvidia*")
LSPCI = re.compile(r"\S|\s+(?:Bus: primary|LnkCap:|LnkSta:|ACSCtl:|Kernel driver)")
SMI = {
    "recovery": "gpu_recovery_action",
    "memory": "fb_memory_usage/total",
    "bar1": "bar1_memory_usage/total",
    "utilization": "utilization/gpu_util",
    "gen": "pci/pci_gpu_link_info/pcie_gen/current_link_gen",
    "gen_max": "pci/pci_gpu_link_info/pcie_gen/max_link_gen",
    "gen_card": "pci/pci_gpu_link_info/pcie_gen/max_device_link_gen",
}


def output(*argv: str) -> str:
    """What a command prints; empty when it is not there or fails."""
    status, text, _ = run(*argv)
    return text if status == 0 else ""


def lines_of(directories: tuple[str, ...], ending: str, pattern: str) -> list[str]:
    """Lines that match, of all files with that ending in some directories."""
    paths = [path for directory in directories for path in sorted(glob.glob(directory + "/*" + ending))]
    return [line.strip() for path in paths for line in read(path).splitlines() if re.search(pattern, line)]


def cards() -> dict[str, dict[str, str]]:
    """NVIDIA's display and 3D controllers as the kernel's PCI tree has them, by address."""
    found = {}
    for place in sorted(glob.glob(PCI + "/*")):
        if read(place + "/vendor").strip() == NVIDIA and read(place + "/class").startswith(DISPLAY):
            names = ("current_link_width", "max_link_width", "iommu_group/type")
            found[os.path.basename(place)] = {name: read(place + "/" + name).strip() for name in names}
    return found


def smi() -> dict[str, object]:
    """What nvidia-smi says of every card, or why it says nothing."""
    status, text, complaint = run("nvidia-smi", "-q", "-x")
    found = {"status": status, "gpus": []}
    first = (text if status else "") + complaint
    found["complaint"] = first.strip().splitlines()[0] if first.strip() else ""
    try:
        log = ElementTree.fromstring(text) if status == 0 else None  # noqa: S314 - the driver's own tool printed it
    except ElementTree.ParseError:
        log, found["status"], found["complaint"] = None, -1, "printed no XML"
    for gpu in log.iter("gpu") if log is not None else ():
        one = {name: (gpu.findtext(path) or "").strip() for name, path in SMI.items()}
        one["address"] = gpu.get("id", "").lower()
        tags = ("pid", "type", "process_name", "used_memory")
        one["processes"] = [{tag: info.findtext(tag) or "" for tag in tags} for info in gpu.iter("process_info")]
        for process in one["processes"]:
            process["cgroup"] = read("/proc/" + process["pid"] + "/cgroup").strip()
        found["gpus"].append(one)
    return found


def minors() -> dict[str, int]:
    """Number of a card's device node by PCI address, as the driver counts them."""
    found = {}
    for path in glob.glob("/proc/driver/nvidia/gpus/*/information"):
        match = re.search(r"Device Minor:\s*(\d+)", read(path))
        if match:
            found[path.split("/")[-2]] = int(match.group(1))
    return found


def kernels() -> dict[str, bool]:
    """Kernels that are installed, each with whether it has an nvidia module."""
    found = {}
    for place in glob.glob("/lib/modules/*"):
        if os.path.isdir(place + "/kernel"):
            found[os.path.basename(place)] = bool(glob.glob(place + "/**/nvidia.ko*", recursive=True))
    return found


def kernel_log() -> list[str]:
    """Lines of the driver in the kernel's log since boot."""
    text = output("journalctl", "--dmesg", "--boot", "--no-pager", "--output=short-iso") or output("dmesg")
    return [line for line in text.splitlines() if "NVRM" in line][-500:]


def before_guests() -> list[dict[str, str]]:
    """Units that come before the guests at boot: name, whether enabled, what they run."""
    after = output("systemctl", "show", "--property=After", "pve-guests.service").strip().partition("=")[2].split()
    services = [unit for unit in after if unit.endswith(".service")]
    if not services:
        return []
    shown = output("systemctl", "show", "--property=Id,UnitFileState,ExecStart", "--", *services)
    return [
        dict(line.partition("=")[::2] for line in block.splitlines() if not line.startswith("ExecStart="))
        | {"ExecStart": " ".join(re.findall(r"argv\[\]=([^;]*)", block))}
        for block in shown.strip().split("\n\n")
    ]


def packages() -> dict[str, object]:
    """Driver packages, which of them are held, pins of apt, and whether updates are installed by themselves."""
    # it fails when one pattern matches nothing, and prints the others all the same; apt's own tools write caches
    listed = run("dpkg-query", "--show", "--showformat=${db:Status-Abbrev}|${Package}|${Version}\n", *PACKAGES)[1]
    rows = [line.split("|") for line in listed.splitlines() if line.startswith(("ii", "hi"))]
    timer = run("systemctl", "is-enabled", "apt-daily-upgrade.timer")[1].strip()
    return {
        "installed": {row[1]: row[2] for row in rows},
        "held": [row[1] for row in rows if row[0].startswith("h")],
        "pins": lines_of(("/etc/apt/preferences.d",), "", r"^(?:Package|Pin|Pin-Priority):"),
        "unattended": output("apt-config", "dump", "APT::Periodic::Unattended-Upgrade").strip(),
        "timer": timer,
    }


def container(vmid: object) -> dict[str, object]:
    """The configuration of a container on this node, and what its control group allows and counted."""
    if vmid is None:
        return {"config": "", "cgroup": {}}
    names = ("memory.max", "memory.high", "memory.events")
    return {
        "config": read("/etc/pve/lxc/" + str(vmid) + ".conf"),
        "cgroup": {name: read("/sys/fs/cgroup/lxc/" + str(vmid) + "/" + name).strip() for name in names},
    }


def main() -> None:
    """Print the facts as one JSON object."""
    asked = json.loads(sys.argv[1])
    nodes = {*asked["devices"], *glob.glob("/dev/nvidia*"), *glob.glob("/dev/nvidia-caps/*")} - {"/dev/nvidia-caps"}
    libraries = [glob.glob(place + "/lib" + name + ".so.*.*") for place in LIBRARIES for name in ("cuda", "nvidia-ml")]
    boot = re.search(r"^btime (\d+)", read("/proc/stat"), re.MULTILINE)
    facts = {
        "kernel": output("uname", "-r").strip(),
        "kernels": kernels(),
        "pinned_kernel": read("/etc/kernel/proxmox-boot-pin").strip(),
        "boot": int(boot.group(1)) if boot else 0,
        "cmdline": read("/proc/cmdline").strip(),
        "pve": output("pveversion").strip(),
        "stat": run("stat", "-c", "%n|%F|%t:%T|%a|%u", *sorted(nodes))[1].splitlines() if nodes else [],
        "drivers": read("/proc/devices"),
        "module": read("/proc/driver/nvidia/version"),
        "license": output("modinfo", "-F", "license", "nvidia").strip(),
        "module_file": output("modinfo", "-F", "version", "nvidia").strip(),
        "libraries": sorted({os.path.basename(path) for found in libraries for path in found}),
        "subids": {name: read("/etc/" + name).splitlines() for name in ("subuid", "subgid")},
        "cards": cards(),
        "lspci": [line for line in output("lspci", "-D", "-nn", "-vv").splitlines() if LSPCI.match(line)],
        "smi": smi(),
        "minors": minors(),
        "hmm": read("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm").strip(),
        "modprobe": lines_of(MODPROBE, ".conf", r"^\s*options\s+nvidia[-_]uvm\b"),
        "kernel_log": kernel_log(),
        "before_guests": before_guests(),
        "udev": lines_of(UDEV, ".rules", "nvidia-modprobe"),
        "packages": packages(),
        "written": {path: read(path) for path in WRITTEN},
        "unit_enabled": run("systemctl", "is-enabled", os.path.basename(WRITTEN[0]))[1].strip() == "enabled",
        **container(asked["vmid"]),
    }
    json.dump(facts, sys.stdout)


main()
