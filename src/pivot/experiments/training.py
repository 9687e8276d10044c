"""A stored sample of a drafter's training against what the server computes: trained on X, served Y.

The host's evaluator (``roles/debug_probes/files/whatif``) reads the sample, whatever its names, order and packing,
and measures how far every layer's state of the replayed tokens is from each stored one. This module says what that
means. A stored state is a layer's when that layer is at least MARGIN times nearer than the next one: neighbours differ
by a tenth or more of a state's length, rounding to bfloat16 by less than a hundredth, so nothing has to be tuned.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pivot.drafters.layers import ids_for, numbers
from pivot.findings import Finding, Severity, errors, render
from pivot.wirings.wiring import layer_name

FORMAT = 1
MARGIN = 2.0
# how far a state may be from itself after it was stored so, relative to its length
STORED = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}
RULES = ("always_plus_one", "plus_one_if_first_is_1")  # of which the ids to write are known
REFERENCE = "docs/faults.md"
PROJECT = Path(__file__).resolve().parents[3]
Json = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """One stored state. layer: the layer input it is, None when it is none; last: it is the state behind the last
    layer, normed: after the final norm; shift: by how many tokens it stands late (-1: early)."""

    tensor: str
    index: int
    count: int
    dtype: str
    layer: int | None
    last: bool
    normed: bool
    distance: float
    nearest: int
    second_distance: float
    shift: int

    @property
    def name(self) -> str:
        """``aux_hidden_state[1]``, or the tensor's name alone where it holds one state."""
        return self.tensor if self.count == 1 else f"{self.tensor}[{self.index}]"

    def what(self) -> str:
        """What it is, for a person."""
        if self.layer is None:
            return f"no state of this target (nearest: {layer_name(self.nearest)})"
        if self.last:
            return "behind the last layer" + (", after the final norm" if self.normed else "")
        return layer_name(self.layer)

    def how(self) -> str:
        """How near it is, and how far the next state."""
        kind = "equal" if self.distance <= STORED.get(self.dtype, 1e-4) else "near"
        return f"{kind if self.layer is not None else 'far'} {self.distance:.1e}, next {self.second_distance:.1e}"


def stored_of(matched: Json) -> list[Stored]:
    """The evaluator's answer to "match sample", a state at a time; a KeyError names what it lacks."""
    depth = matched["layers"]
    found = []
    for tensor in matched["tensors"]:
        for piece in tensor["pieces"]:
            sure = piece["distance"] * MARGIN <= piece["second_distance"]
            found.append(
                Stored(
                    tensor=tensor["name"],
                    index=piece["index"],
                    count=len(tensor["pieces"]),
                    dtype=tensor["dtype"],
                    layer=piece["layer"] if sure else None,
                    last=piece["layer"] == depth,
                    normed=piece["normed"],
                    distance=piece["distance"],
                    nearest=piece["layer"],
                    second_distance=piece["second_distance"],
                    shift=piece["shift"],
                )
            )
    return found


def trained_on(stored: Sequence[Stored], count: int) -> tuple[Stored, ...]:
    """The states that a drafter with `count` slices was fed, as far as the sample can tell; empty when it cannot.

    They are those of the one tensor that holds so many; else those of the tensors that hold one each, when there are
    so many. What stands behind the last layer, which trainers keep as what is to be predicted, is left out where that
    is what makes the number fit.
    """
    for kept in (stored, [one for one in stored if not one.last], [one for one in stored if not one.normed]):
        tensors: dict[str, list[Stored]] = {}
        for one in kept:
            tensors.setdefault(one.tensor, []).append(one)
        packed = [pieces for pieces in tensors.values() if len(pieces) == count > 1]
        known = [pieces for pieces in packed if all(one.layer is not None for one in pieces)] or packed
        if known and len({tuple(one.layer for one in pieces) for pieces in known}) == 1:
            return tuple(known[0])
        single = [one for one in kept if one.count == 1]
        if len(single) == count:
            return tuple(
                single if _listed(single) else sorted(single, key=lambda one: (one.layer is None, one.nearest))
            )
    return ()


