"""Locks, gaps, release ids, and what to do on a host."""

import hashlib
import runpy
from pathlib import Path

import pytest

from pivot.engines import engine, releases
from pivot.engines.engine import Distribution, EngineError, Gaps, Metadata, Target
from pivot.findings import Severity

ROOT = Path(__file__).parents[2]
A, B = "a" * 64, "b" * 64
TARGET = Target("3.11", "x86_64", (2, 36))
LOCK_TEXT = f"""# target: python 3.11, x86_64, glibc 2.36
# a comment
pip==26.3 --hash=sha256:{A}
SGLang==0.5.23 --hash=sha256:{B}
"""
KERNELS = Distribution("sglang-cpu-lab", "0.1.0", "f" * 64)


def lock(text=LOCK_TEXT):
    return engine.parse_lock(text, "x.lock")


def wanted(distributions=(KERNELS,)):
    return engine.wanted_release("0.5.23", "cpu", lock(), list(distributions))


def installed():
    return {"pip": "26.3", "sglang": "0.5.23", "sglang-cpu-lab": "0.1.0"}


def release(**changes):
    record = {"id": wanted().id, "lock_sha256": lock().sha256, "records": {"sglang": "t"}}
    return {"record": record, "installed": installed(), "records": {"sglang": "t"}, "problems": []} | changes


def state(**changes):
    python = {
        "path": "/usr/bin/python3.11", "error": "", "implementation": "cpython", "version": "3.11.2",
        "machine": "x86_64", "glibc": "glibc 2.36",
    }  # fmt: skip
    installed = [{"id": wanted().id, "built": "2026-02-01", "healthy": "2026-02-02"}]
    facts = {
        "root": "/opt/sglang", "python": python, "free_bytes": 9 * 2**30, "shared": "", "current": wanted().id,
        "releases": installed, "in_use": [], "release": release(),
    }  # fmt: skip
    return facts | changes


def with_python(**changes):
    return state(python=state()["python"] | changes)


# ---- locks


def test_a_lock_is_read():
    read = lock()
    assert read.target == TARGET
    assert sorted(read.wheels) == ["pip", "sglang"]
    assert read.wheels["sglang"].hashes == (B,)
    assert read.sha256 == hashlib.sha256(LOCK_TEXT.encode()).hexdigest()


def test_continued_lines_with_several_hashes_are_read_as_uv_writes_them():
    read = lock(
        f"# target: python 3.11, x86_64, glibc 2.36\npip==26.3 \\\n    --hash=sha256:{A} \\\n    --hash=sha256:{B}\n"
    )
    assert read.wheels["pip"].hashes == (A, B)


def test_a_rendered_lock_reads_back_the_same():
    text = engine.render_lock(TARGET, lock().wheels.values(), "x.in")
    assert engine.parse_lock(text, "y").wheels == lock().wheels
    assert text.splitlines()[2:] == [f"pip==26.3 --hash=sha256:{A}", f"sglang==0.5.23 --hash=sha256:{B}"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"pip==1 --hash=sha256:{A}\n", "x.lock: no line like '# target: python 3.11"),
        ("# target: python 3.11, x86_64, glibc 2.36\npip==1\n", "'pip==1' is not of the form"),
        (f"# target: python 3.11, x86_64, glibc 2.36\npip>=1 --hash=sha256:{A}\n", "'pip>=1 --hash"),
        (f"# target: python 3.11, x86_64, glibc 2.36\npip==1 --hash=sha256:{A[:-1]}\n", "64 hex digits"),
        (LOCK_TEXT + f"PIP==1 --hash=sha256:{A}\n", "pip is locked twice"),
        ("# target: python 3.11, x86_64, glibc 2.36\n", "no wheel is locked"),
    ],
)
def test_a_broken_lock_is_refused(text, words):
    with pytest.raises(EngineError, match=r"^x\.lock: ") as caught:
        engine.parse_lock(text, "x.lock")
    assert words in str(caught.value)


