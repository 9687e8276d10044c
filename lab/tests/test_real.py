"""The lab itself: real containers through the API with proxmoxer, as the project uses it."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from pivot_lab import daemon, network, system
from pivot_lab.containers import Containers, Identity, cgroup_controllers, put
from pivot_lab.errors import LabError
from pivot_lab.layout import ID_BASE
from pivot_lab.template import tree
from proxmoxer import ProxmoxAPI, ResourceException

from pivot.pve.proxmox_api import Access

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.lxc
VMID = 101


class Api:
    """The API as root@pam, with the facts of lab.yml."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.facts: dict[str, Any] = yaml.safe_load(lab.layout.inventory_vars.read_text())
        password = json.loads(lab.layout.secrets.read_text())["vault_proxmox_password"]
        self.root = self.connect(user="root@pam", password=password)
        self.node = self.root.nodes("pve1")

    def connect(self, user: str, **login: str) -> ProxmoxAPI:
        facts = self.facts
        access = Access(facts["lab_api_host"], facts["lab_api_port"], user, facts["lab_api_ca"], **login)
        return access.connect("the lab's tests")

    def finish(self, upid: str) -> str:
        """The exit status of a worker task, waited for."""
        for _ in range(900):
            task = self.node.tasks(upid).status.get()
            if task["status"] == "stopped":
                return str(task["exitstatus"])
            time.sleep(0.05)
        raise AssertionError(f"{upid} did not end")

    def wanted(self, vmid: int = VMID, **more: Any) -> dict[str, Any]:
        facts = self.facts
        return {
            "vmid": vmid, "hostname": f"guest{vmid}", "ostemplate": facts["lab_template"], "rootfs": "ct:4",
            "storage": "ct", "memory": 512, "swap": 0, "cores": 1, "unprivileged": 1, "features": "nesting=1",
            "net0": f"name=eth0,bridge={facts['lab_bridge']},ip={self.address(vmid)}/24",
            "ssh-public-keys": facts["lab_ssh_public_key"], **more,
        }  # fmt: skip

    def address(self, vmid: int) -> str:
        return str(self.facts["lab_gateway"]).rsplit(".", 1)[0] + f".{vmid - 90}"


@pytest.fixture(scope="module")
def api(lab: Any) -> Api:
    return Api(lab)


@pytest.fixture(scope="module")
def guest(api: Api) -> int:
    """A running container with two devices; its vmid."""
    wanted = api.wanted(dev0="/dev/nvidia0,mode=0640,uid=33,gid=44", dev1="/dev/nvidia-uvm", start=1, description="d")
    assert api.finish(api.node.lxc.post(**wanted)) == "OK"
    return VMID


def pid_of(api: Api, vmid: int) -> int:
    return int(api.node.lxc(vmid).status.current.get()["pid"])


def wait_until_up(api: Api, vmid: int) -> None:
    """Until systemd has started everything there. Before that, a request to end is lost."""
    ask = f"pct exec {vmid} -- systemctl is-system-running"
    for _ in range(300):
        if api.lab.ssh(api.facts["lab_addresses"]["pve1"], ask).stdout.strip() == "running":
            return
        time.sleep(0.2)
    raise AssertionError("it did not come up")


def learn_host_key(api: Api, vmid: int) -> Path:
    """A known_hosts file with the container's key, learnt from the node."""
    lab = api.lab
    shown = lab.ssh(api.facts["lab_addresses"]["pve1"], f"pct exec {vmid} -- cat /etc/ssh/ssh_host_ed25519_key.pub")
    assert shown.returncode == 0, shown.stderr
    path: Path = lab.layout.dot / f"known-{vmid}"
    path.write_text(f"{api.address(vmid)} {shown.stdout}")
    return path


# ---------------------------------------------------------------- up