def _listed(single: Sequence[Stored]) -> bool:
    """Whether these tensors are the items of one list, which has an order; by their names they have none."""
    names = [one.tensor.rpartition(".") for one in single]
    return len({name[0] for name in names}) == 1 and [name[2] for name in names] == [str(n) for n in range(len(names))]


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """The answer. trained: layer inputs in the sample's order, None where it cannot be told; served: those that reach
    `fc`; findings: worst first."""

    subject: str
    stored: tuple[Stored, ...]
    trained: tuple[int, ...] | None
    served: tuple[int | None, ...]
    rows: int
    findings: tuple[Finding, ...]

    def text(self) -> str:
        """The table, and the answer in one line."""
        cells = [("stored in the sample", "training used", "distance", "serving feeds")]
        fed = {one.name: self._fed(index) for index, one in enumerate(_used(self))}
        cells += [(one.name, one.what(), one.how(), fed.get(one.name, "")) for one in self.stored]
        widths = [max(len(row[column]) for row in cells) for column in range(4)]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        return "\n".join([*lines, f"compared on {self.rows} tokens", self.headline])

    @property
    def headline(self) -> str:
        """Training used X, serving feeds Y."""
        if self.trained is None:
            return f"{self.subject}: what training used cannot be told from the sample"
        served = ", ".join("?" if layer is None else str(layer) for layer in self.served) or "nothing"
        same = self.trained == self.served
        return (
            f"{self.subject}: training used the inputs of layers {numbers(self.trained)}, serving feeds {served}: "
            + ("the same" if same else "DIFFERENT")
        )

    def _fed(self, index: int) -> str:
        if index >= len(self.served):
            return ""
        layer = self.served[index]
        return f"slice {index}: " + ("not one layer's state" if layer is None else layer_name(layer))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for Ansible."""
        return {
            "format": FORMAT,
            "subject": self.subject,
            "trained": None if self.trained is None else list(self.trained),
            "served": list(self.served),
            "stored": [dataclasses.asdict(one) | {"what": one.what()} for one in self.stored],
            "headline": self.headline,
            "findings": [finding.as_dict() for finding in self.findings],
            "text": self.text(),
        }


def _used(comparison: Comparison) -> tuple[Stored, ...]:
    return trained_on(comparison.stored, max(len(comparison.served), 1))


def suggested(matched: Json, count: int = 3) -> list[int] | None:
    """What a drafter with `count` slices was trained on by the sample, as a wiring to evaluate; None when not known."""
    used = trained_on(stored_of(matched), count)
    layers = [one.layer for one in used if one.layer is not None]
    return layers if used and len(layers) == len(used) else None


def compare(
    subject: str,
    matched: Json,
    served: Sequence[int | None],
    *,
    contract: Sequence[int] | None = None,
    rule: str | None = None,
) -> Comparison:
    """The sample against what is served.

    matched: the evaluator's answer; served: the layer inputs that reach `fc`, slice by slice; contract: the pins', as
    layer inputs; rule: how the engine reads ids (`pivot.drafters.layers`), for the change to make.
    """
    stored = stored_of(matched)
    used = trained_on(stored, max(len(served), 1))
    known = tuple(one.layer for one in used if one.layer is not None)
    trained = known if used and len(known) == len(used) else None
    found = [*_unknown(subject, stored, used), *_different(subject, trained, tuple(served), rule)]
    if trained is not None and contract and sorted(trained) != sorted(contract):
        message = f"the contract in the pins names the inputs of layers {numbers(contract)}, the sample was made with "
        message += f"those of {numbers(trained)}"
        fix = "correct the contract, or get a sample of this drafter's own training"
        found.append(Finding("TRAINING-CONTRACT", Severity.WARNING, subject, message, fix, REFERENCE))
    return Comparison(subject, tuple(stored), trained, tuple(served), matched["rows"], tuple(found))


def _unknown(subject: str, stored: Sequence[Stored], used: Sequence[Stored]) -> list[Finding]:
    """States that are none of this target's, that stand at other tokens, or that do not say what was used."""
    found = []
    strange = [one for one in stored if one.layer is None]
    if strange and not (used and all(one.layer is not None for one in used)):
        names = ", ".join(f"{one.name} ({one.how()})" for one in strange[:4])
        message = f"{len(strange)} of {len(stored)} stored states are no layer's state of the served target: {names}"
        fix = (
            "the sample was made with another target or checkpoint, or its states were changed before they were stored"
        )
        found.append(Finding("TRAINING-UNKNOWN", Severity.ERROR, subject, message, fix, REFERENCE))
    elif not used:
        message = f"the sample holds {len(stored)} states, and which of them the drafter was fed is not in it"
        fix = "look it up in the trainer's configuration; the table says which layer each one is"
        found.append(Finding("TRAINING-UNDECIDED", Severity.WARNING, subject, message, fix, REFERENCE))
    moved = sorted({one.shift for one in stored if one.layer is not None and one.shift})
    for shift in moved:
        side = "before" if shift > 0 else "after"
        message = f"stored states are those of the token {side} the one they are stored with"
        fix = "drafters read a token beside the state of the one before it; the state of a later token gives it away"
        severity = Severity.INFO if shift > 0 else Severity.WARNING
        found.append(Finding("TRAINING-SHIFT", severity, subject, message, fix, REFERENCE))
    return found


