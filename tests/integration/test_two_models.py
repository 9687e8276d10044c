"""Two models on two containers from one inventory: each host holds and serves its own.

Another engine is installed and another server started: `make soak` alone.
"""

import json
import shutil
import struct
from pathlib import Path

import pytest
import yaml

from pivot.checkpoints import manifest as manifests

from .conftest import FIGURES, ROOT, Host, second_container
from .test_deploy import PROMPTS, post

pytestmark = pytest.mark.skipif("not __import__('os').environ.get('PIVOT_SOAK')", reason="PIVOT_SOAK=1 serves two")

OTHER = "pivot-lab/another"
LAUNCH = yaml.safe_load((ROOT / "inventory/lab/group_vars/inference/server.yml").read_text())["sglang_server_launch"]


def turned(source: Path, place: Path) -> None:
    """The lab's target with the rows of its head one further: the same sizes, other answers."""
    shutil.copytree(source, place)
    path = place / "model.safetensors"
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    (entry,) = [entry for name, entry in header.items() if name.endswith("lm_head.weight")]
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    row = (end - begin) // entry["shape"][0]
    data[begin:end] = data[begin + row : end] + data[begin : begin + row]
    path.write_bytes(data)


@pytest.fixture(scope="module")
def variables(tmp_path_factory):
    """What infer2 has for itself: a model without a drafter, under its own name."""
    place = tmp_path_factory.mktemp("another")
    turned(ROOT / "lab/models/target", place / "model")
    path = place / "another.json"
    assert manifests.main([str(place / "model"), "--repository", OTHER, "--output", str(path)]) == 0
    revision = yaml.safe_load(path.read_text())["revision"]
    source = {"repository": OTHER, "revision": revision, "source": str(place / "model"), "manifest": str(path)}
    flags = {name: value for name, value in LAUNCH.items() if not name.startswith("speculative-")}
    return {
        "model_weights_models": [source],
        "sglang_server_model_path": f"/models/{OTHER}/{revision}",
        "sglang_server_drafter_path": "",
        "sglang_server_eagle_layer_ids": None,
        "sglang_server_launch": {**flags, "served-model-name": "another"},
        "sglang_server_health_prompts": None,
        "sglang_server_health_accept_length": 0,
    }


def models(there):
    """Repositories that a host holds."""
    return there.run("cd /models && ls -d */* | sort").split()


def answer(there, lab):
    """The tokens that a server answers the first recorded prompt with."""
    prompt, key = PROMPTS["prompts"][0], lab["secrets"]["vault_sglang_api_key"]
    sampling = {"temperature": 0, "max_new_tokens": PROMPTS["max_new_tokens"], "ignore_eos": True}
    return post(there, key, "/generate", {"text": prompt["text"], "sampling_params": sampling})["output_ids"]


def test_two_models_on_two_containers(deployed, lab, controller, host, variables):
    before = host.show("InvocationID")
    with second_container(lab, **variables) as inventory:
        run = controller.play("deploy.yml", "-i", inventory)
        assert run.status == "successful", run.output[-6000:]
        FIGURES.append(f"a second container with another model: {run.seconds:.0f} s")
        assert run.stats["changed"].get("infer1", 0) == 0
        assert host.show("InvocationID") == before
        second = Host(lab, "infer2")
        assert models(host) == ["pivot-lab/kimi-k25-tiny", "pivot-lab/kimi-k25-tiny-eagle3"]
        assert models(second) == [OTHER]
        recorded = PROMPTS["prompts"][0]["output_ids"]
        assert answer(host, lab) == recorded
        assert answer(second, lab) != recorded
        assert 'served-model-name: "another"' in second.run("cat /etc/sglang/launch.yaml")
        assert "speculative" not in second.run("cat /etc/sglang/launch.yaml")
        still = controller.play("deploy.yml", "-i", inventory)
        assert (still.status, still.changed_tasks()) == ("successful", [])
        verified = controller.play("deploy.yml", "-i", inventory, "--tags", "verify")
        assert verified.status == "successful", verified.output[-4000:]
