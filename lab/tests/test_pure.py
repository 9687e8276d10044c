"""Decisions of the lab that need neither root nor containers; expectations are written by hand."""

from __future__ import annotations

import gc
import importlib.util
import ipaddress
import json
import os
import re
import socket
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pivot_lab import api, backend, cli, guests, machine, network, node, scratch, system
from pivot_lab.containers import Bind, Device, Nic, Spec, limits, render
from pivot_lab.errors import LabError
from pivot_lab.layout import Layout, check_name, choose_subnet, host

LAYOUT = Layout(Path("/srv/pivot"), Path("/srv/pivot/.cache"))
NET = ipaddress.IPv4Network


# ---------------------------------------------------------------- names


def test_names_derive_from_the_clones_path() -> None:
    # sha256("/srv/pivot") = 3824bcc2…
    assert LAYOUT.lab_id == "3824bcc2"
    assert LAYOUT.bridge == "pv3824bcc2"
    assert LAYOUT.container("ct101") == "3824bcc2-ct101"
    assert next(iter(LAYOUT.port_candidates())) == 21714
    assert Layout(Path("/srv/pivot2"), Path("/c")).lab_id != LAYOUT.lab_id


def test_interface_names_fit_linux() -> None:
    assert LAYOUT.veth("pve1.0") == "v3824bcc2175947"
    assert len(LAYOUT.veth("x" * 90)) == 15
    assert LAYOUT.veth("ct101.0") != LAYOUT.veth("ct101.1")


def test_a_link_and_its_target_are_the_same_clone(tmp_path: Path) -> None:
    (tmp_path / "clone").mkdir()
    (tmp_path / "link").symlink_to("clone")
    assert Layout.of(tmp_path / "link").lab_id == Layout.of(tmp_path / "clone").lab_id


@pytest.mark.parametrize("name", ["a", "sglang-server-instance", "x" * 40])
def test_usable_names(name: str) -> None:
    assert check_name(name, "layer") == name


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a_b", "../a", "a/b", "x" * 41, "a\n"])
def test_unusable_names_get_a_sentence(name: str) -> None:
    with pytest.raises(LabError, match="no usable name: give 1 to 40"):
        check_name(name, "layer")


# ---------------------------------------------------------------- network


def test_subnet_is_the_first_that_overlaps_nothing() -> None:
    candidates = [NET("10.64.0.0/24"), NET("10.64.1.0/24"), NET("10.64.2.0/24")]
    assert choose_subnet(candidates, []) == candidates[0]
    assert choose_subnet(candidates, [NET("10.64.0.128/25"), NET("10.64.1.7/32")]) == candidates[2]
    with pytest.raises(LabError, match="no free /24 network"):
        choose_subnet(candidates, [NET("10.0.0.0/8")])


def test_subnet_candidates_start_from_the_id_and_differ() -> None:
    candidates = list(LAYOUT.subnet_candidates())
    assert str(candidates[0]) == "10.67.109.0/24"
    assert len(set(candidates)) == 200
    assert all(candidate.subnet_of(NET("10.64.0.0/10")) for candidate in candidates)
    assert host(candidates[0], 2) == "10.67.109.2"


def test_a_taken_port_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert network.free_port([port, 0]) == 0
        with pytest.raises(LabError, match="no free port"):
            network.free_port([port])


def test_rules_name_only_this_labs_bridge() -> None:
    text = network.rules(LAYOUT)
    assert text.startswith("table inet pivot_lab_3824bcc2 {")
    assert 'iifname "pv3824bcc2" oifname != "pv3824bcc2" reject' in text
    assert 'iifname "pv3824bcc2" ct state established,related accept\n    iifname "pv3824bcc2" reject' in text


def test_scratch_addresses_rest_before_they_return() -> None:
    assert scratch.next_free(254, set()) == 128
    assert scratch.next_free(128, {129, 130}) == 131
    assert scratch.next_free(254, {128}) == 129
    with pytest.raises(LabError, match="all 127 scratch addresses are in use"):
        scratch.next_free(200, set(range(128, 255)))


# ---------------------------------------------------------------- machine


@pytest.mark.parametrize(
    ("text", "granted"),
    [
        ("root:100000:65536\n", True),
        ("0:100000:65536", True),
        ("root:1:1000000\n", True),
        ("", False),
        ("ubuntu:100000:65536\n", False),
        ("root:100000:65535\n", False),
        ("root:165536:65536\nroot:x:y\n", False),
    ],
)
def test_subordinate_ids(text: str, granted: bool) -> None:
    assert machine.grants_range(text) is granted


