"""Raw lines of a container: what differs, and the node's file, which is written in place and survives a kill."""

import errno
import fcntl
import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pivot.pve import proxmox_raw
from pivot.pve.proxmox_raw import Edits, answered, edits, findings, parsed

SOAK = bool(os.environ.get("PIVOT_SOAK"))
SCRIPT = Path(__file__).parents[2] / "roles/proxmox_container/files/raw_lines.py"
MEMLOCK = ("lxc.prlimit.memlock", "unlimited")
MOUNT = ("lxc.mount.entry", "/dev/x dev/x none bind,optional,create=file")
# as Proxmox writes it: description, keys, raw lines, what waits for a restart, snapshots with raw lines of their own
HEAD = """#Managed by Pivot%3A 100 %25
#second line
arch: amd64
cores: 2
hostname: llm01
memory: 2048
lxc.idmap: u 0 100000 65536
lxc.prlimit.memlock = 65536
"""
TAIL = """
[pve:pending]
dev0: /dev/nvidia0

[before-update]
#as it was
hostname: llm01
lxc.prlimit.memlock: 65536
snaptime: 1767225600
"""


# --- what differs


def test_lines_as_the_inventory_says_them() -> None:
    assert parsed([{"lxc.prlimit.memlock": "unlimited"}, {"lxc.tty.max": 4}]) == (MEMLOCK, ("lxc.tty.max", "4"))


def test_switches_and_nothing_of_yaml_are_written_as_lxc_reads_them() -> None:
    lines = parsed(yaml.safe_load("[{lxc.autodev: yes}, {lxc.hook.version: false}, {lxc.cap.drop: }]"))
    assert lines == (("lxc.autodev", "1"), ("lxc.hook.version", "0"), ("lxc.cap.drop", ""))
    assert [finding.message for finding in findings("llm01", lines)] == [
        "proxmox_container_lxc: the value of lxc.cap.drop is empty, or no single line"
    ]


@pytest.mark.parametrize(
    ("wanted", "actual", "remove", "expected"),
    [
        ([MEMLOCK], [], [], Edits(add=(MEMLOCK,))),
        ([MEMLOCK], [MEMLOCK], [], Edits()),
        ([MEMLOCK], [["lxc.prlimit.memlock", "65536"]], [], Edits((("lxc.prlimit.memlock", "65536"),), (MEMLOCK,))),
        # each mount entry stands for itself, and lines that nobody named are kept
        ([MOUNT], [["lxc.mount.entry", "/a a none bind"], MEMLOCK], [], Edits(add=(MOUNT,))),
        ([], [MEMLOCK, MOUNT], [], Edits()),
        ([], [MEMLOCK, MOUNT], ["lxc.prlimit.memlock"], Edits(remove=(MEMLOCK,))),
        ([], [MEMLOCK, MOUNT], [f"lxc.mount.entry:  {MOUNT[1]}"], Edits(remove=(MOUNT,))),
        ([MOUNT], [["lxc.mount.entry", "/a a none bind"], MOUNT], ["lxc.mount.entry"],
         Edits(remove=(("lxc.mount.entry", "/a a none bind"),))),
        ([("lxc.cgroup2.devices.allow", "c 195:* rwm")], [["lxc.cgroup2.devices.allow", "c 511:* rwm"]], [],
         Edits(add=(("lxc.cgroup2.devices.allow", "c 195:* rwm"),))),
        ([("lxc.cgroup2.memory.high", "1")], [["lxc.cgroup2.memory.high", "2"]], [],
         Edits((("lxc.cgroup2.memory.high", "2"),), (("lxc.cgroup2.memory.high", "1"),))),
    ],
)  # fmt: skip
def test_what_differs(wanted: Any, actual: Any, remove: list[str], expected: Edits) -> None:
    found = edits(wanted, actual, remove)
    assert found == expected
    assert found.changes is bool(expected.remove or expected.add)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("lxc.prlimits.memlock", "1"), "did you mean lxc.prlimit.memlock?"),
        (("lxc.rootfs.path", "/x"), "Proxmox's own"),
        (("lxc.cgroup.devices.allow", "c 195:* rwm"), "write lxc.cgroup2."),
        (("memory", "1"), "knows no raw key memory"),
        (("lxc.prlimit.memlock", ""), "is empty"),
        (("lxc.prlimit.memlock", "1\nhostname: db01"), "no single line"),
        (("lxc.environment", "A=\x00"), "no single line"),
        (("lxc.prlimit.memlock\n", "1"), "knows no raw key"),
    ],
)
def test_what_proxmox_would_drop_is_refused(line: proxmox_raw.Line, words: str) -> None:
    said = findings("llm01", [line])
    assert {finding.code for finding in said} == {"PVE-RAW-LINE"}
    assert words in " ".join(f"{finding.message} {finding.fix}" for finding in said)


