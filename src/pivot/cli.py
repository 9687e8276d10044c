"""``pivot COMMAND``: what can be done without a play. A command is a module with a `main`, imported when asked for."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final

# command → the module whose main(arguments: list[str]) -> int runs it, and one line of what it does
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "bundle": ("pivot.bundles.bundles", "bundles of logs: list, show, compare, prune"),
    "check": ("pivot.inventory.check_command", "what preflight says about an inventory, without a play"),
    "compare-training": (
        "pivot.experiments.training",
        "which layers a drafter was trained on, by a stored sample, and which it is fed",
    ),
    "diagnose": ("pivot.logs.diagnosis", "what a bundle of logs means: the state, and suspects in order"),
    "engine": ("pivot.engines.descriptions", "describe an SGLang wheel: flags, variables, how layer ids are read"),
    "experiment": (
        "pivot.experiments.experiment",
        "the answer of playbooks/experiment.yml, or what two answers differ in",
    ),
    "faults": ("pivot.faults", "every finding by code, as Markdown"),
    "manifest": ("pivot.checkpoints.manifest", "what a model directory holds, to be pinned: hashes, config, tensors"),
    "whatif": (
        "pivot.experiments.whatif_command",
        "what a drafter would get accepted with other layers or parts, from records",
    ),
    "wiring": ("pivot.wirings.wiring_command", "which layers reach a drafter, from records; or how two runs differ"),
}
INTERRUPTED = 130  # what a shell reports for SIGINT


def usage() -> str:
    """The table, for ``pivot --help``."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {line}" for name, (_, line) in sorted(COMMANDS.items())]
    return "\n".join(["usage: pivot COMMAND ...", "", *rows, "", "pivot COMMAND --help says more"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command: its exit status, or 2 for a command that there is not."""
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or [""]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f"did you mean {close[0]}?" if close else "pivot --help lists them"
        print(f"pivot: {name!r} is no command: {advice}" if name else usage(), file=sys.stderr)
        return 2
    try:
        status = importlib.import_module(COMMANDS[name][0]).main(rest)
        sys.stdout.flush()
    except BrokenPipeError:
        # whoever read has had enough; what is still buffered goes nowhere when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