def test_missing_programs_are_named_as_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda tool: None if tool in {"nft", "lxc-start"} else "/bin/" + tool)
    with pytest.raises(LabError, match="these Debian packages are missing: lxc nftables;"):
        machine.require_tools()
    monkeypatch.setattr(machine.shutil, "which", lambda tool: "/bin/" + tool)
    machine.require_tools()


def test_every_package_that_a_program_comes_from_is_listed() -> None:
    listed = set((Path(__file__).parents[1] / "debian-packages.txt").read_text().split())
    assert set(machine.TOOLS.values()) - {"mount", "tar"} <= listed  # these two are on every Debian
    assert "mmdebstrap" in listed


def test_only_root_may(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(["--root", str(tmp_path), "up"]) == 1
    assert capsys.readouterr().err == "pivot-lab: the lab makes containers, a bridge and mounts: run it as root\n"


def test_a_root_that_is_no_directory_gets_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--root", "/nonexistent", "status"]) == 1
    assert capsys.readouterr().err.startswith("pivot-lab: --root names /nonexistent, which is no directory")


# ---------------------------------------------------------------- LXC configuration


def test_limits_follow_the_kernels_cgroups() -> None:
    spec = Spec("h", (), memory=512, swap=0, cores=2)
    assert limits(spec, {"memory": "v1", "cpu": "v1"}) == [
        ("lxc.cgroup.memory.limit_in_bytes", "536870912"), ("lxc.cgroup.cpu.cfs_quota_us", "200000"),
    ]  # fmt: skip
    assert limits(spec, {"memory": "v2", "cpu": "v2"}) == [
        ("lxc.cgroup2.memory.max", "536870912"), ("lxc.cgroup2.memory.swap.max", "0"),
        ("lxc.cgroup2.cpu.max", "200000 100000"),
    ]  # fmt: skip
    assert limits(spec, {}) == []
    assert limits(Spec("h", ()), {"memory": "v2", "cpu": "v2"}) == []


def test_rendered_configuration() -> None:
    spec = Spec(
        "infer1", (Nic("eth0", "BC:24:11:00:00:01", "10.64.0.11/24"), Nic("eth1", "BC:24:11:00:00:02", None)),
        devices=(Device("/dev/nvidia-caps/nvidia-cap1", "c", 235, 1),), binds=(Bind(Path("/run/x"), "/mnt/x", True),),
    )  # fmt: skip
    home = "/var/lib/pivot-lab/3824bcc2/lxc/3824bcc2-ct101"
    lines = render(LAYOUT, "ct101", spec, {}).splitlines()
    assert f"lxc.rootfs.path = dir:{home}/rootfs" in lines
    assert "lxc.idmap = u 0 100000 65536" in lines
    assert "lxc.idmap = g 0 100000 65536" in lines
    assert "lxc.net.0.link = pv3824bcc2" in lines
    assert "lxc.net.0.ipv4.address = 10.64.0.11/24" in lines
    assert not any(line.startswith("lxc.net.1.ipv4") or "gateway" in line for line in lines)
    assert (
        f"lxc.mount.entry = {home}/dev/nvidia-caps/nvidia-cap1 dev/nvidia-caps/nvidia-cap1 none bind,create=file 0 0"
    ) in lines
    assert "lxc.mount.entry = /run/x mnt/x none bind,create=dir,ro 0 0" in lines


# ---------------------------------------------------------------- from Proxmox's configuration to a container


@pytest.fixture
def lxc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> backend.LxcBackend:
    """A backend whose node shows /dev/nvidia0 as a plain copy of /dev/null's numbers, without mknod."""
    known = {"/dev/nvidia0": ("c", 195, 0), "/dev/nvidia-uvm": ("c", 511, 0)}
    monkeypatch.setattr(backend, "find_device", lambda _layout, path: known.get(path))
    return backend.LxcBackend(LAYOUT, NET("10.64.0.0/24"))


def test_a_configuration_becomes_a_spec(lxc: backend.LxcBackend) -> None:
    spec = lxc.spec({
        "hostname": "infer1", "memory": 4096, "swap": 0, "cores": 2,
        "net0": "name=eth0,bridge=pv3824bcc2,hwaddr=BC:24:11:00:00:01,ip=10.64.0.11/24,type=veth",
        "dev0": "/dev/nvidia0,mode=0666", "dev10": "path=/dev/nvidia-uvm,uid=5,gid=44",
    })  # fmt: skip
    assert spec == Spec(
        "infer1", (Nic("eth0", "BC:24:11:00:00:01", "10.64.0.11/24"),), memory=4096, swap=0, cores=2.0,
        devices=(
            Device("/dev/nvidia0", "c", 195, 0, 0o666), Device("/dev/nvidia-uvm", "c", 511, 0, 0o660, uid=5, gid=44),
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"mp0": "ct:1,mp=/models"}, "no mount points: leave out mp0"),
        ({"net0": "name=eth0,bridge=vmbr0"}, "bridge 'vmbr0' does not exist: this lab has pv3824bcc2 only"),
        ({"net0": "name=eth0,bridge=pv3824bcc2,ip=10.64.0.5/24,gw=10.64.0.1"}, "no gateway: leave out gw"),
        ({"net0": "name=eth0,bridge=pv3824bcc2,ip=dhcp"}, "no DHCP server: give a static address in 10.64.0.0/24"),
        ({"unprivileged": 0}, "unprivileged: set unprivileged=1"),
    ],
)
def test_what_would_be_pretence_is_refused(lxc: backend.LxcBackend, config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LabError, match=sentence):
        lxc.check(config)
    lxc.check({"net0": "name=eth0,bridge=pv3824bcc2,ip=10.64.0.5/24", "unprivileged": 1, "memory": 16})


