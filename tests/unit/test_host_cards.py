"""Cards of a node, what lies between them, Xids, and the lines of a container's file: variations, verdicts by hand."""

from pathlib import Path
from typing import Any

import pytest

from pivot.findings import Finding, Severity
from pivot.machines import cards, container_lines, pci, xids

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


def said(found: Any) -> list[tuple[str, Severity]]:
    return [(finding.code, finding.severity) for finding in found]


# --- the PCI tree: a root port with a switch and two cards, another with one card

LSPCI = """\
0000:10:01.1 PCI bridge [0604]: a root port
	Bus: primary=10, secondary=11, subordinate=14, sec-latency=0
		LnkCap:	Port #0, Speed 32GT/s, Width x16
		LnkSta:	Speed 32GT/s, Width x16
		ACSCtl:	SrcValid+ TransBlk- ReqRedir- CmpltRedir- UpstreamFwd+ EgressCtrl- DirectTrans-
0000:11:00.0 PCI bridge [0604]: the switch
	Bus: primary=11, secondary=12, subordinate=14, sec-latency=0
0000:12:00.0 PCI bridge [0604]: its first port
	Bus: primary=12, secondary=13, subordinate=13, sec-latency=0
0000:13:00.0 3D controller [0302]: NVIDIA Corporation Device [10de:2bb5] (rev a1)
		LnkSta:	Speed 2.5GT/s (downgraded), Width x16
0000:14:00.0 3D controller [0302]: NVIDIA Corporation Device [10de:2bb5] (rev ff)
0000:f0:01.1 PCI bridge [0604]: another root port
	Bus: primary=f0, secondary=f1, subordinate=f1, sec-latency=0
		LnkSta:	Speed 32GT/s, Width x4 (downgraded)
		ACSCtl:	SrcValid+ TransBlk- ReqRedir+ CmpltRedir- UpstreamFwd+ EgressCtrl- DirectTrans-
0000:f1:00.0 3D controller [0302]: NVIDIA Corporation Device [10de:2bb5] (rev a1)
	Kernel driver in use: vfio-pci
"""
TREE = pci.parse_lspci(LSPCI.splitlines())
WIDE = {"current_link_width": "16", "max_link_width": "16", "iommu_group/type": ""}


def test_the_tree_is_read() -> None:
    assert [bridge.address for bridge in pci.above("00000000:13:00.0", TREE)] == [
        "0000:10:01.1",
        "0000:11:00.0",
        "0000:12:00.0",
    ]
    assert pci.above("0001:13:00.0", TREE) == []
    assert [address for address, device in TREE.items() if device.lost] == ["0000:14:00.0"]
    assert (TREE["0000:10:01.1"].width, TREE["0000:f0:01.1"].width, TREE["0000:11:00.0"].width) == (16, 4, 0)


@pytest.mark.parametrize(
    ("addresses", "tree", "code"),
    [
        (["0000:13:00.0", "0000:14:00.0"], TREE, None),
        (["0000:13:00.0"], TREE, None),
        (["0000:f1:00.0"], TREE, None),  # a card alone has no peers
        (["0000:13:00.0", "0000:f1:00.0"], TREE, "HOST-PCI-ACS"),
        (["0000:13:00.0", "0000:f1:00.0"], {}, "HOST-PCI-UNSEEN"),
    ],
)
def test_access_control_between_cards(addresses: list[str], tree: dict[str, pci.Device], code: str | None) -> None:
    found = pci.acs_findings(addresses, tree, "n")
    assert said(found) == ([(code, WARNING)] if code else [])
    if code == "HOST-PCI-ACS":
        assert "at 0000:f0:01.1:" in found[0].message
        assert "setpci -s 0000:f0:01.1 ECAP_ACS+6.w=0000" in found[0].fix