def test_up_again_changes_nothing(lab: Any, api: Api) -> None:
    facts, vault = lab.layout.inventory_vars.read_text(), lab.layout.inventory_vault.read_text()
    ran = daemon.running(lab.layout)
    done = lab.run("up")
    assert ran == daemon.running(lab.layout) is not None
    assert "the lab was already up" in done.stderr
    assert (lab.layout.inventory_vars.read_text(), lab.layout.inventory_vault.read_text()) == (facts, vault)


def test_secrets_are_for_root_only_and_the_vault_holds_them(lab: Any, api: Api) -> None:
    layout = lab.layout
    assert stat.S_IMODE(layout.dot.stat().st_mode) == 0o700
    for path in (layout.secrets, layout.vault_password, layout.ssh_key, layout.certificate_key):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    shown = subprocess.run(
        ["ansible-vault", "view", "--vault-password-file", layout.vault_password, layout.inventory_vault],
        capture_output=True, text=True, check=True, cwd="/",
    ).stdout  # fmt: skip
    secrets = json.loads(layout.secrets.read_text())
    assert yaml.safe_load(shown) == secrets
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = process.read_text(errors="replace")
        except OSError:  # it ended in the meantime
            continue
        assert not any(value in text for value in secrets.values())


def test_token_and_password_open_the_api_and_nothing_else_does(api: Api) -> None:
    token = json.loads(api.lab.layout.secrets.read_text())["vault_proxmox_token_value"]
    deploy = api.connect(user="deploy@pve", token_id="pivot", token_secret=token)
    assert deploy.version.get()["version"] == "9.2.11"
    with pytest.raises(ResourceException, match=r"403.*device passthrough is only allowed for root@pam"):
        deploy.nodes("pve1").lxc.post(**api.wanted(199, dev0="/dev/nvidia0"))
    with pytest.raises(ResourceException, match="401"):
        api.connect(user="deploy@pve", token_id="pivot", token_secret="wrong").version.get()


def test_the_certificate_is_the_labs_own(api: Api) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        ssl.create_default_context().wrap_socket(
            socket.create_connection(("127.0.0.1", api.facts["lab_api_port"])), server_hostname="127.0.0.1"
        )


# ---------------------------------------------------------------- containers of the API


def test_a_created_container_is_a_machine_of_its_own(api: Api, guest: int) -> None:
    known = learn_host_key(api, guest)
    Containers(api.lab.layout).wait_for_ssh(f"ct{guest}", api.address(guest))
    shown = api.lab.ssh(
        api.address(guest),
        "systemctl is-system-running --wait; hostname; getent hosts guest101; ip route; id -un",
        known,
    )
    lines = shown.stdout.splitlines()
    assert lines[:2] == ["running", "guest101"], shown.stderr
    assert lines[2].split() == [api.address(guest), "guest101"]  # as on a real node, whatever listens on its own name
    assert not any(line.startswith("default") for line in lines)
    assert lines[-1] == "root"
    assert len(Path(f"/proc/{pid_of(api, guest)}/root/etc/machine-id").read_text().strip()) == 32


def test_it_is_unprivileged(api: Api, guest: int) -> None:
    status = Path(f"/proc/{pid_of(api, guest)}/status").read_text()
    assert f"Uid:\t{ID_BASE}\t{ID_BASE}" in status


def test_devices_are_real_nodes_owned_by_the_mapped_ids(api: Api, guest: int) -> None:
    root = Path(f"/proc/{pid_of(api, guest)}/root/dev")
    nvidia0, uvm = (root / "nvidia0").stat(), (root / "nvidia-uvm").stat()
    assert stat.S_ISCHR(nvidia0.st_mode)
    assert (os.major(nvidia0.st_rdev), os.minor(nvidia0.st_rdev)) == (195, 0)
    assert (nvidia0.st_uid, nvidia0.st_gid, stat.S_IMODE(nvidia0.st_mode)) == (ID_BASE + 33, ID_BASE + 44, 0o640)
    assert (os.major(uvm.st_rdev), uvm.st_uid, stat.S_IMODE(uvm.st_mode)) == (511, ID_BASE, 0o660)
    assert not (root / "nvidiactl").exists()  # on the node, but not asked for
    seen = Containers(api.lab.layout).execute(f"ct{guest}", ["stat", "-c", "%u %g %a %t", "/dev/nvidia0"])
    assert seen.stdout == b"33 44 640 c3\n"


