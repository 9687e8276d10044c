import json
import re
from pathlib import Path

import pytest

from pivot.findings import Severity
from pivot.pve import proxmox, proxmox_values
from pivot.pve.proxmox_refusals import explain, task_failed, transient

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
    (finding,) = proxmox.plan("infer", {"unprivileged": "0", "net0": CURRENT["net0"]}, CURRENT).findings
    assert finding.code == "PVE-UNPRIVILEGED"
    assert finding.severity is Severity.ERROR
    assert not proxmox.plan("infer", {"unprivileged": "1", "net0": CURRENT["net0"]}, CURRENT).findings


def test_a_container_of_another_name_is_somebody_elses():
    assert proxmox.owner_finding("llm01", 301, "infer", CURRENT) is None
    finding = proxmox.owner_finding("llm01", 301, "llm01", CURRENT)
    assert finding is not None
    assert finding.code == "PVE-VMID-TAKEN"
    assert "'infer'" in finding.message


def test_the_address_that_a_configuration_asks_for():
    assert (
        proxmox_values.static_address({"net0": "name=eth0,bridge=vmbr0,ip=192.0.2.31/24,gw=192.0.2.1"}) == "192.0.2.31"
    )
    assert proxmox_values.static_address({"net0": "name=eth0,bridge=vmbr0,ip=dhcp"}) is None
    assert proxmox_values.static_address({"net0": "name=eth0,bridge=vmbr0"}) is None
    assert proxmox_values.static_address({}) is None


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
         "PVE-PARAMETER", "memory: type check"),
    ],
)  # fmt: skip
def test_refusals_become_one_sentence_with_a_fix(status, reason, errors, code, words):
    finding = explain("infer1", status, reason, errors)
    assert finding.code == code
    assert any(word in finding.message for word in words.split("|"))
    assert finding.fix


@pytest.mark.parametrize(
    ("text", "gib"), [("700G", 700.0), ("8", 8.0), ("1T", 1024.0), ("512M", 0.5), ("vm-1.raw", None)]
)
def test_sizes(text, gib):
    assert proxmox_values.size_gib(text) == gib


@pytest.mark.parametrize(
    ("wanted", "actual"),
    [
        ({"onboot": "0"}, {}),
        ({"protection": "0", "swap": "512"}, {}),
        ({"features": "nesting=1,keyctl=0"}, {"features": "nesting=1"}),
        ({"features": ""}, {}),
        ({"tags": ""}, {}),
        ({"dev0": "/dev/nvidia0,mode=0660,uid=0"}, {"dev0": "/dev/nvidia0"}),
        ({"dev0": "path=/dev/nvidia0,deny-write=0"}, {"dev0": "/dev/nvidia0,mode=0660"}),
        ({"net0": "name=eth0,bridge=vmbr0,firewall=0"}, {"net0": "name=eth0,bridge=vmbr0,hwaddr=A,type=veth"}),
        ({"net0": "name=eth0,hwaddr=bc:24:11:aa:bb:cc"}, {"net0": "name=eth0,hwaddr=BC:24:11:AA:BB:CC,type=veth"}),
        ({"mp0": "fast:700,mp=/models"}, {"mp0": "fast:subvol-1,mp=/models,size=700G"}),
        ({"mp0": "fast:0.5,mp=/models"}, {"mp0": "fast:subvol-1,mp=/models,size=512M"}),
        ({"mp0": "/srv/models,mp=/models,ro=1"}, {"mp0": "/srv/models,mp=/models,ro=1"}),
        ({"mp0": "fast:subvol-1,mp=/models"}, {"mp0": "fast:subvol-1,mp=/models,size=700G"}),
        ({"startup": "up=5,order=2"}, {"startup": "order=2,up=5"}),
        ({"nameserver": "192.0.2.1 192.0.2.2"}, {"nameserver": "192.0.2.1,192.0.2.2"}),
        ({"searchdomain": "a.example, b.example"}, {"searchdomain": "a.example b.example"}),
        ({"tags": "GPU;Pivot"}, {"tags": "gpu;pivot"}),
        ({"cpulimit": "2.0", "cores": "4"}, {"cpulimit": 2, "cores": 4}),
        ({"description": "a\n\nb\n"}, {"description": "a\n\nb"}),
        ({"net0": "name=eth0,host-managed=0"}, {"net0": "name=eth0,hwaddr=A,type=veth"}),
        ({"dev0": "mode=0666,/dev/nvidia0"}, {"dev0": "/dev/nvidia0,mode=0666"}),  # the path may stand anywhere
        ({"net0": "name=eth0,,ip=dhcp, "}, {"net0": "name=eth0,hwaddr=A,ip=dhcp,type=veth"}),
        ({"startup": "up=5,2"}, {"startup": "order=2,up=5"}),
        ({"onboot": "1", "protection": "0"}, {"onboot": 1.0, "protection": "off"}),
        ({"onboot": "1"}, {"onboot": True}),
        ({"unprivileged": "1"}, {"unprivileged": 1.0}),
        ({"cpulimit": "0", "console": "1", "tty": "2", "cmode": "tty"}, {}),
        ({"description": "", "tags": ""}, {"description": None, "tags": ""}),
        ({"features": "nesting=1,mount=nfs;cifs"}, {"features": "mount=cifs;nfs,nesting=1"}),
        ({"mp0": "/srv,mp=/srv,mountoptions=nodev;noatime"}, {"mp0": "/srv,mp=/srv,mountoptions=noatime;nodev"}),
        ({"mp0": "fast:1.1,mp=/m"}, {"mp0": "fast:vm-1-disk-1,mp=/m,size=1126M"}),  # whole MiB are made
        ({"mp0": "fast:1024,mp=/m"}, {"mp0": "fast:vm-1-disk-1,mp=/m,size=1T"}),
        ({"mp0": "fast:0,mp=/m"}, {"mp0": "fast:1/vm-1-disk-1.subvol,mp=/m,size=0T"}),
        ({"rootfs": "ct:8.3"}, {"rootfs": "ct:vm-1-disk-0,size=8499M"}),
    ],
)
def test_what_says_the_same_is_no_difference(wanted, actual):
    plan = proxmox.plan("infer", wanted, actual)
    assert (plan.changes, plan.findings) == (False, ())