@pytest.mark.parametrize(
    ("kinds", "wanted", "words"),
    [
        (["", ""], "undecided", ""),
        (["identity", "identity"], "undecided", ""),
        (["DMA"], "undecided", ""),  # one card
        (["", ""], "off", ""),
        (["DMA-FQ", "DMA-FQ"], "on", ""),
        (["DMA", "DMA"], "undecided", "translates the cards' addresses (started with iommu=x)"),
        (["identity", "DMA"], "undecided", "translates"),
        (["identity", "identity"], "off", "the IOMMU is pt, proxmox_host_iommu says off"),
        (["", ""], "pt", "the IOMMU is off, proxmox_host_iommu says pt"),
    ],
)
def test_the_iommu(kinds: list[str], wanted: str, words: str) -> None:
    its = {f"0000:{number}:00.0": {"iommu_group/type": kind} for number, kind in enumerate(kinds)}
    found = pci.iommu_findings(its, wanted, "quiet iommu=x", "n")
    assert said(found) == ([("HOST-PCI-IOMMU", WARNING)] if words else [])
    assert all(words in finding.message for finding in found)


def test_cards_of_virtual_machines_are_nobodys_here() -> None:
    seen = {"0000:13:00.0": 1, "0000:14:00.0": 2, "0000:f1:00.0": 3, "0000:99:00.0": 4}
    assert pci.not_lent(seen, TREE) == {"0000:13:00.0": 1, "0000:14:00.0": 2, "0000:99:00.0": 4}
    assert pci.not_lent(seen, {}) == seen


def test_width_of_links() -> None:
    its = {"0000:13:00.0": WIDE, "0000:f1:00.0": WIDE, "0000:14:00.0": {**WIDE, "current_link_width": "8"}}
    own, port = pci.width_findings(its, TREE, "n")
    assert (own.code, port.code) == ("HOST-GPU-LINK", "HOST-GPU-LINK")
    assert "the link at 0000:14:00.0 has 8 lanes" in own.message
    assert "the link at 0000:f0:01.1 has 4 lanes, and 0000:f1:00.0 could use 16" in port.message
    assert list(pci.width_findings({"0000:13:00.0": WIDE}, TREE, "n")) == []
    assert (
        list(pci.width_findings({"0000:13:00.0": {"current_link_width": "63", "max_link_width": ""}}, TREE, "n")) == []
    )


# --- cards

GPU: dict[str, Any] = {
    "address": "00000000:13:00.0",
    "recovery": "None",
    "memory": "97887 MiB",
    "bar1": "131072 MiB",
    "utilization": "0 %",
    "gen": "1",
    "gen_max": "5",
    "gen_card": "5",
    "processes": [],
}
OURS: dict[str, object] = {"0000:13:00.0": {}}


def state(**changes: Any) -> list[tuple[str, Severity]]:
    return said(cards.state_findings({"smi": {"gpus": [GPU | changes]}}, OURS, "n"))


def test_a_card_by_itself() -> None:
    assert state() == []
    assert state(recovery="N/A", bar1="N/A", gen_max="N/A") == []
    assert state(recovery="Reset") == [("HOST-GPU-RECOVERY", ERROR)]
    assert state(bar1="256 MiB") == [("HOST-GPU-BAR1", WARNING)]
    assert state(bar1="256 MiB", address="00000000:14:00.0") == []  # another's
    assert state(gen_max="4") == [("HOST-GPU-SLOT", INFO)]
    assert state(utilization="49 %") == []
    assert state(utilization="50 %") == [("HOST-GPU-LINK", WARNING)]
    assert state(utilization="99 %", gen="5") == []


def machine(seen: list[str], known: list[str], **smi: Any) -> dict[str, Any]:
    gpus = [GPU | {"address": f"0000{address}"} for address in known]
    return {"cards": {address: {} for address in seen}, "smi": {"status": 0, "complaint": "", "gpus": gpus} | smi}


