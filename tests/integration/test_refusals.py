"""Wirings that cost accept length are stopped before anything is touched; what only looks like one is not."""

import copy
import json

import pytest
import yaml

from .conftest import FIGURES, ROOT

LAB = ROOT / "inventory/lab"
PINS = yaml.safe_load((LAB / "group_vars/all/pins.yml").read_text())["pivot_pins"]
LAUNCH = yaml.safe_load((LAB / "group_vars/inference/server.yml").read_text())["sglang_server_launch"]
CONFIG = json.loads((LAB / "manifests/kimi-k25-tiny-eagle3.json").read_text())["config"]
IDS = "sglang_server_eagle_layer_ids"
SECONDS = {}


def contract(**changes):
    """The pins with another contract of the drafter: as if it had been trained for that."""
    pins = copy.deepcopy(PINS)
    pins["models"]["kimi-k25-tiny-eagle3"]["contract"].update(changes)
    return {"pivot_pins": pins}


def top_level(ids):
    """A drafter whose ids stand where SGLang does not read them, and nothing set by the deployment."""
    config = {name: value for name, value in CONFIG.items() if name != "eagle_config"}
    return {"sglang_server_drafter_config": {**config, "eagle_aux_hidden_state_layer_ids": ids}, IDS: None}


STOPPED = {
    "ids plus one": (
        {IDS: [4, 6, 8]},
        "the inputs of layers 4, 6, 8 would reach the drafter, which was trained on the inputs of 3, 5, 7",
        f"fix: {IDS}: [3, 5, 7]",
    ),
    "embedding first": (
        {IDS: [0, 3, 5]},
        "ids [0, 3, 5] on 0.5.23 → inputs of layers 0, 3, 5 (outputs of the embedding, 2, 4)",
        f"fix: {IDS}: [3, 5, 7]",
    ),
    "two ids": (
        {IDS: [3, 5]},
        "fc takes 288 (3 x 96), but 2 ids give 192 (2 x 96)",
        "fix: give as many ids as the drafter was trained with",
    ),
    "a top-level key that matters": (
        top_level([3, 5, 7]),
        "is not read, so [3, 5, 7] would be ignored and the default 2, 4, 5 used",
        f"fix: write {IDS}: [3, 5, 7], which puts them under eagle_config",
    ),
    "an id past the end": (
        {IDS: [3, 5, 9]},
        "input of layer 9 would be kept, but the target has layers 0 to 7: only 2 of 3 states reach fc",
        f"fix: {IDS}: [3, 5, 7]",
    ),
    "EAGLE with an EAGLE-3 drafter": (
        {"sglang_server_launch": {**LAUNCH, "speculative-algorithm": "EAGLE"}},
        "speculative-algorithm is 'EAGLE', but LlamaForCausalLMEagle3 is an EAGLE-3 drafter: no states would be kept",
        "fix: write speculative-algorithm: EAGLE3 into sglang_server_launch",
    ),
    "a drafter of another target": (
        contract(target="pivot-lab/another"),
        "the drafter was made for pivot-lab/another, but pivot-lab/kimi-k25-tiny is served",
        "fix: pin the drafter of this target, or correct the contract",
    ),
}
HARMLESS = {
    "the first id is 1 and shifts to the right layers": (
        {IDS: [1, 4, 6], **contract(layers=[2, 5, 7])},
        "the first id is 1, so SGLang 0.5.23 raises all by 1, to 2, 5, 7",
    ),
    "another order": (
        {IDS: [7, 3, 5]},
        "the ids [7, 3, 5] do not ascend; states are packed in the order of the layers all the same",
    ),
    "a top-level key that equals the default": (
        {**top_level([2, 4, 5]), **contract(layers=[2, 4, 5])},
        "is not read; [2, 4, 5] happen to be the default layers 2, 4, 5",
    ),
}


@pytest.fixture(scope="module")
def process(deployed, host):
    """The running service, which nothing here may touch."""
    before = host.show("MainPID", "InvocationID")
    assert before["MainPID"] != "0"
    yield before
    assert host.show("MainPID", "InvocationID") == before
    whole = [seconds for kind, seconds in SECONDS.values() if kind == "stopped"]
    if whole:
        FIGURES.append(f"wrong wirings: {len(whole)} stopped, each after {max(whole):.1f} s at most")


def play(controller, tmp_path, variables, *arguments):
    values = tmp_path / "values.yml"
    values.write_text(yaml.safe_dump(variables))
    run = controller.play("deploy.yml", *arguments, "-e", f"@{values}")
    return run, " ".join(run.output.split())


@pytest.mark.parametrize("name", STOPPED)
def test_it_is_stopped_before_anything_is_touched(process, controller, host, tmp_path, name):
    variables, said, fix = STOPPED[name]
    run, text = play(controller, tmp_path, variables)
    SECONDS[name] = "stopped", run.seconds
    assert run.status == "failed", run.output[-4000:]
    assert said in text
    assert fix in text
    assert run.remote_tasks() == []
    assert host.show("MainPID", "InvocationID") == process


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_alike_is_said_and_no_error(process, controller, tmp_path, name):
    variables, said = HARMLESS[name]
    run, text = play(controller, tmp_path, variables, "--tags", "preflight")
    assert run.status == "successful", run.output[-4000:]
    assert said in text
    assert "; agrees" in text
