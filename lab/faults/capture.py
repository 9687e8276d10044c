"""Record a few rows of the wiring bench for the unit tests: real runs, as small as they can be.

    python lab/faults/capture.py --python ENGINE

Writes tests/unit/data/records: one gzip file of records a row, and index.json with what each is and its sha256. Served
again, a row gives other bytes (times, process numbers, the last bits of a state) and the same answer.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "tests/unit/data/records"
CAPTURED = (
    "right",
    "ids - 1",
    "key at the top level only",
    "d2t zero",
    "EAGLE for EAGLE3",
    "forced ids",
    "slice of the position before",
    "packing rotated",
    "slice scaled",
    "slice rounded to bfloat16",
)
SMALL = ("--prompts", "1", "--new-tokens", "10", "--rows", "4")


def capture(python: str, row: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Serve one row and keep its records; its entry of the index."""
    out = scratch / "row"
    script = str(ROOT / "lab/faults/serve_row.py")
    subprocess.run([python, script, "--out", str(out), "--row", json.dumps(row), *SMALL], check=True)
    outcome = json.loads((out / "outcome.json").read_text(encoding="utf-8"))
    files = {}
    for number, path in enumerate(sorted((out / "records").glob("*.jsonl"))):
        if path.stat().st_size < 2000:
            continue  # of a process that runs no model: a header and nothing else
        slug = "".join(letter if letter.isalnum() else "-" for letter in row["name"])
        kept = PLACE / f"{slug}-{number}.jsonl.gz"
        kept.write_bytes(gzip.compress(path.read_bytes(), 9, mtime=0))
        files[kept.name] = hashlib.sha256(kept.read_bytes()).hexdigest()
    drafter = json.loads((out / "drafter/config.json").read_text(encoding="utf-8"))
    meta = {f"pivot-prompt-{prompt['id']}": prompt["meta"] for prompt in outcome["prompts"]}
    return {"row": row["name"], "files": files, "eagle_config": drafter.get("eagle_config"), "meta": meta}


def main() -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of an installed engine")
    parser.add_argument("--row", action="append", help="only this row; the others stay as they are")
    arguments = parser.parse_args()
    PLACE.mkdir(parents=True, exist_ok=True)
    index = PLACE / "index.json"
    kept = json.loads(index.read_text(encoding="utf-8"))["records"] if index.exists() else []
    table = yaml.safe_load((ROOT / "lab/faults/rows.yml").read_text(encoding="utf-8"))["rows"]
    wanted = arguments.row or CAPTURED
    entries = {entry["row"]: entry for entry in kept}
    for row in (row for row in table if row["name"] in wanted):
        with tempfile.TemporaryDirectory() as temporary:
            entries[row["name"]] = capture(arguments.python, row, Path(temporary))
        print(f"{row['name']}: {', '.join(entries[row['name']]['files'])}", flush=True)
        ordered = [entries[name] for name in (row["name"] for row in table) if name in entries]
        command = f"python lab/faults/capture.py, serve_row.py {' '.join(SMALL)}"
        text = json.dumps({"written_by": command, "records": ordered}, indent=1)
        index.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
