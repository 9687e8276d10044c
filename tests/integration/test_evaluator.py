"""The what-if's evaluator with the deployed engine's torch, against a second implementation and SGLang's own parts."""

import base64
import json
import shlex
import zlib

from .conftest import ROOT

WHATIF = ROOT / "roles/debug_probes/files/whatif"
CHECKS = ROOT / "tests/integration"
# on the host: the files from what is given, and one run
THERE = """
import base64, json, os, pathlib, subprocess, sys, tempfile, zlib
with tempfile.TemporaryDirectory() as place:
    files = json.loads(zlib.decompress(base64.b64decode(sys.argv[1])))
    pathlib.Path(place, "whatif").mkdir()
    for name, text in files.items():
        pathlib.Path(place, name).write_text(text)
    line = [sys.executable, sys.argv[2]]
    sys.exit(subprocess.run(line, cwd=place, env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}).returncode)
"""


def held(host, check):
    """What a check beside this file prints, run with the evaluator beside it."""
    sources = {f"whatif/{path.name}": path.read_text(encoding="utf-8") for path in WHATIF.glob("*.py")}
    files = json.dumps({**sources, check: (CHECKS / check).read_text(encoding="utf-8")})
    packed = base64.b64encode(zlib.compress(files.encode())).decode()
    said = host.run(f"/opt/sglang/current/bin/python -c {shlex.quote(THERE)} {packed} {check}")
    return {name: len(found) for name, found in json.loads(said.splitlines()[-1]).items()}


def test_the_evaluator_computes_what_sglang_does(deployed, host):
    assert held(host, "check_evaluator.py") == {"drafters": 15, "ropes": 6}


def test_a_training_sample_is_read_in_every_packing(deployed, host):
    assert held(host, "check_sample.py") == {"samples": 13, "masks": 5}