def test_a_key_given_twice_is_refused_where_the_last_would_win() -> None:
    (finding,) = findings("llm01", [MEMLOCK, ("lxc.prlimit.memlock", "1")])
    assert "lxc.prlimit.memlock is given 2 times" in finding.message
    assert findings("llm01", [MOUNT, ("lxc.mount.entry", "/a a none bind"), MEMLOCK]) == []


def test_lines_of_an_inventory_are_looked_at_before_any_node() -> None:
    assert proxmox_raw.deployed("llm01", {"proxmox_container_lxc": [{"lxc.mistyped": 1}]})[0].code == "PVE-RAW-LINE"
    for right in ({}, {"proxmox_container_lxc": [{"lxc.prlimit.memlock": "unlimited"}]}):
        assert proxmox_raw.deployed("llm01", right) == []
    assert proxmox_raw.deployed("llm01", {"proxmox_container_lxc": ["lxc.mistyped: 1"]}) == []  # a matter of types


@pytest.mark.parametrize(
    ("problem", "detail", "code", "words"),
    [
        ("missing", ["/etc/pve/lxc/9.conf"], "PVE-NO-CONTAINER", "/etc/pve/lxc/9.conf"),
        ("locked", ["backup"], "PVE-LOCKED", "(backup)"),
        ("refused", ["Permission denied"], "PVE-RAW-WRITE", "Permission denied"),
        ("broken", ["No space left on device", "/var/lib/pivot/lxc-9.json"], "PVE-RAW-WRITE", "lxc-9.json"),
        ("unverified", ["/var/lib/pivot/lxc-9.json"], "PVE-RAW-WRITE", "lxc-9.json"),
        ("interrupted", ["/var/lib/pivot/lxc-9.json"], "PVE-RAW-WRITE", "lxc-9.json"),
    ],
)
def test_what_the_node_says_is_one_sentence(problem: str, detail: list[str], code: str, words: str) -> None:
    (finding,) = answered("llm01", {"problem": problem, "detail": detail})
    assert (finding.code, words in finding.message) == (code, True)
    assert answered("llm01", {"problem": "", "detail": []}) == []