def test_memory_is_limited_and_can_be_changed_while_it_runs(api: Api, guest: int) -> None:
    if "memory" not in cgroup_controllers():
        pytest.skip("this kernel cannot limit memory")

    def limit() -> int:
        name = api.lab.layout.container(f"ct{guest}")
        files = [*Path("/sys/fs/cgroup").rglob(f"*{name}*/memory.limit_in_bytes"),
                 *Path("/sys/fs/cgroup").rglob(f"*{name}*/memory.max")]  # fmt: skip
        (payload,) = [path for path in files if "payload" in path.parent.name]
        return int(payload.read_text())

    assert limit() == 512 * 1024**2
    api.node.lxc(guest).config.put(memory=640)
    assert limit() == 640 * 1024**2


def test_a_network_change_waits_for_the_next_start(api: Api, guest: int) -> None:
    net0 = api.wanted()["net0"]
    api.node.lxc(guest).config.put(net0=net0 + ",mtu=1400")
    pending = {item["key"]: item for item in api.node.lxc(guest).pending.get()}
    assert "mtu=1400" in pending["net0"]["pending"]
    assert "mtu" not in pending["net0"]["value"]
    api.node.lxc(guest).config.put(revert="net0")


def test_a_device_the_node_lacks_is_refused(api: Api, guest: int) -> None:
    with pytest.raises(ResourceException, match="Device /dev/nvidia7 does not exist"):
        api.node.lxc(guest).config.put(dev2="/dev/nvidia7")
    with pytest.raises(ResourceException, match="unable to hotplug dev2"):
        api.node.lxc(guest).config.put(dev2="/dev/nvidiactl")


def test_what_the_lab_cannot_do_is_refused_in_a_sentence(api: Api, guest: int) -> None:
    for call in (
        api.node.lxc(guest).status.suspend.post,
        lambda: api.node.lxc(guest).snapshot.post(snapname="before"),
        lambda: api.node.lxc(guest).clone.post(newid=150),
        lambda: api.node.lxc(guest).resize.put(disk="rootfs", size="+1G"),
    ):
        with pytest.raises(ResourceException, match="the lab cannot do this for real"):
            call()


def test_stop_start_reboot_shutdown(api: Api, guest: int) -> None:
    first = pid_of(api, guest)
    status = api.node.lxc(guest).status
    wait_until_up(api, guest)
    assert api.finish(status.reboot.post(timeout=30)) == "OK"
    second = pid_of(api, guest)
    assert second != first
    assert system.start_time(first) is None
    assert api.finish(status.stop.post()) == "OK"
    assert system.start_time(second) is None
    assert api.node.lxc(guest).status.current.get()["status"] == "stopped"
    assert api.finish(status.start.post()) == "OK"
    wait_until_up(api, guest)
    assert api.finish(status.shutdown.post(timeout=30)) == "OK"
    assert api.finish(status.start.post()) == "OK"
    assert system.start_time(pid_of(api, guest)) is not None


def test_a_container_that_ends_by_itself_shows_as_stopped(api: Api, guest: int) -> None:
    os.kill(pid_of(api, guest), signal.SIGKILL)
    for _ in range(100):
        if api.node.lxc(guest).status.current.get()["status"] == "stopped":
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the API still shows it as running")
    assert api.finish(api.node.lxc(guest).status.start.post()) == "OK"


def test_containers_survive_the_daemon(lab: Any, api: Api, guest: int) -> None:
    before, config = pid_of(api, guest), api.node.lxc(guest).config.get()
    pid = daemon.running(lab.layout)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert "the lab is up" in lab.run("up").stderr
    again = Api(lab)
    assert pid_of(again, guest) == before
    assert again.node.lxc(guest).config.get() == config


