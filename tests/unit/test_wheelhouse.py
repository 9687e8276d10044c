"""Wheelhouses: made from real (tiny) wheels, without a network; pip itself is asked through a find-links folder."""

import hashlib
import json
import os
import zipfile

import pytest

from pivot.engines import downloads, engine, patches, wheelhouse
from pivot.engines.engine import EngineError

from . import test_patches

HEAD = "# target: python 3.11, x86_64, glibc 2.36\n"


def make_wheel(folder, name, version="1.0", requires=(), tag="py3-none-any"):
    """A wheel that pip accepts; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {item}\n" for item in requires)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A lock of two wheels that lie in a find-links folder; the network is out of reach for pip."""
    for name in [item for item in os.environ if item.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIVOT_FIND_LINKS", str(tmp_path / "links"))
    links = tmp_path / "links"
    wheels = [make_wheel(links, "alpha", requires=("beta>=2",)), make_wheel(links, "beta", "2.0+cpu")]
    write_lock(tmp_path, wheels)
    return tmp_path


def write_lock(place, wheels):
    lines = [f"{path.name.split('-')[0]}=={path.name.split('-')[1]} --hash=sha256:{sha(path)}\n" for path in wheels]
    (place / "x.lock").write_text(HEAD + "".join(lines))


def build(place, sources=()):
    said = []
    house = wheelhouse.build(place / "x.lock", place / "cache", sources, report=said.append)
    return house, said


def distribution(place, name="local-thing", body="x = 1\n"):
    folder = place / name
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        f'[project]\nname = "{name}"\nversion = "0.1"\n[tool.setuptools]\npy-modules = ["local_thing"]\n'
    )
    (folder / "local_thing.py").write_text(body)
    return folder


def test_a_wheelhouse_holds_the_locked_wheels_and_what_pip_needs_to_install_them(place):
    house, said = build(place)
    assert house.built
    assert sorted(path.name for path in (house.path / "wheels").iterdir()) == [
        "alpha-1.0-py3-none-any.whl",
        "beta-2.0+cpu-py3-none-any.whl",
    ]
    assert (house.path / "requirements.txt").read_text().splitlines() == [
        line for line in (place / "x.lock").read_text().splitlines() if not line.startswith("#")
    ]
    assert said[-1].startswith(f"wheelhouse {house.digest}: 2 wheels")


def test_a_second_build_only_looks(place, monkeypatch):
    first, _ = build(place)
    monkeypatch.setattr(downloads, "download", None)  # a call would fail
    second, said = build(place)
    assert not second.built
    assert (second.path, second.wheels, second.size) == (first.path, first.wheels, first.size)
    assert "ready" in said[0]


@pytest.mark.parametrize("damage", ["removed", "grown", "replaced", "manifest", "requirements"])
def test_a_damaged_wheelhouse_is_made_whole(place, damage):
    house, _ = build(place)
    wheel = house.path / "wheels" / "alpha-1.0-py3-none-any.whl"
    good = sha(wheel)
    if damage == "removed":
        wheel.unlink()
    elif damage == "grown":
        with wheel.open("ab") as file:
            file.write(b"x")
    elif damage == "replaced":  # same size, other bytes, written later
        wheel.write_bytes(bytes(len(wheel.read_bytes())))
    elif damage == "manifest":
        (house.path / "manifest.json").write_text("{")
    else:
        (house.path / "requirements.txt").unlink()
    again, _ = build(place)
    assert again.built
    assert sha(wheel) == good
    assert not build(place)[0].built


def test_what_an_interrupted_build_left_is_used_or_replaced(place, monkeypatch):
    digest = engine.release_digest(wheelhouse.read_lock(place / "x.lock").sha256, [])
    wheels = place / "cache" / f".{digest}.partial" / "wheels"
    make_wheel(wheels, "alpha", requires=("beta>=2",))
    whole = place / "links" / "alpha-1.0-py3-none-any.whl"
    (wheels / whole.name).write_bytes(whole.read_bytes())
    (wheels / "beta-2.0+cpu-py3-none-any.whl").write_bytes(b"half")
    asked = []
    real = downloads.download
    monkeypatch.setattr(downloads, "download", lambda wanted, *rest: (asked.extend(wanted), real(asked, *rest)))
    house, said = build(place)
    assert [wheel.name for wheel in asked] == ["beta"]
    assert "1 of 2 locked wheels are here" in said[0]
    assert house.wheels == 2


def test_another_wheelhouse_lends_its_wheels(place, monkeypatch):
    first, _ = build(place)
    (place / "x.lock").write_text((place / "x.lock").read_text() + "# changed\n")
    monkeypatch.setattr(downloads, "download", None)  # a call would fail
    second, _ = build(place)
    assert second.digest != first.digest
    assert second.wheels == 2