@pytest.mark.parametrize(
    ("wanted", "actual"),
    [
        ({"onboot": "1"}, {}),
        ({"cores": "4"}, {}),
        ({"features": "nesting=1"}, {"features": "nesting=1,keyctl=1"}),
        ({"dev0": "/dev/nvidia0,mode=0666"}, {"dev0": "/dev/nvidia0"}),
        ({"dev0": "/dev/nvidia0"}, {"dev0": "/dev/nvidia0,gid=44"}),
        ({"net0": "name=eth0,bridge=vmbr0"}, {"net0": "name=eth0,bridge=vmbr0,tag=7,type=veth"}),
        ({"net0": "name=eth0,bridge=vmbr0"}, {"net0": "name=eth0,bridge=vmbr0,firewall=1"}),
        ({"mp0": "fast:subvol-2,mp=/models"}, {"mp0": "fast:subvol-1,mp=/models,size=700G"}),
        ({"mp0": "/srv/models,mp=/models"}, {"mp0": "/srv/other,mp=/models"}),
        ({"mp0": "fast:700,mp=/models"}, {"mp0": "/srv/models,mp=/models"}),
        ({"nameserver": "192.0.2.2 192.0.2.1"}, {"nameserver": "192.0.2.1 192.0.2.2"}),
        ({"cpulimit": "2.5"}, {"cpulimit": 2}),
        ({"description": " a"}, {"description": "a\n"}),
        ({"tags": "a"}, {"tags": "a;b"}),
        ({"onboot": "0"}, {"onboot": 1.0}),
        ({"features": "mount=nfs"}, {"features": "mount=nfs;cifs"}),
        # an allocation that failed is still pending: it is asked for again, and is no volume
        ({"mp0": "fast:700,mp=/models"}, {"mp0": "fast:700,mp=/models"}),
    ],
)
def test_a_real_difference_is_one_key_to_send_and_no_other(wanted, actual):
    plan = proxmox.plan("infer", wanted, {"hostname": "infer", "memory": 512, **actual})
    assert plan.set == wanted
    assert plan.delete == plan.findings == ()


def test_an_emptied_value_is_deleted_and_never_sent_empty():
    plan = proxmox.plan("infer", {"features": "", "tags": ""}, {"features": "nesting=1", "tags": "a"})
    assert plan.set == {}
    assert plan.delete == ("features", "tags")


