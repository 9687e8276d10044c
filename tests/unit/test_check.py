"""All checks of an inventory in one report, and `pivot check`, which prints it without a play."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pivot.engines import descriptions
from pivot.engines.engine_source import DescriptionError
from pivot.findings import Finding, Severity
from pivot.inventory import check, check_command
from pivot.inventory.check import Host, Report, Said, Whole, accepted

ROOT = Path(__file__).parents[2]
LAB = ROOT / "inventory/lab"
GROUPS = {"all": ["llm01", "llm02"], "inference": ["llm01", "llm02"], "ungrouped": []}
OPTIONS = (*("sglang_server_port", "sglang_server_launch", "sglang_server_environment", "sglang_server_nccl_profile"),)
SPECS: dict[str, Any] = {"sglang_server": {name: {} for name in OPTIONS}}
PINS = {"engines": {}, "models": {}}


def host(name="llm01", given=(), problems=None, **values):
    values = {"pivot_pins": PINS, **values}
    return Host(name=name, given=frozenset({*values, *given}), values=values, problems=problems or {}, place=LAB)


def whole(**changes):
    values = {"groups": GROUPS, "addresses": {}, "waivers": {}, "place": LAB}
    return Whole(**{**values, **changes})


def run(*hosts, said=(), **changes):
    return check.run(hosts, whole(**changes), SPECS, ROOT, lambda _options, _values: list(said), roles=())


def codes(report):
    return [(finding.code, finding.subject, str(finding.severity)) for finding in report.findings]


def test_a_host_without_faults_has_no_findings():
    report = run(host(sglang_server_port=30000))
    assert report.findings == ()
    assert not report.failed
    assert report.text() == "nothing to object to"


def test_findings_of_all_kinds_and_hosts_come_together():
    wrong = host(
        "llm02",
        given=["sglang_server_prot"],
        problems={"sglang_server_port": "'number' is undefined"},
        sglang_server_environment={"NCCL_P2P_LEVLE": "SYS"},
        sglang_server_launch={"context_length": 1},
    )
    addresses = {name: {"ansible_host": "192.0.2.1"} for name in GROUPS["all"]}
    report = run(host(), wrong, addresses=addresses)
    assert {code for code, _, _ in codes(report)} == {
        *("VAR-UNKNOWN", "VAR-UNDEFINED", "NCCL-UNKNOWN", "LAUNCH-NAME", "HOST-COLLISION"),
    }
    assert report.failed


def test_what_the_validator_says_is_a_finding():
    assert codes(run(host(sglang_server_port="x"), said=["sglang_server_port is no int"])) == [
        ("VAR-TYPE", "llm01", "error")
    ]


def test_the_same_finding_of_two_hosts_is_one():
    null = {"engines": {}, "models": {}, "driver": {"version": None, "file": "", "sha256": ""}}
    report = run(host(pivot_pins=null), host("llm02", pivot_pins=null))
    assert codes(report) == [("PIN-NULL", "pivot_pins.driver", "error")]


def test_launch_settings_of_a_wrong_type_are_left_to_the_types():
    assert run(host(sglang_server_launch="fast", sglang_server_environment=3)).findings == ()


def test_a_damaged_description_of_the_engine(monkeypatch):
    def damaged(version):
        raise DescriptionError(f"sglang-{version}.json cannot be read")

    monkeypatch.setattr(descriptions, "load", damaged)
    report = run(host(sglang_engine_version="0.5.23"))
    assert codes(report) == [("ENGINE-DESCRIPTION", "llm01", "error")]
    assert "pivot engine describe WHEEL" in report.text()


def test_a_manifest_that_cannot_be_read_is_none(tmp_path):
    for text in (b"{", b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "m.json").write_bytes(text)
        assert check.read_manifest(str(tmp_path / "m.json")) is None
    assert check.read_manifest(str(tmp_path / "nowhere.json")) is None
    assert check.read_manifest(str(tmp_path)) is None


# --- waivers


COLLISION = {name: {"ansible_host": "192.0.2.1"} for name in GROUPS["all"]}


@pytest.mark.parametrize(
    ("waivers", "severity"),
    [
        ({}, "error"),
        ({"llm01": None, "llm02": None}, "error"),
        ({"llm01": {"HOST-COLLISION": "one at a time"}, "llm02": {"HOST-COLLISION": "one at a time"}}, "info"),
        # one host cannot speak for the other
        ({"llm01": {"HOST-COLLISION": "one at a time"}, "llm02": {}}, "error"),
        ({"llm01": {"HOST-COLLISION": "one at a time"}, "llm02": "HOST-COLLISION"}, "error"),
        ({"llm01": {"HOST-COLLISION": " "}, "llm02": {"HOST-COLLISION": " "}}, "error"),
        ({"llm01": {"HOST-COLLISON": "x"}, "llm02": {"HOST-COLLISON": "x"}}, "error"),
    ],
)
def test_what_concerns_several_hosts_is_waived_by_all_of_them(waivers, severity):
    report = run(host(), host("llm02"), addresses=COLLISION, waivers=waivers)
    assert codes(report) == [("HOST-COLLISION", "llm01, llm02", severity)]
    assert ("(accepted by pivot_waivers: one at a time)" in report.text()) == (severity == "info")


def test_an_ungrouped_host_can_be_accepted():
    groups = {**GROUPS, "ungrouped": ["build01"], "all": [*GROUPS["all"], "build01"]}
    waivers = {name: {"HOST-UNGROUPED": "builds wheels"} for name in groups["all"]}
    assert codes(run(groups=groups)) == [("HOST-UNGROUPED", "the inventory", "error")]
    assert codes(run(groups=groups, waivers=waivers)) == [("HOST-UNGROUPED", "the inventory", "info")]


def test_waivers_that_all_hosts_share():
    assert accepted({}) == {}
    assert accepted({"a": {"HOST-NONE": "x", "VAR-TYPE": "y"}, "b": {"HOST-NONE": "z"}}) == {"HOST-NONE": "x"}
    assert accepted({"a": {7: "x", "HOST-NONE": True}}) == {}


def test_a_hosts_own_waiver_is_printed_with_its_reason():
    wrong = {"sglang_server_environment": {"NCCL_P2P_LEVLE": "SYS"}}
    report = run(host(**wrong, pivot_waivers={"NCCL-UNKNOWN": "a build of our own"}), host("llm02", **wrong))
    assert codes(report) == [("NCCL-UNKNOWN", "llm01", "info"), ("NCCL-UNKNOWN", "llm02", "error")]
    assert "(accepted by pivot_waivers: a build of our own)" in report.text()


# --- what is said


def test_what_is_said_and_what_the_summary_repeats():
    said = {"llm01": Said("ids [3]", ("a note",), "81 GiB"), "llm02": Said()}
    finding = Finding("A-B", Severity.WARNING, "llm01", "odd", "look")
    report = Report((finding,), said)
    assert report.text().splitlines() == [
        "llm01: ids [3]",
        "llm01:   a note",
        "llm01: 81 GiB",
        "WARNING A-B  llm01: odd",
        "        fix: look",
    ]
    assert report.summaries() == {"llm01": {"layers": "ids [3]", "memory": "81 GiB"}}
    data = json.loads(json.dumps(report.as_dict()))
    assert data["failed"] is False
    assert data["findings"] == [finding.as_dict()]
    assert data["hosts"]["llm01"] == {"layers": "ids [3]", "notes": ["a note"], "memory": "81 GiB"}


# --- the command


def pivot_check(*arguments, **options):
    words = [sys.executable, "-m", "pivot.cli", "check", *map(str, arguments)]
    return subprocess.run(words, check=False, capture_output=True, text=True, **{"cwd": ROOT, **options})


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The lab's inventory with what `make lab-up` writes, made up; two levels below a project, as copies are."""
    place = tmp_path_factory.mktemp("project")
    inventory = place / "inventory/lab"
    shutil.copytree(LAB, inventory)
    for name in ("requirements", "lab"):
        (place / name).symlink_to(ROOT / name)
    (place / "key").write_text("made up\n")
    subnet = "192.0.2"
    generated = {
        "lab_api_host": "127.0.0.1",
        "lab_api_port": 34567,
        "lab_api_ca": str(place / "key"),
        "lab_bridge": "pv1",
        "lab_subnet": f"{subnet}.0/24",
        "lab_gateway": f"{subnet}.1",
        "lab_addresses": {"pve1": f"{subnet}.2", "infer1": f"{subnet}.11", "infer2": f"{subnet}.12"},
        "lab_template": "local:vztmpl/x.tar",
        "lab_ssh_key": str(place / "key"),
        "lab_ssh_public_key": "ssh-ed25519 AAAA",
        "lab_known_hosts": str(place / "known_hosts"),
    }
    (inventory / "group_vars/all/lab.yml").write_text(yaml.safe_dump(generated))
    secrets = {
        "vault_proxmox_password": "made-up-1",
        "vault_proxmox_token_value": "made-up-3",
        "vault_sglang_api_key": "made-up-2",
    }
    (inventory / "group_vars/all/vault.yml").write_text(yaml.safe_dump(secrets))
    return inventory