def test_a_wheel_that_is_not_to_be_had_is_one_sentence(place):
    (place / "links" / "beta-2.0+cpu-py3-none-any.whl").unlink()
    with pytest.raises(EngineError) as caught:
        build(place)
    text = str(caught.value)
    assert text.startswith("no wheel of beta 2.0+cpu for Python 3.11 was found in the package index and ")
    assert str(place / "links") in text
    assert "set PIVOT_FIND_LINKS" in text
    assert not list((place / "cache").glob("*/manifest.json"))


def test_a_wheel_of_another_platform_is_not_taken(place):
    (place / "links" / "beta-2.0+cpu-py3-none-any.whl").unlink()
    make_wheel(place / "links", "beta", "2.0+cpu", tag="cp312-cp312-manylinux_2_28_x86_64")
    with pytest.raises(EngineError, match=r"no wheel of beta 2\.0\+cpu for Python 3\.11"):
        build(place)


def test_a_wheel_with_another_hash_is_refused(place):
    make_wheel(place / "links", "beta", "2.0+cpu", requires=("alpha",))
    with pytest.raises(EngineError, match=r"beta from .* is not the locked file, its sha256 differs"):
        build(place)


def test_an_unnamed_gap_stops_the_build_and_a_named_one_does_not(place):
    write_lock(place, [make_wheel(place / "links", "alpha", requires=("gamma",))])
    with pytest.raises(EngineError, match="ENGINE-GAP  alpha: asks for 'gamma', but gamma is not locked"):
        build(place)
    (place / "x.gaps.yml").write_text("absent: {gamma: not needed here}\n")
    assert build(place)[0].wheels == 1


def test_a_local_distribution_is_built_the_same_every_time(place):
    source = distribution(place)
    one, two = wheelhouse.build_wheel(source, place), place / "again"
    two.mkdir()
    digest = sha(one)
    (source / "local_thing.py").chmod(0o600)
    os.utime(source / "local_thing.py", (1e9, 1e9))
    assert sha(wheelhouse.build_wheel(source, two)) == digest
    assert sorted(path.name for path in source.iterdir()) == ["local_thing.py", "pyproject.toml"]


def test_a_local_distribution_is_part_of_wheelhouse_and_requirements(place):
    house, _ = build(place, [distribution(place)])
    (wheel,) = (house.path / "wheels").glob("local_thing-*.whl")
    lines = (house.path / "requirements.txt").read_text().splitlines()
    assert lines[-1] == f"local-thing==0.1 --hash=sha256:{sha(wheel)}"
    manifest = json.loads((house.path / "manifest.json").read_text())
    assert manifest["files"][wheel.name]["source"] == wheelhouse.read_distribution(place / "local-thing").tree


def test_the_source_decides_about_the_digest_and_leftovers_and_tests_do_not(place):
    source = distribution(place)
    before = wheelhouse.read_distribution(source)
    (source / "__pycache__").mkdir()
    (source / "__pycache__" / "x.pyc").write_bytes(b"1")
    (source / "local_thing.egg-info").mkdir()
    (source / "local_thing.egg-info" / "PKG-INFO").write_text("x")
    (source / ".hidden").write_text("x")
    (source / "check_it.py").write_text("x")
    (source / "tests").mkdir()
    (source / "tests" / "test_it.py").write_text("x")
    assert wheelhouse.read_distribution(source) == before
    assert wheelhouse.read_distribution(distribution(place, body="x = 2\n")).tree != before.tree


def test_a_distribution_that_cannot_be_built_is_one_sentence(place):
    source = distribution(place)
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "nonsense"\n[project]\nname="a"\nversion="1"\n'
    )
    with pytest.raises(EngineError, match=r"the wheel of .*local-thing cannot be built: "):
        wheelhouse.build_wheel(source, place)


@pytest.mark.parametrize("text", ["[project]\nname = 'a'\n", "[project\n"])
def test_a_distribution_without_name_or_version_is_refused(place, text):
    (place / "d").mkdir()
    (place / "d" / "pyproject.toml").write_text(text)
    with pytest.raises(EngineError, match=r"must give project\.name and project\.version"):
        wheelhouse.read_distribution(place / "d")


def test_the_command_line_says_errors_in_one_line(place, capsys):
    assert wheelhouse.main(["build", "--lock", str(place / "none.lock"), "--out", str(place / "cache")]) == 1
    assert capsys.readouterr().err == (
        f"ERROR: the lock file {place / 'none.lock'} cannot be read: No such file or directory\n"
    )


