"""Preflight and `pivot check` over inventory/example as a stranger fills it: what is refused, and in which words."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from .example_checkout import EXAMPLE, unknown


def report(text):
    """Findings as a terminal shows them: (code, subject, message, fix), those of several hosts once."""
    pattern = r"^ *(?:\[ERROR\].* )?ERROR +([A-Z-]+)  ([^:\n]+): ([^\n]+)\n +fix: ([^\n]+)"
    return sorted(set(re.findall(pattern, text, re.MULTILINE)))


def test_preflight_refuses_the_nulls_on_a_fresh_checkout(untouched):
    done = untouched.play("playbooks/preflight.yml")
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    trust = untouched.mine / "trust"
    missing = [item for item in report(text) if item[0] == "FILE-MISSING"]
    assert {item[1] for item in missing} == {"llm01", "llm02"}
    assert {item[2].split(" names ")[-1] for item in missing} == {
        f"{trust / 'known_hosts'}, whose directory does not exist",
        f"{trust / 'pve-root-ca.pem'}, which is no file of this controller",
    }
    assert [item for item in report(text) if item not in missing] == sorted(unknown("mine"))


def test_what_is_missing_is_said_in_the_order_of_day_one(untouched):
    text = untouched.play("playbooks/preflight.yml").stdout
    order = ["trust/known_hosts", "pve-root-ca.pem", "version is not", "the source", "revision is", "convention is"]
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_a_forgotten_vault_is_named_with_what_belongs_into_it(filled):
    vault = filled.mine / "group_vars/all/vault.yml"
    kept = vault.read_text()
    vault.unlink()
    text = filled.play("playbooks/preflight.yml").stdout
    vault.write_text(kept)
    assert "VAR-UNDEFINED" in text
    assert "not set: vault_proxmox_password, vault_sglang_api_key" in text
    assert "write it into group_vars/all/vault.yml" in text


def test_preflight_passes_when_they_are_filled(filled):
    done = filled.play("playbooks/preflight.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert report(done.stdout + done.stderr) == []


def test_preflight_says_which_layers_reach_the_drafter(filled):
    done = filled.play("playbooks/preflight.yml")
    line = (
        "ids [3, 31, 59] on 0.5.23 → inputs of layers 3, 31, 59 (outputs of 2, 30, 58); "
        "contract: outputs of 2, 30, 58; agrees"
    )
    for host in ("llm01", "llm02"):
        assert re.search(rf"^{host}\n  layers +{re.escape(line)}$", done.stdout, re.MULTILINE), done.stdout
    done = filled.play("playbooks/preflight.yml", sglang_server_eagle_layer_ids=[2, 30, 58])
    assert done.returncode == 2, done.stdout
    assert "contract: outputs of 2, 30, 58; DISAGREES; write [3, 31, 59]" in done.stdout
    assert {item[0] for item in report(done.stdout + done.stderr)} == {"DRAFTER-LAYERS"}


def test_preflight_sees_what_an_operator_gets_wrong_at_once(filled):
    done = filled.play(
        "playbooks/preflight.yml",
        sglang_server_environment={"OMP_NUM_THREADS": 8},
        sglang_server_prot=1,
        proxmox_container_memory="768G",
        proxmox_container_vmid=9001,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    assert {item[0] for item in report(text)} == {"ENV-TYPE", "VAR-UNKNOWN", "VAR-TYPE", "HOST-COLLISION"}
    for words in ('OMP_NUM_THREADS: "8"', "did you mean sglang_server_port?", "the vmid 9001 is given to 2 hosts"):
        assert words in text
    assert "Traceback" not in text


def test_a_backend_without_kernels_for_the_cards_is_refused_before_anything_is_touched(filled):
    launch_file = yaml.safe_load((filled.root / "inventory/mine/group_vars/inference/server.yml").read_text())
    flags = {**launch_file["sglang_server_launch"], "attention-backend": "trtllm_mla"}
    done = filled.play("playbooks/preflight.yml", sglang_server_launch=flags)
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    assert {item[0] for item in report(text)} == {"LAUNCH-BACKEND"}
    assert "no kernels for compute capability 12.0" in text


def test_preflight_says_what_fits_into_a_card(filled):
    done = filled.play("playbooks/preflight.yml")
    # 0.85 x 95.6 GiB less 553e9 B / 8; 18,127,260,618 B / (70,272 + 4,096) B
    line = (
        "81.3 of 95.6 GiB a card are static: weights 63.7, drafter 0.7, KV cache 16.9 = 243,750 tokens of 74,368 B; "
        "1 request of 131,072 tokens fits; or 16 of 15,234; 14.3 GiB for graphs, NCCL and activations"
    )
    assert len(re.findall(rf"^  memory +{re.escape(line)}$", done.stdout, re.MULTILINE)) == 2, done.stdout
    assert "BUDGET-" not in done.stdout
    text = (filled.root / "inventory/mine/group_vars/inference/server.yml").read_text()
    flags = {**yaml.safe_load(text)["sglang_server_launch"], "tp-size": 4}
    done = filled.play("playbooks/preflight.yml", sglang_server_launch=flags)
    assert done.returncode == 2
    assert {item[0] for item in report(done.stdout + done.stderr)} == {"BUDGET-WEIGHTS"}


def test_a_misspelt_variable_of_nccl_is_refused_and_what_is_for_debugging_has_its_reason(filled):
    assert "NCCL-" not in filled.play("playbooks/preflight.yml").stdout
    done = filled.play(
        "playbooks/preflight.yml", sglang_server_environment={"NCCL_P2P_LEVLE": "SYS", "NCCL_ALGO": "Ring"}
    )
    assert {item[0] for item in report(done.stdout + done.stderr)} == {"NCCL-UNKNOWN"}
    assert "did you mean NCCL_P2P_LEVEL?" in done.stdout
    # given on the command line, without a comment
    assert "NVIDIA counts NCCL_ALGO among what is for debugging" in done.stdout


def test_a_waived_finding_is_printed_and_stops_nothing(filled):
    wrong = {"sglang_server_environment": {"NCCL_P2P_LEVLE": "SYS"}}
    done = filled.play("playbooks/preflight.yml", **wrong, pivot_waivers={"NCCL-UNKNOWN": "a build of our own"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "INFO    NCCL-UNKNOWN" in done.stdout + done.stderr
    assert "(accepted by pivot_waivers: a build of our own)" in " ".join((done.stdout + done.stderr).split())
    done = filled.play("playbooks/preflight.yml", **wrong, pivot_waivers={"NCCL-UNKNOWN": "", "NCCL-UNKOWN": "x"})
    assert done.returncode == 2
    codes = {item[0] for item in report(done.stdout + done.stderr)}
    assert codes == {"NCCL-UNKNOWN", "WAIVER-REASON", "WAIVER-UNKNOWN"}


def test_what_is_worth_knowing_is_printed_and_no_warning(filled):
    done = filled.play("playbooks/preflight.yml", sglang_server_eagle_layer_ids=[31, 3, 59])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for host in ("llm01", "llm02"):
        assert [line for line in lines if line.startswith(f"  {host}: ids [31, 3, 59] on 0.5.23 → ")]
        assert [line for line in lines if line.startswith(f"  {host}:   rope: theta 1000000.0")]
        assert [line for line in lines if line.startswith(f"  INFO    DRAFTER-ORDER  {host}: ")]
    assert not re.search(r"\[WARNING\]:\s+INFO", done.stdout + done.stderr)


@pytest.mark.parametrize("variables", [{}, {"sglang_server_prot": 1, "proxmox_container_vmid": 9001}])
def test_the_command_says_what_the_play_says(filled, variables):
    command = Path(sys.executable).with_name("pivot")
    done = filled.run(str(command), "check", "inventory/mine", "--json", "-e", json.dumps(variables))
    assert done.returncode == (1 if variables else 0), done.stdout + done.stderr
    data = json.loads(done.stdout)
    wrong = [item for item in data["findings"] if item["severity"] == "error"]
    found = {(item["code"], item["subject"], item["message"], item["fix"]) for item in wrong}
    play = filled.play("playbooks/preflight.yml", **variables)
    assert sorted(found) == report(play.stdout + play.stderr)
    for host, said in data["hosts"].items():
        assert f"{host}: {said['layers']}" in play.stdout


@pytest.mark.parametrize(
    ("tag", "name", "value"),
    [
        ("provision", "proxmox_host_devices", {"all": True}),
        ("engine", "sglang_engine_keep_releases", "many"),
        ("weights", "model_weights_models", "all"),
        ("serve", "sglang_server_port", "abc"),
    ],
)
def test_without_preflight_the_argument_specs_still_hold(filled, tag, name, value):
    words = ["ansible-playbook", "-i", "inventory/mine", "deploy.yml", "--skip-tags", "preflight", "--tags", tag]
    done = filled.run(*words, "-e", json.dumps({name: value}))
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    assert "Validation of arguments failed" in text
    assert name in text
    assert "Everything wrong with the inventory" not in text


def test_an_unknown_profile_names_the_known_ones(filled):
    done = filled.play("playbooks/preflight.yml", sglang_server_nccl_profile="fast")
    assert done.returncode == 2
    words = " ".join((done.stdout + done.stderr).split())
    assert "sglang_server_nccl_profile must be one of: none, latency, throughput, p2p-fallback, got: fast" in words


# The whole story reads it, without a lab


@pytest.mark.parametrize("vault", [True, False])
def test_the_story_is_understood_without_a_lab(filled, vault):
    assert not (filled.root / ".lab").exists()
    environment = dict(filled.environment)
    password = environment.pop("ANSIBLE_VAULT_PASSWORD_FILE")
    words = ["ansible-playbook", "deploy.yml", "--syntax-check", "-i"]
    words += ["inventory/mine", "--vault-password-file", password] if vault else [str(EXAMPLE)]
    done = filled.run(*words, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "playbook: deploy.yml" in done.stdout


def test_the_vault_is_closed_to_the_labs_password(filled):
    environment = {k: v for k, v in filled.environment.items() if k != "ANSIBLE_VAULT_PASSWORD_FILE"}
    done = filled.run("ansible-playbook", "-i", "inventory/mine", "playbooks/preflight.yml", environment=environment)
    assert done.returncode != 0
    assert "made-up-pass" not in done.stdout + done.stderr
    assert f"VAULT-CLOSED  {filled.mine}/group_vars/all/vault.yml" in done.stderr


# Values
