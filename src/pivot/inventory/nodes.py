"""One server over several machines: nnodes, node-rank and dist-init-addr of a group, compared with each other.

Machines belong together when they name the same dist-init-addr. Each of them would wait for the others without a word,
so what does not fit shows only as a start that never ends.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pivot.findings import Finding, Severity

ERROR, WARNING = Severity.ERROR, Severity.WARNING
MEETING = ("dist-init-addr", "nccl-init-addr")
TP = ("tp-size", "tensor-parallel-size", "tp")
PP = ("pp-size", "pipeline-parallel-size", "pp")
# what has to be the same everywhere: flags under all their names
SAME = (TP, PP, ("dp-size", "data-parallel-size"), ("ep-size", "expert-parallel-size", "ep"), ("dtype",))
WHERE = "sglang_server_launch"
# what has to be worked out for every host, also for one that a run leaves out
VARIABLES = (
    *("ansible_host", "sglang_server_launch", "sglang_server_port", "sglang_server_nccl_port"),
    *("sglang_engine_version", "sglang_server_model_path", "sglang_server_drafter_path"),
)
Wrong = tuple[str, Severity, str, str]
"""A finding's code, severity, message and fix."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine. address: ansible_host; ports: those that something else of the server listens on, with what it is;
    common: what else has to be the same on all, by name."""

    name: str
    address: str
    flags: Mapping[str, Any]
    ports: Mapping[int, str] = dataclasses.field(default_factory=dict)
    common: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def flag(self, names: Sequence[str]) -> Any:
        """A flag under any of its names, None when it is not set."""
        return next((self.flags[name] for name in names if name in self.flags), None)

    @property
    def count(self) -> int:
        """Machines of the group as this one says, 1 when it says nothing; -1 for what is no number of machines."""
        return _whole(self.flag(("nnodes",)), 1)

    @property
    def rank(self) -> int:
        """Its own rank; SGLang takes 0 where nothing is said."""
        return _whole(self.flag(("node-rank",)), 0)

    @property
    def meeting(self) -> str:
        """Address and port where all meet, empty when it is not set."""
        return str(self.flag(MEETING) or "")


def _whole(value: object, otherwise: int) -> int:
    if value is None:
        return otherwise
    text = "" if isinstance(value, bool) else str(value)
    return int(text) if re.fullmatch(r"[0-9]{1,6}", text) else -1


def node(name: str, values: Mapping[str, Any]) -> Node:
    """A host of an inventory by its variables, worked out."""
    flags = values.get("sglang_server_launch")
    ports = {
        _whole(values.get("sglang_server_port"), 30000): "sglang_server_port",
        _whole(values.get("sglang_server_nccl_port"), 30001): "sglang_server_nccl_port",
    }
    common = {
        key: values[key]
        for key in ("sglang_engine_version", "sglang_server_model_path", "sglang_server_drafter_path")
        if key in values
    }
    return Node(
        name=name,
        address=str(values.get("ansible_host") or ""),
        flags=flags if isinstance(flags, Mapping) else {},
        ports=ports,
        common=common,
    )


def check(nodes: Sequence[Node]) -> list[Finding]:
    """Everything that keeps machines from becoming one server. nodes: all of the inventory."""
    found = [
        Finding(code, severity, item.name, message, fix)
        for item in nodes
        for code, severity, message, fix in _alone(item)
    ]
    groups: dict[str, list[Node]] = {}
    for item in nodes:
        if item.count > 1 and item.meeting:
            groups.setdefault(item.meeting, []).append(item)
    for meeting, members in sorted(groups.items()):
        subject = ", ".join(item.name for item in members)
        wrong = [*_group(meeting, members, nodes), *_place(meeting, members, nodes)]
        found += [Finding(code, severity, subject, message, fix) for code, severity, message, fix in wrong]
    return found


def _alone(item: Node) -> Iterator[Wrong]:
    """What one machine's own settings get wrong."""
    count, rank = item.count, item.rank
    if count < 1:
        message = f"{WHERE}.nnodes is {str(item.flag(('nnodes',)))[:40]!r}, which is no number of machines"
        yield "LAUNCH-NODES-COUNT", ERROR, message, "write how many machines serve together"
        return
    if not 0 <= rank < count:
        message = f"{WHERE}.node-rank is {str(item.flag(('node-rank',)))[:40]!r} of {count}"
        fix = "write nnodes" if count == 1 else f"write a rank from 0 to {count - 1}"
        yield "LAUNCH-NODES-RANK", ERROR, message, fix
    if count == 1:
        return
    if not item.meeting:
        message = f"{WHERE}.nnodes is {count}, but dist-init-addr, where the machines meet, is not set"
        yield "LAUNCH-NODES-ADDRESS", ERROR, message, "write dist-init-addr: the address of rank 0, with a free port"
    spread = [_whole(item.flag(names), 1) for names in (TP, PP)]
    if min(spread) > 0 and spread[0] * spread[1] % count:
        message = f"tp-size {spread[0]} times pp-size {spread[1]} is not a multiple of the {count} machines"
        yield "LAUNCH-NODES-SIZE", ERROR, message, f"write a tp-size that is a multiple of {count}"


