"""What recording costs: the tiny pair served twice at once, with the probe and without it, asked in turns.

    python probe/bench.py --python /opt/sglang/current/bin/python [--rounds N] [--records DIR]

`--python` is the interpreter of an installed SGLang with the lab's CPU kernels; any Python from 3.11 on runs this
program. Both servers run throughout, so that whatever else the machine does falls on both alike.
Exit status 1 when an output differs from plain decoding or the median over all
pairs of requests is below `--least`: what the rest of the machine does spoils sums more than medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
MODELS = PROJECT / "lab" / "models"
sys.path.insert(0, str(MODELS))

import beside  # noqa: E402 - after the path above, as the linter sorts them
import serve  # noqa: E402 - the lab's own, beside its models

NEW_TOKENS = 64
LEAST = 0.85
# a reply that begins with pivot- is one whose tokens are recorded: the dearest case
RID = "pivot-bench"


@dataclass
class Side:
    """One of the two servers. seconds: of each request; processor: seconds of all its processes."""

    name: str
    port: int
    process: int = 0
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    wrong: int = 0
    processor: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second over all requests."""
        return self.tokens / sum(self.seconds)


def ask(side: Side, prompt: Mapping[str, Any], number: int) -> None:
    """One greedy request; counts its tokens, its time, and whether they are those of plain decoding."""
    began = time.monotonic()
    reply = serve.generate(side.port, prompt["text"], NEW_TOKENS, rid=f"{RID}-{number}")
    side.seconds.append(time.monotonic() - began)
    side.tokens += len(reply["output_ids"])
    side.wrong += reply["output_ids"] != prompt["output_ids"]


def processor_seconds(port: int) -> float:
    """Processor time of every process whose session's leader was told to listen on this port."""
    total, leaders = 0.0, set()
    stats: list[tuple[int, float]] = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            stats.append((int(fields[3]), (int(fields[11]) + int(fields[12])) / 100))
            if f"\0--port\0{port}\0" in (directory / "cmdline").read_text():
                leaders.add(int(fields[3]))
    total += sum(seconds for session, seconds in stats if session in leaders)
    return total


def run(sides: Sequence[Side], prompts: Sequence[Mapping[str, Any]], rounds: int) -> None:
    """Every prompt to both servers in turns, `rounds` times, after one round that is not counted."""
    for number, prompt in enumerate(prompts[:2]):
        for side in sides:
            ask(side, prompt, number)
    for side in sides:
        side.seconds, side.tokens, side.processor = [], 0, -processor_seconds(side.port)
    for turn in range(rounds):
        for number, prompt in enumerate(prompts):
            order = sides if (turn + number) % 2 else sides[::-1]
            for side in order:
                ask(side, prompt, number)
    for side in sides:
        side.processor += processor_seconds(side.port)


def parse() -> argparse.Namespace:
    """The command line; ends with a sentence when it asks for something that is not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of an installed engine")
    parser.add_argument("--rounds", type=int, default=2, help="how often every prompt is asked")
    parser.add_argument("--records", type=Path, help="keep the records in this directory")
    parser.add_argument("--least", type=float, default=LEAST, help="throughput on against off that must be reached")
    arguments = parser.parse_args()
    if shutil.which(arguments.python) is None:
        parser.error(f"--python: {arguments.python} is not an executable file; give the engine's interpreter")
    if arguments.rounds < 1:
        parser.error("--rounds: give a number of at least 1")
    return arguments


def main() -> int:
    """Measure, print one line of figures for each side and the ratio."""
    arguments = parse()
    serve.end_on_terminate()
    prompts = json.loads((MODELS / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    off, on = Side("off", serve.free_port()), Side("on", serve.free_port())
    with tempfile.TemporaryDirectory(prefix="pivot-probe-") as scratch, contextlib.ExitStack() as stack:
        root = Path(scratch)
        records = arguments.records or root / "records"
        records.mkdir(parents=True, exist_ok=True)
        probed = {"PYTHONPATH": str(beside.install(root / "beside")), "PIVOT_PROBE_DIR": str(records)}
        for side, environment in ((off, {}), (on, probed)):
            line = serve.command(arguments.python, MODELS / "target", MODELS / "drafter", side.port)
            stack.enter_context(serve.serving(line, root / f"{side.name}.log", environment))
        run((off, on), prompts, arguments.rounds)
        written = sum(path.stat().st_size for path in records.iterdir())
    for side in (off, on):
        print(
            f"{side.name:<4} {side.rate:7.1f} tok/s  median {statistics.median(side.seconds):.3f} s a request  "
            f"{side.processor:6.1f} s of processor  {side.wrong} of {len(side.seconds)} outputs wrong"
        )
    paired = statistics.median(one / other for one, other in zip(off.seconds, on.seconds, strict=True))
    ratio = on.rate / off.rate
    print(
        f"on/off: throughput {ratio:.3f} (median of pairs {paired:.3f}), {written / on.tokens / 1024:.1f} KiB a token"
    )
    return int(bool(off.wrong or on.wrong) or paired < arguments.least)


if __name__ == "__main__":
    sys.exit(main())