def test_interfaces_and_mounts_that_nobody_named_are_named_and_left():
    actual = {"net0": "name=eth0", "net1": "name=eth1", "mp3": "fast:subvol-1,mp=/x,size=1G"}
    plan = proxmox.plan("infer", {"net0": "name=eth0"}, actual)
    assert not plan.changes
    (finding,) = plan.findings
    assert (finding.code, finding.severity) == ("PVE-UNNAMED", Severity.WARNING)
    assert "mp3, net1" in finding.message


def test_keys_that_shall_not_be_there_are_removed_by_name():
    plan = proxmox.plan("infer", {"net0": "name=eth0"}, {"net0": "name=eth0", "mp3": "fast:x,mp=/x"}, ["mp3", "mp4"])
    assert plan.delete == ("mp3",)
    assert plan.findings == ()


def test_a_changed_interface_keeps_its_hardware_address():
    actual = {"net0": "name=eth0,bridge=vmbr0,hwaddr=BC:24:11:00:00:01,ip=dhcp,type=veth"}
    plan = proxmox.plan("infer", {"net0": "name=eth0,bridge=vmbr0,ip=dhcp,firewall=1"}, actual)
    assert plan.set == {"net0": "name=eth0,bridge=vmbr0,ip=dhcp,firewall=1,hwaddr=BC:24:11:00:00:01"}
    wanted = {"net0": "name=eth0,bridge=vmbr0,ip=dhcp,hwaddr=BC:24:11:00:00:02"}
    assert proxmox.plan("infer", wanted, actual).set == wanted


MOUNT = {"mp0": "fast:subvol-1,mp=/models,size=700G"}


def test_changed_options_of_a_mount_keep_its_volume():
    plan = proxmox.plan("infer", {"mp0": "fast:700,mp=/models,backup=1"}, MOUNT)
    assert plan.set == {"mp0": "fast:subvol-1,mp=/models,backup=1,size=700G"}
    assert not plan.findings
    assert proxmox.plan("infer", {"mp0": "fast:0.5,mp=/m"}, {"mp0": "fast:x,mp=/n,size=512M"}).set == {
        "mp0": "fast:x,mp=/m,size=512M"
    }


@pytest.mark.parametrize("wanted", ["slow:700,mp=/models", "fast:800,mp=/models"])
def test_a_volume_is_never_replaced_by_an_empty_one(wanted):
    (finding,) = proxmox.plan("infer", {"mp0": wanted}, MOUNT).findings
    assert (finding.code, finding.severity) == ("PVE-VOLUME", Severity.ERROR)
    assert "mp0 is a volume on fast with 700 GiB" in finding.message


@pytest.mark.parametrize(
    ("wanted", "actual"),
    [
        ("fast:700,mp=/models", {}),  # a new mount point
        ("fast:700,mp=/models", MOUNT),
        ("fast:subvol-2,mp=/models", MOUNT),  # somebody names another volume
        ("/srv/models,mp=/models", MOUNT),
    ],
)
def test_a_volume_may_be_made_or_named(wanted, actual):
    assert not proxmox.plan("infer", {"mp0": wanted}, actual).findings


@pytest.mark.parametrize(
    ("wanted", "codes"), [("ct:2", ["PVE-ROOTFS-SIZE"]), ("ct:1", []), ("other:1", []), ("ct:vm-1.raw", [])]
)
def test_another_size_of_the_root_file_system_is_said_and_never_sent(wanted, codes):
    plan = proxmox.plan("infer", {"rootfs": wanted, "dev0": "x", "dev1": "y", "net0": "z"}, CURRENT)
    assert [finding.code for finding in plan.findings] == codes
    assert "rootfs" not in plan.set


@pytest.mark.parametrize(
    ("wanted", "actual", "sent", "deleted"),
    [
        ("nesting=1,keyctl=0", "", "nesting=1", ()),  # an explicit 0 is a change that only root may make
        ("nesting=1,keyctl=0,fuse=off", "nesting=1,keyctl=1", "nesting=1", ()),
        ("nesting=0", "nesting=1", "", ("features",)),
        ("nesting=yes,mount=nfs;cifs", "nesting=1", "nesting=1,mount=nfs;cifs", ()),
    ],
)
def test_features_that_are_off_are_not_sent(wanted, actual, sent, deleted):
    current = {"features": actual} if actual else {}
    plan = proxmox.plan("infer", {"features": wanted}, current)
    assert plan.set == ({"features": sent} if sent else {})
    assert plan.delete == deleted


