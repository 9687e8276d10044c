"""Patches of SGLang: tried on a small wheel, built into one of its own version, and found when they do not apply."""

import base64
import csv
import hashlib
import io
import os
import subprocess
import sys
import zipfile

import pytest

from pivot.engines import engine, patches
from pivot.engines.engine import EngineError
from pivot.engines.patches import Patch

FILES = {
    "sglang/__init__.py": b"",
    "sglang/_version.py": b"__version__ = version = '0.5.23'\n",
    "sglang/srt/models/kimi.py": b"def layers():\n    # the default\n    return [2, 30, 58]\n",
    "sglang/srt/old.py": b"gone = True\n",
}
CHANGE = """\
--- a/sglang/srt/models/kimi.py
+++ b/sglang/srt/models/kimi.py
@@ -1,3 +1,3 @@
 def layers():
     # the default
-    return [2, 30, 58]
+    return [1, 29, 57]
"""
ADD_AND_REMOVE = """\
diff --git a/python/sglang/srt/new.py b/python/sglang/srt/new.py
new file mode 100644
--- /dev/null
+++ b/python/sglang/srt/new.py
@@ -0,0 +1 @@
+fresh = True
diff --git a/python/sglang/srt/old.py b/python/sglang/srt/old.py
deleted file mode 100644
--- a/python/sglang/srt/old.py
+++ /dev/null
@@ -1 +0,0 @@
-gone = True
"""


NEW_FILE = ADD_AND_REMOVE[: ADD_AND_REMOVE.index("diff --git a/python/sglang/srt/old.py")]
RENAME = """\
diff --git a/python/sglang/srt/old.py b/python/sglang/srt/older.py
similarity index 100%
rename from python/sglang/srt/old.py
rename to python/sglang/srt/older.py
"""
LINK = """\
diff --git a/sglang/link.py b/sglang/link.py
new file mode 120000
--- /dev/null
+++ b/sglang/link.py
@@ -0,0 +1 @@
+/etc/hostname
\\ No newline at end of file
"""


def make_wheel(folder):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sglang-0.5.23-py3-none-any.whl"
    info = "sglang-0.5.23.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("sglang")
        for name, content in FILES.items():
            archive.writestr(name, content)
        metadata = "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\nRequires-Dist: torch\n\nVersion: of a text\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "stale,,\n")
    return path


@pytest.fixture
def wheel(tmp_path):
    return make_wheel(tmp_path / "cache/some/wheels")


def patch(place, name, text):
    path = place / name
    path.write_text(text)
    return Patch(path, hashlib.sha256(path.read_bytes()).hexdigest())


def test_a_patched_wheel_has_its_own_version_and_a_record_of_its_files(tmp_path, wheel):
    applied = [patch(tmp_path, "change.patch", CHANGE), patch(tmp_path, "files.patch", ADD_AND_REMOVE)]
    version = engine.patched_version("0.5.23", [item.sha256 for item in applied])
    made = patches.build(wheel, applied, version, tmp_path)
    assert made.name == f"sglang-{version}-py3-none-any.whl"
    info = f"sglang-{version}.dist-info"
    with zipfile.ZipFile(made) as archive:
        names = archive.namelist()
        assert set(names) == {
            *("sglang/__init__.py", "sglang/_version.py", "sglang/srt/models/kimi.py", "sglang/srt/new.py"),
            *(f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD"),
        }
        assert archive.read("sglang/srt/models/kimi.py").endswith(b"return [1, 29, 57]\n")
        assert archive.read("sglang/_version.py") == f"__version__ = version = '{version}'\n".encode()
        metadata = archive.read(f"{info}/METADATA").decode()
        assert f"\nVersion: {version}\nRequires-Dist" in metadata
        assert metadata.endswith("\nVersion: of a text\n")
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(archive.read(f"{info}/RECORD").decode()))}
        assert rows.pop(f"{info}/RECORD") == ["", ""]
        assert set(rows) == set(names) - {f"{info}/RECORD"}
        for name, (digest, size) in rows.items():
            content = archive.read(name)
            assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert int(size) == len(content)


