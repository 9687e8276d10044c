"""Suspects about what a server stands on: volumes, shared memory, GPUs and their driver, memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from pivot.findings import Severity
from pivot.logs.evidence import Facts
from pivot.logs.log_kinds import SHM
from pivot.logs.suspect import Suspect, suspect

OLD_SHM_SECONDS = 60
RANKS = ("tp-size", "tp", "tensor-parallel-size")  # one flag in three spellings
NO_VOLUMES = ("squashfs", "iso9660", "erofs")  # read-only images are always full
WRITTEN = re.compile(r"/|/(?:run|home|root|srv)|/(?:var|tmp|run|opt|etc)\b.*")


def volume(facts: Facts) -> Iterator[Suspect]:
    """A full volume, met by the server or not yet."""
    note = facts.note("volume-full")
    full = [line for mount, kind, used, line in facts.machine.volumes if used >= 100 and _written(mount, kind)]
    if note is None and not full:
        return
    yield suspect(
        "DIAG-VOLUME-FULL",
        Severity.ERROR if note else Severity.WARNING,
        facts,
        "a volume that the server writes to is full" if note else "a volume is full that logs or caches are written to",
        "df -h; then free the volume that the line names, and start again",
        evidence=[note, *full],
    )


def _written(mount: str, kind: str) -> bool:
    """Whether a full volume there is a fault: weights may fill theirs, read-only images always do."""
    return kind not in NO_VOLUMES and WRITTEN.fullmatch(mount) is not None


def shared_memory(facts: Facts) -> Iterator[Suspect]:
    """Shared memory that is full: how large it is, and what earlier runs left in it."""
    note = facts.note("shm-full")
    mounted = [(used, line) for mount, _, used, line in facts.machine.volumes if mount == SHM]
    full = [line for used, line in mounted if used >= 99]
    if not (note or full):
        return
    started = facts.run.first_time if facts.run else None
    old = [
        line
        for name, time, _, line in facts.machine.listing
        if re.match(rf"{SHM}/(?:nccl|psm|sem)\b", name) and started is not None and time < started - OLD_SHM_SECONDS
    ]
    stale = f"; {len(old)} segments there are older than this start" if old else ""
    yield suspect(
        "DIAG-SHM-FULL",
        Severity.ERROR,
        facts,
        f"shared memory is full: NCCL and SGLang need segments in {SHM}{stale}",
        f"df -h {SHM}; ls -l {SHM}; remove what no process uses, then give it more room (size, not NCCL flags)",
        evidence=[note, *(full or [line for _, line in mounted]), *old],
    )


def lost_gpus(facts: Facts) -> Iterator[Suspect]:
    """GPUs that need a reset, the container's or others, and those whose memory reports errors."""
    lost = [(xid.device, xid.evidence) for xid in facts.kernel.xids if xid.klass == "fatal"]
    lost += facts.kernel.lost.items()
    for own in (True, False):
        its = [(device, line) for device, line in lost if _may_be_own(facts, device) is own]
        devices = ", ".join(dict.fromkeys(device for device, _ in its if device)) or "it fell off the bus"
        if its:
            yield suspect(
                "DIAG-GPU-LOST",
                Severity.ERROR if own else Severity.WARNING,
                facts,
                f"a GPU needs a reset ({devices}); a warm reboot may not be enough"
                if own
                else f"a GPU that the container does not have needs a reset ({devices})",
                "power the node fully off and on, then nvidia-smi -q | grep -i recovery",
                evidence=[line for _, line in its],
            )
    memory = [xid for xid in facts.kernel.xids if xid.klass == "memory"]
    if memory:
        yield suspect(
            "DIAG-GPU-ECC",
            Severity.WARNING,
            facts,
            f"the memory of a GPU reports errors ({', '.join(dict.fromkeys(xid.device for xid in memory))})",
            "nvidia-smi -q -d ECC,ROW_REMAPPER",
            evidence=[xid.evidence for xid in memory],
        )


def _may_be_own(facts: Facts, device: str) -> bool:
    """Whether a card may be the container's: not when that shows all that its server uses, and this one is not there.

    A server that is well uses no other; one that is not may miss the lost one.
    """
    shown, given = [card.name.lower() for card in facts.machine.cards], facts.arguments
    ranks = next((given[name] for name in RANKS if name in given), "1" if given else "")
    all_shown = facts.well or (ranks.isdecimal() and len(shown) >= int(ranks[:9]))
    return not shown or not all_shown or any(device in name for name in shown)


def link(facts: Facts) -> Iterator[Suspect]:
    """PCIe links that break, or are narrower than both ends allow."""
    narrow = [card for card in facts.machine.cards if card.lanes and card.lanes[0] < card.lanes[1]]
    if narrow:
        widths = ", ".join(f"{card.name} x{card.lanes[0]} of x{card.lanes[1]}" for card in narrow if card.lanes)
        yield suspect(
            "DIAG-PCIE-WIDTH",
            Severity.WARNING,
            facts,
            f"GPUs have fewer PCIe lanes than they could: {widths}",
            "nvidia-smi -q | grep -A3 'Link Width'; lspci -tv: the slot, a switch or a retimer gives no more",
            evidence=[card.evidence for card in narrow],
        )
    if note := facts.kernel.notes.get("link"):
        yield suspect(
            "DIAG-PCIE-LINK",
            Severity.WARNING,
            facts,
            f"a PCIe link reports uncorrected errors or goes down ({note.count} messages)",
            "lspci -vv of the device that the line names; pcie_aspm=off, cooling and seating are what others changed",
            evidence=[note],
        )