@pytest.mark.parametrize(
    ("key", "wanted", "sent"),
    [
        ("mp0", "fast:700,mp=/models", "fast:700,mp=/models"),
        ("mp0", "fast:700G,mp=/models,backup=0", "fast:700,mp=/models,backup=0"),  # 700G would be a volume's name
        ("mp0", "mp=/models,volume=fast:1T", "fast:1024,mp=/models"),
        ("rootfs", "ct:512M", "ct:0.5"),
        ("mp0", "fast:vm-101-disk-1,mp=/models", "fast:vm-101-disk-1,mp=/models"),
        ("mp0", "/srv/models,mp=/models", "/srv/models,mp=/models"),
    ],
)
def test_a_new_volume_is_asked_for_in_gib(key, wanted, sent):
    assert proxmox.to_create({key: wanted}) == {key: sent}


@pytest.mark.parametrize(
    ("key", "wanted", "sent"),
    [
        ("net0", "name=eth0, bridge=vmbr0 ,ip = dhcp\n", "name=eth0,bridge=vmbr0,ip=dhcp"),
        ("net1", "name=eth1, bridge=vmbr1,", "name=eth1,bridge=vmbr1"),
        ("dev0", "/dev/nvidia0, mode=0666", "/dev/nvidia0,mode=0666"),
        ("mp0", "/srv/my models, mp=/models", "/srv/my models,mp=/models"),
        ("mp1", "fast:700, mp=/models", "fast:700,mp=/models"),
        ("startup", "order=2, up=30", "order=2,up=30"),
    ],
)
def test_spaces_that_the_checks_pass_over_are_not_sent_and_are_no_difference(key, wanted, sent):
    assert proxmox.to_create({key: wanted}) == {key: sent}
    assert proxmox.plan("infer", {key: wanted}, {}).set == {key: sent}
    kept = sent.replace("fast:700", "fast:vm-101-disk-1,size=700G")
    assert not proxmox.plan("infer", {key: wanted}, {key: kept}).changes


def test_an_interface_keeps_its_address_and_loses_its_spaces():
    current = {"net0": "name=eth0,bridge=vmbr0,hwaddr=BC:24:11:00:00:01,type=veth"}
    plan = proxmox.plan("infer", {"net0": "name=eth0, bridge=vmbr1"}, current)
    assert plan.set == {"net0": "name=eth0,bridge=vmbr1,hwaddr=BC:24:11:00:00:01"}


def test_a_new_container_is_sent_what_says_something():
    assert proxmox.to_create({"features": "nesting=0", "hookscript": "", "swap": "0"}) == {"swap": "0"}


@pytest.mark.parametrize("version", ["8.2.4", "8.4", "9.0.3", "9.2.11", "9.11.1"])
def test_a_release_that_this_was_written_for_needs_no_words(version):
    assert proxmox.release_finding("infer", version) is None


@pytest.mark.parametrize("version", ["7.4-3", "8.1.11", "10.0.1", ""])
def test_any_other_release_is_named(version):
    finding = proxmox.release_finding("infer", version)
    assert finding is not None
    assert (finding.code, finding.severity) == ("PVE-RELEASE", Severity.WARNING)
    assert (version or "unknown") in finding.message


ROOT_KEYS = {"dev0": "/dev/nvidia0", "features": "nesting=1,fuse=1", "mp0": "/srv,mp=/srv", "hookscript": "local:x"}


@pytest.mark.parametrize(
    ("wanted", "actual", "expected"),
    [
        (ROOT_KEYS, None, ["dev0", "features", "mp0", "hookscript"]),
        ({"features": "nesting=1"}, {"features": "nesting=1,keyctl=1"}, ["features"]),  # a removed flag is a change
        ({"features": "nesting=1,keyctl=1"}, {"features": "keyctl=1", "unprivileged": 1}, []),
        ({"features": "nesting=1", "unprivileged": "1"}, None, []),
        ({"features": "nesting=1", "unprivileged": "0"}, None, ["features"]),  # all of a privileged one
        ({"features": "nesting=1"}, {"features": ""}, ["features"]),
        # Proxmox compares what is written, so that a flag of 0 which goes away is a change
        ({"features": "nesting=1"}, {"features": "keyctl=0", "unprivileged": 1.0}, ["features"]),
        ({"features": "nesting=1"}, {"features": "nesting=0", "unprivileged": 1.0}, []),
        ({"mp0": "fast:700,mp=/models"}, None, []),
        ({"memory": "1", "net0": "name=eth0"}, None, []),
    ],
)
def test_what_only_root_may_set(wanted, actual, expected):
    assert proxmox.root_only(wanted, actual) == expected


