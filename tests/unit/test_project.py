"""What holds for the whole repository."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIXED = "playbooks roles inventory templates molecule tests ansible.cfg deploy.yml".split()  # noqa: SIM905 - a list of names


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_the_top_level_is_the_designs():
    assert all((ROOT / name).exists() for name in FIXED)


def test_host_keys_are_never_left_unchecked():
    wrong = re.compile(r"host_key_checking\s*[=:]\s*false|StrictHostKeyChecking[= ](no|off|accept-new)", re.IGNORECASE)
    for path in tracked("*.yml", "*.cfg", "*.py", "*.sh", "*.md", "*.j2", "Makefile"):
        if path != Path(__file__):
            assert not wrong.search(path.read_text()), path


def test_the_lab_is_imported_by_nothing_that_runs_against_a_cluster():
    foreign = re.compile(r"^\s*(from|import) (pivot_lab|fakepve)\b", re.MULTILINE)
    for path in tracked("src/*.py", "plugins/*.py", "roles/*.py", "probe/*.py"):
        assert not foreign.search(path.read_text()), path
    assert "fakepve" not in (ROOT / "requirements/controller.txt").read_text()


def test_every_direct_dependency_has_its_reason():
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    for name in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        (line,) = [line for line in text.splitlines() if line.strip().startswith(f'"{name}"')]
        assert re.search(r"#\s*\S+", line), name
    for name in ("ansible-core", "ansible-runner", "jinja2", "proxmoxer", "pytest-testinfra"):
        assert f'"{name}"' in text


@pytest.fixture
def bare(tmp_path):
    """The bootstrap's files, and a PATH without any Python or package."""
    for name in ("scripts/bootstrap.sh", "lab/debian-packages.txt", "lab/pyproject.toml", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "requirements").mkdir()
    shutil.copy(ROOT / "requirements/dev.txt", tmp_path / "requirements")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "env", "dirname", "uname", "id", "cat", "sha256sum", "grep", "rm"):
        (tools / name).symlink_to(shutil.which(name))
    dpkg = tools / "dpkg-query"
    dpkg.write_text("#!/bin/bash\necho 'install ok installed'\n")
    dpkg.chmod(0o755)
    return tmp_path


def bootstrap(place, **environment):
    return subprocess.run(
        [place / "scripts/bootstrap.sh"],
        check=False,
        capture_output=True,
        text=True,
        env={"PATH": str(place / "bin"), "HOME": str(place), **environment},
    )


def test_without_a_new_enough_python_the_bootstrap_says_what_to_install(bare):
    done = bootstrap(bare)
    assert done.returncode == 1
    assert done.stderr.startswith("[setup] no Python of at least 3.12 found on PATH or in pyenv: install one")
    assert len(done.stderr.splitlines()) == 1


def test_an_old_python_is_not_taken(bare):
    old = bare / "bin/python3"
    old.write_text("#!/bin/bash\nexit 1\n")
    old.chmod(0o755)
    assert "no Python of at least 3.12" in bootstrap(bare).stderr


PYTHON = """#!/bin/bash
if [[ "$1 $2" == "-m venv" ]]; then
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
    printf '#!/bin/bash\\nexit 0\\n' >"$3/bin/pip" && chmod +x "$3/bin/pip"
fi
"""


def with_python(place):
    """A STAND-IN for a Python that is new enough."""
    for name in ("mkdir", "cp", "chmod"):
        (place / "bin" / name).symlink_to(shutil.which(name))
    (place / "bin/python3").write_text(PYTHON)
    (place / "bin/python3").chmod(0o755)


def test_a_copy_and_a_half_made_venv_are_made_anew(bare, tmp_path_factory):
    with_python(bare)
    assert "making .venv with" in bootstrap(bare).stdout
    assert bootstrap(bare).stdout == ""
    (bare / ".venv/.pivot-home").unlink()  # a run that was killed while it made the venv
    (bare / ".venv/bin/pip").unlink()
    assert bootstrap(bare).stdout.startswith("[setup] .venv was made for another place, or not to its end")
    assert (bare / ".venv/bin/pip").exists()
    copy = tmp_path_factory.mktemp("other") / "pivot"
    shutil.copytree(bare, copy, symlinks=True)
    assert bootstrap(copy).stdout.startswith("[setup] .venv was made for another place")
    assert (bootstrap(copy).stdout, bootstrap(bare).stdout) == ("", "")


def test_a_path_with_a_blank_is_refused(bare, tmp_path_factory):
    place = tmp_path_factory.mktemp("My Projects") / "pivot"
    shutil.copytree(bare, place, symlinks=True)
    done = bootstrap(place)
    assert done.returncode == 1
    assert done.stderr.startswith("[setup] the path of this clone has a blank")


def test_missing_packages_are_listed_first(bare):
    (bare / "bin/dpkg-query").write_text("#!/bin/bash\nexit 1\n")
    apt = bare / "bin/apt-get"
    apt.write_text("#!/bin/bash\nexit 100\n")
    apt.chmod(0o755)
    done = bootstrap(bare)
    assert done.returncode != 0
    assert "installing Debian packages: " in done.stdout or "installing them needs root" in done.stderr


@pytest.mark.skipif(
    not os.access(ROOT / ".venv/.pivot-lock", os.R_OK), reason="the tests run outside of make setup's .venv"
)
def test_a_second_bootstrap_does_nothing():
    done = subprocess.run([ROOT / "scripts/bootstrap.sh"], check=True, capture_output=True, text=True)
    assert done.stdout == done.stderr == ""