def test_a_create_that_the_daemon_did_not_finish_leaves_nothing(lab: Any, api: Api, guest: int) -> None:
    for _ in range(3):  # on a machine that stands still for a moment it may be finished before the kill
        api = Api(lab)
        api.node.lxc.post(**api.wanted(102))
        pid = daemon.running(lab.layout)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        lab.run("up")
        api = Api(lab)
        if 102 not in {int(item["vmid"]) for item in api.node.lxc.get()}:
            break
        api.finish(api.node.lxc(102).delete())
    assert {int(item["vmid"]) for item in Api(lab).node.lxc.get()} == {guest}
    assert not Containers(lab.layout).home("ct102").exists()
    assert not [path for path in system.mounts_below(lab.layout.machine) if "ct102" in str(path)]


def test_a_create_that_fails_leaves_nothing(lab: Any) -> None:
    containers = Containers(lab.layout)
    identity = Identity("", key_types=("no-such-type",))
    with pytest.raises(LabError, match="ssh-keygen"):
        containers.create("ct150", [tree(lab.layout)], "x", identity, lambda _line: None)
    assert not containers.home("ct150").exists()
    assert not [path for path in system.mounts_below(lab.layout.machine) if "ct150" in str(path)]


def test_the_nodes_files_of_containers_are_only_written_in_place(lab: Any, guest: int) -> None:
    """What pmxcfs refuses is refused; what is written there counts from the next start on."""
    api = Api(lab)
    node, path = api.facts["lab_addresses"]["pve1"], f"/etc/pve/lxc/{guest}.conf"
    assert f"hostname: guest{guest}\n" in lab.ssh(node, f"cat {path}").stdout
    for command in (
        f"chmod 640 {path}", f"chown root {path}", f"mv {path} {path}.old", f"touch {path}.new",
        f"cp {path} /root/c && mv /root/c {path}", f"rm {path}", f"sed -i s/a/b/ {path}",
    ):  # fmt: skip
        assert lab.ssh(node, command).returncode != 0, command
    assert lab.ssh(node, f"echo 'lxc.prlimit.nofile: 4321' >> {path}").returncode == 0
    assert api.node.lxc(guest).config.get()["lxc"] == [["lxc.prlimit.nofile", "4321"]]
    assert "lxc.prlimit.nofile: 4321\n" in lab.ssh(node, f"pct config {guest}").stdout
    assert "lxc" not in [item["key"] for item in api.node.lxc(guest).pending.get()]
    api.node.lxc(guest).config.put(description="changed through the API")
    assert lab.ssh(node, f"cat {path}").stdout.startswith("#changed through the API\n")
    assert lab.ssh(node, f"tail -n 1 {path}").stdout == "lxc.prlimit.nofile: 4321\n"
    wait_until_up(api, guest)
    assert api.finish(api.node.lxc(guest).status.shutdown.post()) == "OK"
    assert api.finish(api.node.lxc(guest).status.start.post()) == "OK"
    assert "4321" in Path(f"/proc/{pid_of(api, guest)}/limits").read_text()


def test_destroy_leaves_nothing(lab: Any, guest: int) -> None:
    api = Api(lab)
    with pytest.raises(ResourceException, match="container is running"):
        api.node.lxc(guest).delete()
    pid = pid_of(api, guest)
    assert api.finish(api.node.lxc(guest).delete(force=1, purge=1)) == "OK"
    assert system.start_time(pid) is None
    assert not Containers(lab.layout).home(f"ct{guest}").exists()
    assert api.node.lxc.get() == []


# ---------------------------------------------------------------- the node


