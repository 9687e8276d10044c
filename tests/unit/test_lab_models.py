"""The committed tiny pair: what is pinned, prompted and served is what lies in lab/models."""

import contextlib
import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pivot.checkpoints import manifest

PROJECT = Path(__file__).parents[2]
MODELS = PROJECT / "lab/models"
MANIFESTS = PROJECT / "inventory/lab/manifests"


def load(name: str) -> ModuleType:
    """A script of lab/models as a module (they import each other by their own directory)."""
    if str(MODELS) not in sys.path:
        sys.path.append(str(MODELS))
    spec = importlib.util.spec_from_file_location(name, MODELS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


serve = load("serve")


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("directory", "name"), [("target", "kimi-k25-tiny"), ("drafter", "kimi-k25-tiny-eagle3")])
def test_manifest_is_that_of_the_committed_files(directory: str, name: str) -> None:
    pinned = manifest.load_manifest(MANIFESTS / f"{name}.json")
    assert manifest.build_manifest(MODELS / directory, f"pivot-lab/{name}") == pinned


def test_layer_ids_show_when_they_are_lost() -> None:
    layers = read(MODELS / "target/config.json")["text_config"]["num_hidden_layers"]
    ids = read(MODELS / "drafter/config.json")["eagle_config"][serve.IDS_KEY]
    default = [2, layers // 2, layers - 3]
    assert all(own != lost for own, lost in zip(ids, default, strict=True))
    assert ids[0] != 1  # SGLang 0.5.23 would shift the whole list
    assert max(ids) < layers


def test_prompts_come_from_files_that_were_never_trained_on() -> None:
    held = set(read(MODELS / "held-out.json")["files"])
    prompts = read(MODELS / "prompts.json")
    assert len(prompts["prompts"]) == 20
    for prompt in prompts["prompts"]:
        assert prompt["file"] in held
        assert len(prompt["output_ids"]) == prompts["max_new_tokens"]


def test_served_figures_keep_what_the_lab_promises() -> None:
    served = read(MODELS / "figures.json")["served"]
    right = served["right"]["accept_length"]
    assert right >= 2.3
    assert served["key removed"]["accept_length"] <= right - 0.3
    assert served["embedding first"]["accept_length"] <= right - 0.3
    for wiring in ("plain", "right", "key removed", "embedding first", "ids - 1"):
        assert served[wiring]["equals_recorded_plain_output"] == "20/20"


@pytest.mark.parametrize(("layers", "expected"), [([0, 3, 5], [0, 3, 5]), (None, None)])
def test_drafter_view_changes_only_the_ids(
    tmp_path: Path, layers: list[int] | None, expected: list[int] | None
) -> None:
    view = serve.drafter_view(MODELS / "drafter", layers, tmp_path / "view")
    before, after = read(MODELS / "drafter/config.json"), read(view / "config.json")
    assert after["eagle_config"].pop(serve.IDS_KEY, None) == expected
    before["eagle_config"].pop(serve.IDS_KEY)
    assert after == before
    assert (view / "model.safetensors").resolve() == MODELS / "drafter/model.safetensors"


def test_outcome_figures() -> None:
    outcome = serve.Outcome(serve.Wiring("x"), [[1] * 8, [1] * 8], ["", ""], 8, [4, 2, 1, 1], 1.0, 4.0)
    assert outcome.accept_length == 2.0
    assert outcome.per_position == [0.5, 0.25, 0.125]
    assert outcome.tokens_per_second == 4.0
    plain = serve.Outcome(serve.Wiring("plain", drafter=False), [[1] * 8], [""], 0, [], 1.0, 4.0)
    assert plain.accept_length is None
    assert plain.per_position == []


def test_server_that_ends_is_reported_with_its_log(tmp_path: Path) -> None:
    line = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with pytest.raises(serve.ServeError, match="ended with status 3") as caught, serve.serving(line, tmp_path / "log"):
        pass
    assert "no such model" in str(caught.value)


def test_server_is_stopped_with_everything_it_started(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        f"print({serve.READY!r}, flush=True)\n"
        "time.sleep(60)\n"
    )
    with serve.serving([sys.executable, "-c", script], tmp_path / "log") as seconds:
        assert seconds < 60
    status = Path("/proc") / (tmp_path / "child").read_text() / "status"

    def lives() -> bool:
        with contextlib.suppress(OSError):  # it ends while it is read
            return "zombie" not in status.read_text()
        return False

    deadline = time.monotonic() + 10
    while lives():
        assert time.monotonic() < deadline, "the server's child outlived it"
        time.sleep(0.05)
