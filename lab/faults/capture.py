"""Keep a little of what the wiring bench recorded, for the unit tests.

    python lab/faults/bench.py --python ENGINE --keep DIR
    python lab/faults/capture.py DIR

Writes tests/unit/data/records: one gzip file a row, the header and every record of the first forwards of the first
prompt, line by line as the probe wrote them; and index.json with the sha256 of each. Rows that DIR lacks stay as they
were captured before. Served again, a row gives other bytes (times, process numbers, the last bits of a state) and the
same answer.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import ROOT, ROWS, slug
from yaml import safe_load

PLACE = ROOT / "tests/unit/data/records"
CAPTURED = (
    "right",
    "ids minus 1",
    "key at the top level only",
    "random head",
    "d2t zero",
    "EAGLE for EAGLE3",
    "forced ids",
    "slice of the position before",
    "packing rotated",
    "slice scaled",
    "slice rounded to bfloat16",
)
FORWARDS = 8
REQUEST = "pivot-prompt-p01"


def selected(text: str) -> Iterator[str]:
    """The lines that are kept of one file of records."""
    targets: list[int] = []
    for line in text.splitlines(keepends=True):
        record = json.loads(line)
        if record["point"] == "target" and record["requests"] == [REQUEST] and len(targets) < FORWARDS:
            targets.append(record["n"])
            yield line
        elif record["point"] == "header" or record.get("target") in targets:
            yield line


def main() -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", type=Path, help="what bench.py --keep left")
    kept: Path = parser.parse_args().kept
    PLACE.mkdir(parents=True, exist_ok=True)
    index = PLACE / "index.json"
    before = json.loads(index.read_text(encoding="utf-8"))["records"] if index.exists() else []
    known = {entry["row"]: entry for entry in before}
    for row in safe_load(ROWS.read_text(encoding="utf-8"))["rows"]:
        source = kept / slug(row)
        if row["name"] not in CAPTURED or not (source / "outcome.json").exists():
            continue
        texts = [path.read_text(encoding="utf-8") for path in sorted((source / "records").glob("*.jsonl"))]
        (text,) = [text for text in texts if '"point":"target"' in text]  # the other process runs no model
        file = PLACE / f"{slug(row)}.jsonl.gz"
        file.write_bytes(gzip.compress("".join(selected(text)).encode(), 9, mtime=0))
        config = json.loads((source / "drafter/config.json").read_text(encoding="utf-8"))
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        entry = {"file": file.name, "sha256": digest, "eagle_config": config.get("eagle_config")}
        known[row["name"]] = {"row": row["name"], **entry}
    entries = [known[name] for name in CAPTURED if name in known]
    written = {"written_by": "lab/faults/capture.py", "forwards": FORWARDS, "records": entries}
    index.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in PLACE.iterdir())
    print(f"{len(entries)} rows, {size} bytes in {PLACE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
