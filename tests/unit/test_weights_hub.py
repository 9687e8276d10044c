"""The third source: the real client asks a stand-in of the hub (hub_stand_in.py), in the job as the role starts it."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pivot.checkpoints.weights import Action

from .hub_stand_in import Hub, serve
from .weights_host import Host, content, toy

CONTENTS = {"config.json": b"{}", "sub/model.safetensors": content(1, 30 << 20)}  # three of the client's chunks


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve(Hub({"lab/toy": {"r1": CONTENTS}})) as served:
        yield served


@pytest.fixture
def host(tmp_path: Path, hub: Hub) -> Host:
    made = Host(tmp_path, wanted=toy(CONTENTS, hub=True), contents=CONTENTS)
    made.hub = {"endpoint": hub.endpoint, "python": sys.executable, "workers": 2}
    return made


def said(host: Host) -> str:
    """What a run says that cannot fetch everything."""
    text = host.converge()[-1]
    assert not host.release.exists()
    return text


def test_a_pinned_revision_is_fetched_verified_and_published(host: Host, hub: Hub) -> None:
    (step,) = host.plan().of(Action.PUBLISH)
    assert step.fetch == tuple(sorted(CONTENTS))
    assert step.summary().endswith("2 files (31.5 MB) from the hub")
    assert host.converge() == ["publish"]
    assert host.served() == CONTENTS
    assert host.names() == [".verified-r1.json", "r1"]
    assert sorted(path.name for path in host.release.iterdir()) == ["config.json", "sub"]
    assert host.converge() == []
    assert sorted(name for name, _, _ in hub.sent) == ["config.json", "model.safetensors"]


def test_only_what_is_wrong_is_fetched_again(host: Host, hub: Hub) -> None:
    host.converge()
    hub.sent.clear()
    (host.release / "config.json").write_bytes(b"[]")
    assert host.converge() == ["verify", "publish"]
    assert [name for name, _, _ in hub.sent] == ["config.json"]
    assert host.served() == CONTENTS


def test_a_killed_download_is_continued_where_it_was(host: Host, hub: Hub) -> None:
    hub.slow = threading.Event()
    (step,) = host.plan().of(Action.PUBLISH)
    host.run("prepare", step.for_host())
    host.start(step)
    limit = time.monotonic() + 30
    while host.look()["models"][0]["incoming"]["files"].get("sub/model.safetensors", [0])[0] < 10 << 20:
        assert time.monotonic() < limit
    host.kill()
    hub.slow.set()
    (again,) = host.plan().of(Action.PUBLISH)
    assert again.size < step.size
    hub.slow = None
    hub.sent.clear()
    assert host.converge()[-1] == "publish"
    assert host.served() == CONTENTS
    (begin,) = [begin for name, begin, _ in hub.sent if name == "model.safetensors"]
    assert begin > 0


def test_a_connection_that_breaks_is_taken_up_again(host: Host, hub: Hub) -> None:
    hub.cut = 21 << 20
    assert host.converge() == ["publish"]
    assert host.served() == CONTENTS
    assert len([name for name, begin, _ in hub.sent if name == "model.safetensors" and begin]) >= 1


def test_a_file_of_another_content_is_not_published(host: Host, hub: Hub) -> None:
    hub.repositories["lab/toy"]["r1"] = {**CONTENTS, "config.json": b"[]"}
    (text,) = host.converge()
    assert list(json.loads(text)[str(host.release)]) == ["config.json"]
    assert not host.release.exists()
    hub.repositories["lab/toy"]["r1"] = CONTENTS
    assert host.converge() == ["publish"]


def test_what_the_hub_refuses_is_a_sentence(host: Host, hub: Hub) -> None:
    hub.repositories["lab/toy"] = {"r1": {"config.json": b"{}"}}
    assert "lab/toy has no file sub/model.safetensors at r1: the manifest is of another" in said(host)
    hub.repositories["lab/toy"] = {"r2": CONTENTS}
    assert f"{hub.endpoint} has no revision r1 of lab/toy" in said(host)
    hub.repositories.clear()
    assert f"{hub.endpoint} has no repository lab/toy" in said(host)
    hub.repositories["lab/toy"] = {"r1": CONTENTS}
    hub.token, hub.gated = "hf_secret", True
    assert "only to accounts that were granted it: set model_weights_hub_token" in said(host)


def test_the_token_stands_in_one_file_of_root_while_the_job_runs(host: Host, hub: Hub) -> None:
    hub.token = "hf_secret"
    (step,) = host.plan().of(Action.PUBLISH)
    host.run("prepare", step.for_host())
    token = host.jobs / "token"
    token.write_text("hf_secret")
    token.chmod(0o600)
    host.start(step)
    assert host.end()["ended"] == "ok"
    assert host.served() == CONTENTS
    assert not token.exists()
    kept = [path for place in (host.jobs, host.bin, host.root) for path in place.rglob("*") if path.is_file()]
    assert kept
    assert [path for path in kept if b"hf_secret" in path.read_bytes()] == []


def test_no_hub_and_no_client_are_sentences(host: Host, tmp_path: Path) -> None:
    host.hub["python"] = str(tmp_path / "nothing")
    assert said(host) == f"model_weights_hub_python {tmp_path}/nothing: No such file or directory"
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    host.hub["python"] = str(bare)
    assert "has no huggingface_hub: set model_weights_hub_python" in said(host)


def test_a_path_and_the_controller_come_before_the_hub(host: Host, tmp_path: Path) -> None:
    (step,) = host.plan().of(Action.PUBLISH)
    assert step.fetch
    host.wanted = toy(CONTENTS, hub=True, source=str(host.source))
    (step,) = host.plan().of(Action.PUBLISH)
    assert (step.send, step.fetch) == (tuple(sorted(CONTENTS)), ())
    host.wanted = toy(CONTENTS, hub=True, source=str(tmp_path / "gone"))
    (step,) = host.plan().of(Action.PUBLISH)
    assert step.fetch
    host.wanted = toy(CONTENTS, hub=True, source=str(host.source), paths=(str(host.source),))
    (step,) = host.plan().of(Action.VERIFY)
    assert step.trees == (str(host.source),)


def test_the_hub_is_down(host: Host) -> None:
    host.hub["endpoint"] = "http://127.0.0.1:9"  # the discard port, which nobody serves
    text = said(host)
    assert "could not be fetched from http://127.0.0.1:9" in text
    assert text.endswith("what has arrived is kept, run again")
