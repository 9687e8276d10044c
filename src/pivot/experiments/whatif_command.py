"""``pivot whatif``, and the question that the evaluator is asked."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pivot.drafters.layers import numbers
from pivot.experiments.whatif import judge
from pivot.experiments.whatif_candidates import candidates
from pivot.experiments.whatif_figures import Json, Question
from pivot.findings import render
from pivot.program import program

EVALUATOR = Path(__file__).resolve().parents[3] / "roles/debug_probes/files/whatif"


def question_for(
    *,
    tensors: Sequence[str],
    drafter: str,
    target: str | None,
    asked: Json,
    candidates: Sequence[Json],
    device: str = "cpu",
    since: str = "",
) -> dict[str, Any]:
    """The evaluator's argument. asked: `pivot.experiments.ask.as_dict`, of which the replayed prompts are evaluated;
    since: UTC, of which recordings on states count."""
    server = asked.get("server") or {}
    return {
        "tensors": list(tensors),
        "drafter": drafter,
        "target": target,
        "steps": int(server.get("speculative_num_steps") or 3),
        "topk": int(server.get("speculative_eagle_topk") or 1),
        "sequences": [
            {
                "id": one["id"],
                "rid": one["rid"],
                "prompt_tokens": one["prompt_tokens"],
                "tokens": one["prompt_tokens"] + len(one["output_ids"]),
            }
            for one in asked["prompts"]
            if one["replayed"]
        ],
        "candidates": list(candidates),
        "device": device,
        "since": since,
    }


def layers_of(text: str) -> list[int]:
    """``3,5,7`` as numbers; an ArgumentTypeError is a sentence."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers such as 3,5,7") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pivot whatif",
        description="What a drafter would get accepted with other layers or parts, from recorded states. "
        "Runs where the records and the engine are; playbooks/experiment.yml does all of it on a host.",
    )
    parser.add_argument("--python", required=True, help="the engine's interpreter, with torch and safetensors")
    parser.add_argument("--tensors", required=True, help="directory with the probe's tensors files")
    parser.add_argument("--asked", required=True, type=Path, help="what was asked and served (asked.json)")
    parser.add_argument("--drafter", required=True, help="directory of the drafter")
    parser.add_argument("--target", help="directory of the target: lets its head be tried in the drafter's place")
    parser.add_argument("--depth", required=True, type=int, help="layers of the target")
    parser.add_argument("--served", type=layers_of, help="layer inputs that reach fc, e.g. 3,5,7")
    parser.add_argument("--contract", type=layers_of, help="layer inputs that the drafter was trained on")
    parser.add_argument("--layers", type=layers_of, action="append", default=[], help="a further choice to evaluate")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print the whole answer as JSON")
    return parser


def run_evaluator(python: str, question: Json) -> Any:
    """The evaluator's answer; ValueError with a sentence when it has none."""
    line = [python, "-I", "-", json.dumps(question)]
    done = subprocess.run(line, input=program(EVALUATOR), capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"{python} could not run the evaluator: {last}") from None
    if "failed" in answer:
        raise ValueError(answer["failed"])
    return answer


def main(arguments: list[str]) -> int:
    """``pivot whatif``: 0 when nothing is wrong, 1 when something is, 2 when there is no answer."""
    given = _parser().parse_args(arguments)
    try:
        asked = json.loads(given.asked.read_text(encoding="utf-8"))
        count = len(given.contract or given.served or [0, 0, 0])
        further = {f"given {numbers(layers)}": layers for layers in given.layers}
        wanted = candidates(given.depth, count, served=given.served, contract=given.contract, others=further)
        question = question_for(
            tensors=[given.tensors],
            drafter=given.drafter,
            target=given.target,
            asked=asked,
            candidates=wanted,
            device=given.device,
        )
        evaluation = run_evaluator(given.python, question)
    except (OSError, ValueError, KeyError) as error:
        print(f"pivot whatif: {error}", file=sys.stderr)
        return 2
    judgement = judge(
        Question(
            subject=Path(given.drafter).name,
            evaluation=evaluation,
            asked=asked,
            served=given.served,
            contract=given.contract,
            flags=asked.get("server") or {},
        )
    )
    if given.json:
        print(json.dumps(judgement.as_dict(), indent=1))
    else:
        print("\n".join(filter(None, [judgement.text(), *judgement.notes, render(judgement.findings)])))
    return 1 if judgement.findings else 0