def test_pct_answers_five_verbs_and_refuses_the_rest(lab: Any, api: Api) -> None:
    node = Api(lab).facts["lab_addresses"]["pve1"]
    assert lab.ssh(node, "pct list").stdout == "VMID       Status     Lock         Name                \n"
    missing = lab.ssh(node, "pct status 999")
    assert (missing.returncode, missing.stderr) == (2, "Configuration file 'nodes/pve1/lxc/999.conf' does not exist\n")
    refused = lab.ssh(node, "pct destroy 101")
    assert refused.returncode == 255
    assert (
        refused.stderr
        == "pct: the lab's stand-in knows list, status, config, set, exec; 'destroy' goes through the API\n"
    )
    assert lab.ssh(node, "pct set 999 --memory 1").returncode == 2
    assert lab.ssh(node, "pct exec").stderr == "pct: usage: pct exec <vmid> -- <command>\n"


def test_the_nodes_stand_in_devices_say_what_they_are(lab: Any) -> None:
    node = Api(lab).facts["lab_addresses"]["pve1"]
    shown = lab.ssh(
        node, "stat -c '%t %T %U' /dev/nvidia0 /dev/nvidiactl /dev/nvidia-uvm; cat /etc/motd; : < /dev/nvidia0"
    )
    assert shown.stdout.splitlines()[:3] == ["c3 0 root", "c3 ff root", "1ff 0 root"]
    assert "stand-ins without a driver" in shown.stdout
    assert "No such device or address" in shown.stderr


def test_a_wrong_host_key_is_not_accepted(lab: Any, tmp_path: Path) -> None:
    node = Api(lab).facts["lab_addresses"]["pve1"]
    wrong = tmp_path / "known_hosts"
    own = lab.layout.ssh_key.with_suffix(".pub").read_text().split()
    wrong.write_text(f"{node} {own[0]} {own[1]}\n")
    assert "Host key verification failed" in lab.ssh(node, "true", wrong).stderr
    assert lab.ssh(node, "true").returncode == 0


# ---------------------------------------------------------------- scratch containers and the network


@pytest.fixture
def scratched(lab: Any) -> Iterator[dict[str, Any]]:
    made: dict[str, Any] = json.loads(lab.run("scratch", "up", "one", "--memory", "256").stdout)
    yield made
    lab.run("scratch", "down", "one")


def test_no_way_out_of_a_container(lab: Any, neighbour: Any, scratched: dict[str, Any]) -> None:
    other = json.loads(neighbour.run("scratch", "up", "two").stdout)
    gateway = Api(lab).facts["lab_gateway"]
    inside = Path(scratched["known_hosts"])

    def reach(address: str, port: int, seconds: int = 3) -> str:
        command = f"timeout {seconds} bash -c 'echo > /dev/tcp/{address}/{port}' 2>&1 && echo REACHED"
        return str(lab.ssh(scratched["address"], command, inside).stdout)

    assert "Network is unreachable" in reach("192.0.2.9", 80, 30)
    assert "REACHED" not in reach(gateway, int(Api(lab).facts["lab_api_port"]))
    # also where containers' roots make themselves a way, and this machine would forward
    other_gateway = other["address"].rsplit(".", 1)[0] + ".1"
    lab.ssh(scratched["address"], f"ip route add default via {gateway}", inside)
    neighbour.ssh(other["address"], f"ip route add default via {other_gateway}", Path(other["known_hosts"]))
    for layout in (lab.layout, neighbour.layout):
        Path(f"/proc/sys/net/ipv4/conf/{layout.bridge}/forwarding").write_text("1")
    assert "REACHED" not in reach(other["address"], 22)
    assert "REACHED" not in reach("192.0.2.9", 80)
    for layout in (lab.layout, neighbour.layout):
        subprocess.run(["nft", "delete", "table", "inet", layout.table], check=True)
    assert "REACHED" in reach(other["address"], 22, 30)  # so it was the rules that held
    neighbour.run("scratch", "down", "two")
    lab.run("up")
    assert network.rules_stand(lab.layout)
    assert "REACHED" not in reach(other_gateway, 22)