def driver(facts: Facts) -> Iterator[Suspect]:
    """The node's driver against the container's libraries, and which kernel modules it is."""
    said, refused = facts.note("driver"), facts.kernel.notes.get("driver")  # the kernel does not say which container's
    module, library = facts.machine.module, facts.machine.library
    known, differ = bool(module and library), bool(module and library and module != library)
    if said or differ or (refused and not known):
        now = said or differ or not facts.well
        pair = f": the module is {module}, libcuda is {library}" if differ else ""
        compat = "; a compat directory of CUDA holds another libcuda" if facts.machine.compat else ""
        yield suspect(
            "DIAG-DRIVER",
            Severity.ERROR if now else Severity.WARNING,
            facts,
            f"the node's driver and the container's libraries differ{pair}{compat}"
            if now
            else "the node's driver has refused a program with other libraries since it booted",
            "cat /proc/driver/nvidia/version; ldconfig -p | grep libcuda; install the pinned one where it moved",
            evidence=[said or refused, facts.machine.compat],
        )
    closed = facts.kernel.notes.get("modules")
    if closed:
        yield suspect(
            "DIAG-MODULES",
            Severity.ERROR,
            facts,
            "the driver's kernel modules cannot run this GPU: Blackwell needs the open ones",
            "modinfo -F license nvidia on the node (Dual MIT/GPL is right); install the open modules, then reboot it",
            evidence=[closed, facts.machine.closed],
        )


def devices(facts: Facts) -> Iterator[Suspect]:
    """Device nodes that are none, or have numbers that the driver no longer has; CUDA that does not begin."""
    note = facts.note("devices")
    wrong = [node for node in facts.machine.devices if node.is_file or node.is_stale(facts.machine.majors)]
    if not (note or wrong):
        return
    kinds = [
        f"{node.path} is a regular file" if node.is_file
        else f"{node.path} has the major {node.major}, the driver has {facts.machine.majors[node.driver]}"
        for node in wrong
    ]  # fmt: skip
    named = "; ".join(kinds[:3]) or "look at /dev/nvidia-uvm first, whose major changes with kernel and driver"
    yield suspect(
        "DIAG-DEVICES",
        Severity.ERROR,
        facts,
        f"CUDA does not reach the GPUs: {named}",
        "grep nvidia /proc/devices; ls -l /dev/nvidia*; nvidia-modprobe -u -c 0 on the node, then restart it",
        evidence=[note, *(node.evidence for node in wrong)],
    )


def late_devices(facts: Facts) -> Iterator[Suspect]:
    """Device nodes that were not there when the node started the container."""
    if note := facts.kernel.notes.get("late-device"):
        yield suspect(
            "DIAG-DEVICE-LATE",
            Severity.WARNING,
            facts,
            "the container could not be started once, because a device of the node was not there yet",
            "on the node a oneshot before pve-guests.service: nvidia-smi, then nvidia-modprobe -u -m -s -c 0",
            evidence=[note],
        )


def small_window(facts: Facts) -> Iterator[Suspect]:
    """BAR1 smaller than the card's memory: peers cannot reach all of it."""
    small = [
        card for card in facts.machine.cards if card.bar1_mib is not None and card.bar1_mib < (card.memory_mib or 0)
    ]
    if small:
        yield suspect(
            "DIAG-BAR1",
            Severity.WARNING,
            facts,
            f"{len(small)} GPUs show {small[0].bar1_mib} MiB of their {small[0].memory_mib} MiB through BAR1",
            "switch Resizable BAR and above-4G decoding on in the node's firmware",
            evidence=[card.evidence for card in small],
        )


def leftovers(facts: Facts) -> Iterator[Suspect]:
    """Who else holds memory of the GPUs."""
    own = {process.pid for process in facts.processes}
    foreign = [(pid, name, line) for pid, name, line in facts.machine.on_gpus if own and pid not in own]
    notes = [note for kind in ("unbalanced", "left-behind") if (note := facts.note(kind))]
    if not foreign and not notes:
        return
    named = f": {', '.join(f'{name} ({pid})' for pid, name, _ in foreign[:4])}" if foreign else ""
    yield suspect(
        "DIAG-LEFTOVERS",
        Severity.ERROR,
        facts,
        f"processes of an earlier run, or of somebody else, hold memory of the GPUs{named}",
        "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv; end them by their pid",
        evidence=[*notes, *(line for _, _, line in foreign)],
    )


def host_memory(facts: Facts) -> Iterator[Suspect]:
    """Memory that ran out, and memory whose limit slows a load down."""
    kernel, note = facts.kernel.notes.get("host-memory"), facts.note("host-memory")
    kills = facts.machine.memory_events.get("oom_kill", 0)
    if kernel or note or kills:
        counted = f"; its cgroup counts {kills} kills" if kills else ""
        now = note is not None or not facts.well  # the kernel's lines and the cgroup's count are of all since boot
        yield suspect(
            "DIAG-HOST-MEMORY",
            Severity.ERROR if now else Severity.WARNING,
            facts,
            f"the host ran out of memory for the server{counted}"
            if now
            else f"the host ran out of memory since it booted{counted}",
            "raise the container's memory, or load with less prefetch: cat /sys/fs/cgroup/memory.events",
            evidence=[note, kernel],
        )
    run, held = facts.run, facts.machine.memory_events.get("high", 0)
    if run and run.loading and not run.ready and held:
        yield suspect(
            "DIAG-MEMORY-HIGH",
            Severity.WARNING,
            facts,
            f"the container's memory limit holds the load back ({held} times): pages of the weights count against it",
            "raise the container's memory, or load without mmap: weight-loader-disable-mmap",
            evidence=[run.loading],
        )


CHECKS: tuple[Callable[[Facts], Iterator[Suspect]], ...] = (
    volume,
    shared_memory,
    lost_gpus,
    driver,
    devices,
    leftovers,
    host_memory,
    late_devices,
    link,
    small_window,
)
