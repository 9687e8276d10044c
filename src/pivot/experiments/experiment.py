"""One answer from one experiment: what reaches the drafter, what that costs, and who is the first suspect.

Three things are put together, each proof of its own kind: the wiring (bit for bit, `pivot.wirings.wiring`), the
prediction for other wirings and parts against what was served (`pivot.experiments.whatif`), and whether debugging
itself changed what is served (`pivot.experiments.ask`). `question` says what the evaluator is to be asked, `answer`
makes the diagnosis.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pivot.drafters.layers import numbers
from pivot.experiments import ask, whatif
from pivot.experiments.whatif_candidates import candidates
from pivot.experiments.whatif_command import question_for
from pivot.experiments.whatif_figures import Question
from pivot.findings import Finding, Severity, errors, render
from pivot.wirings.wiring import Wiring, analyse, asked_layers, read

FORMAT = 1
# who is to blame, and what a person reads about it
SUSPECTS = {
    "none": "nothing is wrong",
    "wired": "the wiring is not to blame; for more, too little was evaluated",
    "config": "the choice of layers is wrong",
    "serving": "serving is the first suspect",
    "drafter": "the drafter is the first suspect",
    "unseen": "too little was recorded for an answer",
}
IDS = "eagle_aux_hidden_state_layer_ids"
Json = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What one experiment left. records: directory of the probe's JSON lines; asked: `pivot.experiments.ask.as_dict` of
    while the probe was in, before: of before; contract: the layer inputs that the drafter was trained on, ascending;
    config: the drafter's config.json as it is served; environment: of the service; least: the accept length that is
    expected."""

    subject: str
    records: Path
    asked: Json
    before: Json | None = None
    evaluation: Json | None = None
    contract: Sequence[int] | None = None
    config: Json = dataclasses.field(default_factory=dict)
    environment: Json = dataclasses.field(default_factory=dict)
    least: float = 0.0
    since: str = ""

    def wiring(self) -> Wiring:
        """The records' own answer."""
        recordings = read(self.records, self.since)
        return analyse(recordings, self.contract, asked_layers(recordings, self.config))

    def count(self) -> int:
        """How many states the drafter's `fc` takes."""
        ids = (self.config.get("eagle_config") or {}).get(IDS)
        given = self.config.get("num_aux_hidden_states")
        return int(given) if given else len(ids) if ids else 3


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer. suspect: a key of SUSPECTS; lines: the reasoning, step by step; findings: ranked, worst first."""

    subject: str
    suspect: str
    lines: tuple[str, ...]
    findings: tuple[Finding, ...]
    wiring: Wiring
    judgement: whatif.Judgement | None

    @property
    def headline(self) -> str:
        """The answer in one line."""
        first = next(iter(errors(self.findings)), None)
        return f"{self.subject}: {SUSPECTS[self.suspect]}" + (f" ({first.code})" if first else "")

    def text(self) -> str:
        """Everything for a terminal: the answer, the reasoning, the findings with their changes, the table."""
        parts = [self.headline, *self.lines, render(self.findings)]
        if self.judgement:
            parts.append(self.judgement.text())
        return "\n".join(part for part in parts if part)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, for Ansible, and to be compared with another run."""
        return {
            "format": FORMAT,
            "subject": self.subject,
            "suspect": self.suspect,
            "headline": self.headline,
            "lines": list(self.lines),
            "findings": [finding.as_dict() for finding in self.findings],
            "wiring": self.wiring.as_dict(),
            "rule": self.wiring.rule,
            "whatif": None if self.judgement is None else self.judgement.as_dict(),
            "text": self.text(),
        }


# --- what to evaluate


def question(
    experiment: Experiment,
    *,
    tensors: Sequence[str],
    drafter: str,
    target: str | None,
    others: Mapping[str, Sequence[int]] | None = None,
    device: str = "cpu",
) -> dict[str, Any] | None:
    """The evaluator's argument, None where the records do not tell how many layers the target has.

    tensors, drafter, target: paths on the host; others: further layer choices by name.
    """
    seen = experiment.wiring()
    if seen.depth is None:
        return None
    served = [layer for layer in seen.layers if layer is not None]
    chosen = candidates(
        seen.depth,
        experiment.count(),
        served=served if len(served) == len(seen.layers) else None,
        contract=experiment.contract,
        others=others,
    )
    return question_for(
        tensors=tensors,
        drafter=drafter,
        target=target,
        asked=experiment.asked,
        candidates=chosen,
        device=device,
        since=experiment.since,
    )


# --- the diagnosis


