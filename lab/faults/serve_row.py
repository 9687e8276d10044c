"""Serve one row of the wiring bench with the probe beside the engine, and keep what came of it.

    ENGINE lab/faults/serve_row.py --out DIR --row JSON [--prompts N] [--probe DIR]

Runs where the engine is, with the engine's interpreter. `--out` receives ``outcome.json``, ``server.log`` and the
directories ``records`` (of the probe), ``target`` and ``drafter`` (what was served). Exit status 0 also when the server
did not start: the outcome says so, and a row may expect it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "models")]

import mutate  # noqa: E402 - its imports need the path that the line above sets
import recipe  # noqa: E402 - found by that path
import serve  # noqa: E402 - found by that path

PROBE = HERE.parents[1] / "probe"
BROKEN = "BROKEN ON PURPOSE"
TENSOR_BYTES = 64 * 1024 * 1024


def plugin(source: Path, place: Path) -> None:
    """A plugin as it lies beside an engine: its package, and a dist-info with its entry points."""
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.copytree(
        source / "src", place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    info = place / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


def environment(out: Path, row: Mapping[str, Any], probe: Path, rows: int) -> dict[str, str]:
    """The variables of the server: the probe, the fault plugin where the row has one, and the row's own."""
    plugins = out / "plugins"
    plugin(probe, plugins)
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(plugins), os.environ.get("PYTHONPATH", "")])),
        "PIVOT_PROBE_DIR": str(out / "records"),
        "PIVOT_PROBE_ROWS": str(rows),
        "PIVOT_PROBE_TENSOR_BYTES": str(TENSOR_BYTES),
        "LAB_BROKEN_ENGINE": "",
    }
    if row.get("fault"):
        plugin(HERE / "plugin", plugins)
        variables["LAB_BROKEN_ENGINE"] = json.dumps(row["fault"])
    return {**variables, **row.get("environment", {})}


def ask(port: int, target: Path, count: int, new_tokens: int) -> list[dict[str, Any]]:
    """Every prompt answered greedily, then its whole sequence replayed through an empty cache, in two rounds."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    prompts = recipe.read_json(recipe.PROMPTS)["prompts"][:count]
    answers = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt["text"]).ids
        reply = serve.generate(port, ids, new_tokens, rid=f"pivot-prompt-{prompt['id']}")
        meta = {key: value for key, value in reply["meta_info"].items() if key.startswith("spec_")}
        answers.append({"id": prompt["id"], "prompt_ids": ids, "output_ids": reply["output_ids"], "meta": meta})
    for answer in answers:
        name = f"pivot-replay-{answer['id']}"
        serve.generate(port, answer["prompt_ids"] + answer["output_ids"], 1, rid=name, extra_key=name)
    return answers


def run(out: Path, row: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Serve the row and ask the prompts; what came of it as outcome.json keeps it."""
    (out / "records").mkdir(parents=True)
    target = mutate.view(recipe.TARGET, out / "target", {}, row.get("target", {}))
    drafter = mutate.view(recipe.DRAFTER, out / "drafter", row.get("config", {}), row.get("weights", {}))
    port = serve.free_port()
    line = [*serve.command(sys.executable, target, drafter, port), *row.get("flags", [])]
    log = out / "server.log"
    outcome: dict[str, Any] = {
        "row": row["name"],
        "new_tokens": arguments.new_tokens,
        "command": line,
        "started": False,
        "prompts": [],
    }
    began = time.monotonic()
    try:
        variables = environment(out, row, arguments.probe.resolve(), arguments.rows)
        with serve.serving(line, log, variables) as seconds:
            outcome |= {"started": True, "start_seconds": round(seconds, 1)}
            outcome["server"] = {
                name: value for name, value in serve.server_info(port).items() if name.startswith("speculative_")
            }
            outcome["prompts"] = ask(port, target, arguments.prompts, arguments.new_tokens)
            time.sleep(1)  # the probe's writer is off the critical path
    except serve.ServeError as error:
        outcome["error"] = str(error)
    outcome["seconds"] = round(time.monotonic() - began, 1)
    text = log.read_text(encoding="utf-8", errors="replace")
    if row.get("fault") and BROKEN not in text:
        raise serve.ServeError(f"the fault plugin did not act; see {log}")
    outcome["log"] = [line for line in text.splitlines() if "Error" in line][-3:]
    return outcome


def main() -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a directory that does not exist yet")
    parser.add_argument("--row", type=json.loads, required=True)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=4, help="rows recorded of a forward: a verification's")
    parser.add_argument("--probe", type=Path, default=PROBE)
    arguments = parser.parse_args()
    serve.end_on_terminate()
    out = arguments.out.resolve()
    try:
        outcome = run(out, arguments.row, arguments)
    except (serve.ServeError, ValueError, OSError) as error:
        print(f"serve_row: {error}", file=sys.stderr)
        return 2
    recipe.write_json(out / "outcome.json", outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
