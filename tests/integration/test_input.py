"""Bad input: one sentence each (what, where it was set, what would be right), all of a run at once, nothing changed.

Comes after test_deploy.py: every case here is refused beside a server that goes on serving.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess

import pytest
import requests
import yaml
from pivot_lab.containers import Containers
from pivot_lab.layout import Layout

from .conftest import ROOT, existing

WRONG = ROOT / ".lab/wrong"  # two levels below the project, as the variables of a copied inventory want it


def run(*arguments, inventory="inventory/lab", environment=None):
    """What a person sees who types this: exit status and output."""
    done = subprocess.run(
        ["ansible-playbook", "-i", str(inventory), *arguments],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1", **(environment or {})},
    )
    return done.returncode, done.stdout + done.stderr


def refused(lab, *arguments, words, **options):
    """The output of a run that has to end with these words, and with nothing that is not for people."""
    status, text = run(*arguments, **options)
    assert status != 0, text
    assert "Traceback" not in text
    assert not re.search(r"changed=[1-9]", text), text
    for secret in lab["secrets"].values():
        assert secret not in text
    flat = " ".join(text.split())
    for word in words:
        assert word in flat, f"{word!r} is not in\n{text}"
    return text


def codes(text):
    return set(re.findall(r"^ +(?:ERROR|WARNING) +([A-Z]+(?:-[A-Z]+)+)  ", text, re.MULTILINE))


def extra(**variables):
    return ("-e", json.dumps(variables))


@pytest.fixture
def inventory():
    """Makes an inventory of its own: the lab's with files added, or removed where they are None."""

    def make(**files):
        shutil.copytree(ROOT / "inventory/lab", WRONG)
        for name, content in files.items():
            path = WRONG / name
            if content is None:
                path.unlink()
            else:
                path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return WRONG

    shutil.rmtree(WRONG, ignore_errors=True)  # of an interrupted test
    yield make
    shutil.rmtree(WRONG, ignore_errors=True)  # a test may need none


def hosts(**inference):
    """Further containers, as an inventory file says it."""
    return {"all": {"children": {"lab": {"children": {"inference": {"hosts": inference}}}}}}


STATE = r"""
systemctl show sglang -P InvocationID -P NRestarts
find /etc/sglang /etc/systemd/system /usr/local/lib/sglang /opt/sglang /models -maxdepth 3 \
  \( -type d -printf '%p\n' -o -printf '%p %T@ %l\n' \) | sort
ls -d /opt/pivot-probe /var/lib/pivot-probe /var/tmp/pivot-bundle-* /opt/other 2>/dev/null
echo looked
"""


@pytest.fixture(scope="module", autouse=True)
def unchanged(deployed, lab, host):
    """Nothing that these tests do changes host, container or trust."""

    started = Containers(Layout.of(ROOT))

    def state():
        trust = (ROOT / ".lab/ssh/known_hosts").read_text()
        there = host.run("bash -s", stdin=STATE)
        assert there.endswith("looked\n")
        return there, existing(lab), started.pid("ct101"), trust

    before = state()
    yield
    assert state() == before


