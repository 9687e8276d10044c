"""A package as the text of one program."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import init_plugin_loader, lookup_loader

from pivot.program import program, sources

FILES = Path(__file__).parents[2] / "roles"
ON_HOSTS = sorted(path for path in FILES.glob("*/files/*") if path.suffix == ".py" or (path / "__main__.py").is_file())


@pytest.fixture
def package(tmp_path):
    """A package of three modules, one of which names the others."""
    place = tmp_path / "answers"
    place.mkdir()
    (place / "__init__.py").write_text('"""Ünder test: {braces} and \\\\ """\n')
    (place / "numbers.py").write_text("SIX = 6\n")
    (place / "__main__.py").write_text(
        "import sys\nimport answers\nfrom answers.numbers import SIX\n"
        'print(answers.__doc__, SIX, sys.argv[1], "answers.numbers" in sys.modules)\n'
    )
    return place


def run(text, *arguments):
    line = [sys.executable, "-I", "-", *arguments]
    return subprocess.run(line, input=text, capture_output=True, text=True, check=False)


def test_it_runs_from_standard_input_with_its_modules_and_arguments(package):
    done = run(program(package), json.dumps({"a": 1}))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == 'Ünder test: {braces} and \\  6 {"a": 1} True\n'


def test_its_exit_status_is_the_programs(package):
    (package / "__main__.py").write_text("import sys\nsys.exit(3)\n")
    assert run(program(package)).returncode == 3


def test_what_a_script_imports_of_pivot_travels_with_it(tmp_path):
    script = tmp_path / "masks.py"
    script.write_text(
        "import sys\nfrom pivot.engines.installed import SMALL\nfrom pivot.bundles.redact import MASK, Redactor\n"
        'print(Redactor(["s3cret-word"]).text("password=s3cret-word").count(MASK), SMALL, __name__)\n'
        'print(*(name.rpartition(".")[2] for name in sys.modules if name.startswith("pivot.")))\n'
    )
    done = run(program(script))
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first == "1 65536 __main__"
    assert {"installed", "redact", "secret_names", "secret_shapes"} <= set(second.split())


@pytest.mark.parametrize("name", ["__init__.py", "__main__.py"])
def test_what_cannot_be_run_is_said(package, name):
    (package / name).unlink()
    with pytest.raises(FileNotFoundError, match=r"is no package that can be run: it lacks answers"):
        program(package)


def test_the_lookup_finds_a_package_among_a_roles_files(package):
    init_plugin_loader()
    lookup = lookup_loader.get("program", loader=DataLoader())
    assert lookup.run([str(package)], variables={}) == [program(package)]
    assert "evaluates" in lookup.run(["whatif"], variables={"ansible_search_path": ["roles/debug_probes"]})[0].lower()


@pytest.mark.parametrize("path", ON_HOSTS, ids=lambda path: path.stem)
def test_what_is_sent_to_hosts_is_python_3_9_with_all_that_it_imports(path):
    found = sources(path)
    assert path.stem in found
    for text in found.values():
        ast.parse(text, feature_version=(3, 9))


def test_there_are_such_files():
    assert {path.stem for path in ON_HOSTS} >= {"collect", "node_facts", "probe_state", "weights_job", "whatif"}