def test_platforms_go_from_new_to_old_with_their_aliases():
    tags = TARGET.platforms()
    assert tags[:2] == ["manylinux_2_36_x86_64", "manylinux_2_35_x86_64"]
    assert tags.index("manylinux2014_x86_64") == tags.index("manylinux_2_17_x86_64") + 1
    assert tags[-3:] == ["manylinux_2_5_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    assert TARGET.abi == "cp311"


# ---- releases


def test_the_release_id_says_version_accelerator_and_digest():
    made = wanted()
    expected = hashlib.sha256(f"{lock().sha256}\nsglang-cpu-lab==0.1.0 {'f' * 64}".encode()).hexdigest()[:12]
    assert made.id == f"0.5.23-cpu-{expected}"
    assert made.installed == installed()


def test_the_digest_changes_with_lock_and_sources_and_not_with_order():
    other = Distribution("other", "1", "e" * 64)
    base = engine.release_digest("1", [KERNELS, other])
    assert base == engine.release_digest("1", [other, KERNELS])
    assert base != engine.release_digest("2", [KERNELS, other])
    assert base != engine.release_digest("1", [KERNELS])
    assert base != engine.release_digest("1", [KERNELS, Distribution("other", "1", "d" * 64)])


def test_a_lock_of_another_version_is_refused():
    with pytest.raises(EngineError, match=r"x\.lock locks sglang 0\.5\.23, and version 0\.5\.22 is asked for"):
        engine.wanted_release("0.5.22", "cpu", lock(), [])


@pytest.mark.parametrize("name", ["sglang", "pip"])
def test_a_lock_without_the_engine_or_its_installer_is_refused(name):
    text = "\n".join(line for line in LOCK_TEXT.splitlines() if not line.lower().startswith(name))
    with pytest.raises(EngineError, match=f"locks no {name}"):
        engine.wanted_release("0.5.23", "cpu", lock(text), [])


def test_a_lock_with_two_hashes_for_a_wheel_is_refused():
    with pytest.raises(EngineError, match="pip has 2 hashes"):
        engine.wanted_release("0.5.23", "cpu", lock(LOCK_TEXT.replace(A, f"{A} --hash=sha256:{B}")), [])


def test_a_local_distribution_that_is_also_locked_is_refused():
    with pytest.raises(EngineError, match=r"Pip is also in x\.lock"):
        engine.wanted_release("0.5.23", "cpu", lock(), [Distribution("Pip", "1", A)])


def test_a_tree_hash_depends_on_paths_and_contents_alone():
    assert engine.tree_sha256({"a": "1", "b": "2"}) == engine.tree_sha256({"b": "2", "a": "1"})
    assert engine.tree_sha256({"a": "1"}) == hashlib.sha256(b"a\0001\n").hexdigest()
    assert engine.tree_sha256({"a": "1"}) != engine.tree_sha256({"a": "2"})


# ---- gaps


def gaps(absent=None, replaced=None):
    return engine.parse_gaps({"absent": absent or {}, "replaced": replaced or {}}, "x.gaps.yml")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "a mapping with the keys"),
        ({"missing": {}}, "a mapping with the keys"),
        ({"absent": ["x"]}, "'absent' must be a mapping"),
        ({"absent": {"x": None}}, "absent.x needs its reason"),
        ({"absent": {"x": "  "}}, "absent.x needs its reason"),
        ({"replaced": {"x": "1.0"}}, "replaced.x needs exactly"),
        ({"replaced": {"x": {"version": 1.0, "reason": "r"}}}, "quote the version"),
        ({"absent": {"x": "r"}, "replaced": {"X": {"version": "1", "reason": "r"}}}, "x cannot be both"),
    ],
)
def test_a_broken_gaps_file_is_refused(data, words):
    with pytest.raises(EngineError) as caught:
        engine.parse_gaps(data, "x.gaps.yml")
    assert words in str(caught.value)


def test_an_empty_gaps_file_has_no_gaps():
    assert engine.parse_gaps({}, "g") == Gaps("g", {}, {})


def check(wheels, names=None):
    return [(item.code, item.severity, item.subject) for item in engine.metadata_gaps(wheels, names or gaps(), TARGET)]


def test_a_complete_set_has_no_findings():
    assert check([Metadata("a", "1", ("b>=1", "c; sys_platform == 'win32'")), Metadata("b", "1", ())]) == []


def test_a_missing_package_is_an_error_until_it_is_named():
    wheels = [Metadata("a", "1", ("Some_Thing>=2",))]
    assert check(wheels) == [("ENGINE-GAP", Severity.ERROR, "a")]
    assert check(wheels, gaps({"some-thing": "why"})) == []


def test_another_version_is_an_error_until_exactly_that_version_is_named():
    wheels = [Metadata("a", "1", ("torch==2.14.1",)), Metadata("torch", "2.13.0+cpu", ())]
    assert check(wheels) == [("ENGINE-GAP", Severity.ERROR, "a")]
    assert check(wheels, gaps(None, {"torch": {"version": "2.12.0", "reason": "r"}}))[0][1] is Severity.ERROR
    assert check(wheels, gaps(None, {"torch": {"version": "2.13.0+cpu", "reason": "r"}})) == []