# --- before anything is reached


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"sglang_server_prot": 30000}, ["VAR-UNKNOWN infer1: sglang_server_prot", "did you mean sglang_server_port?"]),
        (
            {"sglang_server_port": "abc"},
            ["VAR-TYPE infer1:", "sglang_server_port", "is 'abc', which is no whole number"],
        ),
        ({"proxmox_container_vmid": "one"}, ["VAR-TYPE infer1:", "proxmox_container_vmid", "set in hosts.yml:"]),
        (
            {"sglang_server_launch": "fast"},
            ["VAR-TYPE infer1:", "sglang_server_launch", "group_vars/inference/server.yml"],
        ),
        (
            {"proxmox_container_api_ca": "/nowhere/ca.pem"},
            ["FILE-MISSING infer1: proxmox_container_api_ca", "pve-root-ca.pem"],
        ),
        (
            {"proxmox_container_memory": "{{ nothing }}"},
            ["VAR-UNDEFINED infer1: not set: nothing", "needed by proxmox_container_memory"],
        ),
        ({"pivot_pins": 5}, ["PIN-FORM pivot_pins:", "inventory/example/group_vars/all/pins.yml"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_variable(lab, variables, words):
    refused(lab, "deploy.yml", *extra(**variables), words=words)


def test_all_findings_of_a_run_at_once_with_their_places(lab, inventory):
    wrong = (
        "---\nsglang_server_prot: 1\nsglang_engine_keep_releases: many\n"
        "proxmox_container_known_hosts: /nowhere/at/all\n"
        "gpu_runtime_shm_min_mib: '{{ no_such_name }}'\n"
        "sglang_server_environment: {NCCL_DEBUG: 1}\n"
    )
    two = hosts(infer2={"ansible_host": "{{ lab_addresses.pve1 }}", "proxmox_container_vmid": 101})
    where = inventory(**{"group_vars/inference/wrong.yml": wrong, "more.yml": two})
    words = [
        "sglang_server_prot (group_vars/inference/wrong.yml:2)",
        "set in group_vars/inference/wrong.yml:3",
        "proxmox_container_known_hosts (group_vars/inference/container.yml:",
        "the vmid 101 is given to 2 hosts",
        f"the address {lab['lab_addresses']['pve1']} is given to 2 hosts",
        'NCCL_DEBUG: "1"',
    ]
    text = refused(lab, "deploy.yml", inventory=where, words=words)
    expected = {"VAR-UNKNOWN", "VAR-TYPE", "FILE-MISSING", "VAR-UNDEFINED", "ENV-TYPE", "HOST-COLLISION"}
    assert codes(text) == expected
    # nothing but preflight was begun
    assert text.count("TASK [") == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["HOST-NONE the inventory: no host is in the group inference", "name another with -i"]),
        ("all: {hosts: {stray: {}}}", ["HOST-NONE", "HOST-UNGROUPED the inventory: the host stray", "is in no group"]),
        (
            "all:\n  children:\n    inferrence:\n      hosts:\n        a:\n",
            ["did you mean inference where it says inferrence"],
        ),
    ],
    ids=["empty", "no group", "misspelt group"],
)
def test_an_inventory_with_nobody_to_deploy_to(lab, tmp_path, content, words):
    (tmp_path / "hosts.yml").write_text(content)
    refused(lab, "deploy.yml", inventory=tmp_path / "hosts.yml", words=words)


def test_a_host_in_no_group_beside_others(lab, inventory):
    where = inventory(**{"stray.yml": {"all": {"hosts": {"stray": {}}}}})
    text = refused(lab, "deploy.yml", inventory=where, words=["the host stray (stray.yml:3) is in no group"])
    assert codes(text) == {"HOST-UNGROUPED"}


def test_two_hosts_with_one_address(lab, inventory):
    where = inventory(
        **{"more.yml": hosts(infer2={"ansible_host": lab["lab_addresses"]["infer1"], "proxmox_container_vmid": 102})}
    )
    text = refused(lab, "deploy.yml", inventory=where, words=["is given to 2 hosts (ansible_host)"])
    assert codes(text) == {"HOST-COLLISION"}


def test_a_lab_that_is_not_up(lab, inventory):
    where = inventory(**{"group_vars/all/lab.yml": None, "group_vars/all/vault.yml": None})
    words = ["not set: lab_addresses", "needed by ansible_host (hosts.yml:", "fix: the lab is not up: make lab-up"]
    text = refused(lab, "deploy.yml", inventory=where, words=words)
    assert codes(text) == {"VAR-UNDEFINED"}
    assert text.count("make lab-up") == 2  # Ansible prints a failure twice


def test_a_vault_that_was_never_written(lab, inventory):
    where = inventory(**{"group_vars/all/vault.yml": None})
    refused(
        lab,
        "deploy.yml",
        inventory=where,
        words=["not set: vault_proxmox_password, vault_sglang_api_key", "ansible-vault"],
    )


def test_a_wrong_vault_password_names_the_file(lab, tmp_path):
    (tmp_path / "password").write_text("wrong\n")
    environment = {"ANSIBLE_VAULT_PASSWORD_FILE": str(tmp_path / "password")}
    words = [
        "VAULT-CLOSED",
        "inventory/lab/group_vars/all/vault.yml: the vault password",
        "ANSIBLE_VAULT_PASSWORD_FILE",
    ]
    refused(lab, "deploy.yml", environment=environment, words=words)


