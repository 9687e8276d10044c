"""A server that somebody set up by hand, with a wrong layer id and two misspelt variables."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from testinfra.host import Host

from pivot.serving import launch

PROJECT = Path(os.environ["MOLECULE_PROJECT_DIRECTORY"])
INVENTORY = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"], "inventory")


@pytest.fixture(scope="module")
def dest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inventories")


def run_playbook(*options: str) -> subprocess.CompletedProcess[str]:
    command = ["ansible-playbook", "-i", str(INVENTORY), str(PROJECT / "playbooks/inspect.yml"), *options]
    plain = {**os.environ, "PIVOT_LOG": "", "ANSIBLE_FORCE_COLOR": "0", "ANSIBLE_NOCOLOR": "1"}
    return subprocess.run(command, cwd=PROJECT, env=plain, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def output(dest: Path) -> str:
    """What the playbook prints when everything is shown."""
    done = run_playbook("-vvv", "-e", f"server_inspect_dest={dest}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def lines(output: str) -> str:
    """The lines as they are read by people, in one text."""
    begin = output.index("Say what was found")
    return " ".join(output[begin : output.index("PLAY RECAP")].split())


def test_the_wrong_layers_are_named_with_what_to_write(lines: str) -> None:
    assert (
        "layers: ids [4, 5, 6] on 0.5.23 → inputs of layers 4, 5, 6 (outputs of 3, 4, 5); "
        "contract: inputs of 3, 5, 7; DISAGREES; write [3, 5, 7]"
    ) in lines
    assert "ERROR DRAFTER-LAYERS" in lines


def test_the_misspelt_variables_are_named_with_what_was_meant(lines: str) -> None:
    assert "ENV-UNKNOWN" in lines
    assert "SGLANG_ENABLE_TORCH_COMPIEL is no variable of SGLang 0.5.23" in lines
    assert "did you mean SGLANG_ENABLE_TORCH_COMPILE?" in lines
    assert "NCCL_DEBGU is no variable that NVIDIA documents" in lines
    assert "did you mean NCCL_DEBUG?" in lines


def test_unit_engine_and_models_are_found(lines: str) -> None:
    for text in (
        "chat.service, process",
        "SGLang 0.5.23, /opt/sglang/current/bin/python",
        "10-site.conf",
        "./drafter (/srv/chat/drafter)",
    ):
        assert text in lines
    # everything could be read, and the server answered with its own key
    assert set(re.findall(r"INSPECT-\w+", lines)) == {"INSPECT-PATHS"}
    assert "max total num tokens" in lines


def test_code_that_is_not_the_engines_own_is_named(lines: str) -> None:
    assert "Python also takes code from /srv/chat/patches (PYTHONPATH)" in lines


def test_the_inventory_has_what_counts_and_names_of_secrets(lines: str, dest: Path) -> None:
    assert 'sglang_server_api_key: "{{ vault_sglang_api_key }}"' in lines
    values = yaml.safe_load((dest / "instance.yml").read_text())
    assert values["sglang_server_name"] == "chat"
    assert values["sglang_server_port"] == 31000
    assert values["sglang_server_api_key"] == "{{ vault_sglang_api_key }}"
    assert values["sglang_server_drafter_path"] == "/srv/chat/drafter"
    assert values["sglang_server_eagle_layer_ids"] == [4, 5, 6]
    assert "model.safetensors" in values["sglang_server_drafter_files"]
    assert values["sglang_server_launch"]["max-total-tokens"] == 4096
    assert launch.check("instance", values["sglang_server_launch"], values["sglang_server_environment"]) == []
    assert values["sglang_server_launch"]["admin-api-key"] == "{{ vault_sglang_admin_api_key }}"
    assert values["sglang_server_environment"]["HF_TOKEN"] == "{{ vault_hf_token }}"  # noqa: S105 - a name, no secret
    assert "SITE_ACCESS_TOKEN" not in values["sglang_server_environment"]


def test_no_secret_is_shown_not_even_to_the_curious(output: str) -> None:
    assert "stdout" in output  # the output of the task on the host is there
    assert "never-shown" not in output


def test_where_there_is_nothing_to_look_at_it_says_so() -> None:
    done = run_playbook("-e", "server_inspect_pid=4000000")
    assert done.returncode == 2
    assert "there is no process 4000000" in " ".join(done.stdout.split() + done.stderr.split())
    assert "Traceback" not in done.stdout + done.stderr


def test_strictly_errors_end_the_run() -> None:
    done = run_playbook("-e", "server_inspect_strict=true")
    assert done.returncode == 2
    assert "DRAFTER-LAYERS" in done.stdout + done.stderr


def test_nothing_changed_on_the_host(host: Host, output: str) -> None:
    assert output
    now = host.check_output("/root/capture") + "\n"
    before = host.file("/root/before").content_string
    assert now.splitlines() == before.splitlines()
    assert yaml.safe_load(host.check_output("cat /srv/chat/drafter/config.json"))["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [4, 5, 6]
    }