def test_a_layer_makes_what_was_installed_instant(lab: Any, scratched: dict[str, Any]) -> None:
    known = Path(scratched["known_hosts"])
    change = "mkdir -p /opt/a/b && echo kept > /opt/a/b/c && echo new > /etc/motd && rm /etc/debian_version"
    lab.ssh(scratched["address"], change, known)
    assert "saved in" in lab.run("layer", "save", "one", "big").stderr
    assert lab.run("layer", "list").stdout == "big\n"
    clone = json.loads(lab.run("scratch", "up", "clone", "--layer", "big").stdout)
    try:
        command = (
            "cat /opt/a/b/c /etc/motd; ls /etc/debian_version; mv /opt/a /opt/z && mv /usr/games /usr/g && hostname"
        )
        shown = lab.ssh(clone["address"], command, Path(clone["known_hosts"]))
        assert shown.stdout == "kept\nnew\nclone\n", shown.stderr
        assert "the layer 'big' is used by the container s-clone" in lab.run("layer", "drop", "big", check=False).stderr
        assert (
            "there is no layer 'small' (saved: big)"
            in lab.run("scratch", "up", "x", "--layer", "small", check=False).stderr
        )
    finally:
        lab.run("scratch", "down", "clone")
    lab.run("layer", "drop", "big")
    assert lab.run("layer", "list").stdout == ""


def test_a_directory_of_a_container_becomes_a_layer_and_the_container_stays(lab: Any) -> None:
    made = json.loads(lab.run("scratch", "up", "donor").stdout)
    try:
        change = (
            "mkdir -p /opt/a/b && echo kept >/opt/a/b/c && ln -s b/c /opt/a/l && chown 7:8 /opt/a/b && touch /etc/n"
        )
        lab.ssh(made["address"], change, Path(made["known_hosts"]))
        assert "copied to" in lab.run("layer", "copy", "s-donor", "/opt/a", "part").stderr
        assert "already exists" in lab.run("layer", "copy", "s-donor", "/opt/a", "part", check=False).stderr
        assert "has added no directory /opt/z" in lab.run("layer", "copy", "s-donor", "/opt/z", "z", check=False).stderr
        assert lab.run("layer", "list").stdout == "part\n"
        assert Path(lab.run("layer", "show", "part").stdout.strip(), "opt/a/b/c").read_text() == "kept\n"
        clone = json.loads(lab.run("scratch", "up", "heir", "--layer", "part").stdout)
        look = "cat /opt/a/l; stat -c %u:%g:%a /opt /opt/a /opt/a/b; ls /etc/n; hostname"
        shown = lab.ssh(clone["address"], look, Path(clone["known_hosts"]))
        assert shown.stdout == "kept\n0:0:755\n0:0:755\n7:8:755\nheir\n", shown.stderr
        assert lab.ssh(made["address"], "hostname", Path(made["known_hosts"])).stdout == "donor\n"
    finally:
        lab.run("scratch", "down", "heir")
        lab.run("scratch", "down", "donor")
    lab.run("layer", "drop", "part")


def test_scratch_containers_made_at_once_do_not_collide(lab: Any) -> None:
    with ThreadPoolExecutor(3) as pool:
        made = [json.loads(done.stdout) for done in pool.map(lambda name: lab.run("scratch", "up", name), "abc")]
    assert len({item["address"] for item in made}) == 3
    for item in made:
        shown = lab.ssh(item["address"], "hostname", Path(item["known_hosts"]))
        assert shown.stdout.strip() == item["name"], shown.stderr
    assert {item["name"] for item in json.loads(lab.run("scratch", "list").stdout)} == {"a", "b", "c"}
    assert "already exists" in lab.run("scratch", "up", "a", check=False).stderr
    for name in "abc":
        lab.run("scratch", "down", name)
    assert json.loads(lab.run("scratch", "list").stdout) == []