# --- the node's file


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script over directories of this machine."""
    spec = importlib.util.spec_from_file_location("raw_lines", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("CONFIGS", "LOCKS", "COPIES"):
        monkeypatch.setattr(module, name, tmp_path / name.lower())
    module.CONFIGS.mkdir()
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.2)
    (module.CONFIGS / "101.conf").write_text(HEAD + TAIL)
    return module


def apply(node: ModuleType, remove: Any = (), add: Any = ()) -> dict[str, Any]:
    request = {
        "do": "apply",
        "vmid": 101,
        "remove": [list(item) for item in remove],
        "add": [list(item) for item in add],
    }
    said: dict[str, Any] = node.answer(json.loads(json.dumps(request)))
    return said


def text(node: ModuleType) -> str:
    return str((node.CONFIGS / "101.conf").read_text())


def left(node: ModuleType) -> list[Path]:
    """Everything beside the configuration itself and the lock."""
    return [*(path for path in node.CONFIGS.iterdir() if path.name != "101.conf"), *node.COPIES.glob("*")]


REPLACE = {"remove": [("lxc.prlimit.memlock", "65536")], "add": [MEMLOCK, MOUNT]}


def test_lines_are_written_above_the_first_section_and_nothing_else_is_touched(node: ModuleType) -> None:
    said = apply(node, **REPLACE)
    kept = HEAD.replace("lxc.prlimit.memlock = 65536\n", "")
    assert text(node) == f"{kept}lxc.prlimit.memlock: unlimited\nlxc.mount.entry: {MOUNT[1]}\n{TAIL}"
    assert (said["changed"], said["problem"]) == (True, "")
    assert said["lines"] == [["lxc.idmap", "u 0 100000 65536"], list(MEMLOCK), list(MOUNT)]
    assert left(node) == []


def test_a_second_time_nothing_is_written(node: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(node, **REPLACE)
    monkeypatch.setattr(node, "write", None)
    assert apply(node, **REPLACE)["changed"] is False


def test_gather_only_reads(node: ModuleType) -> None:
    said = node.answer({"do": "gather", "vmid": 101})
    assert said["lines"] == [["lxc.idmap", "u 0 100000 65536"], ["lxc.prlimit.memlock", "65536"]]
    assert (said["lock"], said["interrupted"], said["changed"]) == ("", "", False)
    assert not node.LOCKS.exists()
    assert node.answer({"do": "gather", "vmid": 102})["problem"] == "missing"


@pytest.mark.parametrize("tail", ["", "\n", TAIL])
@pytest.mark.parametrize("head", ["", "hostname: a", "hostname: a\n", "#only a comment\n\n"])
def test_any_shape_of_file(node: ModuleType, head: str, tail: str) -> None:
    (node.CONFIGS / "101.conf").write_text(head + tail)
    assert apply(node, add=[MEMLOCK])["lines"] == [list(MEMLOCK)]
    written = text(node)
    assert written.endswith(tail.lstrip("\n"))
    assert all(line in written.split("\n") for line in head.split("\n"))
    assert apply(node, remove=[MEMLOCK])["lines"] == []
    assert "lxc.prlimit.memlock: unlimited" not in text(node)


@pytest.mark.parametrize("lock", ["backup", "snapshot", "migrate"])
def test_a_locked_configuration_is_not_touched(node: ModuleType, lock: str) -> None:
    (node.CONFIGS / "101.conf").write_text(f"lock: {lock}\n{HEAD}{TAIL}")
    said = apply(node, **REPLACE)
    assert (said["problem"], said["detail"], text(node)) == ("locked", [lock], f"lock: {lock}\n{HEAD}{TAIL}")


def test_proxmoxs_own_lock_is_waited_for_and_respected(node: ModuleType) -> None:
    node.LOCKS.mkdir()
    with (node.LOCKS / "pve-config-101.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert apply(node, **REPLACE)["problem"] == "locked"
        assert text(node) == HEAD + TAIL
    assert apply(node, **REPLACE)["changed"] is True


class Pmxcfs:
    """A stand-in for what pmxcfs refuses below a directory; the lab's node refuses it by ownership."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.refused = str(directory), 0
        for name in ("rename", "replace", "chmod", "chown", "link", "unlink"):
            monkeypatch.setattr(os, name, self.guarded(getattr(os, name)))
        for name in ("fchmod", "fchown"):
            monkeypatch.setattr(os, name, self.refuse)

    def refuse(self, *_: Any, **__: Any) -> None:
        self.refused += 1
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def guarded(self, function: Any) -> Any:
        def call(*paths: Any, **rest: Any) -> Any:
            if any(str(path).startswith(self.directory) for path in paths):
                self.refuse()
            return function(*paths, **rest)

        return call


def test_what_pmxcfs_refuses_is_never_asked_for(node: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Pmxcfs(node.CONFIGS, monkeypatch)
    inode = (node.CONFIGS / "101.conf").stat().st_ino
    assert apply(node, **REPLACE)["changed"] is True
    assert refusing.refused == 0
    assert (node.CONFIGS / "101.conf").stat().st_ino == inode
    with pytest.raises(PermissionError):  # the stand-in itself
        (node.CONFIGS / "101.conf").rename(node.CONFIGS / "other")


def test_a_file_system_without_quorum_is_named_and_nothing_is_left(
    node: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "pwrite", refuse)
    said = apply(node, **REPLACE)
    assert (said["problem"], said["detail"]) == ("refused", ["Permission denied"])
    assert (text(node), left(node)) == (HEAD + TAIL, [])


SHORTER = {"remove": [("lxc.prlimit.memlock", "65536"), ("lxc.idmap", "u 0 100000 65536")]}


@pytest.mark.parametrize("change", [REPLACE, SHORTER], ids=["longer", "shorter"])
@pytest.mark.parametrize("after", [0, 1, 60, 170, 10_000], ids=lambda count: f"{count} bytes")
def test_a_killed_write_is_finished_by_the_next_run(
    node: ModuleType, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], after: int
) -> None:
    """pwrite takes what it takes and then the process is gone, before the file is cut."""
    real = os.pwrite

    def killed(descriptor: int, data: bytes, offset: int) -> int:
        real(descriptor, data[:after], offset)
        raise KeyboardInterrupt

    expected = node.edited(HEAD + TAIL, [list(line) for line in change.get("remove", ())],
                           [list(line) for line in change.get("add", ())])  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", killed)
        with pytest.raises(KeyboardInterrupt):
            apply(node, **change)
    assert node.answer({"do": "gather", "vmid": 101})["interrupted"] == str(node.COPIES / "lxc-101.json")
    assert (node.COPIES / "lxc-101.json").stat().st_mode & 0o777 == 0o600
    apply(node)
    assert (text(node), left(node)) == (expected, [])