# --- what the API says


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"proxmox_container_api_port": 1}, ["PVE-UNREACHABLE", "127.0.0.1:1 does not answer", "make lab-up"]),
        (
            {"proxmox_container_api_ca": requests.certs.where()},
            ["PVE-CERTIFICATE", "not signed by the authority in proxmox_container_api_ca"],
        ),
        ({"proxmox_container_api_ca": str(ROOT / "LICENSE")}, ["PVE-CERTIFICATE", "proxmox_container_api_ca"]),
        (
            {"proxmox_container_api_password": "not this one"},
            ["PVE-LOGIN", "does not accept the credentials", "in the vault"],
        ),
    ],
    ids=["unreachable", "untrusted", "no certificate", "password"],
)
def test_an_api_that_refuses(lab, variables, words):
    refused(lab, "deploy.yml", "--tags", "preflight,provision", *extra(**variables), words=words)


def test_a_vmid_of_another_container(lab, inventory):
    where = inventory(
        **{"more.yml": hosts(infer9={"ansible_host": lab["lab_addresses"]["infer2"], "proxmox_container_vmid": 101})}
    )
    words = ["PVE-VMID-TAKEN infer9: vmid 101 belongs to the container 'infer1'", "proxmox_container_vmid a free id"]
    refused(lab, "playbooks/provision.yml", "--limit", "infer9", inventory=where, words=words)


def test_an_address_that_another_machine_has(lab, inventory):
    where = inventory(
        **{"more.yml": hosts(infer9={"ansible_host": "{{ lab_gateway }}", "proxmox_container_vmid": 109})}
    )
    words = [
        f"PVE-ADDRESS-IN-USE infer9: container 109 is to be created with the address {lab['lab_gateway']}",
        "a free address",
    ]
    refused(lab, "playbooks/provision.yml", "--limit", "infer9", inventory=where, words=words)


# --- what the host says


@pytest.fixture
def small(host):
    """A volume of one MiB in the container, and whether it is to be filled."""
    host.run("mkdir -p /srv/small && mount -t tmpfs -o size=1m none /srv/small")

    def fill():
        host.run("dd if=/dev/zero of=/srv/small/filler bs=4k 2>/dev/null", check=False)

    yield fill
    with contextlib.suppress(AssertionError):
        host.run("umount /srv/small")
    host.run("rmdir /srv/small")


@pytest.mark.parametrize(
    ("playbook", "variables", "words"),
    [
        (
            "weights",
            {"model_weights_root": "/srv/small/models"},
            ["WEIGHTS-SPACE /srv/small/models:", "set model_weights_root to a larger"],
        ),
        (
            "engine",
            {"sglang_engine_root": "/srv/small/sglang"},
            ["ENGINE-SPACE infer1:", "free under /srv/small/sglang"],
        ),
        (
            "serve",
            {"sglang_server_config_dir": "/srv/small/conf"},
            ["SERVER-SPACE infer1:", "where /srv/small/conf is"],
        ),
    ],
    ids=["weights", "engine", "serve"],
)
def test_a_full_disk(lab, host, small, playbook, variables, words):
    refused(lab, f"playbooks/{playbook}.yml", *extra(**variables), words=words)
    assert host.run("find /srv/small -mindepth 1") == ""


def test_a_full_disk_while_collecting(lab, small):
    small()
    words = ["infer1: no room for a bundle: /srv/small has 0 bytes free (log_bundle_staging_directories)"]
    refused(lab, "playbooks/collect.yml", *extra(log_bundle_staging_directories=["/srv/small"]), words=words)


def test_a_full_disk_while_switching_the_probe_on(lab, host, small):
    small()
    status, text = run("playbooks/debug_on.yml", *extra(debug_probes_root="/srv/small/probe"))
    flat = " ".join(text.split())
    assert status != 0
    assert "Traceback" not in text
    assert "No space left on device" in flat
    assert "sglang.service: equal to the baseline of" in flat


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("/usr/bin/python3.99", ["ENGINE-PYTHON", "/usr/bin/python3.99", "does not exist"]),
        ("/bin/true", ["ENGINE-PYTHON", "/bin/true", "is no Python"]),
        ("/srv/small/python3.9", ["ENGINE-PYTHON", "3.9.2", "3.11"]),
    ],
)
def test_a_wrong_or_missing_python(lab, host, small, python, words):
    host.run(
        "cat >/srv/small/python3.9; chmod +x /srv/small/python3.9",
        stdin='#!/bin/sh\necho \'["cpython", "3.9.2"]\'\n',
    )
    variables = {"sglang_engine_root": "/opt/other", "sglang_engine_python": python}
    refused(lab, "playbooks/engine.yml", *extra(**variables), words=words)