LINE = "ids [3, 5, 7] on 0.5.23 → inputs of layers 3, 5, 7 (outputs of 2, 4, 6); contract: inputs of 3, 5, 7; agrees"


def test_the_lab_is_clean(lab):
    done = pivot_check(lab)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"infer1: {LINE}"
    assert lines[-1] == "nothing to object to"
    assert "made-up" not in done.stdout + done.stderr


def test_faults_are_found_and_make_the_status(lab):
    extra = {"sglang_server_eagle_layer_ids": [4, 6, 8], "sglang_server_prot": 1}
    done = pivot_check(lab, "--json", "--host", "infer1", "-e", json.dumps(extra))
    assert done.returncode == 1, done.stdout + done.stderr
    data = json.loads(done.stdout)
    assert {item["code"] for item in data["findings"]} == {"VAR-UNKNOWN", "DRAFTER-RANGE", "DRAFTER-LAYERS"}
    assert data["hosts"]["infer1"]["layers"].endswith("DISAGREES; write [3, 5, 7]")


def test_from_another_directory_and_without_a_lab(tmp_path):
    done = pivot_check(LAB, cwd=tmp_path)
    assert LINE in done.stdout, done.stderr
    done = pivot_check(ROOT / "inventory/example", "--host", "llm02", cwd=tmp_path)
    assert done.returncode == 1
    assert "PIN-NULL" in done.stdout
    assert "llm01:" not in done.stdout