def answer(experiment: Experiment) -> Diagnosis:
    """The whole diagnosis of one experiment; without an evaluation it ends at the wiring."""
    seen = experiment.wiring()
    judgement = None
    if experiment.evaluation is not None:
        judgement = whatif.judge(
            Question(
                subject=experiment.subject,
                evaluation=experiment.evaluation,
                asked=experiment.asked,
                served=seen.layers or None,
                contract=experiment.contract,
                flags=experiment.asked.get("server") or {},
                environment=experiment.environment,
                least=experiment.least,
            )
        )
    changed = ask.compare(experiment.before, experiment.asked, experiment.subject) if experiment.before else []
    padded = bool((experiment.asked.get("server") or {}).get("enable_dp_attention"))
    return diagnose(experiment.subject, seen, judgement, changed, padded=padded)


def _padding(subject: str) -> Finding:
    message = (
        "the server runs with enable-dp-attention, which pads its batches: the probe was never tried with it, and rows "
        "of padding look like states that were changed on the way"
    )
    fix = "serve once without enable-dp-attention, and ask again"
    return Finding("WIRE-PADDED", Severity.WARNING, subject, message, fix, "docs/faults.md")


def diagnose(
    subject: str,
    seen: Wiring,
    judgement: whatif.Judgement | None,
    others: Sequence[Finding] = (),
    *,
    padded: bool = False,
) -> Diagnosis:
    """Rank what was found. others: findings that qualify the answer, such as that debugging changed what is served;
    padded: recorded forwards may hold rows of nobody, so that they convict nobody."""
    others = [_padding(subject), *others] if padded else others
    wired = sorted(seen.findings, key=lambda finding: list(Severity).index(finding.severity))
    judged = list(judgement.findings) if judgement else []
    suspect = "unseen" if padded and seen.verdict == "engine" else _suspect(seen, judgement)
    first = _of(suspect, judged)
    rest = [finding for finding in judged if finding not in first]
    if suspect in ("serving", "config") and errors(wired):
        ranked = [*wired, *first, *rest]  # what is proven comes before what is predicted
    else:
        ranked = [*first, *errors(wired), *rest, *(finding for finding in wired if finding not in errors(wired))]
    return Diagnosis(subject, suspect, tuple(_lines(seen, judgement)), (*ranked, *others), seen, judgement)


def _suspect(seen: Wiring, judgement: whatif.Judgement | None) -> str:
    """Who is to blame: what the records prove first, then what the predictions show."""
    if seen.verdict == "unseen":
        return "unseen"
    if seen.verdict == "bypassed" or (seen.verdict == "engine" and errors(seen.findings)):
        return "serving"
    if seen.verdict == "config":
        return "config"
    found = errors(judgement.findings) if judgement else []
    if found:
        return family(found[0])
    return "none" if judgement and judgement.tells else "wired"


def family(finding: Finding) -> str:
    """The suspect that a prediction's finding points at."""
    if finding.code in ("WHATIF-SERVED-LESS", "WHATIF-SERVED-MORE"):
        return "serving"
    return "config" if finding.code in ("WHATIF-LAYERS", "WHATIF-CONTRACT") else "drafter"


def _of(suspect: str, found: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in found if family(finding) == suspect]


def _lines(seen: Wiring, judgement: whatif.Judgement | None) -> list[str]:
    """The reasoning, a line a step."""
    lines = [f"wiring   {_wiring_line(seen)}", *(f"         {piece}" for piece in seen.slices)]
    if judgement is None:
        lines.append("what-if  was not evaluated: the answer ends at the wiring")
        return lines
    lines.append(f"serving  {_serving_line(judgement)}")
    costs = _cost(judgement)
    if costs:
        lines.append(f"layers   {costs}")
    lines.append(f"drafter  {_drafter_line(judgement)}")
    return lines


def _wiring_line(seen: Wiring) -> str:
    layers = [layer for layer in seen.layers if layer is not None]
    said = {
        "right": f"right: fc receives the inputs of layers {numbers(layers)}, on which the drafter was trained",
        "consistent": f"as configured: fc receives the inputs of layers {numbers(layers)}; what the drafter was "
        "trained on is not given",
        "config": f"wrong, as the engine is told: fc receives the inputs of layers {numbers(layers)}, the drafter was "
        f"trained on those of {numbers(seen.expected or ())}",
        "engine": "not what the engine was told to hand over",
        "bypassed": "none: the drafter's fc is not run at all",
        "unseen": "right in every prefill, and verifications were not seen"
        if seen.slices
        else "nothing of it was seen",
    }
    return said[seen.verdict]


