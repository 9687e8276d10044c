"""The wiring bench: wrong wirings applied to the real SGLang, and what the analysis makes of each.

    python lab/faults/bench.py [--python ENGINE] [--class NAME] [--row NAME] [--prompts N] [--keep DIR]

Without `--python` the rows are served in the lab's container, with the engine deployed there. Prints wiring → accept
length and acceptance by position → verdict → right or wrong; exit status 1 when a row is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pivot import wiring
from pivot.wiring_findings import codes

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "lab/faults/rows.yml"
CONTRACT = (3, 5, 7)
CLASSES = ("none", "look-alike", "config", "weights", "flags", "engine")
SENT = ("lab/models", "lab/faults", "probe", "roles/debug_probes/files")
KEPT_THERE = ("*.safetensors", "plugins", "__pycache__")


class BenchError(Exception):
    """The bench itself cannot go on; the text says why."""


# --- where the engine is


@dataclasses.dataclass(frozen=True)
class Local:
    """An engine's interpreter on this machine."""

    python: str
    scratch: Path

    def serve(self, number: int, row: Mapping[str, Any], prompts: int) -> Path:
        """Serve one row; the directory with what came of it, on this machine."""
        out = self.scratch / f"row-{number:02d}"
        script = ROOT / "lab/faults/serve_row.py"
        _run([self.python, str(script), "--out", str(out), "--row", json.dumps(row), "--prompts", str(prompts)])
        return out


@dataclasses.dataclass(frozen=True)
class Container:
    """The engine that is deployed in the lab's first container."""

    python: str
    scratch: Path
    address: str
    key: str
    known_hosts: str
    there: str = "/var/tmp/pivot-bench-wiring"  # noqa: S108 - in the lab's own container, removed at the end

    @classmethod
    def from_lab(cls, scratch: Path) -> Container:
        """The lab of this clone; BenchError when it is not up."""
        variables = ROOT / "inventory/lab/group_vars/all/lab.yml"
        if not variables.exists():
            raise BenchError("the lab is not up: make deploy, or give an engine's interpreter with --python")
        lab = yaml.safe_load(variables.read_text(encoding="utf-8"))
        address = lab["lab_addresses"]["infer1"]
        place = cls("/opt/sglang/current/bin/python", scratch, address, lab["lab_ssh_key"], lab["lab_known_hosts"])
        place.end()
        for name in SENT:
            _run([*place._rsync, "--relative", f"{ROOT}/./{name}/", f"root@{address}:{place.there}/"])
        return place

    @property
    def _ssh(self) -> list[str]:
        return [
            "ssh",
            "-i",
            self.key,
            "-o",
            f"UserKnownHostsFile={self.known_hosts}",
            "-o",
            "StrictHostKeyChecking=yes",
        ]

    @property
    def _rsync(self) -> list[str]:
        return ["rsync", "--recursive", "--exclude", "__pycache__", "--rsh", shlex.join(self._ssh)]

    def serve(self, number: int, row: Mapping[str, Any], prompts: int) -> Path:
        """Serve one row there, and bring here what the analysis reads."""
        out = f"{self.there}/row-{number:02d}"
        script = f"{self.there}/lab/faults/serve_row.py"
        line = [self.python, script, "--out", out, "--row", json.dumps(row), "--prompts", str(prompts)]
        _run([*self._ssh, f"root@{self.address}", shlex.join(line)])
        here = self.scratch / f"row-{number:02d}"
        left = [option for name in KEPT_THERE for option in ("--exclude", name)]
        _run([*self._rsync, *left, f"root@{self.address}:{out}/", f"{here}/"])
        return here

    def end(self) -> None:
        """Remove everything of the bench there."""
        _run([*self._ssh, f"root@{self.address}", f"rm -rf {self.there}"])


def _run(line: Sequence[str]) -> str:
    """A command's output; BenchError with the end of what it said when it fails."""
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"{line[0]} ended with status {done.returncode}: {done.stderr.strip()[-800:]}")
    return done.stdout


# --- one row


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a row. wrong: what is not as expected, in words; empty when all is."""

    row: Mapping[str, Any]
    answer: wiring.Wiring | None
    outcome: Mapping[str, Any]
    wrong: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """The wiring's verdict in a word, or that the server did not start."""
        return "stopped" if self.answer is None else self.answer.verdict

    @property
    def served(self) -> str:
        """Accept length and acceptance by position, of what the server itself reported."""
        seen = reported(self.outcome)
        shares = " ".join(f"{share:.2f}"[1:] if share < 1 else "1.0" for share in seen.per_position)
        return f"{seen.length:.3f}  {shares}" if seen.length else "-"


def reported(outcome: Mapping[str, Any]) -> wiring.Acceptance:
    """The acceptance that the server reported of the prompts."""
    histogram: list[int] = []
    for prompt in outcome["prompts"]:
        for accepted, count in enumerate(prompt["meta"].get("spec_correct_drafts_histogram", [])):
            histogram += [0] * (accepted + 1 - len(histogram))
            histogram[accepted] += count
    return wiring.Acceptance(tuple(histogram))


