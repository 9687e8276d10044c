"""Described hardware, entered where a gatherer reads the real one: files, device nodes and tools of a machine.

A description is YAML; tests/data/hardware/healthy.yml shows its keys. It becomes a directory: `tree` holds files by
their path, `bin` holds tools. Shell commands lay the tree over the machine that runs them and make device nodes, in a
mount namespace of their own (`alone`) or in a scratch container, which is thrown away (`enter`).
"""

from __future__ import annotations

import argparse
import copy
import io
import shlex
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pivot_lab.containers import Containers
from pivot_lab.errors import LabError
from pivot_lab.layout import ID_BASE, Layout
from pivot_lab.system import run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VMID = 9001
# what a machine has of its own, and a description replaces
REPLACED = ("/proc/driver", "/proc/devices", "/proc/cmdline", "/proc/meminfo", "/sys/bus/pci", "/sys/module")
CGROUP = "/sys/fs/cgroup"
# these stay a container's own: its systemd and its packages are real
REAL = ("systemctl", "dpkg-query", "apt-config")
# what a tool does with arguments that nothing is described for
OTHERWISE = {"uname": 'exec /usr/bin/uname "$@"'}
SMI_GPU = """\
<gpu id="0000{address}"><product_name>{name}</product_name><gpu_recovery_action>{recovery}</gpu_recovery_action>
<pci><pci_gpu_link_info><pcie_gen><max_link_gen>{gen_max}</max_link_gen><current_link_gen>{gen}</current_link_gen><max_device_link_gen>{gen_card}</max_device_link_gen>
</pcie_gen></pci_gpu_link_info></pci>
<fb_memory_usage><total>{memory}</total></fb_memory_usage><bar1_memory_usage><total>{bar1}</total></bar1_memory_usage>
<utilization><gpu_util>{utilization}</gpu_util></utilization><processes>{processes}</processes></gpu>
"""


