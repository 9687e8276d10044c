"""``pivot wiring``: what the probe's records of a run prove, or what differs between two runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pivot.findings import errors, render
from pivot.wirings import wiring
from pivot.wirings.records import SUFFIX


def _numbers(text: str) -> list[int]:
    """``3,5,7`` as numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers, such as 3,5,7") from None


def _records(text: str) -> Path:
    path = Path(text)
    if not path.is_dir() or not any(path.glob(f"*{SUFFIX}")):
        raise argparse.ArgumentTypeError(f"{text} is no directory with records (*{SUFFIX}) of the probe")
    return path


def _config(text: str) -> dict[str, object]:
    path = Path(text)
    try:
        config = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read as a config.json: {error}") from None
    if not isinstance(config, dict):
        raise argparse.ArgumentTypeError(f"{text} holds no JSON object")
    return config


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pivot wiring", description=__doc__)
    parser.add_argument("records", type=_records, help="directory with the records of a run")
    parser.add_argument("other", type=_records, nargs="?", help="directory with those of another run: what differs")
    parser.add_argument("--expected", type=_numbers, metavar="3,5,7", help="the layers the drafter was trained on")
    parser.add_argument("--convention", choices=("input", "output"), default="input", help="of --expected")
    parser.add_argument("--drafter", type=_config, metavar="DIR", help="the served drafter, for the ids it asks for")
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry: 1 when something is wrong, 0 otherwise; two runs are compared and not judged."""
    asked = _parser().parse_args(arguments)
    expected = None if asked.expected is None else wiring.as_inputs(asked.expected, asked.convention)
    answers = []
    for directory in filter(None, (asked.records, asked.other)):
        recordings = wiring.read(directory)
        wanted = None if asked.drafter is None else wiring.asked_layers(recordings, asked.drafter)
        answers.append(wiring.analyse(recordings, expected, wanted))
    difference = wiring.compare(*answers) if asked.other else ""
    if asked.json:
        plain = [answer.as_dict() for answer in answers]
        print(json.dumps({"runs": plain, "difference": difference} if asked.other else plain[0], indent=1))
    elif asked.other:
        print(difference)
    else:
        print("\n".join(filter(None, [answers[0].text(), render(answers[0].findings)])))
    return 1 if not asked.other and errors(answers[0].findings) else 0


if __name__ == "__main__":
    sys.exit(main())