# --- every refusal of the recordings

RECORDINGS = json.loads((Path(__file__).parents[2] / "lab/tests/data/recordings-9.2.11.json").read_text())
# the recording's name → code, and words that the sentence has to say
REFUSALS = {
    "no auth": ("PVE-LOGIN", "No ticket"),
    "bad token": ("PVE-LOGIN", "Authentication failed!"),
    "write without csrf": ("PVE-LOGIN", "forgery"),
    "nextid taken bad": ("PVE-PARAMETER", "vmid: type check"),
    "content unknown storage": ("PVE-STORAGE", "'nope'"),
    "unknown node": ("PVE-NODE-OFFLINE", "'nosuch'"),
    "unknown path": ("PVE-VERSION", "/nodes/pve1/lxcx"),
    "unknown method": ("PVE-VERSION", "PUT /nodes/pve1/lxc"),
    "create: unknown param + bad int": ("PVE-PARAMETER", "bogus: property is not defined"),
    "create: missing ostemplate": ("PVE-PARAMETER", "ostemplate: property is missing"),
    "create: vmid too small": ("PVE-PARAMETER", "vmid: value does not look like a valid VM ID"),
    "create: hostname underscore": ("PVE-PARAMETER", "hostname: value does not look like a valid DNS name"),
    "create: memory too small": ("PVE-PARAMETER", "memory: value must have a minimum value of 16"),
    "create: net no prefix": ("PVE-PARAMETER", "net0.ip: value does not look like a valid ipv4"),
    "create: net missing name": ("PVE-PARAMETER", "net0.name: property is missing"),
    "create: net bad key": ("PVE-PARAMETER", "net0.speed: property is not defined"),
    "create: dev bad mode": ("PVE-PARAMETER", "dev0.mode: value does not match the regex pattern"),
    "create: dev no path": ("PVE-PARAMETER", "without a path"),
    "create: dev not /dev": ("PVE-PARAMETER", "/etc/passwd is not a valid device path"),
    "create: dev missing on host": ("PVE-DEVICE-MISSING", "/dev/nvidia7"),
    "create: dev256": ("PVE-PARAMETER", "dev256: property is not defined"),
    "create: lxc raw key": ("PVE-PARAMETER", "lxc.cgroup2.devices.allow: property is not defined"),
    "create: features bad": ("PVE-PARAMETER", "features.foo: property is not defined"),
    "create: tags bad char": ("PVE-PARAMETER", "tags: invalid characters in tag"),
    "create: mp without mp=": ("PVE-PARAMETER", "mp0.mp: property is missing"),
    "create: rootfs unknown storage": ("PVE-STORAGE", "'nope'"),
    "create: rootfs on local (no rootdir)": ("PVE-STORAGE", "'local' does not support container directories"),
    "create: template wrong type": ("PVE-TEMPLATE", "local:iso/x.iso"),
    "create: pool missing": ("PVE-POOL", "'nopool'"),
    "create: hookscript missing": ("PVE-HOOKSCRIPT", "local:snippets/none.sh"),
    "create: short password": ("PVE-PARAMETER", "password: value must be at least 5 characters"),
    "create: bad ssh key": ("PVE-PARAMETER", "ssh public key"),
    "create: cpulimit huge": ("PVE-PARAMETER", "cpulimit: value must have a maximum value of 8192"),
    "create: cores huge": ("PVE-PARAMETER", "cores: value must have a maximum value of 8192"),
    "create: onboot yes": ("PVE-PARAMETER", "onboot: type check ('boolean') failed"),
    "create: nameserver bad": ("PVE-PARAMETER", "nameserver: value does not look like a valid IP address"),
    "create: startup bad": ("PVE-PARAMETER", "startup: unable to parse startup options"),
    "root token: dev0": ("PVE-ROOT-ONLY", "not even root's"),
    "root token: features keyctl": ("PVE-ROOT-ONLY", "features"),
    "root token: bind mount": ("PVE-ROOT-ONLY", "bind mounts"),
    "root token: hookscript": ("PVE-ROOT-ONLY", "hook script"),
    "deploy token: dev0": ("PVE-ROOT-ONLY", "devices"),
    "deploy token: features keyctl": ("PVE-ROOT-ONLY", "features"),
    "deploy token: bind mount": ("PVE-ROOT-ONLY", "bind mounts"),
    "deploy token: hookscript": ("PVE-ROOT-ONLY", "hook script"),
    "deploy token: privileged": ("PVE-FORBIDDEN", "Sys.Modify"),
    "deploy: user create denied": ("PVE-FORBIDDEN", "Realm.AllocateUser"),
    "create: same id again": ("PVE-VMID-TAKEN", "CT 301 already exists"),
    "config of missing": ("PVE-NO-CONTAINER", "999.conf"),
    "status of missing": ("PVE-NO-CONTAINER", "999.conf"),
    "update: nothing": ("PVE-NOTHING-SENT", "without any key"),
    "update: cmode default (community.proxmox 2.0.0)": ("PVE-PARAMETER", "cmode: value 'default'"),
    "update: dev missing on host": ("PVE-DEVICE-MISSING", "/dev/nvidia9"),
    "update: unprivileged": ("PVE-READ-ONLY", "'unprivileged'"),
    "update: delete+set": ("PVE-PARAMETER", "delete: you can't use"),
    "update: delete unknown": ("PVE-PARAMETER", "delete: unknown option 'bogus'"),
    "update: delete rootfs": ("PVE-READ-ONLY", "'rootfs'"),
    "update: wrong digest": ("PVE-CHANGED-MEANWHILE", "while this run"),
    "update: root token dev": ("PVE-ROOT-ONLY", "devices"),
    "update: deploy dev": ("PVE-ROOT-ONLY", "devices"),
    "update: deploy delete dev": ("PVE-ROOT-ONLY", "devices"),
    "resize shrink": ("PVE-SHRINK", "never shrinks"),
    "stop not running": ("PVE-POWER", "CT 301 not running"),
    "shutdown not running": ("PVE-POWER", "CT 301 not running"),
    "start 301 again": ("PVE-POWER", "CT 301 already running"),
    "running: dev add": ("PVE-RESTART-NEEDED", "unable to hotplug dev4"),
    "delete running": ("PVE-RUNNING", "container is running"),
    "delete protected": ("PVE-PROTECTED", "protection mode enabled"),
    "delete missing": ("PVE-NO-CONTAINER", "301.conf"),
    "task status bogus": ("PVE-NO-TASK", "no such task"),
    "task status garbage": ("PVE-NO-TASK", "unable to parse worker upid"),
    "token create again": ("PVE-PARAMETER", "tokenid: Token already exists."),
}


