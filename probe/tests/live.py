"""Starts a real server on the CPU for each case and holds the probe's records against it (live_check.py).

    python probe/tests/live.py --python /opt/sglang/current/bin/python [--case NAME …] [--keep DIR]

`--python` is the interpreter of an installed SGLang with the lab's CPU kernels; any Python from 3.11 on runs this
program. A case takes about a minute and a half on two idle cores. Status 1 when a case fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
MODELS = PROJECT / "lab" / "models"
sys.path[:0] = [str(MODELS), str(PROJECT / "probe")]

import beside  # noqa: E402 - after the paths above, as the linter sorts them
import serve  # noqa: E402 - the lab's own, beside its models


class Case(NamedTuple):
    """One server. pair: the lab's, or what make_pairs.py makes; flags and environment: beside the usual ones;
    check: arguments of live_check.py; evaluated: the what-if's evaluator is held against it."""

    name: str
    what: str
    pair: str = "lab"
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    check: tuple[str, ...] = ()
    evaluated: bool = False


CASES = [
    Case("chain", "the tiny Kimi-K2.5 with its drafter, topk 1", evaluated=True),
    Case(
        "tree",
        "the same with topk 4 and 8 draft tokens",
        flags=("--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8"),
        check=("--kind", "tree"),
    ),
    Case(
        "eagle",
        "the same with --speculative-algorithm EAGLE: fc is skipped",
        flags=("--speculative-algorithm", "EAGLE"),
        check=("--kind", "eagle"),
    ),
    Case("raising", "every hook raises", environment=(("PIVOT_PROBE_TEST_PLANT", "hooks"),), check=("--raising",)),
    Case("quota", "a quota soon reached", environment=(("PIVOT_PROBE_MAX_BYTES", "400000"),), check=("--ended",)),
    Case("llama", "a Llama target of random weights with the lab's drafter", pair="llama", evaluated=True),
    Case(
        "mla", "the tiny Kimi-K2.5 with an MLA drafter (kimi_k25_eagle3) of random weights", pair="mla", evaluated=True
    ),
    Case(
        "tp2",
        "two ranks",
        flags=("--tp-size", "2"),
        environment=(("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),),
    ),
]


def install(directory: Path) -> Path:
    """The probe as it lies on a host, and the plugin that plants faults beside it."""
    shutil.copy(HERE / "planted_fault.py", beside.install(directory))
    beside.register(
        directory, "planted_fault", "0", {"sglang.srt.plugins": {"planted_fault": "planted_fault:register"}}
    )
    return directory


def pairs(python: str, directory: Path) -> dict[str, tuple[Path, Path]]:
    """Target and drafter by the name of the pair; those that the lab has not are made."""
    subprocess.run([python, str(HERE / "make_pairs.py"), str(MODELS), str(directory)], check=True)
    lab = (MODELS / "target", MODELS / "drafter")
    # of a Llama target SGLang takes the layer after each that is named: these give the inputs of 3, 5 and 7
    shifted = serve.drafter_view(lab[1], (2, 4, 6), directory / "shifted")
    return {"lab": lab, "llama": (directory / "llama", shifted), "mla": (lab[0], directory / "mla")}


def run(case: Case, python: str, models: tuple[Path, Path], scratch: Path) -> bool:
    """Serve one case and check it; whether it holds."""
    records, log, port = scratch / "records", scratch / "server.log", serve.free_port()
    records.mkdir(parents=True)
    line = [*serve.command(python, *models, port), "--enable-return-hidden-states", *case.flags]
    environment = {
        "PYTHONPATH": str(install(scratch / "beside")),
        "PIVOT_PROBE_DIR": str(records),
        **dict(case.environment),
    }
    check = [python, str(HERE / "live_check.py"), "--url", f"http://127.0.0.1:{port}", "--records", str(records)]
    check += ["--models", str(MODELS), "--target", str(models[0]), *case.check]
    if case.evaluated:
        check += ["--drafter", str(models[1])]
    try:
        with serve.serving(line, log, environment) as started:
            began = time.monotonic()
            # waiting threads of torch would spin beside the server
            patient = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
            done = subprocess.run(check, check=False, capture_output=True, text=True, env=patient)
    except serve.ServeError as error:
        print(f"{case.name}: FAILED: {error}")
        return False
    seconds = f"start {started:.0f} s, check {time.monotonic() - began:.0f} s"
    said = done.stdout.strip() if done.returncode == 0 else f"FAILED: {done.stderr.strip()[-2000:]}"
    print(f"{case.name}: {said} ({seconds})", flush=True)
    return done.returncode == 0


def main() -> int:
    """Every case that was asked for, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of an installed engine")
    names = ", ".join(f"{case.name} ({case.what})" for case in CASES)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help=names)
    parser.add_argument("--keep", type=Path, help="keep records and logs in this directory, which must not exist")
    arguments = parser.parse_args()
    if shutil.which(arguments.python) is None:
        parser.error(f"--python: {arguments.python} is not an executable file; give the engine's interpreter")
    serve.end_on_terminate()
    with contextlib.ExitStack() as stack:
        scratch = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pivot-probe-")))
        scratch.mkdir(parents=True, exist_ok=arguments.keep is None)
        made = pairs(arguments.python, scratch / "models")
        wanted = [case for case in CASES if not arguments.case or case.name in arguments.case]
        held = [subprocess.run([arguments.python, str(HERE / "older_engines.py")], check=False).returncode == 0]
        held += [run(case, arguments.python, made[case.pair], scratch / case.name) for case in wanted]
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
