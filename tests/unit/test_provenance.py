"""Whether the running server is the installed release: what a host finds, and what is said about it."""

import base64
import hashlib
import importlib.util
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pivot.engines import installed, provenance
from pivot.program import program

SCRIPT = Path(__file__).parents[2] / "roles/sglang_server/files/running_code.py"
MODELS = "sglang/srt/models/kimi_k25.py"


def load():
    spec = importlib.util.spec_from_file_location("running_code", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


host_side = load()


# ---- what is said


def code(**changes):
    found = {
        "release": "/opt/sglang/releases/one", "begins": "/opt/sglang/releases/one/bin/python", "mapped": 40,
        "outside": [], "gone": [], "altered": [], "elsewhere": [], "variables": [],
    }  # fmt: skip
    return found | changes


def test_a_server_that_is_the_release_is_nothing_to_say():
    assert provenance.check("h", code()) == []


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"begins": "/opt/old/bin/python"}, "SERVER-CODE", "begins with /opt/old/bin/python, which is not of /opt/sgl"),
        ({"begins": ""}, "SERVER-CODE", "begins with nothing"),
        ({"mapped": 0}, "SERVER-CODE", "has no library of /opt/sglang/releases/one in its memory"),
        ({"gone": ["/r/a.so"]}, "SERVER-CODE", "files of /opt/sglang/releases/one that are no more: /r/a.so"),
        (
            {"outside": ["/x/site-packages/a.so"]},
            "SERVER-CODE",
            "not of /opt/sglang/releases/one: /x/site-packages/a.so",
        ),
        ({"altered": [[MODELS, "changed"]]}, "SERVER-FILE", f"{MODELS} (changed)"),
        ({"altered": [[f"f{n}", "added"] for n in range(9)]}, "SERVER-FILE", "f4 (added) and 4 more"),
        ({"elsewhere": [["/srv/x", "a.pth"]]}, "SERVER-PATHS", "takes code from elsewhere too: /srv/x (a.pth)"),
        ({"variables": ["PYTHONPATH"]}, "SERVER-PATHS", "elsewhere too: PYTHONPATH"),
    ],
)
def test_what_is_not_the_release_is_named(changes, kind, words):
    (finding,) = provenance.check("h", code(**changes))
    assert (finding.code, str(finding.severity)) == (kind, "error")
    assert words in finding.message


def test_variables_that_are_meant_and_the_probes_path_are_nothing_to_say():
    assert provenance.check("h", code(variables=["LD_PRELOAD"]), meant={"LD_PRELOAD": "x"}) == []
    assert provenance.check("h", code(variables=["PYTHONPATH"]), probed=True) == []
    assert provenance.check("h", code(variables=["LD_PRELOAD"]), probed=True) != []


# ---- what a host finds


def distribution(site, name, files, extra=""):
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    rows = []
    for path, content in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        rows.append(f"{path},sha256={digest},{len(content)}\n")
    (info / "RECORD").write_text("".join(rows) + extra + f"{info.name}/RECORD,,\n")
    return info


@pytest.fixture
def release(tmp_path):
    """An environment with an engine, another distribution, and one .pth file of its own."""
    path = tmp_path / "releases/one"
    site = path / "lib/python3.11/site-packages"
    distribution(site, "sglang", {"sglang/__init__.py": b"", MODELS: b"a = 1\n"}, "sglang/__pycache__/a.pyc,,\n")
    distribution(site, "thing", {"thing.py": b"t = 1\n", "thing.pth": b"import thing\n"}, "../../bin/x,sha256=y,1\n")
    (path / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    return path


def site_of(release):
    return release / "lib/python3.11/site-packages"


def test_an_untouched_release_has_no_differences(release):
    (site_of(release) / "sglang/__pycache__").mkdir()
    (site_of(release) / "sglang/__pycache__/a.pyc").write_bytes(b"x")
    assert host_side.differing(site_of(release)) == []
    assert installed.elsewhere(site_of(release)) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda site: (site / MODELS).write_text("a = 2\n"), [[MODELS, "changed"]]),  # one byte
        (lambda site: (site / MODELS).unlink(), [[MODELS, "missing"]]),
        (lambda site: (site / "sglang/srt/debug.py").write_text(""), [["sglang/srt/debug.py", "added"]]),
        (lambda site: (site / "thing.py").write_text("t = 10\n"), [["thing.py", "changed"]]),
        (lambda site: (site / "thing.py").write_text("t = 2\n"), []),  # of other distributions sizes alone are compared
        (lambda site: (site / "thing-1.0.dist-info/RECORD").unlink(), [["thing-1.0.dist-info/RECORD", "unreadable"]]),
        (lambda site: os.mkfifo(site / "sglang/pipe"), [["sglang/pipe", "added"]]),
        # a module without its source is imported like any other
        (lambda site: (site / "sglang/srt/evil.pyc").write_bytes(b"x"), [["sglang/srt/evil.pyc", "added"]]),
        # a directory that lies elsewhere may hold more than the engine's own files
        (
            lambda site: (site / "sglang/srt/models").symlink_to(
                (site / "sglang/srt/models").rename(site.parent / "x")
            ),
            [["sglang/srt/models", "added"]],
        ),
    ],
)
def test_every_difference_is_named(release, change, expected):
    change(site_of(release))
    assert host_side.differing(site_of(release)) == expected