def _group(meeting: str, members: Sequence[Node], nodes: Sequence[Node]) -> Iterator[Wrong]:
    """What the members of a group say differently."""
    counts = sorted({item.count for item in members})
    if len(counts) > 1:
        said = "; ".join(f"{count}: {_names(members, count)}" for count in counts)
        message = f"nnodes differs among the machines that meet at {meeting}: {said}"
        yield "LAUNCH-NODES-COUNT", ERROR, message, "write the same nnodes for all"
    elif counts[0] != len(members):
        message = f"nnodes is {counts[0]}, but {len(members)} of this inventory meet at {meeting}"
        others = [item for item in nodes if item not in members and item.count > 1]
        named = ", ".join(f"{item.name} names {item.meeting or 'none'}" for item in others)
        fix = f"give all the same dist-init-addr ({named})" if named else "correct nnodes, or add the missing machines"
        yield "LAUNCH-NODES-COUNT", ERROR, message, fix
    ranks = Counter(item.rank for item in members)
    for rank in sorted(rank for rank, often in ranks.items() if often > 1):
        owners = " and ".join(item.name for item in members if item.rank == rank)
        message = f"node-rank {rank} is that of {owners} (0 where none is set)"
        yield "LAUNCH-NODES-RANK", ERROR, message, f"each needs its own: 0 to {len(members) - 1}"
    for names in SAME:
        if said := _differ({item.name: item.flag(names) for item in members}):
            yield "LAUNCH-NODES-DIFFER", ERROR, f"{names[0]} differs: {said}", "write the same for all"
    for key in sorted({key for item in members for key in item.common}):
        if said := _differ({item.name: item.common.get(key) for item in members}):
            yield "LAUNCH-NODES-DIFFER", ERROR, f"{key} differs: {said}", "serve the same everywhere"


def _differ(values: Mapping[str, object]) -> str:
    """Who has which value, empty when all have the same."""
    if len({str(value) for value in values.values()}) == 1:
        return ""
    return ", ".join(f"{str(value)[:80]} at {name}" for name, value in values.items())


def _names(members: Sequence[Node], count: int) -> str:
    return ", ".join(item.name for item in members if item.count == count)


def _place(meeting: str, members: Sequence[Node], nodes: Sequence[Node]) -> Iterator[Wrong]:
    """Whether the others can reach rank 0 where they are told to."""
    match = re.fullmatch(r"(?:tcp://)?(?:\[([0-9a-fA-F:.]+)\]|([^\s:\[\]/]+)):([0-9]{1,5})", meeting)
    if match is None or not 0 < int(match[3]) < 1 << 16:
        message = f"dist-init-addr is {meeting!r}, not an address with a port"
        yield "LAUNCH-NODES-ADDRESS", ERROR, message, "write dist-init-addr: 192.0.2.11:25000, the address of rank 0"
        return
    address, port = match[1] or match[2], int(match[3])
    first = next((item for item in members if item.rank == 0), None)
    right = f"write {first.address}:{port}" if first and first.address else "write the address of rank 0"
    if _local(address):
        message = f"dist-init-addr {meeting} is every machine's own address: the others would wait at themselves"
        yield "LAUNCH-NODES-ADDRESS", ERROR, message, right
    elif first and address not in (first.address, first.name):
        owner = next((item.name for item in nodes if address in (item.address, item.name)), None)
        if owner:
            message = f"dist-init-addr {meeting} is {owner}, but rank 0 is {first.name}"
            yield "LAUNCH-NODES-ADDRESS", ERROR, message, right
        else:
            message = f"dist-init-addr {meeting} is no address of this inventory, and rank 0 is {first.name}"
            yield (
                "LAUNCH-NODES-ADDRESS",
                WARNING,
                message,
                f"{right}, unless it is another network's address of that machine",
            )
    if first and port in first.ports:
        message = f"dist-init-addr {meeting} names the port of {first.ports[port]}"
        yield (
            "LAUNCH-NODES-ADDRESS",
            ERROR,
            message,
            "write another port: that one is in use, or closed to other machines",
        )


def _local(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return False
    return number.is_loopback or number.is_unspecified