@pytest.mark.parametrize("recording", [r for r in RECORDINGS if r["status"] >= 400], ids=lambda r: r["name"])
def test_every_refusal_of_the_recordings_is_one_sentence(recording):
    code, words = REFUSALS[recording["name"]]
    finding = explain("infer", recording["status"], recording["reason"], recording["body"].get("errors"))
    assert finding.code == code
    assert words in finding.message
    assert finding.fix
    assert "\n" not in finding.message + finding.fix
    assert not transient(recording["status"], recording["reason"])


FAILED_TASKS = {
    "create: template missing file": ("PVE-TEMPLATE", "local:vztmpl/nope.tar.zst"),
    "create: template bad string": ("PVE-TEMPLATE", "'nonsense'"),
    "start missing": ("PVE-NO-CONTAINER", "999.conf"),
}


def test_every_failed_task_of_the_recordings_is_one_sentence():
    ended = {r["name"]: r["exitstatus"] for r in RECORDINGS if "exitstatus" in r}
    assert len(ended) == 18
    failed = {name: result for name, result in ended.items() if not re.match(r"OK$|WARNINGS: \d+$", result)}
    assert failed.keys() == FAILED_TASKS.keys()
    for name, result in failed.items():
        finding = task_failed("infer", "vzcreate", result, [])
        assert (finding.code, FAILED_TASKS[name][1] in finding.message) == (FAILED_TASKS[name][0], True)


