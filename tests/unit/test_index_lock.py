import re
from pathlib import Path

import pytest

from pivot.engines import engine, index_lock
from pivot.engines.index_lock import Offer

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements/engine/cuda-py312.lock"
TARGET = engine.Target("3.12", "x86_64", (2, 39))
# what sglang 0.5.23 pins in its own metadata for Linux on x86_64
PINNED = {
    "apache-tvm-ffi": "0.1.11",
    "blobfile": "3.0.0",
    "compressed-tensors": "0.18.0",
    "deepseek-recipe": "0.2.0",
    "flashinfer-python": "0.7.2",
    "humming-kernels": "0.1.12",
    "numba": "0.65.1",
    "nvidia-cutlass-dsl": "4.8.0",
    "nvidia-mathdx": "25.6.0",
    "openai": "2.8.0",
    "openai-harmony": "0.0.4",
    "outlines": "0.1.11",
    "quack-kernels": "0.6.5",
    "sentencepiece": "0.2.1",
    "sgl-deep-ep": "0.1.2.post1",
    "sgl-deep-gemm": "0.2.3.post2",
    "sgl-flash-mla": "1.0.0",
    "sglang-kernel": "0.4.10",
    "soundfile": "0.13.1",
    "tilelang": "0.1.12",
    "timm": "1.0.25",
    "tml-renderers": "0.1.0",
    "tokenizers": "0.23.2",
    "torch": "2.14.1",
    "torchaudio": "2.11.0",
    "torchcodec": "0.17.0",
    "transformers": "5.19.0",
    "xgrammar": "0.2.7",
}
# what torch 2.14 brings for the GPU, and what installs the release
ALSO = {"pip", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "nvidia-cublas", "torchvision", "triton"}


def problems(text):
    """What is wrong with a lock's text, as short sentences."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    names = [line.split("==")[0] for line in lines]
    found = [f"form: {x}" for x in lines if not re.fullmatch(r"[a-z0-9-]+==[^\s+;]+ --hash=sha256:[0-9a-f]{64}", x)]
    found += [f"twice: {name}" for name in sorted({name for name in names if names.count(name) > 1})]
    found += ["order"] if names != sorted(names) else []
    locked = dict(line.split(" ")[0].split("==", 1) for line in lines if "==" in line)
    wanted = {"sglang": "0.5.23", **PINNED}
    found += [f"{name}: {locked.get(name)}" for name in sorted(wanted) if locked.get(name) != wanted[name]]
    return found + [f"missing: {name}" for name in sorted(ALSO - locked.keys())]


def test_the_cuda_lock_is_whole():
    assert problems(LOCK.read_text()) == []
    lock = engine.parse_lock(LOCK.read_text(), "cuda-py312.lock")
    assert lock.target == TARGET
    assert engine.wanted_release("0.5.23", "cuda", lock, []).version == "0.5.23"


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (r"^torch==2\.14\.1 ", "torch==2.13.0 ", ["torch: 2.13.0"]),
        (r"^torch==2\.14\.1 ", "torch==2.14.1+cu130 ", ["form: torch==2.14.1+cu130", "torch: 2.14.1+cu130"]),
        (r"^pip==[^\n]*\n", "", ["missing: pip"]),
        (r"^(tqdm==\S+) [^\n]*", r"\1", ["form: tqdm=="]),
        (r"^(tqdm==\S+ --hash=sha256:\S{60})\S{4}", r"\1", ["form: tqdm=="]),
        (r"^(tqdm)==", r"\1>=", ["form: tqdm>="]),
        (r"^(tqdm==[^\n]*\n)", r"\1\1", ["twice: tqdm"]),
        (r"^(torch==[^\n]*\n)(.*)", r"\2\1", ["order"]),
    ],
)
def test_each_fault_of_a_lock_is_seen(old, new, found):
    text = LOCK.read_text()
    broken = re.sub(old, new, text, count=1, flags=re.MULTILINE | (re.DOTALL if "(.*)" in old else 0))
    assert broken != text
    assert [seen[: len(want)] for seen, want in zip(problems(broken), found, strict=True)] == found


def test_the_lock_names_no_place():
    for path in (LOCK, LOCK.with_suffix(".in")):
        assert "//" not in path.read_text(), path.name


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        # the exact interpreter before the stable ABI before pure Python
        (["x-1-py3-none-any.whl", "x-1-cp310-abi3-manylinux_2_17_x86_64.whl", "x-1-cp312-cp312-linux_x86_64.whl"], 2),
        (["x-1-py3-none-any.whl", "x-1-cp310-abi3-manylinux2014_x86_64.whl"], 1),
        # the newest platform that still fits
        (["x-1-cp312-cp312-manylinux_2_17_x86_64.whl", "x-1-cp312-cp312-manylinux_2_28_x86_64.whl"], 1),
        (["x-1-cp312-cp312-manylinux_2_17_x86_64.whl", "x-1-cp312-cp312-manylinux_2_40_x86_64.whl"], 0),
        # the highest build of equal tags
        (["x-1-2-py3-none-any.whl", "x-1-10-py3-none-any.whl", "x-1-py3-none-any.whl"], 1),
        # other interpreters, machines and what is no wheel
        (["x-1-cp311-cp311-manylinux_2_17_x86_64.whl", "x-1-cp313-cp313-manylinux_2_17_x86_64.whl"], None),
        (["x-1-cp312-cp312-musllinux_1_2_x86_64.whl", "x-1-cp312-cp312-manylinux_2_17_aarch64.whl"], None),
        (["x-1.tar.gz", "x.whl"], None),
    ],
)
def test_the_wheel_that_pip_would_take(files, chosen):
    order = {tag: rank for rank, tag in enumerate(index_lock.tags(TARGET))}
    best = index_lock.best([Offer(name, "0" * 64, 1) for name in files], order)
    assert (best.filename if best else None) == (None if chosen is None else files[chosen])


def test_every_package_without_a_wheel_is_named():
    packages = {
        ("a", "1"): [Offer("a-1.tar.gz", "0" * 64, 1)],
        ("b", "2"): [],
        ("c", "3"): [Offer("c-3-py3-none-any.whl", "1" * 64, 1)],
    }
    with pytest.raises(engine.EngineError, match=r"glibc 2\.39 of a==1, b==2: pin another"):
        index_lock.select(packages, TARGET)


def test_a_lock_is_rendered_with_what_was_chosen():
    chosen = {
        "b==2": Offer("b-2-py3-none-any.whl", "b" * 64, 10**9),
        "a==1": Offer("a-1-py3-none-any.whl", "a" * 64, 5 * 10**8),
    }
    text = index_lock.render(TARGET, chosen, "x.in", "2026-11-29")
    lock = engine.parse_lock(text, "x.lock")
    assert lock.target == TARGET
    assert list(lock.wheels) == ["a", "b"]
    assert "Resolved 2026-11-29: 2 wheels, 1.5 GB" in text


def test_uv_results_are_read():
    text = """
    [[packages]]
    name = "Some_Name"
    version = "1.0"
    wheels = [
        {url = "https://x.example/a/some_name-1.0%2Blocal-py3-none-any.whl", size = 7, hashes = {sha256 = "ab"}},
        {path = "wheels/some_name-1.0-py3-none-any.whl", hashes = {sha256 = "cd"}},
    ]
    """
    assert index_lock.parse_pylock(text, "t") == {
        ("some-name", "1.0"): [
            Offer("some_name-1.0+local-py3-none-any.whl", "ab", 7),
            Offer("some_name-1.0-py3-none-any.whl", "cd", 0),
        ]
    }
    with pytest.raises(engine.EngineError, match=r"t is not the pylock\.toml"):
        index_lock.parse_pylock("[[packages]]\nname = 'a'", "t")


@pytest.fixture
def fake_uv(tmp_path, monkeypatch):
    """A uv that resolves to a==1, or keeps what its output file has; UV_CONSTRAINT must not reach it."""
    tool = tmp_path / "bin/uv"
    tool.parent.mkdir()
    tool.write_text(
        """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