def edit_record(name, edit):
    """A change of a distribution's RECORD, for the lists below."""

    def change(site):
        place = site / f"{name}-1.0.dist-info/RECORD"
        place.write_bytes(edit(place.read_bytes()))

    return change


def sha512(content):
    digest = base64.urlsafe_b64encode(hashlib.sha512(content).digest()).rstrip(b"=")
    rows = f"{MODELS},sha512={digest.decode()},6\nsglang/__init__.py,,\n".encode()
    return edit_record("sglang", lambda _: rows)


TORN = ["sglang-1.0.dist-info/RECORD", "unreadable"]
UNHASHED = ["sglang/__init__.py", "without a hash"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (edit_record("thing", lambda text: text.replace(b",6\n", b",\n")), []),  # a size may be left out
        (edit_record("sglang", lambda text: text.replace(b"\n", b"\r\n") + b"\r\n"), []),
        (sha512(b"a = 1\n"), [UNHASHED]),
        (sha512(b"a = 2\n"), [UNHASHED, [MODELS, "changed"]]),
        (edit_record("sglang", lambda text: text.replace(b"sha256=", b"sha000=")), [TORN]),
        (edit_record("sglang", lambda text: b'"' + text + b"x\n" * 100_000), [TORN]),  # all of it is one field
    ],
)
def test_records_as_others_write_them_and_torn_ones(release, change, expected):
    change(site_of(release))
    assert host_side.differing(site_of(release)) == expected


def test_a_pipe_in_a_files_place_is_not_waited_for(release):
    (site_of(release) / MODELS).unlink()
    os.mkfifo(site_of(release) / MODELS)
    assert host_side.differing(site_of(release)) == [[MODELS, "changed"]]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("stray.pth", "# a comment\n/opt/patches\nimport os; os.x()\n", ["/opt/patches", "import os; os.x()"]),
        ("sglang.egg-link", "/src/sglang/python\n.\n", ["/src/sglang/python"]),
        ("usercustomize.py", "", ["usercustomize.py"]),
        ("sitecustomize.py", "", ["sitecustomize.py"]),
        ("sitecustomize.pyc", "", ["sitecustomize.pyc"]),
        ("sitecustomize/__init__.py", "", ["sitecustomize"]),
        ("usercustomize.cpython-311-x86_64-linux-gnu.so", "", ["usercustomize.cpython-311-x86_64-linux-gnu.so"]),
        ("sitecustomized.py", "", []),
        ("__editable___sglang_finder.py", "", ["__editable___sglang_finder.py"]),
        ("sglang-1.0.dist-info/direct_url.json", '{"url": "file:///a%20b", "dir_info": {"editable": true}}', ["/a b"]),
        ("sglang-1.0.dist-info/direct_url.json", '{"url": "file:///x.whl", "archive_info": {}}', []),
        ("sglang-1.0.dist-info/direct_url.json", "[" * 100000, []),
        ("ordinary.py", "", []),
    ],
)  # fmt: skip
def test_what_brings_code_from_elsewhere_is_named(release, name, text, expected):
    (site_of(release) / name).parent.mkdir(exist_ok=True)
    (site_of(release) / name).write_text(text)
    assert [what for what, _ in installed.elsewhere(site_of(release))] == expected