def merged(base: Any, change: Any) -> Any:
    """A description with a change: mappings key by key, null takes a key away, everything else replaces."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return copy.deepcopy(change)
    result = {key: merged(value, change[key]) if key in change else copy.deepcopy(value) for key, value in base.items()}
    result |= {key: copy.deepcopy(value) for key, value in change.items() if key not in base}
    return {key: value for key, value in result.items() if not (key in change and change[key] is None)}


def describe(directory: Path, fault: str | None = None) -> dict[str, Any]:
    """The healthy machine of a directory, with one fault of its faults.yml or none; KeyError: no such fault."""
    healthy: dict[str, Any] = yaml.safe_load((directory / "healthy.yml").read_text(encoding="utf-8"))
    if fault is None:
        return healthy
    faults = yaml.safe_load((directory / "faults.yml").read_text(encoding="utf-8"))
    result: dict[str, Any] = merged(healthy, faults[fault]["change"])
    return result


class Machine:
    """What a described node, or the container on it, has to show."""

    def __init__(self, description: dict[str, Any], *, container: bool) -> None:
        self.told, self.container = description, container
        self.cards = {address: description["card"] | card for address, card in description["cards"].items()}
        self.side = description["container"] if container else description

    def files(self) -> Iterator[tuple[str, str]]:
        """Files by path."""
        told = self.told
        if text := told["driver"]["text"]:
            yield "/proc/driver/nvidia/version", text + "\n"
            for address, card in self.cards.items():
                if card["in_driver"]:
                    yield f"/proc/driver/nvidia/gpus/{address}/information", f"Device Minor: \t {card['minor']}\n"
        numbers = "".join(f"{number:3} {name}\n" for name, number in told["majors"].items())
        yield "/proc/devices", f"Character devices:\n{numbers}\nBlock devices:\n  8 sd\n"
        for name in self.libraries:
            yield f"/usr/lib/x86_64-linux-gnu/{name}", ""
        if self.container:
            yield "/proc/meminfo", f"MemTotal:       {self.side['memory_kib']} kB\n"
        else:
            yield from self._node_files()

    @property
    def libraries(self) -> list[str]:
        """Names of the driver's libraries."""
        names: list[str] = (self.side if self.container else self.told["driver"])["libraries"]
        return names

    def _node_files(self) -> Iterator[tuple[str, str]]:
        told = self.told
        yield "/proc/cmdline", told["cmdline"] + "\n"
        for address, card in self.cards.items():
            place = f"/sys/bus/pci/devices/{address}"
            shown = {"vendor": "0x10de", "class": "0x030200"}
            shown |= {"current_link_width": card["width"], "max_link_width": card["width_max"]}
            yield from ((f"{place}/{name}", f"{value}\n") for name, value in shown.items())
            if card["iommu"]:
                yield f"{place}/iommu_group/type", card["iommu"] + "\n"
        if told["driver"]["text"]:
            yield "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm", told["hmm"] + "\n"
        yield from ((f"/etc/{name}", "root:100000:65536\n") for name in ("subuid", "subgid"))
        yield "/etc/modprobe.d/nvidia.conf", told["modprobe"] + "\n"
        yield f"/etc/pve/lxc/{VMID}.conf", told["config"]
        yield f"{CGROUP}/lxc/{VMID}/memory.events", told["memory_events"]
        for release, built in told["kernels"].items():
            yield f"/usr/lib/modules/{release}/kernel/README", ""
            if built:
                yield f"/usr/lib/modules/{release}/updates/dkms/nvidia.ko", ""

    def tools(self) -> dict[str, str]:
        """Scripts by name."""
        side, smi = self.side, self.side["smi"]
        listed = "".join(f"GPU {card['minor']}: {card['name']}\n" for card in self._seen())
        answers = {
            "nvidia-smi": [("-L", listed, smi["status"], smi["complaint"]), ("-q -x", self._smi(), smi["status"], "")],
            "dpkg-query": [("*", self._packages(), 1, "")],
            "apt-config": [("*", f'APT::Periodic::Unattended-Upgrade "{side["packages"]["unattended"]}";\n', 0, "")],
            "systemctl": [("is-enabled *", side["packages"]["timer"] + "\n", 0, "")],
        }
        if smi["status"]:
            answers["nvidia-smi"] = [("*", "", smi["status"], smi["complaint"])]
        if self.container:
            answers["ldconfig"] = [("-p", f"\t{side['loader']}\n", 0, "")]
            if smi["status"] < 0:
                del answers["nvidia-smi"]
        else:
            answers |= self._node_tools()
            answers["systemctl"] += self._units()
        return {name: _script(cases, otherwise=OTHERWISE.get(name, "exit 2")) for name, cases in answers.items()}

    def _packages(self) -> str:
        packages = self.side["packages"]
        rows = ((name, version, name in packages["held"]) for name, version in packages["installed"].items())
        return "".join(f"{'hi' if held else 'ii'} |{name}|{version}\n" for name, version, held in rows)

    def _node_tools(self) -> dict[str, list[tuple[str, str, int, str]]]:
        told, driver = self.told, self.told["driver"]
        missing = 0 if driver["license"] else 1
        return {
            "uname": [("-r", told["release"] + "\n", 0, "")],
            "pveversion": [("*", told["pve"] + "\n", 0, "")],
            "lspci": [("*", self._lspci(), 0, "")],
            "modinfo": [
                ("-F license nvidia", driver["license"] + "\n", missing, ""),
                ("-F version nvidia", driver["file"] + "\n", missing, ""),
            ],
            "journalctl": [("*", "".join(line + "\n" for line in told["kernel_log"]), 0, "")],
            "dmesg": [("*", "", 0, "")],
        }

    def _units(self) -> list[tuple[str, str, int, str]]:
        shown = [
            f"Id={name}\nUnitFileState={unit['state']}\nExecStart={{ argv[]={unit['runs']} ; ignore_errors=no }}\n"
            for name, unit in self.told["units"].items()
        ]
        after = " ".join(["basic.target", *self.told["units"]])
        return [("*=After *", f"After={after}\n", 0, ""), ("*=Id,*", "\n".join(shown), 0, "")]

    def _seen(self) -> list[dict[str, Any]]:
        return [card for card in self.cards.values() if card["in_driver"]]

    def _smi(self) -> str:
        gpus = []
        for address, card in self.cards.items():
            if not card["in_driver"]:
                continue
            processes = "".join(
                f"<process_info>{''.join(f'<{tag}>{value}</{tag}>' for tag, value in process.items())}</process_info>"
                for process in card["processes"]
            )
            gpus.append(SMI_GPU.format(address=address.upper(), **(card | {"processes": processes})))
        return f"<?xml version='1.0' ?>\n<nvidia_smi_log>\n{''.join(gpus)}</nvidia_smi_log>\n"

    def _lspci(self) -> str:
        text = ""
        for address, given in self.told["bridges"].items():
            bridge = self.told["bridge"] | given
            first, last = bridge["buses"]
            text += f"{address} PCI bridge [0604]: a composed bridge\n"
            text += f"\tBus: primary={address[5:7]}, secondary={first}, subordinate={last}, sec-latency=0\n"
            text += f"\t\tLnkSta:\tSpeed 32GT/s, Width x{bridge['width']}\n\t\tACSCtl:\t{bridge['acs']}\n\n"
        for address, card in self.cards.items():
            text += f"{address} {card['pci']}\n\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x{card['width']}\n\n"
        return text

    def write(self, directory: Path, *, own: Sequence[str] = ()) -> None:
        """Write tree and bin. own: tools that the machine keeps for itself."""
        for path, text in self.files():
            place = directory / "tree" / path.removeprefix("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
        for name, text in self.tools().items():
            if name not in own:
                place = directory / "bin" / name
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text, encoding="utf-8")
                place.chmod(0o755)

    def mounts(self, directory: str) -> str:
        """Shell commands that lay the tree over what the kernel shows; where a tree has no such part it is emptied."""
        lines = ["set -e"]
        paths = {path for path, _ in self.files()}
        for place in REPLACED:
            if any(path == place or path.startswith(place + "/") for path in paths):
                lines.append(f"mount --bind {directory}/tree{place} {place}")
            elif place == "/proc/driver":
                lines.append("mount -t tmpfs tmpfs /proc/driver")
        return "\n".join(lines) + "\n"

    def alone(self, directory: Path) -> str:
        """Shell commands for a mount namespace of their own, where nothing but the description is to be seen."""
        lines = [
            self.mounts(str(directory)),
            f"mkdir -p {directory}/tree/etc {directory}/tree/usr/lib",
            f"mount --bind {directory}/tree/etc /etc",
            f"mount -t overlay overlay -o lowerdir={directory}/tree/usr/lib:/usr/lib /usr/lib",
            f"if [ -d {directory}/tree{CGROUP} ]; then mount --bind {directory}/tree{CGROUP} {CGROUP}; fi",
            "mount -t tmpfs tmpfs /dev; mknod /dev/null c 1 3; mkdir /dev/shm",
            f"mount -t tmpfs -o mode=1777,size={self.told['container']['shm_mib']}m tmpfs /dev/shm",
            f"export PATH={directory}/bin:$PATH",
        ]
        return "\n".join([*lines, self.nodes()])

    def nodes(self) -> str:
        """Shell commands that make the device nodes."""
        lines = []
        for path, given in self.told["nodes"].items():
            if isinstance(given, list):
                closed = 0o666 & ~int(given[2], 8)  # chmod does not work everywhere these commands run
                lines.append(f"rm -f {path}; (umask {closed:04o}; mknod {path} c {given[0]} {given[1]})")
            else:
                lines.append(f"rm -f {path}; touch {path}")
        return "\n".join(lines) + "\n"


