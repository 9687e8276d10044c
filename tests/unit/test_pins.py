import copy
import json

import pytest

from pivot import pins

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


def test_a_null_names_the_command_that_fills_it(place):
    registry = copy.deepcopy(REGISTRY)
    registry["models"]["m"]["revision"] = None
    registry["engines"]["e"]["sha256"] = None
    fixes = [finding.fix for finding in pins.check(registry, place, place)]
    assert fixes == ["sha256sum e.lock", "python -m pivot.weights src --repository a/m"]
