"""A real service with the probe: what it records, and what it leaves alone."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

from pivot.wirings import wiring

PROJECT = Path(os.environ["MOLECULE_PROJECT_DIRECTORY"])
RECORDS = "/var/log/pivot-probe"
LAYERS = [3, 5, 7]
# generate, from the host itself: prompt → token ids
ASK = """
import json, sys, urllib.request
body = {"text": sys.argv[1], "sampling_params": {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}}
kind = {"Content-Type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:31000/generate", json.dumps(body).encode(), kind)
print(json.dumps(json.load(urllib.request.urlopen(request, timeout=120))["output_ids"]))
"""


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((PROJECT / "lab/models/prompts.json").read_text())["prompts"][:3]
    return found


@pytest.fixture(scope="module")
def recordings(host: Host, prompts: list[dict[str, Any]], outputs: list[list[int]]) -> list[wiring.Recording]:
    assert len(outputs) == len(prompts)  # the requests were sent
    names = host.check_output(f"ls {RECORDS}").split()
    return [
        wiring.parse(name, host.check_output(f"cat {RECORDS}/{name}") + "\n")
        for name in names
        if name.endswith(".jsonl")
    ]


@pytest.fixture(scope="module")
def outputs(host: Host, prompts: list[dict[str, Any]]) -> list[list[int]]:
    return [json.loads(host.check_output("python3 -c %s %s", ASK, prompt["text"])) for prompt in prompts]


def test_tokens_with_the_probe_are_those_of_plain_decoding(
    prompts: list[dict[str, Any]], outputs: list[list[int]]
) -> None:
    assert outputs == [prompt["output_ids"] for prompt in prompts]


def test_the_three_points_and_the_layers_are_recorded(recordings: list[wiring.Recording]) -> None:
    answer = wiring.analyse(recordings, LAYERS)
    assert answer.capture == tuple(LAYERS)
    assert answer.layers == tuple(LAYERS)
    assert answer.calls > 30
    assert all(
        dict(piece.layers)[layer].exact == answer.calls for piece, layer in zip(answer.slices, LAYERS, strict=True)
    )
    assert answer.packed.exact == answer.forwards
    assert answer.fed.exact == answer.calls
    assert answer.findings == ()


def test_other_ids_would_have_been_found_out(recordings: list[wiring.Recording]) -> None:
    assert [finding.code for finding in wiring.analyse(recordings, [2, 4, 5]).findings] == ["WIRE-IDS"]


def test_the_header_names_versions_and_every_hook_found_its_place(recordings: list[wiring.Recording]) -> None:
    headers = [recording.header for recording in recordings if recording.header]
    assert headers
    for header in headers:
        assert header["sglang"] == "0.5.23"
        assert set(header["hooks"].values()) == {"registered"}
        assert len(header["hooks"]) == 10


def test_no_prompt_stands_in_the_records(
    host: Host, recordings: list[wiring.Recording], prompts: list[dict[str, Any]]
) -> None:
    assert recordings
    for prompt in prompts:
        word = max(re.findall(r"\w+", prompt["text"]), key=len)  # long: no print holds it by chance
        assert len(word) >= 6
        assert host.run("grep -rqF -- %s %s", word, RECORDS).rc == 1


def test_records_are_for_root_and_the_service_alone(host: Host) -> None:
    directory = host.file(RECORDS)
    assert (directory.user, directory.group, directory.mode) == ("llm", "llm", 0o750)
    assert host.check_output(f"find {RECORDS} -type f -perm /007") == ""


def test_the_baseline_is_readable_by_root_alone_and_holds_no_secret(host: Host) -> None:
    state = host.file("/var/lib/pivot-probe/state.json")
    assert (state.user, state.mode) == ("root", 0o600)
    assert "made-up-and-never-shown" not in state.content_string
    assert json.loads(state.content_string)["phase"] == "on"


def test_the_other_plugin_is_still_named_and_paths_are_set(host: Host) -> None:
    pid = host.check_output("systemctl show llm --property MainPID --value")
    environment = host.check_output(f"tr '\\0' '\\n' </proc/{pid}/environ").splitlines()
    assert "SGLANG_PLUGINS=cpu_lab,pivot_probe" in environment
    assert "PYTHONPATH=/opt/pivot-probe" in environment
    assert f"PIVOT_PROBE_DIR={RECORDS}" in environment


def test_switching_on_took_one_restart_and_left_the_engine_alone(host: Host) -> None:
    assert host.check_output("journalctl -u llm -o cat | grep -c '^Started llm.service'") == "2"
    assert host.check_output("systemctl show llm --property NRestarts --value") == "0"
    before, now = (
        host.file("/root/before").content_string,
        host.check_output("/root/capture llm '*pivot-probe*'") + "\n",
    )
    assert before != now  # so that equality afterwards means something
    assert before.split("== engine")[1].split("==")[0] == now.split("== engine")[1].split("==")[0]
