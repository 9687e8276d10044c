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
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pivot.experiments import ask, experiment
from pivot.experiments.whatif_command import EVALUATOR
from pivot.findings import errors
from pivot.program import program
from pivot.wirings import wiring
from pivot.wirings.wiring_findings import codes

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "lab/faults/rows.yml"
CONTRACT = (3, 5, 7)
CLASSES = ("none", "look-alike", "config", "weights", "flags", "engine")
SENT = ("lab/models", "lab/faults", "probe")
# how far the what-if may lie from what is served
ACCURACY = 0.15
# how what is wrong begins where only the what-if can tell
PREDICTED = ("suspect:", "first finding:", "what-if:")
KEPT_THERE = ("*.safetensors", "plugins", "__pycache__")


# predicted: accept length of the layers that reach fc; meant: of those of the contract
COLUMNS = "{:<10} {:<44} {:>6} {:<15} {:>9} {:>5}  {:<10} {:<12} {:<27} {}"
HEADER = COLUMNS.format(
    "class", "what is changed", "served", "by position", "predicted", "meant", "wiring", "layers", "first suspect", ""
).rstrip()


class BenchError(Exception):
    """The bench itself cannot go on; the text says why."""


# --- where the engine is


@dataclasses.dataclass(frozen=True)
class Local:
    """An engine's interpreter on this machine."""

    python: str
    scratch: Path

    def at(self, row: Mapping[str, Any]) -> str:
        """Where the row's files lie on the engine's machine."""
        return str(self.scratch / slug(row))

    def evaluate(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The what-if's answer."""
        answer: dict[str, Any] = json.loads(_run([self.python, "-I", "-", json.dumps(question)], program(EVALUATOR)))
        return answer

    def serve(self, row: Mapping[str, Any], prompts: int) -> None:
        """Serve one row."""
        out = self.scratch / slug(row)
        shutil.rmtree(out, ignore_errors=True)
        script = ROOT / "lab/faults/serve_row.py"
        _run([self.python, str(script), "--out", str(out), "--row", json.dumps(row), "--prompts", str(prompts)])


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

    def at(self, row: Mapping[str, Any]) -> str:
        """Where the row's files lie on the engine's machine."""
        return f"{self.there}/{slug(row)}"

    def evaluate(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The what-if's answer."""
        line = shlex.join([self.python, "-I", "-", json.dumps(question)])
        answer: dict[str, Any] = json.loads(_run([*self._ssh, f"root@{self.address}", line], program(EVALUATOR)))
        return answer

    def serve(self, row: Mapping[str, Any], prompts: int) -> None:
        """Serve one row there, and bring here what the analysis reads."""
        out = self.at(row)
        script = f"{self.there}/lab/faults/serve_row.py"
        line = [self.python, script, "--out", out, "--row", json.dumps(row), "--prompts", str(prompts)]
        _run([*self._ssh, f"root@{self.address}", shlex.join(line)])
        here = self.scratch / slug(row)
        left = [option for name in KEPT_THERE for option in ("--exclude", name)]
        _run([*self._rsync, *left, f"root@{self.address}:{out}/", f"{here}/"])

    def end(self) -> None:
        """Remove everything of the bench there."""
        _run([*self._ssh, f"root@{self.address}", f"rm -rf {self.there}"])


def _run(line: Sequence[str], stdin: str | None = None) -> str:
    """A command's output; BenchError with the end of what it said when it fails. Ended itself, it ends the command."""
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            said, complained = process.communicate(stdin)
        except BaseException:
            process.terminate()  # a row being served then ends its server
            raise
    if process.returncode:
        raise BenchError(f"{line[0]} ended with status {process.returncode}: {complained.strip()[-800:]}")
    return said


# --- one row


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a row. wrong: what is not as expected, in words; empty when all is."""

    row: Mapping[str, Any]
    answer: wiring.Wiring | None = None
    diagnosis: experiment.Diagnosis | None = None
    served: wiring.Acceptance = dataclasses.field(default_factory=wiring.Acceptance)
    wrong: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The wiring's verdict in a word, or that the server did not start."""
        return "stopped" if self.answer is None else self.answer.verdict

    @property
    def predicted(self) -> float | None:
        """The accept length that the what-if predicts for the layers that reach fc, or should reach it."""
        judged = self.diagnosis.judgement if self.diagnosis else None
        return judged.reference.figures.length if judged and judged.reference else None

    @property
    def intended(self) -> float | None:
        """The accept length that the what-if predicts for the layers of the contract."""
        judged = self.diagnosis.judgement if self.diagnosis else None
        return judged.base.figures.length if judged and judged.base else None


def reported(outcome: Mapping[str, Any]) -> wiring.Acceptance:
    """The acceptance that the server reported of the prompts."""
    histogram: list[int] = []
    for prompt in outcome["prompts"]:
        for accepted, count in enumerate(prompt["meta"].get("spec_correct_drafts_histogram", [])):
            histogram += [0] * (accepted + 1 - len(histogram))
            histogram[accepted] += count
    return wiring.Acceptance(tuple(histogram))


def asked(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked and answered, as `pivot.experiments.ask` keeps it."""
    prompts = []
    for prompt in outcome["prompts"]:
        reply = {"output_ids": prompt["output_ids"], "meta_info": prompt["meta"]}
        one = ask.Asked.of(prompt["id"], prompt["prompt_ids"], reply)
        prompts.append(dataclasses.replace(one, replayed=True))
    return ask.as_dict(prompts, outcome["new_tokens"], outcome["server"])


def judge(directory: Path, row: Mapping[str, Any], place: Local | Container | None, again: bool = False) -> Result:
    """A served row against what is expected of it. place: where the what-if is evaluated, None for nowhere; again: an
    evaluation that is there is taken."""
    expected = row["expect"]
    outcome = _json(directory / "outcome.json")
    if not outcome["started"]:
        text = (directory / "server.log").read_text(encoding="utf-8", errors="replace")
        wrong = [] if expected["wiring"] == "stopped" else [f"the server did not start: {outcome['error'][:200]}"]
        if not wrong and expected["says"] not in text:
            wrong = [f"its log does not say {expected['says']!r}"]
        return Result(row, wrong=tuple(wrong))
    about = experiment.Experiment(
        subject=row["name"],
        records=directory / "records",
        asked=asked(outcome),
        contract=row.get("contract", CONTRACT),
        config=_json(directory / "drafter/config.json"),
        environment=row.get("environment", {}),
        least=row.get("least", 0.0),
    )
    kept = directory / "evaluation.json"
    if place is not None and not (again and kept.exists()):
        there = place.at(row)
        question = experiment.question(
            about, tensors=[f"{there}/records"], drafter=f"{there}/drafter", target=f"{there}/target"
        )
        if question is not None:
            kept.write_text(json.dumps(place.evaluate(question)), encoding="utf-8")
    about = dataclasses.replace(about, evaluation=_json(kept) if kept.exists() else None)
    recordings = wiring.read(about.records)
    meta = {f"pivot-prompt-{prompt['id']}": prompt["meta"] for prompt in outcome["prompts"]}
    answer = wiring.analyse(recordings, about.contract, wiring.asked_layers(recordings, about.config), meta)
    result = Result(row, answer, experiment.answer(about), reported(outcome))
    return dataclasses.replace(result, wrong=tuple(differences(result, answer)))


def without_prediction(result: Result) -> Result:
    """A result without what the what-if is needed for."""
    kept = [item for item in result.wrong if not item.startswith(PREDICTED)]
    return dataclasses.replace(result, wrong=tuple(kept))


def _json(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def differences(result: Result, answer: wiring.Wiring) -> Iterator[str]:
    """What the analysis says otherwise than the table."""
    expected = result.row["expect"]
    seen = [piece.layer if piece.layer is not None else _odd(piece) for piece in answer.slices]
    diagnosis = result.diagnosis
    first = next(iter(errors(diagnosis.findings)), None) if diagnosis else None
    for name, is_, should in (
        ("wiring", answer.verdict, expected["wiring"]),
        ("slices", seen, expected.get("slices")),
        ("findings", codes(answer.findings), expected.get("findings")),
        ("suspect", diagnosis.suspect if diagnosis else None, expected.get("suspect")),
        ("first finding", first.code if first else None, expected.get("first")),
    ):
        if should is not None and is_ != should:
            yield f"{name}: {is_}, expected {should}"
    yield from _predictions(result)


def _predictions(result: Result) -> Iterator[str]:
    """Whether the what-if predicts what is served, or more than that, as the row's class (or the row) has it."""
    served, predicted, intended = result.served.length, result.predicted, result.intended
    kind = result.row["expect"].get("predicted", "less" if result.row["class"] in ("flags", "engine") else "served")
    if kind is None:
        return
    if served is None or predicted is None or intended is None:
        yield "what-if: nothing was served or predicted"
    elif kind == "served" and abs(predicted - served) > ACCURACY:
        yield f"what-if: {predicted:.2f} is predicted, served is {served:.2f}"
    elif kind == "less" and intended - served <= ACCURACY:
        yield f"what-if: served is not below the {intended:.2f} predicted for the contract"


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


def slug(row: Mapping[str, Any]) -> str:
    """A row's name as that of a directory."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in row["name"]).split())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def line(result: Result) -> str:
    """One row of the printed table, and under it what is wrong."""
    row, diagnosis = result.row, result.diagnosis
    first = next(iter(errors(diagnosis.findings)), None) if diagnosis else None
    text = COLUMNS.format(
        row["class"],
        row["name"],
        _number(result.served.length),
        " ".join(f"{share:.2f}" for share in result.served.per_position),
        _number(result.predicted),
        _number(result.intended),
        result.verdict,
        str([piece.source for piece in result.answer.slices]) if result.answer else "",
        f"{diagnosis.suspect} {first.code if first else ''}" if diagnosis else "",
        "WRONG" if result.wrong else "right",
    )
    return "\n".join([text, *(f"           {item}" for item in result.wrong)])


def parse() -> argparse.Namespace:
    """The command line; ends with a sentence when it asks for something that is not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="interpreter of an engine on this machine, instead of the lab's container")
    parser.add_argument("--class", dest="kind", action="append", choices=CLASSES)
    parser.add_argument("--row", action="append", help="only this row")
    parser.add_argument("--prompts", type=int, default=10, help="prompts a row, 10 when not given")
    parser.add_argument("--keep", type=Path, help="keep what the rows left in this directory")
    parser.add_argument("--again", action="store_true", help="serve nothing: judge the rows --keep has, once more")
    parser.add_argument("--wiring-only", action="store_true", help="leave the what-if out, and what it is needed for")
    arguments = parser.parse_args()
    if arguments.python and shutil.which(arguments.python) is None:
        parser.error(f"--python: {arguments.python} is not an executable file; give the engine's interpreter")
    if arguments.again and not arguments.keep:
        parser.error(
            "--again: give --keep and the directory of an earlier run; with --python, what-ifs are made up for"
        )
    if arguments.prompts < 1:
        parser.error("--prompts: give a number of at least 1")
    return arguments


def bench(arguments: argparse.Namespace, scratch: Path) -> int:
    """Serve the rows one after another and print the table; how many of them are wrong."""
    chosen = [row for row in rows(arguments) if not arguments.again or (scratch / slug(row) / "outcome.json").exists()]
    if not chosen:
        raise BenchError("there is no such row" + (f" in {scratch}" if arguments.again else ""))
    place: Local | Container | None = None
    if arguments.python:
        place = Local(arguments.python, scratch)
    elif not arguments.again:
        place = Container.from_lab(scratch)
    wrong = 0
    print(HEADER, flush=True)
    try:
        for row in chosen:
            if place is not None and not arguments.again:
                place.serve(row, arguments.prompts)
            result = judge(scratch / slug(row), row, None if arguments.wiring_only else place, arguments.again)
            if arguments.wiring_only:
                result = without_prediction(result)
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
    # an end from outside, too, ends the server and removes what lies in the container
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
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