def test_no_link_in_a_container_leads_a_write_out_of_it(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "hosts").write_text("mine")
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc" / "hosts").symlink_to(outside / "hosts")
    put(root, "etc/hosts", "new")
    assert (outside / "hosts").read_text() == "mine"
    assert (root / "etc" / "hosts").read_text() == "new"
    (root / "etc" / "hosts").unlink()
    (root / "etc").rmdir()
    (root / "etc").symlink_to(outside)
    with pytest.raises(LabError, match="cannot be written"):
        put(root, "etc/hosts", "new")
    assert (outside / "hosts").read_text() == "mine"


def test_containers_outlive_their_bridge(lab: Any) -> None:
    made = json.loads(lab.run("scratch", "up", "stays").stdout)
    known = Path(made["known_hosts"])
    subprocess.run(["ip", "link", "del", lab.layout.bridge], check=True)
    lab.run("up")
    assert lab.ssh(made["address"], "hostname", known).stdout == "stays\n"
    for path in (lab.layout.dot / "state.json", lab.layout.secrets, lab.layout.ca):
        path.unlink()  # as where someone cleans the clone under a running lab
    lab.run("up")
    assert lab.ssh(made["address"], "hostname", known).stdout == "stays\n"
    assert Api(lab).root.version.get()["version"] == "9.2.11"
    lab.run("scratch", "down", "stays")


# ---------------------------------------------------------------- down


def traces(lab: Any) -> list[str]:
    """Everything on this machine that bears the mark of a lab, the cache aside."""
    layout = lab.layout
    found = [
        str(path)
        for path in (layout.dot, layout.machine, layout.inventory_vars, layout.inventory_vault)
        if path.exists()
    ]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if layout.lab_id in line]
    found += [path.name for path in Path("/sys/class/net").iterdir() if layout.lab_id in path.name]
    found += [line for line in system.run(["nft", "list", "tables"]).splitlines() if layout.lab_id in line]
    found += [str(path) for path in Path("/sys/fs/cgroup").rglob(f"*{layout.lab_id}*") if path.is_dir()]
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = process.read_text(errors="replace").replace("\0", " ")
        except OSError:  # it ended in the meantime
            continue
        if layout.lab_id in text or (f"--root {layout.root} " in text and " daemon" in text):
            found.append(text)
    return found


def test_down_leaves_no_trace_and_touches_no_other_lab(lab: Any, neighbour: Any) -> None:
    other = json.loads(neighbour.run("scratch", "up", "stays").stdout)
    lab.run("up")
    lab.run("scratch", "up", "goes")
    archive = list(lab.layout.cache.glob("template-*.tar.zst"))
    assert traces(lab)
    lab.run("down")
    assert traces(lab) == []
    assert list(lab.layout.cache.glob("template-*.tar.zst")) == archive
    assert "there is no lab of" in lab.run("down").stderr
    assert neighbour.ssh(other["address"], "hostname", Path(other["known_hosts"])).stdout == "stays\n"
    neighbour.run("down")
    assert traces(neighbour) == []


def test_a_half_made_lab_is_finished_or_removed(lab: Any) -> None:
    layout = lab.layout
    lab.run("scratch", "up", "early")  # base only: no API, no node
    assert daemon.running(layout) is None
    lab.run("up")
    os.kill(daemon.running(layout) or 0, signal.SIGKILL)  # ... as after a machine's crash
    subprocess.run(["ip", "link", "del", layout.bridge], check=True)
    Containers(layout).kill("pve1")
    Containers(layout).unmount("pve1")
    layout.inventory_vault.unlink()
    for part in ("secrets.json", "state.json"):
        (layout.dot / part).unlink()
    assert "the lab is up" in lab.run("up").stderr
    assert lab.ssh(Api(lab).facts["lab_addresses"]["pve1"], "pct list").returncode == 0
    system.write(layout.dot / "state.json", "{")
    assert "is damaged" in lab.run("up", check=False).stderr
    lab.run("down")
    assert traces(lab) == []
