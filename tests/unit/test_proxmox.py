import pytest

from pivot import proxmox
from pivot.findings import Severity

CURRENT = {
    "arch": "amd64", "cores": 2, "description": "managed by ansible\n", "dev0": "/dev/nvidia0,mode=0666",
    "dev1": "/dev/nvidiactl,gid=44", "digest": "d", "features": "nesting=1,keyctl=1", "hostname": "infer",
    "memory": 1024, "net0": "name=eth0,bridge=vmbr0,gw=192.0.2.10,hwaddr=MAC,ip=192.0.2.31/24,type=veth",
    "rootfs": "ct:301/vm-301-disk-0.raw,size=1G", "tags": "gpu;infer", "unprivileged": 1,
}  # fmt: skip


def test_field_case_b06_removed_flags_are_seen_and_a_volume_is_not_allocated_twice():
    current = {
        "features": "nesting=1,keyctl=1",
        "net0": "name=eth0,bridge=vmbr0,ip=192.0.2.10/24,firewall=1",
        "memory": 512,
        "mp0": "fast:subvol-9001-disk-1,mp=/models,size=700G",
    }
    wanted = {
        "features": "nesting=1",
        "net0": "name=eth0,bridge=vmbr0,ip=192.0.2.10/24",
        "memory": "786432",
        "mp0": "fast:700,mp=/models",
    }
    plan = proxmox.plan("llm01", wanted, current)
    assert plan.set == {
        "features": "nesting=1",
        "net0": "name=eth0,bridge=vmbr0,ip=192.0.2.10/24",
        "memory": "786432",
    }
    assert plan.delete == ()


def test_the_servers_own_additions_order_and_newlines_are_no_difference():
    wanted = {
        "description": "managed by ansible",
        "dev0": "mode=0666,path=/dev/nvidia0",
        "dev1": "/dev/nvidiactl,gid=44",
        "net0": "bridge=vmbr0,name=eth0,ip=192.0.2.31/24,gw=192.0.2.10",
        "tags": "infer;gpu",
        "features": "keyctl=1,nesting=1",
        "memory": "1024",
    }
    plan = proxmox.plan("infer", wanted, CURRENT)
    assert not plan.changes
    assert plan.before == plan.after == {}


def test_a_wanted_mac_address_is_compared():
    wanted = {
        "net0": "name=eth0,bridge=vmbr0,gw=192.0.2.10,hwaddr=OTHER,ip=192.0.2.31/24",
        "dev0": "x",
        "dev1": "y",
    }
    assert "net0" in proxmox.plan("infer", wanted, CURRENT).set


def test_devices_are_managed_as_a_whole_and_other_keys_are_left_alone():
    plan = proxmox.plan("infer", {"dev0": "/dev/nvidia0,mode=0666"}, CURRENT)
    assert plan.set == {}
    assert plan.delete == ("dev1",)
    assert plan.needs_stop
    assert plan.before == {"dev1": "/dev/nvidiactl,gid=44"}


def test_memory_alone_needs_no_stop():
    wanted = {"memory": "2048", "dev0": "/dev/nvidia0,mode=0666", "dev1": "/dev/nvidiactl,gid=44"}
    plan = proxmox.plan("infer", wanted, CURRENT)
    assert plan.set == {"memory": "2048"}
    assert not plan.needs_stop


def test_rootfs_and_template_are_never_sent_to_an_existing_container():
    wanted = {
        "rootfs": "ct:99",
        "ostemplate": "local:vztmpl/x",
        "ssh-public-keys": "k",
        "dev0": "a",
        "dev1": "b",
    }
    assert not {"rootfs", "ostemplate", "ssh-public-keys"} & proxmox.plan("infer", wanted, CURRENT).set.keys()


def test_unprivileged_cannot_be_changed_and_says_so():
    (finding,) = proxmox.plan("infer", {"unprivileged": "0"}, CURRENT).findings
    assert finding.code == "PVE-UNPRIVILEGED"
    assert finding.severity is Severity.ERROR
    assert not proxmox.plan("infer", {"unprivileged": "1"}, CURRENT).findings


def test_a_container_of_another_name_is_somebody_elses():
    assert proxmox.owner_finding("llm01", 301, "infer", CURRENT) is None
    finding = proxmox.owner_finding("llm01", 301, "llm01", CURRENT)
    assert finding is not None
    assert finding.code == "PVE-VMID-TAKEN"
    assert "'infer'" in finding.message


def test_the_address_that_a_configuration_asks_for():
    assert proxmox.static_address({"net0": "name=eth0,bridge=vmbr0,ip=192.0.2.31/24,gw=192.0.2.1"}) == "192.0.2.31"
    assert proxmox.static_address({"net0": "name=eth0,bridge=vmbr0,ip=dhcp"}) is None
    assert proxmox.static_address({"net0": "name=eth0,bridge=vmbr0"}) is None
    assert proxmox.static_address({}) is None


def test_pending_keys_from_the_recording():
    pending = [
        {"key": "dev0", "pending": "/dev/nvidia0,mode=0660", "value": "/dev/nvidia0,mode=0666"},
        {"key": "swap", "value": 0},
        {"delete": 1, "key": "dev1", "value": "/dev/nvidiactl,gid=44"},
    ]
    assert proxmox.pending_keys(pending) == ["dev0", "dev1"]


@pytest.mark.parametrize(
    ("status", "reason", "errors", "code", "words"),
    [
        (403, "Permission check failed (configuring device passthrough is only allowed for root@pam)", None,
         "PVE-ROOT-ONLY", "not even root's"),
        (403, "Permission check failed (changing feature flags (except nesting) is only allowed for root@pam)", None,
         "PVE-ROOT-ONLY", "empty value"),
        (403, "Permission check failed (mount point type bind is only allowed for root@pam)", None,
         "PVE-ROOT-ONLY", "bind mounts"),
        (403, "Forbidden", None, "PVE-FORBIDDEN", "may not"),
        (400, "Parameter verification failed.", {"privs": "invalid format - invalid privilege 'VM.Monitor'"},
         "PVE-PRIVILEGE", "no longer exists"),
        (500, "Device /dev/nvidia7 does not exist\n", None, "PVE-DEVICE-MISSING", "/dev/nvidia7"),
        (401, "authentication failure", None, "PVE-LOGIN", "credentials"),
        (500, "detected modified configuration - file changed by other user? Try again.\n", None,
         "PVE-CHANGED-MEANWHILE", "meanwhile|while this run"),
        (400, "Parameter verification failed.", {"memory": "type check ('integer') failed - got 'abc'"},
         "PVE-REFUSED", "memory: type check"),
    ],
)  # fmt: skip
def test_refusals_become_one_sentence_with_a_fix(status, reason, errors, code, words):
    finding = proxmox.explain("infer1", status, reason, errors)
    assert finding.code == code
    assert any(word in finding.message for word in words.split("|"))
    assert finding.fix


@pytest.mark.parametrize(
    ("text", "gib"), [("700G", 700.0), ("8", 8.0), ("1T", 1024.0), ("512M", 0.5), ("vm-1.raw", None)]
)
def test_sizes(text, gib):
    assert proxmox.size_gib(text) == gib