def test_a_named_gap_that_is_none_is_a_warning():
    assert check([Metadata("a", "1", ())], gaps({"b": "why"})) == [("ENGINE-GAP-STALE", Severity.WARNING, "b")]


def test_what_an_extra_asks_for_counts_only_when_the_extra_is_asked_for():
    server = Metadata("uvicorn", "1", ("h11", "watch; extra == 'standard'"))
    others = [Metadata("h11", "1", ())]
    assert check([server, *others]) == []
    found = check([Metadata("a", "1", ("uvicorn[standard]",)), server, *others])
    assert found == [("ENGINE-GAP", Severity.ERROR, "uvicorn")]


def test_an_unreadable_requirement_is_refused():
    with pytest.raises(EngineError, match="the wheel of a has a requirement that cannot be read"):
        check([Metadata("a", "1", ("b >>= 1",))])


# ---- hosts


def test_an_unchanged_host_needs_nothing():
    assert releases.plan(wanted(), state(), keep=2) == releases.Plan("none", (), ())


def test_a_fresh_host_needs_the_release():
    made = releases.plan(wanted(), state(release=None, current=None, releases=[]), keep=2)
    assert made == releases.Plan("install", ("not installed",), ())


def test_a_complete_release_that_is_not_current_only_needs_the_link():
    assert releases.plan(wanted(), state(current="older"), keep=2).action == "link"
    assert releases.plan(wanted(), state(current=None), keep=2).reasons == ("current is nothing",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"record": None}, "its release.json is missing or unreadable"),
        ({"record": {"id": "other", "lock_sha256": "x", "records": {"sglang": "t"}}}, "another release's"),
        ({"problems": ["regex: 3 files missing"]}, "regex: 3 files missing"),
        ({"records": {"sglang": "edited"}}, "the RECORD of sglang is not the one that was installed"),
        ({"records": {}}, "the RECORD of sglang is not the one that was installed"),
        ({"installed": {"pip": "26.3", "sglang-cpu-lab": "0.1.0"}}, "sglang 0.5.23 is missing"),
        ({"installed": installed() | {"pip": "26.2"}}, "pip is 26.2, locked is 26.3"),
        ({"installed": installed() | {"six": "1"}}, "six 1 is not in the lock"),
    ],
)
def test_a_damaged_release_is_built_anew_and_said_why(changes, words):
    made = releases.plan(wanted(), state(release=release(**changes)), keep=2)
    assert made.action == "install"
    assert words in "; ".join(made.reasons)


def test_names_and_versions_are_compared_as_packages_compare_them():
    assert (
        releases.installed_findings(wanted(), {"PIP": "26.3.0", "sglang": "0.5.23", "sglang_cpu_lab": "0.1"}, "h") == []
    )


def test_differences_of_the_installed_set_are_errors():
    found = releases.installed_findings(wanted(), {}, "h")
    assert [(item.code, item.severity) for item in found] == [("ENGINE-INSTALLED", Severity.ERROR)] * 3


def removed(names, keep, in_use=(), healthy=""):
    """healthy: names in the order in which they were last found healthy."""
    found = [{"id": name, "built": built, "healthy": str(healthy.find(name) + 1 or "")} for name, built in names]
    return releases.superseded("new", state(releases=found, in_use=list(in_use)), keep)


def test_the_oldest_releases_beyond_the_kept_ones_go():
    names = [("c", "3"), ("new", "4"), ("a", "1"), ("b", "2")]
    assert removed(names, 2) == ("a",)
    assert removed(names, 0) == ("a", "b", "c")
    assert removed(names, 3) == ()
    assert removed(names, 9) == ()


def test_a_release_in_use_never_goes():
    assert removed([("a", "1"), ("b", "2"), ("new", "3")], 0, in_use=["a"]) == ("b",)


def test_the_release_that_was_last_healthy_stays_for_a_rollback():
    names = [("a", "1"), ("b", "2"), ("c", "3"), ("d", "4"), ("new", "5")]
    assert removed(names, 2) == ("a", "b")
    assert removed(names, 2, healthy="a") == ("b",)
    assert removed(names, 2, healthy="ab") == ("a",)
    assert removed(names, 2, healthy="ba") == ("b",)  # a rollback went from b to a: nothing goes back to b
    assert removed(names, 2, healthy="abd") == ("a", "b")
    assert removed([("a", "1"), ("b", "2"), ("new", "3")], 1, healthy="ba") == ()
    assert removed([("z", "")], 0, healthy="") == ("z",)
    assert removed(names, 0, healthy="n") == ("a", "b", "c", "d")


