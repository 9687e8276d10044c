"""The callback in a real ansible-playbook."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
FILTER = """
import os
import pathlib

with (pathlib.Path(__file__).parent / "loaded").open("a") as stream:
    stream.write(f"{os.getpid()}\\n")


class FilterModule:
    def filters(self):
        return {"same": str}
"""


def test_filters_are_loaded_once_and_not_by_every_tasks_worker(tmp_path: Path) -> None:
    filters = tmp_path / "filters"
    filters.mkdir()
    (filters / "same.py").write_text(FILTER)
    tasks = [{"ansible.builtin.debug": {"msg": f"{{{{ 'task {number}' | same }}}}"}} for number in range(3)]
    play = tmp_path / "play.yml"
    play.write_text(yaml.safe_dump([{"hosts": "localhost", "gather_facts": False, "tasks": tasks}]))
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "--inventory", "localhost,", str(play)],
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_FILTER_PLUGINS": str(filters),
            "PIVOT_LOG": str(tmp_path / "ansible.log"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "task 2" in done.stdout, done.stdout + done.stderr
    assert len((filters / "loaded").read_text().splitlines()) == 1