def test_an_inventory_that_is_one_file(tmp_path):
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"stray": None}}}))
    done = pivot_check(tmp_path / "hosts.yml")
    assert done.returncode == 1
    assert "HOST-NONE" in done.stdout
    assert "HOST-UNGROUPED" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inventory/nowhere"], "pivot check: there is no inventory inventory/nowhere"),
        (
            ["inventory/lab", "--host", "infr1"],
            "infr1 is no host of the group inference of inventory/lab: did you mean",
        ),
        (["inventory/lab", "--host", "x"], "it has infer1"),
        (["inventory/lab", "-e", "{"], "pivot check: "),
        (["ansible.cfg"], "pivot check: "),
    ],
)
def test_what_cannot_be_checked_is_one_sentence(arguments, said):
    done = pivot_check(*arguments)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_files_that_are_no_yaml_are_named_with_their_lines(tmp_path):
    inventory = tmp_path / "inventory"
    (inventory / "group_vars/all").mkdir(parents=True)
    (inventory / "hosts.yml").write_text("all:\n  hosts:\n\ta:\n")
    (inventory / "group_vars/all/main.yml").write_text("a: 'b\n")
    done = pivot_check(inventory)
    assert done.returncode == 2
    assert f"FILE-YAML  {inventory}/hosts.yml:3: " in done.stderr
    assert f"FILE-YAML  {inventory}/group_vars/all/main.yml:2: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_node_and_numbers_that_cannot_be(lab):
    wrong = {"proxmox_container_node": "pve9", "sglang_server_port": 99999, "proxmox_container_vmid": 7}
    wrong |= {"proxmox_container_devices": "/dev/nvidia0,mode=0666"}
    done = pivot_check(lab, "--host", "infer1", "-e", json.dumps(wrong))
    assert done.returncode == 1
    assert "proxmox_container_node is pve9, which is no host of this inventory" in done.stdout
    assert "did you mean pve1?" in done.stdout
    assert "sglang_server_port is 99999" in done.stdout
    assert "write a number from 100 to 999999999" in done.stdout
    assert "proxmox_container_devices is a text, which is no list" in done.stdout