def test_a_write_that_breaks_off_names_the_copy(node: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:200], offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        said = apply(node, **REPLACE)
    assert (said["problem"], said["detail"]) == (
        "broken",
        ["No space left on device", str(node.COPIES / "lxc-101.json")],
    )
    assert apply(node)["changed"] is True
    assert "lxc.prlimit.memlock: unlimited" in text(node)


def test_a_file_that_somebody_changed_after_a_killed_write_is_left_to_a_person(node: ModuleType) -> None:
    node.COPIES.mkdir()
    copy = node.COPIES / "lxc-101.json"
    copy.write_text(json.dumps({"before": HEAD, "after": HEAD + "lxc.tty.max: 4\n"}))
    said = apply(node, **REPLACE)
    assert (said["problem"], said["detail"]) == ("interrupted", [str(copy)])
    assert (text(node), copy.exists()) == (HEAD + TAIL, True)


def test_a_copy_that_was_not_finished_means_that_nothing_was_written(node: ModuleType) -> None:
    node.COPIES.mkdir()
    (node.COPIES / "lxc-101.json").write_text('{"before": "#Man')
    assert apply(node, **REPLACE)["changed"] is True
    assert left(node) == []


def test_a_file_that_another_writes_at_the_same_time_is_seen(node: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def foreign(path: Path, _old: bytes, _new: bytes) -> None:
        path.write_text("hostname: db01\n")

    monkeypatch.setattr(node, "write", foreign)
    said = apply(node, **REPLACE)
    assert (said["problem"], said["detail"]) == ("unverified", [str(node.COPIES / "lxc-101.json")])
    assert json.loads((node.COPIES / "lxc-101.json").read_text())["before"] == HEAD + TAIL


LINES = st.lists(
    st.sampled_from(
        ["#note", "hostname: a", "memory: 512", "", "lxc.tty.max: 4", "lxc.idmap = u 0 1 2", "odd\u2028line"]
    )
)
SECTIONS = st.lists(st.sampled_from(["[pve:pending]", "[one]", "lxc.tty.max: 4", "#note", "snaptime: 1", ""]))
RAW = st.lists(
    st.sampled_from([["lxc.tty.max", "4"], ["lxc.idmap", "u 0 1 2"], ["lxc.prlimit.memlock", "1"]]), unique_by=str
)


@settings(max_examples=150, deadline=None, derandomize=not SOAK, database=None)
@given(head=LINES, tail=SECTIONS, remove=RAW, add=RAW)
def test_for_any_file_and_any_edits(head: list[str], tail: list[str], remove: Any, add: Any) -> None:
    spec = importlib.util.spec_from_file_location("raw_lines", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = "\n".join([*head, "[first]", *tail]) + "\n"
    after = module.edited(before, remove, add)
    above, below = after.split("[first]\n", 1)
    assert below == before.split("[first]\n", 1)[1]
    others = [line for line in head if not line.startswith("lxc.")]
    assert [line for line in above.split("\n")[:-1] if not line.startswith("lxc.")] == others
    raw = [module.parsed(line) for line in above.split("\n") if line.startswith("lxc.")]
    assert all(line in raw for line in add)
    assert not [line for line in raw if line in remove and line not in add]
    assert module.edited(after, [line for line in remove if line not in add], add) == after
    old, new = before.encode(), after.encode()
    whole = module.padded(old, new)
    for done in range(0, len(whole) + 1, 7):
        assert module.between(old, new, whole[:done] + old[done:])