def _different(
    subject: str, trained: tuple[int, ...] | None, served: tuple[int | None, ...], rule: str | None
) -> list[Finding]:
    """Training used other layers than serving feeds, or the same in another order."""
    if trained is None or not served or trained == served:
        return []
    fed = ", ".join("?" if layer is None else str(layer) for layer in served)
    if None not in served and sorted(trained) == sorted(layer for layer in served if layer is not None):
        message = f"training packed the inputs of layers {numbers(trained)} in this order, serving packs {fed}"
        fix = "engines pack in the order of the layers: put the blocks of fc.weight in that order"
        return [Finding("TRAINING-ORDER", Severity.ERROR, subject, message, fix, REFERENCE)]
    message = f"training used the inputs of layers {numbers(trained)}, serving feeds those of {fed}"
    rule = rule if rule in RULES else None
    ids = ids_for(trained, rule) if rule else None
    fix = (
        f"write sglang_server_eagle_layer_ids: {list(ids)}, and restart"
        if ids is not None
        else f"make the engine keep the inputs of layers {numbers(sorted(trained))}"
        + (": no ids make this engine do so" if rule else "")
    )
    return [Finding("TRAINING-LAYERS", Severity.ERROR, subject, message, fix, REFERENCE)]


# --- the command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pivot compare-training",
        description="Which layers a drafter was trained on, from a stored training sample, and which it is served. "
        "Runs playbooks/experiment.yml with the sample: the service is restarted twice.",
    )
    parser.add_argument("sample", type=Path, help="a .safetensors file, or a .pt/.ckpt that torch loads weights-only")
    parser.add_argument("-i", "--inventory", help="as ansible-playbook takes it")
    parser.add_argument("-l", "--limit", help="one host, as ansible-playbook takes it")
    parser.add_argument("--json", action="store_true", help="print the answers as JSON")
    return parser


def main(arguments: list[str]) -> int:
    """``pivot compare-training``: 0 when training and serving agree, 1 when not, 2 when there is no answer."""
    given = _parser().parse_args(arguments)
    sample = given.sample.resolve()
    if not sample.is_file():
        print(f"pivot compare-training: {given.sample} is no file", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        line = ["ansible-playbook", str(PROJECT / "playbooks/experiment.yml")]
        line += ["-e", json.dumps({"debug_probes_sample": str(sample), "debug_probes_sample_answers": scratch})]
        line += ["-i", given.inventory] if given.inventory else []
        line += ["--limit", given.limit] if given.limit else []
        environment = {"ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"), **os.environ}
        done = subprocess.run(line, env=environment, stdout=sys.stderr if given.json else None, check=False)
        answers = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(scratch).glob("*.json"))]
    if done.returncode or not answers:
        print("pivot compare-training: the play ended without an answer, see above", file=sys.stderr)
        return 2
    return report(answers, as_json=given.json)


def report(answers: Sequence[Json], *, as_json: bool) -> int:
    """Print the answers (`Comparison.as_dict`); 1 when one of them has an error."""
    found = [Finding.from_dict(dict(finding)) for answered in answers for finding in answered["findings"]]
    if as_json:
        print(json.dumps(list(answers), indent=1))
    else:
        print("\n\n".join([*(answered["text"] for answered in answers), *([render(found)] if found else [])]))
    return 1 if errors(found) else 0