def encrypted(place, lab, *words, given=None):
    """A copy of the lab's inventory, its vault encrypted with a password of its own, or what ansible-vault prints."""
    copy = place / "inventory/mine"
    if not copy.exists():
        shutil.copytree(lab, copy)
    (place / "password").write_text("another\n")
    call = [Path(sys.executable).with_name("ansible-vault"), *words, "--vault-id", f"x@{place}/password"]
    call += ["--encrypt-vault-id", "x"]  # ansible.cfg may name another secret
    done = subprocess.run(call, check=True, capture_output=True, cwd=copy, input=given, text=True)
    return copy, done.stdout


VAULT = "group_vars/all/vault.yml"


def test_a_closed_vault_is_named(lab, tmp_path):
    copy, _ = encrypted(tmp_path, lab, "encrypt", lab / VAULT, "--output", VAULT)
    vault = copy / VAULT
    done = pivot_check(copy)
    assert done.returncode == 2
    assert f"VAULT-CLOSED  {vault}" in done.stderr
    done = pivot_check(copy, "--vault-password-file", tmp_path / "password")
    assert "VAULT-CLOSED" not in done.stderr
    assert LINE in done.stdout


@pytest.mark.parametrize("value", ["@Made-up", "!Made-up", "{%Made-up", "*Made-up", "Made-up: up"])
def test_a_password_that_is_no_yaml_is_not_shown_and_its_vault_is_named(value, lab, tmp_path):
    text = f"---\nvault_proxmox_password: {value}\n"
    copy, _ = encrypted(tmp_path, lab, "encrypt", "-", "--output", VAULT, given=text)
    done = pivot_check(copy, "--vault-password-file", tmp_path / "password")
    assert done.returncode == 2
    assert f"FILE-YAML  {copy / VAULT}: its decrypted text is no YAML" in done.stderr
    assert "single quotes" in done.stderr
    assert "Made-up" not in done.stdout + done.stderr


@pytest.mark.parametrize("value", ["{{Madeup}}", "{%Madeup", "a{#Madeup", "{{Madeup b}}"])
def test_a_password_that_is_taken_for_an_expression_is_not_shown(value, lab, tmp_path):
    copy, _ = encrypted(tmp_path, lab, "encrypt", lab / VAULT, "--output", VAULT)
    secrets = {**yaml.safe_load((lab / VAULT).read_text()), "vault_sglang_api_key": value}
    (copy / VAULT).write_text(yaml.safe_dump(secrets))
    done = pivot_check(copy)
    assert done.returncode == 1, done.stderr
    assert "Madeup" not in done.stdout + done.stderr
    assert "VAR-EXPRESSION" in done.stdout
    assert "cannot be worked out: this is taken for an expression, and is none: vault_sglang_api_key" in done.stdout
    assert "fix: write vault_sglang_api_key: !unsafe 'VALUE'" in done.stdout
    assert "VAR-UNDEFINED" not in done.stdout


def test_a_secret_that_needs_another_one_is_told_as_before(lab, tmp_path):
    copy, _ = encrypted(tmp_path, lab, "encrypt", lab / VAULT, "--output", VAULT)
    secrets = yaml.safe_load((lab / VAULT).read_text()) | {"vault_sglang_api_key": "{{ vault_other }}"}
    (copy / VAULT).write_text(yaml.safe_dump(secrets))
    done = pivot_check(copy)
    assert "not set: vault_other" in done.stdout


