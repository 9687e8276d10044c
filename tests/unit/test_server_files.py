"""What roles/sglang_server sends to a host."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
