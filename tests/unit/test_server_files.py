"""What roles/sglang_server sends to a host."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from pivot.program import program
from pivot.serving import launch

ROOT = Path(__file__).resolve().parents[2]
WRITE = ROOT / "roles/sglang_server/files/write_private.py"


def write(path, text, mode="0640"):
    arguments = json.dumps({"path": str(path), "text": text, "group": "root", "mode": mode})
    script = f"{WRITE.read_text()}\nwrite(**json.loads({json.dumps(arguments)}))\n"
    return subprocess.run([sys.executable, "-I", "-"], input=script, capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="the file becomes root's")
def test_a_private_file_is_written_in_one_step(tmp_path):
    path = tmp_path / "launch.yaml"
    text = 'api-key: "kéy \\" \U0001f600"\nport: 1\n'
    path.write_text("old\n")
    (tmp_path / "launch.yaml.new").write_text("of an interrupted run")
    done = write(path, text)
    assert done.returncode == 0, done.stderr
    assert path.read_text() == text
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["launch.yaml"]


def test_a_script_that_arrived_in_part_writes_nothing(tmp_path):
    path = tmp_path / "launch.yaml"
    script = WRITE.read_text() + '\nwrite(**json.loads("{\\"path\\": '
    done = subprocess.run([sys.executable, "-I", "-"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert not path.exists()


# --- what leaves a host, and what is printed


STATE = ROOT / "roles/sglang_server/files/server_state.py"
PROXY = "http://user:made-up-pw@proxy.example.org:3128"
ENVIRONMENT = {"HF_TOKEN": "made-up-token", "https_proxy": PROXY, "NCCL_DEBUG": "WARN", "QUOTED_PASSWORD": 'made-up" x'}


def test_no_secret_of_a_file_leaves_the_host(tmp_path):
    text = runpy.run_path(str(STATE))["text"]
    files = {
        "environment": launch.environment_text(ENVIRONMENT),
        "launch.yaml": launch.config_text({"api-key": "made-up-1", "admin-api-key": "made-up: #2", "tp-size": 8}),
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        said = text(tmp_path / name)
        assert "made-up" not in said
        assert len(said.splitlines()) == len(content.splitlines())
    assert 'NCCL_DEBUG="WARN"\n' in text(tmp_path / "environment")
    assert "@proxy.example.org:3128" in text(tmp_path / "environment")
    assert "tp-size: 8\n" in text(tmp_path / "launch.yaml")
    assert text(tmp_path / "missing") is None


def test_of_a_secret_variable_only_the_digest_leaves_the_host():
    told = runpy.run_path(str(STATE))["told"]
    said = {name: told(name, value) for name, value in ENVIRONMENT.items()}
    digests = {name: f"sha256:{launch.sha256(value)}" for name, value in ENVIRONMENT.items()}
    assert said == {**digests, "NCCL_DEBUG": "WARN"}


def test_what_looks_at_a_server_is_one_program():
    done = subprocess.run(
        [sys.executable, "-I", "-", "{}"], input=program(STATE), capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1] == "KeyError: 'unit'"


def tasks(place):
    for task in place:
        yield task
        yield from tasks(task.get("block", []))


def test_no_loop_prints_the_text_of_a_file():
    given = [*tasks(yaml.safe_load((ROOT / "roles/sglang_server/tasks/configure.yml").read_text()))]
    loops = [task["loop"] for task in given if "__sglang_server_plain_files" in str(task.get("loop"))]
    assert len(loops) == 2
    assert all("map(attribute='path')" in loop and "content" not in loop for loop in loops)


@pytest.mark.parametrize(
    ("before", "after", "given", "changed", "note"),
    [
        ('T_TOKEN="<redacted>"\n', 'T_TOKEN="made-up-1"\n', {"differs": True}, True, "; only what is masked differs"),
        ('T_TOKEN="<redacted>"\n', 'T_TOKEN="made-up-1"\n', {"differs": False}, False, ""),
        ("", "a\n", {}, True, ""),
        ("a\n", "a\n", {}, False, ""),
    ],
)
def test_a_difference_of_a_file_whose_secrets_stayed_on_the_host(before, after, given, changed, note):
    action = runpy.run_path(str(ROOT / "plugins/action/redacted_diff.py"))["ActionModule"]
    arguments = {"before": before, "after": after, "path": "/x", **given}
    task = SimpleNamespace(args=arguments, async_val=0, check_mode=False, vars={})
    connection = SimpleNamespace(_shell=SimpleNamespace(tmpdir=""))
    result = action(task, connection, *[None] * 4).run(None, {})
    assert result["changed"] is changed
    assert result["diff"][0]["after_header"] == f"/x (as wanted{note})"
    assert "made-up" not in str(result)