def _script(cases: Sequence[tuple[str, str, int, str]], otherwise: str) -> str:
    """A tool that answers by its arguments, given as patterns of the shell."""
    lines = ["#!/bin/sh", "# a stand-in: it prints what was described, whatever the machine is", 'case "$*" in']
    for pattern, text, status, complaint in cases:
        words = "*".join(shlex.quote(part) if part else "" for part in pattern.split("*"))
        lines.append(f"{words}) printf %s {shlex.quote(text)}")
        if complaint:
            lines.append(f"printf '%s\\n' {shlex.quote(complaint)} >&2")
        lines.append(f"exit {max(status, 0)};;")
    return "\n".join([*lines, "esac", otherwise, ""])


def enter(containers: Containers, key: str, machine: Machine) -> None:
    """Enter a machine into a running scratch container, in place of one that was entered before."""
    inside, pid = "/var/lib/described-hardware", containers.pid(key)
    if pid is None:
        raise LabError(f"the container {key} does not run")
    stream = io.BytesIO()
    with tempfile.TemporaryDirectory() as directory, tarfile.open(fileobj=stream, mode="w") as tar:
        machine.write(Path(directory), own=REAL)
        tar.add(directory, arcname=".", filter=_as_root)
    script = f"""set -e
for place in {" ".join(REPLACED)}; do while umount "$place" 2>/dev/null; do :; done; done
rm -rf {inside} /usr/lib/modules /usr/lib/x86_64-linux-gnu/libcuda.so.* /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.*
mkdir -p {inside}; tar -x -C {inside}
for part in etc usr; do if [ -d {inside}/tree/$part ]; then cp -r {inside}/tree/$part/. /$part/; fi; done
cp {inside}/bin/* /usr/local/bin/
{machine.mounts(inside)}"""
    done = containers.execute(key, ["sh", "-c", script], stdin=stream.getvalue())
    if done.returncode:
        raise LabError(f"{key} does not take the hardware: {done.stderr.decode(errors='replace').strip()}")
    # root of a container may not make device nodes; this machine may, in its namespace of mounts and with its id
    ids = [f"--reuid={ID_BASE}", f"--regid={ID_BASE}", "--clear-groups"]
    may = ["--inh-caps=+mknod", "--ambient-caps=+mknod"]
    script = "rm -f /dev/nvidia*\n" + machine.nodes()
    run(["nsenter", "--target", str(pid), "--mount", "setpriv", *ids, *may, "sh", "-c", script])


def _as_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.mode |= 0o755 if info.isdir() else 0o644
    return info


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m pivot_lab.hardware DIRECTORY CONTAINER [FAULT]``: a described machine in a scratch container."""
    parser = argparse.ArgumentParser(prog="pivot_lab.hardware", description=main.__doc__)
    parser.add_argument("directory", type=Path, help="of healthy.yml and faults.yml")
    parser.add_argument("container", help="a scratch container that runs")
    parser.add_argument("fault", nargs="?", help="a key of faults.yml; healthy without one")
    parser.add_argument("--inside", action="store_true", help="the container of the description instead of its node")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the clone whose lab is meant")
    args = parser.parse_args(argv)
    machine = Machine(describe(args.directory, args.fault), container=args.inside)
    enter(Containers(Layout.of(args.root)), "s-" + args.container, machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