def test_pip_installs_it_without_an_index_and_finds_nothing_wrong(tmp_path, wheel):
    made = patches.build(wheel, [patch(tmp_path, "x.patch", CHANGE)], "0.5.23+pivot12345678", tmp_path)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]
    subprocess.run([*command, str(tmp_path / "site"), str(made)], check=True, capture_output=True)
    assert (tmp_path / "site/sglang-0.5.23+pivot12345678.dist-info").is_dir()


def test_it_comes_out_the_same_every_time(tmp_path, wheel):
    applied = [patch(tmp_path, "x.patch", CHANGE)]
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made.append(patches.build(wheel, applied, "0.5.23+pivot1", tmp_path / name).read_bytes())
        os.utime(wheel, (1, 1))
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CHANGE.replace("[2, 30, 58]", "[2, 30, 59]"), "patch failed: sglang/srt/models/kimi.py:1"),
        (CHANGE.replace("kimi.py", "none.py"), "sglang/srt/models/none.py: No such file or directory"),
        (CHANGE.replace("@@ -1,3 +1,3 @@", "@@ -1,3 +1,9 @@"), "corrupt patch"),
        ("nothing\n", "No valid patches in input"),
        ("", "No valid patches in input"),
        ("--- /dev/null\n+++ b/../outside.py\n@@ -0,0 +1 @@\n+x\n", "invalid path"),
        (CHANGE.replace("    # the default", "    # the Default"), "patch failed"),
    ],
)
def test_a_patch_that_does_not_apply_says_where(tmp_path, wheel, text, words):
    with pytest.raises(EngineError, match=r"the patch x\.patch does not apply cleanly to sglang-0\.5\.23") as raised:
        patches.build(wheel, [patch(tmp_path, "x.patch", text)], "0.5.23+pivot1", tmp_path)
    assert words in str(raised.value)
    assert not list(tmp_path.glob("*.whl"))


def test_patches_are_applied_one_after_the_other(tmp_path, wheel):
    second = CHANGE.replace("[1, 29, 57]", "[0]").replace("[2, 30, 58]", "[1, 29, 57]")
    both = [patch(tmp_path, "a.patch", CHANGE), patch(tmp_path, "b.patch", second)]
    assert patches.patched_files(wheel, both)["sglang/srt/models/kimi.py"].endswith(b"return [0]\n")
    with pytest.raises(EngineError, match=r"b\.patch does not apply"):
        patches.patched_files(wheel, both[::-1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (NEW_FILE, {"sglang/srt/new.py": b"fresh = True\n"}),
        (RENAME, {"sglang/srt/old.py": None, "sglang/srt/older.py": b"gone = True\n"}),
        (RENAME.replace("python/", ""), {"sglang/srt/old.py": None, "sglang/srt/older.py": b"gone = True\n"}),
        (RENAME.replace("rename", "copy"), {"sglang/srt/older.py": b"gone = True\n"}),
        # as diff.mnemonicPrefix names the two sides
        (NEW_FILE.replace(" a/", " i/").replace(" b/", " w/"), {"sglang/srt/new.py": b"fresh = True\n"}),
    ],
)
def test_diffs_of_the_repository_are_taken_as_they_are(tmp_path, wheel, text, expected):
    assert patches.patched_files(wheel, [patch(tmp_path, "x.patch", text)]) == expected


@pytest.mark.parametrize("target", ["/etc/hostname", "/nowhere", "srt/old.py"])
def test_a_patch_that_makes_a_link_is_refused(tmp_path, wheel, target):
    with pytest.raises(EngineError, match=r"a patch makes sglang/link\.py a symbolic link"):
        patches.patched_files(wheel, [patch(tmp_path, "x.patch", LINK.replace("/etc/hostname", target))])