@pytest.mark.parametrize(
    ("facts", "codes"),
    [
        (machine(["0000:13:00.0"], ["0000:13:00.0"]), []),
        (machine(["0000:13:00.0", "0000:14:00.0"], ["0000:13:00.0"]), ["HOST-GPU-LOST", "HOST-GPU-COUNT"]),
        (machine(["0000:13:00.0", "0000:f1:00.0"], ["0000:13:00.0"]), ["HOST-GPU-COUNT"]),
        (machine(["0000:13:00.0"], [], status=-1, complaint="did not end within 60 s"), ["HOST-GPU-SMI"]),
    ],
)
def test_all_see_the_same_cards(facts: dict[str, Any], codes: list[str]) -> None:
    found = list(cards.count_findings(facts, TREE, "n"))
    assert said(found) == [(code, ERROR) for code in codes]


@pytest.mark.parametrize(
    ("smi", "code"),
    [
        ({"status": 0, "cards": ["GPU 0: x", "GPU 1: x"], "complaint": ""}, None),
        ({"status": 0, "cards": ["GPU 0: x"], "complaint": ""}, "HOST-GPU-COUNT"),
        ({"status": 18, "cards": [], "complaint": "Failed to initialize NVML"}, "HOST-GPU-SMI"),
    ],
)
def test_cards_in_the_container(smi: dict[str, Any], code: str | None) -> None:
    found = cards.inside_findings(smi, ["/dev/nvidia0", "/dev/nvidia3", "/dev/nvidiactl"], "h")
    assert said(found) == ([(code, ERROR)] if code else [])


def test_which_cards_are_the_containers() -> None:
    facts: dict[str, Any] = {"cards": {"0000:13:00.0": {}, "0000:14:00.0": {}, "0000:15:00.0": {}}}
    facts["minors"] = {"0000:13:00.0": 0, "0000:14:00.0": 1}
    assert list(cards.chosen(facts, ["/dev/nvidia1", "/dev/nvidiactl"])) == ["0000:14:00.0", "0000:15:00.0"]
    assert cards.chosen(facts, ["/dev/nvidiactl"]) == {}


def process(**changes: str) -> dict[str, Any]:
    its = {
        "pid": "7",
        "type": "C",
        "process_name": "/usr/bin/other",
        "used_memory": "9 MiB",
        "cgroup": "0::/lxc/105/ns",
    }
    return {"smi": {"gpus": [GPU | {"processes": [its | changes]}]}}


@pytest.mark.parametrize(
    ("changes", "vmid", "shared", "severity", "words"),
    [
        ({}, 9001, False, ERROR, "process 7 (other) of container 105"),
        ({"cgroup": "0::/system.slice/x.service"}, 9001, False, ERROR, "of the node itself"),
        ({"cgroup": "0::/lxc/90010/ns"}, 9001, False, ERROR, "of container 90010"),
        ({"type": "M+C"}, 9001, True, INFO, "computes on it and holds 9 MiB"),
        ({"cgroup": "0::/lxc/9001/ns/system.slice"}, 9001, False, None, ""),
        ({"cgroup": "0::/lxc/9001"}, 9001, False, None, ""),
        ({"type": "G"}, 9001, False, None, ""),
        ({}, None, False, None, ""),
    ],
)
def test_processes_of_others(
    changes: dict[str, str], vmid: int | None, shared: bool, severity: Severity | None, words: str
) -> None:
    found = list(cards.process_findings(process(**changes), OURS, vmid, shared, "n"))
    assert said(found) == ([("HOST-GPU-PROCESS", severity)] if severity else [])
    assert all(words in finding.message for finding in found)


# --- Xids

B13 = (Path(__file__).parents[1] / "data/field-cases/B13-dmesg.txt").read_text()
BOOT = 1795968000  # 2026-11-29 16:00:00 UTC


def of(text: str, *spared: str) -> list[Finding]:
    return list(xids.xid_findings(xids.reports(text.splitlines(), BOOT), spared, "n"))