@pytest.mark.parametrize("path", ["/dev/../etc/passwd", "/etc/passwd", "nvidia0", "/dev/sda"])
def test_the_node_has_no_such_device(path: str) -> None:
    assert node.find_device(LAYOUT, path) is None


def test_the_node_has_null() -> None:
    assert node.find_device(LAYOUT, "/dev/null") == ("c", 1, 3)


@pytest.mark.parametrize(
    "text",
    ["ssh-ed25519 AAAAC3Nz comment here", "ecdsa-sha2-nistp256 AAAA==", '# note\n\nfrom="10.0.0.1" ssh-rsa AAAA'],
)
def test_public_keys_pass(text: str) -> None:
    api.check_ssh_keys(text)


def test_no_public_key_is_refused() -> None:
    with pytest.raises(api.PveError, match="SSH public key validation error"):
        api.check_ssh_keys("ssh-ed25519 AAAA\nhello")


def test_link_local_address_of_a_hardware_address() -> None:
    assert api.link_local("BC:24:11:07:85:97") == "fe80::be24:11ff:fe07:8597"  # as the recording shows it


def test_guests_survive_on_disk_except_those_still_being_made(tmp_path: Path) -> None:
    path = tmp_path / "guests.json"
    whole = api.FakeCt(101, config={"hostname": "a", "description": "d"}, pending={"dev0": None}, defaults=False)
    half = api.FakeCt(102, config={"lock": "create"}, defaults=False)
    guests.Guests(path, tmp_path / "lxc").save([whole, half])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (loaded,) = guests.Guests(path, tmp_path / "lxc").load()
    assert (loaded.vmid, loaded.config, loaded.pending, loaded.status) == (
        101, {"hostname": "a", "description": "d"}, {"dev0": None}, "stopped",
    )  # fmt: skip
    assert guests.Guests(tmp_path / "none.json", tmp_path / "lxc").load() == []
    assert [entry.name for entry in (tmp_path / "lxc").iterdir()] == ["101.conf"]


FILE = """#50 %25%3A for %C3%A4
#
#end
cores: 2
hostname: a
lxc.prlimit.memlock: unlimited

[pve:pending]
dev0: /dev/nvidia0
delete: memory

[old]
hostname: a
lxc.tty.max: 4
"""


def test_the_nodes_files_are_what_proxmox_would_write_and_their_raw_lines_are_read_back(tmp_path: Path) -> None:
    lines = [["lxc.prlimit.memlock", "unlimited"]]
    config = {"hostname": "a", "cores": 2, "description": "50 %: for ä\n\nend", "lxc": lines}
    text = FILE.replace("dev0: /dev/nvidia0\ndelete: memory", "delete: memory\ndev0: /dev/nvidia0")
    assert (
        guests.render(config, {"dev0": "/dev/nvidia0", "memory": None}, "[old]\nhostname: a\nlxc.tty.max: 4\n") == text
    )
    assert guests.read_back(FILE) == (lines, "[old]\nhostname: a\nlxc.tty.max: 4\n")
    assert guests.read_back("lxc.tty.max = 4") == ([["lxc.tty.max", "4"]], "")