def test_git_of_whoever_runs_it_does_not_bend_a_patch(tmp_path, wheel, monkeypatch):
    """As in a hook of a repository with settings of its own: git hands both on in the environment."""
    spaces = patch(tmp_path, "x.patch", CHANGE.replace("[1, 29, 57]", "[1, 29, 57]   "))
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "repository")], check=True)
    with (tmp_path / "repository/.git/config").open("a") as stream:
        stream.write("[core]\n\tautocrlf = true\n")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "repository/.git"))
    for name, value in (("COUNT", "1"), ("KEY_0", "apply.whitespace"), ("VALUE_0", "fix")):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    (content,) = patches.patched_files(wheel, [spaces]).values()
    assert content.endswith(b"    return [1, 29, 57]   \n")
    assert b"\r" not in content


def test_a_patch_of_something_else_than_the_package_is_refused(tmp_path, wheel):
    text = "--- /dev/null\n+++ b/sitecustomize.py\n@@ -0,0 +1 @@\n+import os\n"
    with pytest.raises(EngineError, match=r"changes sitecustomize\.py, which is no file of the package"):
        patches.patched_files(wheel, [patch(tmp_path, "x.patch", text)])


def test_a_repository_around_the_scratch_directory_does_not_hide_a_patch(tmp_path, wheel, monkeypatch):
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "inside").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "inside"))
    assert patches.patched_files(wheel, [patch(tmp_path, "x.patch", CHANGE)])


# ---- the registry's entries


def entry(item):
    return {"file": item.path.name, "sha256": item.sha256}


def test_patches_are_read_in_order(tmp_path):
    both = [patch(tmp_path, "b.patch", CHANGE), patch(tmp_path, "a.patch", ADD_AND_REMOVE)]
    assert patches.read(map(entry, both), tmp_path) == both


def test_a_patch_that_is_missing_or_changed_is_refused(tmp_path):
    one = patch(tmp_path, "a.patch", CHANGE)
    with pytest.raises(EngineError, match=r"none\.patch does not exist"):
        patches.read([{"file": "none.patch", "sha256": one.sha256}], tmp_path)
    with pytest.raises(EngineError, match=rf"not the pinned one; .* sha256: {one.sha256}"):
        patches.read([{"file": "a.patch", "sha256": "0" * 64}], tmp_path)


# ---- before anything is touched


def lock(wheel):
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    text = f"# target: python 3.11, x86_64, glibc 2.36\npip==26.3 --hash=sha256:{'a' * 64}\n"
    return engine.parse_lock(f"{text}sglang==0.5.23 --hash=sha256:{digest}\n", "x.lock")


def found(place, wheel, entries):
    return patches.check("infer1", entries, place, lock(wheel), place / "cache")


def test_patches_that_apply_are_nothing_to_say(tmp_path, wheel):
    assert found(tmp_path, wheel, [entry(patch(tmp_path, "a.patch", CHANGE))]) == []
    assert found(tmp_path, wheel, []) == []


def test_a_patch_that_does_not_apply_is_found_before_anything_is_built(tmp_path, wheel):
    wrong = patch(tmp_path, "a.patch", CHANGE.replace("30", "31"))
    (finding,) = found(tmp_path, wheel, [entry(wrong)])
    assert (finding.code, finding.subject) == ("ENGINE-PATCH", "infer1")
    assert "a.patch does not apply cleanly to sglang-0.5.23" in finding.message


def test_a_changed_patch_is_found_without_any_wheel(tmp_path, wheel):
    changed = patch(tmp_path, "a.patch", CHANGE)
    changed.path.write_text(CHANGE + "\n")
    (finding,) = patches.check("infer1", [entry(changed)], tmp_path, lock(wheel), tmp_path / "empty")
    assert (finding.code, "not the pinned one" in finding.message) == ("ENGINE-PATCH", True)


def test_without_the_wheel_only_the_build_can_tell(tmp_path, wheel):
    wrong = patch(tmp_path, "a.patch", CHANGE.replace("30", "31"))
    assert patches.check("infer1", [entry(wrong)], tmp_path, lock(wheel), tmp_path / "empty") == []


@pytest.mark.parametrize("entries", ["a.patch", None, ["a.patch"], 3, [{"file": "a.patch"}], [{"sha256": "0"}]])
def test_other_types_are_found_elsewhere(tmp_path, wheel, entries):
    assert found(tmp_path, wheel, entries) == []