def analyse(directory: Path, row: Mapping[str, Any]) -> tuple[wiring.Wiring, Mapping[str, Any]]:
    """The wiring of what was served, and the outcome it is from."""
    outcome = json.loads((directory / "outcome.json").read_text(encoding="utf-8"))
    recordings = wiring.read(directory / "records")
    config = json.loads((directory / "drafter/config.json").read_text(encoding="utf-8"))
    meta = {f"pivot-prompt-{prompt['id']}": prompt["meta"] for prompt in outcome["prompts"]}
    asked = wiring.asked_layers(recordings, config)
    return wiring.analyse(recordings, row.get("contract", CONTRACT), asked, meta), outcome


def judge(directory: Path, row: Mapping[str, Any]) -> Result:
    """A served row against what is expected of it."""
    expected = row["expect"]
    outcome = json.loads((directory / "outcome.json").read_text(encoding="utf-8"))
    if not outcome["started"]:
        text = (directory / "server.log").read_text(encoding="utf-8", errors="replace")
        wrong = [] if expected["wiring"] == "stopped" else [f"the server did not start: {outcome['error'][:200]}"]
        if not wrong and expected["says"] not in text:
            wrong = [f"its log does not say {expected['says']!r}"]
        return Result(row, None, outcome, tuple(wrong))
    answer, outcome = analyse(directory, row)
    return Result(row, answer, outcome, tuple(differences(answer, expected)))


def differences(answer: wiring.Wiring, expected: Mapping[str, Any]) -> Iterator[str]:
    """What the analysis says otherwise than the table."""
    seen = [piece.layer if piece.layer is not None else _odd(piece) for piece in answer.slices]
    for name, is_, should in (
        ("wiring", answer.verdict, expected["wiring"]),
        ("slices", seen, expected.get("slices")),
        ("findings", codes(answer.findings), expected.get("findings")),
    ):
        if should is not None and is_ != should:
            yield f"{name}: {is_}, expected {should}"


def _odd(piece: wiring.Slice) -> list[object]:
    """A slice that is no layer's input, as the table writes it."""
    return ["unstable", None] if piece.match is None else [piece.match.kind, piece.match.layer]


# --- the table


def rows(arguments: argparse.Namespace) -> list[Mapping[str, Any]]:
    """The rows that are asked for, in the table's order; BenchError for a name that is none."""
    table = yaml.safe_load(ROWS.read_text(encoding="utf-8"))["rows"]
    names = [row["name"] for row in table]
    unknown = [name for name in arguments.row or () if name not in names]
    if unknown:
        raise BenchError(f"{unknown[0]!r} is no row; there are: {', '.join(names)}")
    return [
        row
        for row in table
        if (not arguments.row or row["name"] in arguments.row)
        and (not arguments.kind or row["class"] in arguments.kind)
    ]


def line(result: Result) -> str:
    """One row of the printed table, and under it what is wrong."""
    row = result.row
    state = "WRONG" if result.wrong else "right"
    layers = "" if result.answer is None else str([piece.source for piece in result.answer.slices])
    text = f"{row['class']:<10} {row['name']:<40} {result.served:<24} {result.verdict:<10} {layers:<12} {state}"
    return "\n".join([text, *(f"           {item}" for item in result.wrong)])


def parse() -> argparse.Namespace:
    """The command line; ends with a sentence when it asks for something that is not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="interpreter of an engine on this machine, instead of the lab's container")
    parser.add_argument("--class", dest="kind", action="append", choices=CLASSES)
    parser.add_argument("--row", action="append", help="only this row")
    parser.add_argument("--prompts", type=int, default=6, help="prompts a row, 6 when not given")
    parser.add_argument("--keep", type=Path, help="keep what the rows left in this directory")
    arguments = parser.parse_args()
    if arguments.python and shutil.which(arguments.python) is None:
        parser.error(f"--python: {arguments.python} is not an executable file; give the engine's interpreter")
    if arguments.prompts < 1:
        parser.error("--prompts: give a number of at least 1")
    return arguments


def bench(arguments: argparse.Namespace, scratch: Path) -> int:
    """Serve the rows one after another and print the table; how many of them are wrong."""
    chosen = rows(arguments)
    place = Local(arguments.python, scratch) if arguments.python else Container.from_lab(scratch)
    wrong = 0
    print(f"{'class':<10} {'wiring':<40} {'accept length, by position':<24} {'verdict':<10} {'layers':<12}", flush=True)
    try:
        for number, row in enumerate(chosen):
            result = judge(place.serve(number, row, arguments.prompts), row)
            wrong += bool(result.wrong)
            print(line(result), flush=True)
    finally:
        if isinstance(place, Container):
            place.end()
    print(f"{len(chosen)} rows, {wrong} wrong")
    return wrong


def main() -> int:
    """Command line entry."""
    arguments = parse()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = arguments.keep or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            return 1 if bench(arguments, scratch.resolve()) else 0
        except (BenchError, OSError) as error:
            print(f"bench: {error}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