def test_what_the_node_wrote_stays_when_the_api_writes(tmp_path: Path) -> None:
    kept = guests.Guests(tmp_path / "guests.json", tmp_path / "lxc")
    guest = api.FakeCt(101, config={"hostname": "a"}, defaults=False)
    kept.save([guest])
    path = kept.file(101)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("hostname: a\n", 0o666)
    path.write_text("hostname: a\nlxc.tty.max: 4\n\n[old]\nhostname: b\n")
    guest.config["memory"] = 512
    kept.save([guest])
    assert path.read_text() == "hostname: a\nmemory: 512\nlxc.tty.max: 4\n\n[old]\nhostname: b\n"
    assert guest.config["lxc"] == [["lxc.tty.max", "4"]]
    kept.save([])
    assert not path.exists()
    kept.look([guest])
    assert "lxc" not in guest.config


# ---------------------------------------------------------------- system


def test_files_are_replaced_whole_with_their_mode(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "secret"
    system.write(path, "one", 0o600)
    system.write(path, "two", 0o600)
    assert path.read_text() == "two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def test_damaged_state_gets_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert system.read_json(path) == {}
    for text in ("{", "[]"):
        path.write_text(text)
        with pytest.raises(LabError, match="run `pivot-lab down`, then `pivot-lab up`"):
            system.read_json(path)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["no-such-program"], "the program 'no-such-program' is missing"),
        (["sh", "-c", "echo first; echo last >&2; exit 3"], "failed with exit status 3: last"),
        (["sleep", "99"], "did not end within 0 s"),
    ],
)
def test_programs_that_fail_get_a_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(LabError, match=sentence):
        system.run(argv, timeout=0.2 if argv[0] == "sleep" else 60)


def test_programs_get_a_small_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "x")
    assert "SOME_SECRET" not in system.run(["env"])


def test_a_lock_is_exclusive_even_when_its_holder_deletes_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    order: list[str] = []

    def second() -> None:
        with system.locked(path):
            order.append("second")
            assert path.exists()

    with system.locked(path):
        waiter = threading.Thread(target=second)
        waiter.start()
        time.sleep(0.1)
        path.unlink()
        order.append("first")
    waiter.join(5)
    assert order == ["first", "second"]


def test_long_steps_say_that_they_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    said, deadline = "", time.monotonic() + 10
    with system.step("waiting", Path("/x/log"), interval=0.05):
        while "so far" not in said and time.monotonic() < deadline:
            said += capsys.readouterr().err
    lines = (said + capsys.readouterr().err).splitlines()
    assert lines[0] == "waiting (log: /x/log)"
    assert re.fullmatch(r"  … waiting: \d+ s so far \(log: /x/log\)", lines[1])
    assert re.fullmatch(r"  done in \d+\.\d s", lines[-1])


def test_a_process_is_known_by_its_start_time() -> None:
    assert system.start_time(os.getpid()) == system.start_time(os.getpid()) != system.start_time(1)
    assert system.start_time(2**22 + 1) is None


def test_the_vault_password_script_prints_the_labs_password(tmp_path: Path) -> None:
    script = tmp_path / "lab" / "vault-password"
    script.parent.mkdir()
    script.write_text((Path(__file__).parents[1] / "vault-password").read_text())
    script.chmod(0o755)
    assert system.run([script]) == "the lab is not up\n"
    system.write(tmp_path / ".lab" / "vault-password", "made-up\n", 0o600)
    assert system.run([script]) == "made-up\n"


def test_recordings_hold_no_credential() -> None:
    text = (Path(__file__).parent / "data" / "recordings-9.2.11.json").read_text()
    assert "PVEAPIToken" not in text
    assert all(entry["auth"] in {"ticket", "root", "deploy", "none", "badtok", "nocsrf"} for entry in json.loads(text))


# ---------------------------------------------------------------- beside the engine


@pytest.mark.parametrize(
    ("argv", "paused"),
    [
        (["python", "-m", "sglang.launch_server", "--config", "launch.yaml"], True),
        (["python", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"], True),
        (["python", "-m", "pip", "install"], False),
    ],
)
def test_only_a_servers_processes_pause_the_collector_and_until_their_plugins_load(
    argv: list[str], paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(__file__).resolve().parents[1] / "kernels/src/sglang_cpu_lab/collector.py"
    spec = importlib.util.spec_from_file_location("collector", path)  # it is installed beside engines alone
    assert spec and spec.loader
    collector = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(collector)
    monkeypatch.setattr(sys, "orig_argv", argv)
    try:
        collector.pause()
        assert gc.isenabled() is not paused
    finally:
        collector.resume()
    assert gc.isenabled()