def test_b13() -> None:
    application, fatal = of(B13)
    assert (application.code, application.severity, application.subject) == (
        "HOST-XID-APPLICATION",
        INFO,
        "n, 0000:21:00",
    )
    assert (fatal.code, fatal.severity, fatal.subject) == ("HOST-XID-FATAL", ERROR, "n, 0000:a1:00")
    assert "Xid 62, a microcontroller of the card stopped; Xid 154" in fatal.message
    assert "GPU Reset Required" in fatal.message
    assert "power the node fully off" in fatal.fix
    assert "a warm reboot was reported not to help" in fatal.fix


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("[ 1.0] NVRM: loading NVIDIA UNIX Open Kernel Module", []),
        ("2026-11-29T15:30:00+00:00 pve1 kernel: NVRM: Xid (PCI:0000:a1:00): 79, x", []),  # of another boot
        ("2026-11-29T17:30:00+0100 pve1 kernel: NVRM: Xid (PCI:0000:a1:00): 79, x", [("HOST-XID-FATAL", ERROR)]),
        ("2026-11-29T16:30:00,123456 NVRM: Xid (PCI:0000:a1:00): 79, x", [("HOST-XID-FATAL", ERROR)]),
        ("[1] NVRM: Xid (PCI:0000:a1:00): 94, x", [("HOST-XID-MEMORY", WARNING)]),
        ("[1] NVRM: Xid (PCI:0000:a1:00): 95, x", [("HOST-XID-MEMORY", ERROR)]),
        ("[1] NVRM: Xid (PCI:0000:a1:00): 43, pid=1", [("HOST-XID-APPLICATION", INFO)]),
        ("[1] NVRM: Xid (PCI:0000:a1:00): 4711, x", [("HOST-XID-UNKNOWN", WARNING)]),
        ("[1] NVRM: Xid (PCI:0000:a1:00 GPU-I:05): 43, pid=1", [("HOST-XID-APPLICATION", INFO)]),
        ("[1] NVRM: Xid (0009:01:00): 13, pid=1", [("HOST-XID-APPLICATION", INFO)]),
        # a card that was reset is well again; another is not
        (
            "[1] NVRM: Xid (PCI:0000:a1:00): 119, x\n[2] NVRM: Xid (PCI:0000:21:00): 119, x\n"
            "[3] NVRM: Xid (PCI:0000:a1:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) "
            "to 0x0 (None)",
            [("HOST-XID-FATAL", ERROR)],
        ),
        (
            "[1] NVRM: Xid (PCI:0000:a1:00): 13, x\n[2] NVRM: Xid (PCI:0000:a1:00): 48, x\n"
            "[3] NVRM: Xid (PCI:0000:a1:00): 79, x\n[3] NVRM: Xid (PCI:0000:a1:00): 79, x",
            [("HOST-XID-FATAL", ERROR), ("HOST-XID-MEMORY", ERROR), ("HOST-XID-APPLICATION", INFO)],
        ),
    ],
)
def test_xids(text: str, expected: list[tuple[str, Severity]]) -> None:
    assert said(of(text)) == expected


def test_a_card_that_others_get_stops_nothing() -> None:
    text = "[1] NVRM: Xid (PCI:0000:a1:00): 79, x\n[1] NVRM: Xid (PCI:0000:a1:00): 95, x"
    assert said(of(text, "0000:a1:00.0")) == [("HOST-XID-FATAL", WARNING), ("HOST-XID-MEMORY", WARNING)]


def test_the_table_of_xids() -> None:
    table = xids.table()
    assert {number: row.kind for number, row in table.items() if number in (13, 31, 43, 45)} == dict.fromkeys(
        (13, 31, 43, 45), "application"
    )
    assert {table[number].kind for number in (48, 63, 64, 94, 95)} == {"memory"}
    assert {table[number].kind for number in (62, 79, 119, 120, 154, 169)} == {"fatal"}
    assert all(row.blocks for row in table.values() if row.kind == "fatal")
    assert not any(row.blocks for row in table.values() if row.kind == "application")
    assert all(row.source and row.action and row.name for row in table.values())
    assert xids.kind(4711) == "unknown"


# --- lines of a container's file

MAJORS = "Character devices:\n  1 mem\n 10 misc\n195 nvidia\n226 drm\n234 nvidia-caps\n509 hidraw\n511 nvidia-uvm\n"
RIGHT = "features: nesting=1\nunprivileged: 1\n"
RAW = "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional 0 0\n"