def test_system_packages_count_where_pyvenv_says_so(release):
    assert host_side.virtual(release) == (("/usr/",), False)
    (release / "pyvenv.cfg").write_text("home=/opt/python3.11/bin\nInclude-System-Site-Packages=TRUE\n")
    assert host_side.virtual(release) == (("/opt/python3.11/",), True)


def test_an_interpreter_that_is_a_link_has_its_libraries_beside_what_it_links_to(release, tmp_path):
    (tmp_path / "python/bin").mkdir(parents=True)
    (tmp_path / "python/bin/python3.11").write_text("")
    (tmp_path / "local/bin").mkdir(parents=True)
    (tmp_path / "local/bin/python3").symlink_to(tmp_path / "python/bin/python3.11")
    (release / "bin").mkdir()
    (release / "bin/python").symlink_to(tmp_path / "local/bin/python3")
    (release / "pyvenv.cfg").write_text(f"home = {tmp_path}/local/bin\n")
    bases, _ = host_side.virtual(release)
    assert bases == (f"{tmp_path}/local/", f"{tmp_path}/python/")
    assert not host_side.outside(f"{tmp_path}/python/lib/python3.11/lib-dynload/_csv.so", str(release), bases, ())
    assert host_side.outside(f"{tmp_path}/other/x.so", str(release), bases, ())


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/opt/sglang/releases/one/lib/python3.11/site-packages/torch/lib/libtorch.so", False),
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", False),
        ("/usr/lib/python3.11/lib-dynload/_csv.cpython-311-x86_64-linux-gnu.so", False),
        ("/var/cache/sglang/one/triton/abc/kernel.so", False),
        ("/opt/python3.11/lib/libpython3.11.so.1.0", False),
        ("/usr/lib/python3/dist-packages/x.so", True),
        ("/opt/sglang/releases/two/lib/python3.11/site-packages/torch/lib/libtorch.so", True),
        ("/home/me/build/kernel.so", True),
        ("/root/x.so", True),
    ],
)
def test_which_libraries_are_of_elsewhere(path, expected):
    writable = ("/var/cache/sglang/",)
    assert host_side.outside(path, "/opt/sglang/releases/one", ("/opt/python3.11/",), writable) is expected


def test_a_process_is_looked_at_as_the_role_asks(release, tmp_path):
    """A process that maps a library of the release, one that was removed, and one of elsewhere."""
    libraries = [site_of(release) / "a.so", site_of(release) / "old.so", tmp_path / "elsewhere.so"]
    for path in libraries:
        path.write_bytes(bytes(mmap.PAGESIZE))
    (tmp_path / "work").mkdir()
    (tmp_path / "work/torch.py").write_text("")
    maps = (
        "import mmap, sys; files = [open(path, 'r+b') for path in sys.argv[1:]];"
        " kept = [mmap.mmap(file.fileno(), 0) for file in files]; print(flush=True); input()"
    )
    command = [sys.executable, "-c", maps, *map(str, libraries)]
    environment = {**os.environ, "PYTHONPATH": "/opt/patches", "LD_PRELOAD": ""}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path / "work", env=environment
    ) as process:
        process.stdout.readline()
        libraries[1].unlink()
        question = {"pid": process.pid, "python": str(release / "bin/python"), "writable": []}
        line = [sys.executable, "-I", "-", json.dumps(question)]
        done = subprocess.run(line, input=program(SCRIPT), capture_output=True, text=True, check=True)
        process.communicate(b"\n")
    found = json.loads(done.stdout)
    assert found["begins"] == sys.executable
    assert found["mapped"] == 1
    assert found["gone"] == [str(libraries[1])]
    assert str(libraries[2]) in found["outside"]
    assert found["variables"] == ["PYTHONPATH"]
    assert [str(tmp_path / "work/torch.py"), "the working directory"] in found["elsewhere"]


def test_a_process_that_is_gone_is_no_answer(release, capsys):
    host_side.main({"pid": 2**22 + 1, "python": str(release / "bin/python"), "writable": []})
    assert json.loads(capsys.readouterr().out) is None