def test_a_single_value_that_the_password_does_not_open_is_named(lab, tmp_path):
    copy, text = encrypted(tmp_path, lab, "encrypt_string", "--stdin-name", "inner_key", given="made-up-7")
    secrets = yaml.safe_load((lab / VAULT).read_text()) | {"vault_sglang_api_key": "{{ inner_key }}"}
    (copy / VAULT).write_text(f"{yaml.safe_dump(secrets)}{text}")
    done = pivot_check(copy)
    assert done.returncode == 1, done.stderr
    assert "cannot be worked out: the vault password that was given does not open inner_key\n" in done.stdout
    assert "fix: give its own: export ANSIBLE_VAULT_PASSWORD_FILE=FILE" in done.stdout
    assert "correct the expression" not in done.stdout


def test_a_value_inside_of_a_mapping_that_the_password_does_not_open(lab, tmp_path):
    copy, text = encrypted(tmp_path, lab, "encrypt_string", "--stdin-name", "HF_TOKEN", given="made-up-7")
    inside = "".join(f"  {line}\n" for line in text.splitlines())
    (copy / "group_vars/inference/zz.yml").write_text(f"sglang_server_environment:\n{inside}")
    done = pivot_check(copy)
    assert re.search(
        r"sglang_server_environment \([^)]*group_vars/inference/zz.yml:1\) cannot be worked out", done.stdout
    )
    assert "does not open a value that is encrypted by itself" in done.stdout


@pytest.mark.parametrize("name", ["proxmox_container_vmid", "proxmox_container_net0", "sglang_server_model_path"])
def test_a_required_value_that_is_null_is_refused(name, lab):
    done = pivot_check(lab, "--host", "infer1", "-e", json.dumps({name: None}))
    assert done.returncode == 1, done.stdout
    assert re.search(rf"VAR-MISSING +infer1: {name} \([^)]+\) is null, and the role", done.stdout)


def test_a_null_of_an_engines_pin_is_told_once():
    specs = {"sglang_engine": {"sglang_engine_version": {"required": True}}}
    for pins, code in (({"engines": {"e": {"version": None}}}, "PIN-NULL"), (PINS, "VAR-MISSING")):
        one = host(sglang_engine_version=None, pivot_pins=pins)
        found = check.run([one], whole(), specs, ROOT, lambda _options, _values: [], roles=["sglang_engine"]).findings
        told = [item.code for item in found if "version is n" in item.message or "is null" in item.message]
        assert told == [code]


def test_the_roles_are_those_of_the_play():
    (play,) = yaml.safe_load((ROOT / "playbooks/preflight.yml").read_text())
    assert tuple(play["tasks"][0]["preflight"]["roles"]) == check.ROLES


def test_the_project_is_this_one():
    assert check_command.PROJECT == ROOT


def test_machines_that_serve_together_are_compared_also_those_that_are_left_out():
    flags = {"nnodes": 2, "dist-init-addr": "192.0.2.1:25000", "tp-size": 2}
    addresses = {
        name: {"ansible_host": f"192.0.2.{number}", "sglang_server_launch": flags}
        for number, name in enumerate(GROUPS["inference"], 1)
    }
    report = run(host(), addresses=addresses)
    assert [(code, severity) for code, _, severity in codes(report)] == [("LAUNCH-NODES-RANK", "error")]


def test_paths_that_the_unit_hides_are_named():
    report = run(host(sglang_server_launch={"chat-template": "/home/a/c.jinja"}))
    assert codes(report) == [("LAUNCH-FILE", "llm01", "error")]
    assert run(host(sglang_server_launch={"chat-template": "/etc/sglang/c.jinja"})).findings == ()


def test_the_nccl_profile_is_part_of_the_environment():
    values = {"sglang_server_nccl_profile": "p2p-fallback", "sglang_server_environment": {}}
    report = run(host(**values, sglang_server_launch={"disable-custom-all-reduce": True}))
    assert codes(report) == []
    report = run(host(**values, sglang_server_launch={}))
    assert codes(report) == [("LAUNCH-PEERS", "llm01", "error")]