def lines(text: str, events: str = "") -> list[tuple[str, Severity]]:
    facts = {"config": text, "drivers": MAJORS, "cgroup": {"memory.events": events}}
    return said(container_lines.container_findings(facts, 9001, "n"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (RIGHT, []),
        (RIGHT + "lxc.cgroup2.devices.allow: c 195:* rwm\nlxc.cgroup2.devices.allow: c 511:* rwm\n", []),
        (RIGHT + "lxc.cgroup2.devices.allow: c 10:200 rwm\nlxc.cgroup2.devices.allow: c 226:* rwm\n", []),
        (RIGHT + "lxc.cgroup2.devices.allow: a\n", []),
        (RIGHT + "lxc.cgroup2.devices.allow: c 507:* rwm\n", [("HOST-CT-CGROUP", ERROR)]),
        (RIGHT + "lxc.cgroup2.devices.allow = c 507:0 rw\n", [("HOST-CT-CGROUP", ERROR)]),
        # 509 is somebody else's now: a stale rule only where cards are mounted by hand
        (RIGHT + "lxc.cgroup2.devices.allow: c 509:* rwm\n", []),
        (RIGHT + RAW + "lxc.cgroup2.devices.allow: c 509:* rwm\n", [("HOST-CT-CGROUP", ERROR)]),
        (RIGHT + RAW + "lxc.cgroup2.devices.allow: c 511:* rwm\nlxc.cgroup2.devices.allow: c 509:* rwm\n", []),
        # numbers that no driver of cards ever gets
        (RIGHT + RAW + "lxc.cgroup2.devices.allow: c 10:200 rwm\nlxc.cgroup2.devices.allow: c 189:* rwm\n", []),
        # one that is left over beside the right one does nothing
        (
            RIGHT + "lxc.cgroup2.devices.allow: c 507:* rwm\nlxc.cgroup2.devices.allow: c 511:* rwm\n",
            [("HOST-CT-CGROUP", WARNING)],
        ),
        (
            RIGHT + "lxc.cgroup2.devices.allow: a\nlxc.cgroup2.devices.allow: c 507:* rwm\n",
            [("HOST-CT-CGROUP", WARNING)],
        ),
        (
            RIGHT + "dev0: /dev/nvidia-uvm,mode=0666\nlxc.cgroup2.devices.allow: c 507:* rwm\n",
            [("HOST-CT-CGROUP", WARNING)],
        ),
        (RIGHT + "lxc.cgroup.devices.allow: c 195:* rwm\n", [("HOST-CT-CGROUP1", WARNING)]),
        (RIGHT + RAW, []),
        (RIGHT + RAW.replace("optional", "optional,create=file"), [("HOST-CT-CREATE", WARNING)]),
        (RIGHT + "lxc.mount.entry: /dev/dri dev/dri none bind,optional,create=file\n", []),
        (RIGHT + "dev0: path=/dev/nvidia0\n" + RAW, [("HOST-CT-TWICE", WARNING)]),
        (RIGHT + "\n[fresh]\nlxc.prlimit.memlock: unlimited\n", [("HOST-CT-SNAPSHOT", WARNING)]),
        (RIGHT + "lxc.prlimit.memlock: unlimited\n[fresh]\nlxc.prlimit.memlock: unlimited\n", []),
        ("unprivileged: 1\n", [("HOST-CT-NESTING", WARNING)]),
        ("features: keyctl=1,nesting=1\nunprivileged: 1\n", []),
        ("features: nesting=1\nlxc.apparmor.profile: unconfined\n", [("HOST-CT-UNCONFINED", WARNING)]),
        (RIGHT + "lxc.apparmor.profile: unconfined\n", []),
    ],
)
def test_lines_of_a_container(text: str, expected: list[tuple[str, Severity]]) -> None:
    assert lines(text) == expected


def test_processes_that_were_killed_for_memory() -> None:
    assert lines(RIGHT, "high 12\noom 0\noom_kill 0\n") == []
    assert lines(RIGHT, "high 12\noom 2\noom_kill 2\n") == [("HOST-CT-OOM", WARNING)]