def _serving_line(judgement: whatif.Judgement) -> str:
    if judgement.served is None or judgement.reference is None:
        return "no accept length was reported, so there is nothing to compare"
    served, predicted = judgement.served.length, judgement.reference.figures.length
    start = f"served {served:.2f}, predicted {predicted:.2f} for the inputs of layers "
    start += numbers(judgement.reference.layers)
    if any(family(finding) == "serving" for finding in judgement.findings):
        return f"{start}: they disagree, so the fault is in serving"
    if not judgement.tells:
        return f"{start}: too few prompts to tell"
    return f"{start}: serving gets out of the drafter what is in it"


def _cost(judgement: whatif.Judgement) -> str:
    """What the wrong choice of layers costs, empty where it is the right one."""
    reference, base = judgement.reference, judgement.base
    if reference is None or base is None or reference is base:
        return ""
    gain = base.figures.length - reference.figures.length
    return f"{base.figures.length:.2f} is predicted with the inputs of layers {numbers(base.layers)} ({gain:+.2f})"


def _drafter_line(judgement: whatif.Judgement) -> str:
    blamed = _of("drafter", errors(judgement.findings))
    if blamed:
        return f"blamed: {blamed[0].code}"
    if judgement.base is None:
        return "not evaluated"
    if not judgement.tells:
        return "too few prompts to tell"
    tried = sum(row.is_repair for row in judgement.rows)
    return f"cleared: none of {tried} single-part repairs predicts more than {judgement.base.figures.length:.2f} by far"


# --- two runs


def compare(one: Json, other: Json) -> str:
    """What differs between two answers (`Diagnosis.as_dict`), the earlier one first."""
    lines = [f"{one['headline']}  →  {other['headline']}"]
    layers = [answered["wiring"]["layers"] for answered in (one, other)]
    lines.append(
        f"layers    {_named(layers[0])}, both times"
        if layers[0] == layers[1]
        else f"layers    {_named(layers[0])}  →  {_named(layers[1])}"
    )
    for name, pick in (("served", _served), ("predicted", _predicted)):
        first, second = pick(one), pick(other)
        if first is not None and second is not None:
            lines.append(f"{name:<9} {first:.2f}  →  {second:.2f} ({second - first:+.2f})")
    codes = [[finding["code"] for finding in answered["findings"]] for answered in (one, other)]
    gone = [code for code in dict.fromkeys(codes[0]) if code not in codes[1]]
    new = [code for code in dict.fromkeys(codes[1]) if code not in codes[0]]
    lines += [f"gone      {', '.join(gone)}"] if gone else []
    lines += [f"new       {', '.join(new)}"] if new else []
    return "\n".join(lines)


def _named(layers: Sequence[int | None]) -> str:
    return ", ".join("unknown" if layer is None else str(layer) for layer in layers) or "none"


def _served(answered: Json) -> float | None:
    figures = (answered.get("whatif") or {}).get("served")
    length: float | None = figures["length"] if figures else answered["wiring"]["acceptance"]["length"]
    return length


def _predicted(answered: Json) -> float | None:
    judged = answered.get("whatif") or {}
    return next((float(row["length"]) for row in judged.get("rows", []) if row["name"] == judged["reference"]), None)


# --- the command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pivot experiment",
        description="The answer of an experiment (playbooks/experiment.yml leaves it as JSON), or how two differ.",
    )
    parser.add_argument("answer", type=Path, help="an answer")
    parser.add_argument("later", type=Path, nargs="?", help="another one, to be compared with the first")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    return parser


def load(path: Path) -> dict[str, Any]:
    """An answer that was kept; ValueError with a sentence when the file holds none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as an answer: {error}") from error
    if not isinstance(data, dict) or "suspect" not in data:
        raise ValueError(f"{path} holds no answer of an experiment")
    if data.get("format") != FORMAT:
        raise ValueError(f"{path} is of format {data.get('format')}, this Pivot reads {FORMAT}")
    return data


def main(arguments: list[str]) -> int:
    """``pivot experiment``: 0 when nothing is wrong (in the later answer), 1 when something is, 2 for bad input."""
    given = _parser().parse_args(arguments)
    try:
        answers = [load(path) for path in (given.answer, given.later) if path is not None]
    except ValueError as error:
        print(f"pivot experiment: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(answers[-1], indent=1))
    else:
        print(compare(*answers) if len(answers) == 2 else answers[0]["text"])
    return 0 if answers[-1]["suspect"] == "none" else 1
