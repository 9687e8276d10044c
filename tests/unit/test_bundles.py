"""Bundles side by side, and the command."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pivot.bundles import bundles

from .server_bundle import bundle, decode, start

RECORDS = Path(__file__).parent / "data/records/right.jsonl.gz"
MANIFEST = {"schema": 2, "host": "infer1", "unit": "sglang.service", "time": "2026-11-29T103000Z", "files": []}


def made(home: Path, run: str, log: str, **files: Any) -> Path:
    target = home / run / "infer1"
    target.parent.mkdir(parents=True)
    bundle(home / run, log, **files).rename(target)
    return target


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """The same server before and after the layer ids were changed."""
    common = {"packages.json": {"packages": {"sglang": "0.5.23", "torch": "2.11.0"}}}
    log = start().replace("type=Target", "type=KimiK25ForConditionalGeneration")
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}}
    other = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 30, 58]}}
    left = made(
        tmp_path,
        "2026-11-29T100000Z",
        log + decode(29, "1.02", count=4),
        **common,
        **{
            "config/etc/sglang/drafter/ab/config.json": other,
            "config/etc/sglang/launch.yaml": "mem-fraction-static: 0.85\nport: 30000\n",
            "process/environment.json": {"NCCL_P2P_LEVEL": "SYS", "INVOCATION_ID": "a"},
            "system/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module  580.95.05  Release\n",
            "pins.json": {"models": {"drafter": {"revision": "aaaa"}}},
            "system/proc/cmdline": "iommu=pt\n",
            "node/container.conf": "cores: 8\nmemory: 6144\n",
            "manifest.json": {**MANIFEST, "findings": [{"code": "BUNDLE-CUT", "message": "not whole"}]},
        },
    )
    right = made(
        tmp_path,
        "2026-11-29T110000Z",
        log + decode(29, "3.10", count=3) + decode(29, "2.60"),
        **common,
        **{
            "config/etc/sglang/drafter/cd/config.json": ids,
            "config/etc/sglang/launch.yaml": "mem-fraction-static: 0.90\nport: 30000\n",
            "process/environment.json": {"NCCL_P2P_LEVEL": "PHB", "INVOCATION_ID": "b"},
            "system/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module  580.105.08  Release\n",
            "pins.json": {"models": {"drafter": {"revision": "bbbb"}}},
            "system/proc/cmdline": "iommu=off\n",
            "node/container.conf": "cores: 8\nmemory: 8192\n",
            "probe/var/log/pivot-probe/a.jsonl": gzip.decompress(RECORDS.read_bytes()).decode(),
        },
    )
    return left, right


def test_what_matters_side_by_side(pair: tuple[Path, Path]) -> None:
    rows = {(row.section, row.name): (row.left, row.right) for row in bundles.compare(*pair)}
    assert rows[("state", "state")] == ("serving badly", "serving")
    assert rows[("pins", "models.drafter.revision")] == ("aaaa", "bbbb")
    assert rows[("driver", "module")] == ("580.95.05", "580.105.08")
    assert rows[("layers", "ids")] == ("[1, 30, 58]", "[2, 30, 58]")
    assert rows[("layers", "effective")] == ("[2, 31, 59]", "[2, 30, 58]")
    assert rows[("arguments", "mem-fraction-static")] == ("0.85", "0.90")
    assert rows[("environment", "NCCL_P2P_LEVEL")] == ("SYS", "PHB")
    assert rows[("figures", "accept length")] == ("1.02", "2.975")
    assert rows[("accept histogram", "1.00")] == ("100%", "-")
    assert rows[("accept histogram", "3.00")] == ("-", "75%")
    assert [name for section, name in rows if section == "accept histogram"] == ["1.00", "2.50", "3.00"]
    assert rows[("findings", "DIAG-ACCEPT-NONE")][1] == "-"
    assert rows[("phases", "imports")] == ("60.0 s", "60.0 s")
    assert rows[("container", "memory")] == ("6144", "8192")
    assert rows[("machine", "boot options")] == ("iommu=pt", "iommu=off")
    assert rows[("findings", "BUNDLE-CUT")] == ("not whole", "-")
    assert rows[("layers", "as the probe saw")] == ("-", "[3, 5, 7]")
    assert rows[("accepted, as the probe saw", "accept length")][0] == "-"
    assert rows[("accepted, as the probe saw", "accept length")][1] == "2.71"
    assert rows[("accepted, as the probe saw", "2 drafted")] == ("-", "43%")
    same = {("arguments", "port"), ("packages", "torch"), ("environment", "INVOCATION_ID"), ("container", "cores")}
    assert same.isdisjoint(rows)


def test_the_same_bundle_twice_differs_in_nothing(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert {row.section for row in bundles.compare(pair[1], pair[1])} <= bundles.NUMBERS
    assert bundles.main(["compare", str(pair[0]), str(pair[0])]) == 0
    assert bundles.main(["compare", *map(str, pair)]) == 1
    out = capsys.readouterr().out
    assert "2026-11-29T100000Z/infer1" in out
    assert "[1, 30, 58]" in out
    assert bundles.main(["compare", "--json", *map(str, pair)]) == 1
    assert json.loads(capsys.readouterr().out)[0]["section"] == "state"


def test_list_show_and_prune(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "ansible.log").write_text("kept\n")
    left = tmp_path / ".infer1.partial"
    left.mkdir()
    assert bundles.main(["list", "--home", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert [line.split("  ")[0] for line in out.splitlines()] == [*map(str, pair), str(left)]
    assert "unfinished; the next collect goes on there" in out
    manifest = {
        **json.loads((pair[1] / "manifest.json").read_text()),
        "masked_as": [{"name": "api_key", "count": 3}],
        "files": [{"name": "probe", "sha256": None, "reason": "nothing there"}],
    }
    (pair[1] / "manifest.json").write_text(json.dumps(manifest))
    assert bundles.main(["show", str(pair[1])]) == 0
    out = capsys.readouterr().out
    assert "state   SERVING" in out
    assert "probe  (nothing there)" in out
    assert "3  api_key" in out
    assert bundles.main(["prune", "--home", str(tmp_path), "--keep", "1"]) == 0
    assert not pair[0].exists()
    assert not left.exists()
    assert pair[1].exists()
    assert (tmp_path / "test").exists()
    assert (tmp_path / "ansible.log").exists()
    assert bundles.main(["prune", "--home", str(tmp_path), "--keep", "0"]) == 2
    assert bundles.main(["show", str(tmp_path / "none")]) == 2
    assert "pivot bundle list" in capsys.readouterr().err
    assert bundles.main(["list", "--home", str(tmp_path / "none")]) == 0
    assert "no bundle below" in capsys.readouterr().out


ODD = {
    "files null": {"files": None, "findings": None, "masked_as": None},
    "files a mapping": {"files": {"a": 1}, "findings": {"a": 1}, "masked_as": {"a": 1}},
    "entries of anything": {
        "files": [
            1,
            None,
            {"name": ["a"], "bytes": "abc", "sha256": 1, "masked": [1]},
            {"bytes": 1e999, "sha256": "x"},
        ],
        "findings": [1, {"code": ["x"]}],
        "masked_as": [1, {"count": "x"}],
        "host_facts": [1],
    },
    "names of anything": {"host": None, "unit": ["a"], "state": [1], "time": 17},
    "a year that UTC has not": {"time": "9999-12-31T235959-2359"},
    "a year before the first": {"time": "0001-01-01T000000+2359"},
}


@pytest.mark.parametrize("what", ODD)
def test_a_manifest_of_somebody_else_is_shown_as_far_as_it_goes(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = made(tmp_path, "2026-11-29T100000Z", start(), **{"manifest.json": {**MANIFEST, **ODD[what]}})
    good = made(tmp_path, "2026-11-29T110000Z", start(), **{"manifest.json": MANIFEST})
    assert bundles.main(["list", "--home", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith(str(good))
    assert bundles.main(["show", str(odd)]) == 0
    assert "state   SERVING" in capsys.readouterr().out
    assert bundles.main(["compare", str(odd), str(good)]) in (0, 1)
    assert bundles.main(["compare", str(good), str(odd)]) in (0, 1)


def test_what_is_no_bundle_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "2026-11-29T100000Z"
    for name, content in (
        ("cut", '{"schema": 2, "ho'),
        ("list", "[1]"),
        ("deep", '{"a":' * 5000),
        ("new", '{"schema": 9}'),
    ):
        (run / name).mkdir(parents=True)
        (run / name / "manifest.json").write_text(content)
    (run / "directory/manifest.json").mkdir(parents=True)
    (run / "loop").mkdir()
    (run / "loop/manifest.json").symlink_to(run / "loop/manifest.json")
    for name in ("cut", "list", "deep", "new", "directory", "loop"):
        assert bundles.main(["show", str(run / name)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(run / name) in line
    assert bundles.main(["show", str(run)]) == 2
    assert "it holds those of cut, deep, directory, list, loop, new" in capsys.readouterr().err
    assert bundles.main(["list", "--home", str(tmp_path)]) == 0
    damaged = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if "damaged" in line]
    assert [Path(path).name for path in damaged] == ["cut", "deep", "directory", "list", "loop"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("unit-properties.txt", "\0\x01garbage=\nNRestarts=²\n"),
        ("answers.json", [{"path": "/health", "status": "200", "seconds": "s"}, 7]),
        ("process/environment.json", {"SGLANG_SIMULATE_ACC_LEN": None}),
        ("processes.json", [1, {"pid": "x", "state": 5, "busy": "a"}]),
        ("config/launch.yaml", "speculative-num-steps: ²\n"),
        ("system/gpu-processes.txt", "², python, 5 MiB\n"),
        ("packages.json", {"packages": {"sglang": ["x"]}}),
    ],
)
def test_a_damaged_file_of_a_bundle_does_not_make_its_server_bad(tmp_path: Path, file: str, content: Any) -> None:
    odd = made(tmp_path, "2026-11-29T100000Z", start() + decode(29, count=4), **{file: content})
    assert bundles.shown(odd).splitlines()[1].startswith("state   SERVING: ")


def test_a_directory_where_a_file_should_be_is_like_none(tmp_path: Path) -> None:
    odd = made(tmp_path, "2026-11-29T100000Z", start() + decode(29, count=4))
    for name in ("system/df.txt", "process/cmdline.json", "pins.json"):
        (odd / name).mkdir(parents=True)
    assert bundles.shown(odd).splitlines()[1].startswith("state   SERVING: ")
