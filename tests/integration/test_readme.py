"""The README's commands are those that the tests run. Comes after test_deploy.py."""

import os
import re
import subprocess

from .conftest import ROOT

# what a test cannot run inside itself, and who does
ELSEWHERE = {
    "make test": "this is it",
    "make lab-down": ".ci/run, at its end",
    "make bench": "make soak",
    "source .venv/bin/activate": "PATH, below",
    "ansible-playbook deploy.yml --tags debug-on": "test_interruption.py, in another lane",
    "ansible-playbook deploy.yml --tags debug-off": "test_interruption.py, in another lane",
}


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_every_command_was_run(deployed, controller):
    run_here = []
    for command in commands():
        if command in ELSEWHERE or command in controller.commands:
            continue
        done = subprocess.run(
            ["bash", "-c", command],
            check=False,
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}"},
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        run_here.append(command)
    assert "make deploy" in run_here
    assert len(commands()) > 8


def test_nothing_is_excused_that_the_readme_no_longer_names():
    assert set(ELSEWHERE) <= set(commands())