def test_a_release_without_a_record_is_the_oldest():
    assert removed([("a", "2026"), ("broken", "")], 1) == ("broken",)


def host(facts, free=0):
    return [(item.code, item.message) for item in releases.host_findings(wanted(), facts, "h", free)]


def test_a_fitting_host_has_no_findings():
    assert host(state(), 4 * 2**30) == []
    assert host(with_python(glibc="glibc 2.41")) == []
    assert host(state(shared="/srv/wheels")) == []


@pytest.mark.parametrize(
    ("facts", "code", "words"),
    [
        (
            with_python(error="it does not exist"),
            "ENGINE-PYTHON",
            "python3.11 cannot be used: it does not exist",
        ),
        (with_python(version="3.13.1"), "ENGINE-PYTHON", "is cpython 3.13.1, and the lock is for CPython 3.11"),
        (with_python(version="3.1.1"), "ENGINE-PYTHON", "is cpython 3.1.1"),
        (with_python(implementation="pypy"), "ENGINE-PYTHON", "is pypy 3.11.2"),
        (with_python(machine="aarch64"), "ENGINE-PLATFORM", "the host is aarch64"),
        (with_python(glibc="glibc 2.35"), "ENGINE-PLATFORM", "glibc 2.36 or later"),
        (with_python(glibc=""), "ENGINE-PLATFORM", "glibc 2.36 or later"),
        (state(shared=None), "ENGINE-SHARED", "sglang_engine_shared_wheels is no directory of the host"),
        (state(free_bytes=2**30), "ENGINE-SPACE", "1.0 GiB are free under /opt/sglang, a release needs 4.0 GiB"),
    ],
)
def test_an_unfit_host_is_said_in_a_sentence(facts, code, words):
    ((found, message),) = host(facts, 4 * 2**30)
    assert found == code
    assert words in message


# ---- cards


@pytest.mark.parametrize(
    ("built_for", "cards"),
    [
        (["sm_90", "sm_120"], ["12.0"]),
        (["sm_80"], ["8.6", "8.0"]),  # compiled code runs on later cards of its generation
        (["sm_75", "compute_75"], ["12.0"]),  # and intermediate code on all later ones
        (["sm_120a"], ["12.0"]),
        ([], []),
    ],
)
def test_a_release_with_code_for_the_cards_is_nothing_to_say(built_for, cards):
    assert releases.architecture_findings("h", built_for, cards) == []


@pytest.mark.parametrize(
    ("built_for", "cards"),
    [
        (["sm_80", "sm_90"], ["12.0"]),
        (["sm_90a"], ["9.1"]),
        (["sm_89"], ["8.6"]),
        (["gfx942"], ["9.0"]),
        ([], ["12.0"]),
    ],
)
def test_a_release_without_code_for_a_card_is_not_published(built_for, cards):
    (finding,) = releases.architecture_findings("h", built_for, cards)
    assert finding.code == "ENGINE-ARCH"
    assert f"a card here is {cards[0]}" in finding.message


# ---- patches


def test_a_patched_release_has_its_own_version_and_id():
    made = engine.wanted_release("0.5.23", "cpu", lock(), [KERNELS], [A, B])
    label = hashlib.sha256(f"{A}\n{B}".encode()).hexdigest()[:8]
    assert made.version == made.installed["sglang"] == f"0.5.23+pivot{label}"
    lines = f"{lock().sha256}\nsglang-cpu-lab==0.1.0 {'f' * 64}\npatch {A}\npatch {B}"
    assert made.id == f"0.5.23+pivot{label}-cpu-{hashlib.sha256(lines.encode()).hexdigest()[:12]}"


def test_the_order_of_patches_counts_and_none_is_the_published_release():
    of = [engine.wanted_release("0.5.23", "cpu", lock(), [], given).id for given in ([A, B], [B, A], [A], [])]
    assert len(set(of)) == 4
    assert engine.patched_version("0.5.23", []) == "0.5.23"
    assert engine.patched_version("0.5.23+cu130", [A]).startswith("0.5.23+cu130.pivot")


def test_variables_with_a_secret_are_not_handed_to_a_task():
    told = runpy.run_path(str(ROOT / "plugins/filter/pivot_engine.py"))["told"]
    plain = {"https_proxy": "http://proxy.example.org:3128", "OMP_NUM_THREADS": "8"}
    secret = {
        "HF_TOKEN": "made-up",
        "http_proxy": "http://user:made-up@proxy.example.org:3128",
        "HF_ENDPOINT": "https://user:made-up@hub.example.org",
    }
    assert told({**plain, **secret}) == plain
