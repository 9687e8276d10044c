"""Bundles side by side, and the command."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pivot.bundles import bundles

from .test_diagnosis import bundle, decode, start

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
