import copy
import json

import pytest

from pivot.checkpoints import manifest
from pivot.inventory import pins

LOCK_SHA256 = "473c05452e70a932b7ac0a10925fba7f580189f2ec88e7997a3670e978bab76c"  # sha256sum of the lock below
REGISTRY = {
    "engines": {
        "e": {"version": "0.5.23", "accelerator": "cpu", "python": "3.11", "lock": "e.lock", "sha256": LOCK_SHA256}
    },
    "models": {
        "m": {"repository": "a/m", "revision": "r1", "source": "src", "manifest": "m.json"},
        "d": {
            "repository": "a/d",
            "revision": "r2",
            "source": "src",
            "manifest": "d.json",
            "contract": {"target": "a/m", "layers": [3, 5, 7], "convention": "input", "source": "training script"},
        },
    },
}


@pytest.fixture
def place(tmp_path):
    (tmp_path / "e.lock").write_text("torch==2.13.0+cpu\n")
    (tmp_path / "src").mkdir()
    for name, revision in (("m", "r1"), ("d", "r2")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"repository": f"a/{name}", "revision": revision}))
    return tmp_path


def found(registry, place):
    return [(finding.code, finding.subject.split(".")[-1]) for finding in pins.check(registry, place, place)]


def test_a_complete_registry_has_no_findings(place):
    assert found(REGISTRY, place) == []


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("engines", "e", "sha256"), "0" * 64, ("PIN-LOCK", "e")),
        (("engines", "e", "lock"), "gone.lock", ("PIN-LOCK", "e")),
        (("engines", "e", "version"), None, ("PIN-NULL", "e")),
        (("models", "m", "revision"), None, ("PIN-NULL", "m")),
        (("models", "m", "revision"), "r9", ("PIN-MANIFEST", "m")),
        (("models", "m", "manifest"), "gone.json", ("PIN-MANIFEST", "m")),
        (("models", "m", "source"), "gone", ("PIN-SOURCE", "m")),
        (("models", "m", "source"), "e.lock", ("PIN-SOURCE", "m")),
        (("engines", "e", "python"), 3.1, ("PIN-FORM", "e")),
        (("engines", "e"), "0.5.23", ("PIN-FORM", "e")),
        (("models",), ["m"], ("PIN-FORM", "models")),
        (("models", "d", "contract"), "input", ("PIN-FORM", "contract")),
        (("models", "d", "contract", "convention"), "both", ("PIN-CONVENTION", "contract")),
        (("models", "d", "contract", "convention"), None, ("PIN-NULL", "contract")),
    ],
)
def test_each_guard_fires(path, value, expected, place):
    registry = copy.deepcopy(REGISTRY)
    target = registry
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    assert found(registry, place) == [expected]


@pytest.mark.parametrize("other", [{"hub": True}, {"paths": ["/mnt/m"]}])
def test_a_model_that_comes_from_elsewhere_needs_no_source_here(other, place):
    registry = copy.deepcopy(REGISTRY)
    for source in (None, "gone"):
        registry["models"]["m"] |= {"source": source, **other}
        assert found(registry, place) == []
        registry["models"]["m"] |= dict.fromkeys(other)
        assert found(registry, place) == [("PIN-SOURCE" if source else "PIN-NULL", "m")]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"file": "", "sha256": None}, []),  # the libraries come from elsewhere
        ({"version": None}, ["PIN-NULL"]),
        ({"file": None, "sha256": None}, ["PIN-NULL", "PIN-NULL"]),
        ({"sha256": None}, ["PIN-NULL"]),
        ({"version": 580.95}, ["PIN-FORM"]),
        ({"sha256": "0" * 64}, ["PIN-DRIVER"]),
        ({"file": "gone-580.95.05.run"}, ["PIN-DRIVER"]),
        ({"version": "580.105.08"}, ["PIN-DRIVER"]),
    ],
)
def test_the_driver(changes, expected, place):
    (place / "NVIDIA-Linux-x86_64-580.95.05.run").write_text("x")
    sha256 = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"  # printf x | sha256sum
    right = {"version": "580.95.05", "file": "NVIDIA-Linux-x86_64-580.95.05.run", "sha256": sha256}
    registry = {**REGISTRY, "driver": right | changes}
    assert [finding.code for finding in pins.check(registry, place, place)] == expected
    assert found({**REGISTRY, "driver": "580.95.05"}, place) == [("PIN-FORM", "driver")]


def test_a_null_names_the_command_that_fills_it(place):
    registry = copy.deepcopy(REGISTRY)
    registry["models"]["m"]["revision"] = None
    registry["engines"]["e"]["sha256"] = None
    fixes = [finding.fix for finding in pins.check(registry, place, place)]
    command = "pivot manifest src --repository a/m --revision COMMIT --output m.json"
    assert fixes == ["sha256sum e.lock", f"{command}, then revision: COMMIT"]


def test_the_command_for_a_manifest_is_complete(place, capsys):
    registry = copy.deepcopy(REGISTRY)
    registry["models"] = {"m": {**registry["models"]["m"], "manifest": None}}
    (finding,) = pins.check(registry, place, place / "inventory/mine")
    assert finding.fix == ("pivot manifest src --repository a/m --revision r1 --output inventory/mine/manifests/m.json")
    words = finding.fix.split()
    (place / "src/config.json").write_text("{}")
    at = {"src": str(place / "src"), words[-1]: str(place / words[-1])}
    assert manifest.main([at.get(word, word) for word in words[2:]]) == 0, capsys.readouterr().err
    registry["models"] = {"m": {**registry["models"]["m"], "manifest": "manifests/m.json"}}
    assert pins.check(registry, place, place / "inventory/mine") == []


@pytest.mark.parametrize("registry", [None, 5, [], "x"])
def test_what_is_no_registry_at_all_is_one_finding(registry, place):
    assert found(registry, place) == [("PIN-FORM", "pivot_pins")]


def test_a_manifest_that_is_no_object_is_named(place):
    for text in ("[]", "{"):
        (place / "m.json").write_text(text)
        (finding,) = pins.check(REGISTRY, place, place)
        assert (finding.code, finding.message) == ("PIN-MANIFEST", "the manifest m.json is no JSON object")


def with_patches(entries):
    registry = copy.deepcopy(REGISTRY)
    registry["engines"]["e"]["patches"] = entries
    return registry


def test_patches_of_an_engine_are_those_of_the_registry(place):
    (place / "a.patch").write_text("x\n")
    digest = "73cb3858a687a8494ca3323053016282f3dad39d42cf62ca4e79dda2aac7d9ac"  # sha256sum of that
    assert found(with_patches([{"file": "a.patch", "sha256": digest}]), place) == []
    assert found(with_patches([{"file": "a.patch", "sha256": "0" * 64}]), place) == [("PIN-PATCH", "e")]
    assert found(with_patches([{"file": "b.patch", "sha256": digest}]), place) == [("PIN-PATCH", "e")]


@pytest.mark.parametrize("entries", ["a.patch", ["a.patch"], [{"file": "a.patch"}], [{"file": "a", "sha256": 1}]])
def test_patches_of_another_form_are_refused(place, entries):
    assert found(with_patches(entries), place) == [("PIN-FORM", "e")]
