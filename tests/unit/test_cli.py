"""The table of commands: complete, runnable, and imported only when asked for."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from pivot import cli

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pivot.cli", *arguments], cwd=ROOT, check=False, capture_output=True, text=True
    )


def test_help_lists_every_command_with_one_line(capsys):
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, (_, line) in cli.COMMANDS.items():
        assert [row for row in lines if row.split()[:1] == [name] and row.endswith(line)]
    assert max(map(len, lines)) <= 120


def test_every_command_has_a_main_that_takes_its_arguments():
    for name, (module, _) in cli.COMMANDS.items():
        assert len(inspect.signature(importlib.import_module(module).main).parameters) == 1, name


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: pivot {name}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "usage: pivot COMMAND"),
        (("manifst",), "'manifst' is no command: did you mean manifest?"),
        (("xyz",), "'xyz' is no command: pivot --help lists them"),
    ],
)
def test_what_is_no_command(arguments, said, capsys):
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_the_status_is_the_commands(monkeypatch):
    for status in (0, 1, 3):
        monkeypatch.setattr(importlib.import_module("pivot.faults"), "main", lambda _, s=status: s)
        assert cli.main(["faults"]) == status


def test_an_interrupted_command_says_nothing(monkeypatch, capsys):
    def stop(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("pivot.faults"), "main", stop)
    assert cli.main(["faults"]) == cli.INTERRUPTED
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_has_had_enough():
    pipe = 'set -o pipefail; "$0" -m pivot.cli faults | head -n 1'
    done = subprocess.run(["bash", "-c", pipe, sys.executable], cwd=ROOT, check=False, capture_output=True)
    assert done.stdout == b"# Findings, by code\n"
    assert done.stderr == b""


def test_nothing_is_imported_before_it_is_asked_for():
    code = "import sys, pivot.cli; print([name for name in sys.modules if name.startswith('pivot.')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "['pivot.cli']"
    assert run("faults").stdout.startswith("# Findings, by code\n")