def test_the_command_line_ends_with_what_it_made_as_json(place, capsys):
    assert wheelhouse.main(["build", "--lock", str(place / "x.lock"), "--out", str(place / "cache")]) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert made["built"] is True
    assert made["path"] == str(place / "cache" / made["digest"])


def test_a_patched_engine_takes_the_place_of_the_published_one(place, monkeypatch):
    links, alpha = place / "links", place / "links/alpha-1.0-py3-none-any.whl"
    published = test_patches.make_wheel(links)
    make_wheel(links, "torch")
    write_lock(place, [alpha, links / "beta-2.0+cpu-py3-none-any.whl", published, links / "torch-1.0-py3-none-any.whl"])
    change = test_patches.patch(place, "x.patch", test_patches.CHANGE)
    version = engine.patched_version("0.5.23", [change.sha256])
    house = wheelhouse.build(place / "x.lock", place / "cache", report=lambda _: None, applied=[change])
    own = house.path / f"wheels/sglang-{version}-py3-none-any.whl"
    assert [path for path in (house.path / "wheels").iterdir() if path.name.startswith("sglang")] == [own]
    lines = [line for line in (house.path / "requirements.txt").read_text().splitlines() if line.startswith("sglang")]
    assert lines == [f"sglang=={version} --hash=sha256:{sha(own)}"]
    # another patch needs no index: the published wheel stayed in the cache
    monkeypatch.setattr(downloads, "download", None)  # a call would fail
    other = test_patches.patch(place, "y.patch", test_patches.CHANGE.replace("[1, 29, 57]", "[0]"))
    assert wheelhouse.build(place / "x.lock", place / "cache", report=lambda _: None, applied=[other]).built
    again = wheelhouse.build(place / "x.lock", place / "cache", report=lambda _: None, applied=[change])
    assert not again.built
    assert wheelhouse.build(place / "x.lock", place / "cache", report=lambda _: None, applied=[]).built
    assert patches.published(wheelhouse.read_lock(place / "x.lock"), place / "cache")


def test_a_patch_that_does_not_apply_ends_the_build_before_other_wheels_are_fetched(place, monkeypatch):
    links = place / "links"
    published = test_patches.make_wheel(links)
    write_lock(place, [links / "alpha-1.0-py3-none-any.whl", published])
    wrong = test_patches.patch(place, "x.patch", test_patches.CHANGE.replace("30", "31"))
    asked = []
    real = downloads.download
    monkeypatch.setattr(downloads, "download", lambda wanted, *rest: (asked.extend(wanted), real(wanted, *rest)))
    with pytest.raises(EngineError, match=r"the patch x\.patch does not apply cleanly"):
        wheelhouse.build(place / "x.lock", place / "cache", report=lambda _: None, applied=[wrong])
    assert [wheel.name for wheel in asked] == ["sglang"]
    assert not list((place / "cache").glob("[0-9a-f]*/manifest.json"))


def test_pip_settings_come_from_files_and_environment(place, monkeypatch):
    (place / "pip.conf").write_text("[global]\nfind-links = /a\n    /b\n[install]\nfind-links = /not-for-downloads\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(place / "pip.conf"))
    monkeypatch.setenv("PIP_FIND_LINKS", "/c /a")
    assert sorted(downloads.pip_setting("find-links")) == ["/a", "/b", "/c"]
    assert downloads.pip_setting("index-url") == []


def test_passwords_of_sources_are_not_shown(place, monkeypatch):
    (place / "links" / "beta-2.0+cpu-py3-none-any.whl").unlink()
    monkeypatch.setenv("PIVOT_FIND_LINKS", f"{place / 'links'} file://user:secret@localhost/nowhere")
    with pytest.raises(EngineError) as caught:
        build(place)
    assert "secret" not in str(caught.value)
    assert "//***@localhost" in str(caught.value)
    assert downloads.without_password("at https://u:p@ss@h/x@1 and //h/a@b") == "at https://***@h/x@1 and //h/a@b"


def test_the_committed_lock_and_gaps_are_well_formed_and_disjoint():
    folder = wheelhouse.Path(__file__).parents[2] / "requirements" / "engine"
    lock = wheelhouse.read_lock(folder / "cpu-py311.lock")
    gaps = wheelhouse.read_gaps(folder / "cpu-py311.gaps.yml")
    assert engine.wanted_release("0.5.23", "cpu", lock, []).version == "0.5.23"
    assert not set(gaps.absent) & set(lock.wheels)
    assert {name: entry[0] for name, entry in gaps.replaced.items()} == {
        name: lock.wheels[name].version for name in gaps.replaced
    }