@pytest.mark.parametrize(
    ("status", "reason", "errors", "code", "words"),
    [
        (400, "Parameter verification failed.", {"memory": "unable to hotplug memory: unable to set memory.max\n"},
         "PVE-RESTART-NEEDED", "unable to hotplug memory"),
        (400, "Parameter verification failed.",
         {"mp0": "unable to apply pending change mp0 : lvcreate 'fast/vm-1' error: insufficient free space: 1 extents"},
         "PVE-STORAGE-FULL", "insufficient free space"),
        (400, "Parameter verification failed.", {"mp0": "unable to apply pending change mp0 : zfs: cannot create"},
         "PVE-NOT-APPLIED", "cannot create"),
        (500, "storage 'fast' is disabled", None, "PVE-STORAGE", "is disabled"),
        (500, "storage 'fast' is not available on node 'pve1'", None, "PVE-STORAGE", "not available on node"),
        (500, "storage 'local' does not allow content type 'rootdir' (Container)", None, "PVE-STORAGE", "rootdir"),
        (500, "unable to open file '/etc/pve/nodes/pve1/lxc/301.conf.tmp.77' - Permission denied\n", None,
         "PVE-NO-QUORUM", "301.conf.tmp.77"),
        (403, "Permission check failed (/vms/101, VM.Config.Disk|VM.Config.CPU)", None, "PVE-FORBIDDEN", "a privilege"),
        (403, "Permission check failed (/, Sys.Modify for modifying tag 'gpu')", None, "PVE-FORBIDDEN", "a privilege"),
        (403, "Permission check failed (mount point type device is only allowed for root@pam)", None,
         "PVE-ROOT-ONLY", "bind mounts"),
        (500, "CT is locked (backup)\n", None, "PVE-LOCKED", "(backup)"),
        (599, "Too many redirections", None, "PVE-NODE-OFFLINE", "Too many"),
        (500, "can't update CT 101 drive 'mp0' - protection mode enabled\n", None, "PVE-PROTECTED", "drive 'mp0'"),
    ],
)  # fmt: skip
def test_what_the_sources_say_is_one_sentence_too(status, reason, errors, code, words):
    finding = explain("infer", status, reason, errors)
    assert (finding.code, words in finding.message) == (code, True)
    assert "\n" not in finding.message
    assert finding.fix


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (500, "unable to create CT 101 - can't lock file '/run/lock/lxc/pve-config-101.lock' - got timeout"),
        (500, "cfs-lock 'file-replication_cfg' error: got lock request timeout"),
        (500, "cluster not ready - no quorum?"),
        (500, "got timeout\n"),
        (500, "CT is locked (backup)\n"),
        (503, "Service Unavailable"),
        (595, "No route to host"),
        (596, "Broken pipe"),
    ],
)
def test_what_passes_may_be_tried_again(status, reason):
    assert transient(status, reason)


def test_a_field_is_named_by_the_variable_that_sets_it():
    finding = explain("infer", 400, "Parameter verification failed.", {"dev3": "x", "ostemplate": "y", "memory": "z"})
    assert finding.fix == (
        "correct proxmox_container_devices, proxmox_container_memory, proxmox_container_template in the inventory"
    )


@pytest.mark.parametrize(
    ("result", "code"),
    [
        ("unable to create CT 101 - write failed: No space left on device", "PVE-STORAGE-FULL"),
        ("bridge 'vmbr9' does not exist", "PVE-BRIDGE"),
        ("can't lock file '/run/lock/lxc/pve-config-101.lock' - got timeout", "PVE-LOCKED"),
        ("cluster not ready - no quorum?", "PVE-NO-QUORUM"),
        ("Could not get mode or device ID of /dev/nvidia-uvm", "PVE-DEVICE-MISSING"),
        ("command 'tar' failed: exit code 2", "PVE-TASK-FAILED"),
    ],
)  # composed from the sources and from reports, not recorded
def test_a_failed_task_is_one_sentence_with_its_cause(result, code):
    finding = task_failed("infer", "vzstart", result, ["one line", "TASK ERROR"])
    assert finding.code == code
    assert "\n" not in finding.message


def test_what_nobody_knows_is_shown_as_it_is():
    finding = explain("infer", 500, "something new\n")
    assert (finding.code, finding.message) == ("PVE-REFUSED", "Proxmox answered 500: something new")