[ -z "$UV_CONSTRAINT" ] || exit 9
while [ $# -gt 1 ]; do [ "$1" = --output-file ] && out=$2; shift; done
grep -q broken "$1" && { echo no solution >&2; exit 1; }
case $out in
*.txt) grep -q a== "$out" 2>/dev/null || echo "a==1" > "$out" ;;
*) version=$(grep -o 'a==[0-9]*' "$1" | cut -c4-)
   printf '[[packages]]\\nname="a"\\nversion="%s"\\n' "$version" > "$out"
   printf 'wheels=[{url="x/a-%s-py3-none-any.whl",hashes={sha256="%064d"}}]\\n' "$version" "$version" >> "$out" ;;
esac
"""
    )
    tool.chmod(0o755)
    monkeypatch.setattr(index_lock.sys, "executable", str(tool.parent / "python"))
    monkeypatch.setattr(index_lock.downloads, "pip_setting", lambda _: [])
    monkeypatch.setenv("UV_CONSTRAINT", "/somewhere")
    source = tmp_path / "x.in"
    source.write_text("# target: python 3.12, x86_64, glibc 2.39\na\n")
    return source


def test_a_lock_is_made_kept_and_upgraded(fake_uv):
    path, changed = index_lock.lock(fake_uv, "2026-01-01")
    assert changed
    assert path.read_text().endswith(f"a==1 --hash=sha256:{1:064d}\n")
    # unchanged wheels leave the file alone, its day included
    assert index_lock.lock(fake_uv, "2026-02-02") == (path, False)
    assert "Resolved 2026-01-01" in path.read_text()
    path.write_text(path.read_text().replace("a==1 ", "a==7 "))
    index_lock.lock(fake_uv, "2026-03-03")
    assert f"a==7 --hash=sha256:{7:064d}" in path.read_text()
    index_lock.lock(fake_uv, "2026-03-03", upgrade=True)
    assert "a==1 " in path.read_text()
    calls = (fake_uv.parent / "bin/calls").read_text()
    assert "--python-version 3.12 --python-platform x86_64-manylinux_2_39" in calls
    assert all("--no-config" in line for line in calls.splitlines())


def test_no_solution_is_one_error_and_leaves_the_lock(fake_uv, capsys):
    index_lock.lock(fake_uv, "2026-01-01")
    before = fake_uv.with_suffix(".lock").read_text()
    fake_uv.write_text(fake_uv.read_text() + "broken\n")
    assert index_lock.main([str(fake_uv)]) == 1
    assert "uv found no solution" in capsys.readouterr().err
    assert fake_uv.with_suffix(".lock").read_text() == before
    assert index_lock.main([str(fake_uv.parent / "none.in")]) == 1
