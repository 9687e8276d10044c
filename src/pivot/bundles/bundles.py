"""``pivot bundle list|show|compare|prune``: the bundles of this machine, and what two of them differ in."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pivot.drafters.configs import Findings, read_ids
from pivot.drafters.layers import kept_layers
from pivot.engines import descriptions
from pivot.logs import machine
from pivot.logs.diagnosis import Diagnosis, diagnose, render, served
from pivot.logs.evidence import BundleError, Facts, mappings, read, read_json, whole
from pivot.wirings import records, wiring
from pivot.wirings.slices import slices

HOME = Path("artifacts")
ABSENT = "-"
WIDE = 44  # characters of one value in a comparison
# what differs between any two starts and means nothing
IGNORED_ENVIRONMENT = frozenset({"INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID", "MEMORY_PRESSURE_WATCH", "PWD"})
IDS = "eagle_aux_hidden_state_layer_ids"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One difference: what, and its value in each bundle."""

    section: str
    name: str
    left: str
    right: str


def bundles(home: Path) -> list[Path]:
    """Directories with a manifest, two below `home`, in the order of their runs."""
    return sorted(path.parent for path in home.glob("*/*/manifest.json"))


def unfinished(home: Path) -> list[Path]:
    """What interrupted transfers have left: the next run of their host goes on there."""
    return sorted(path for path in home.glob(".*.partial") if path.is_dir())


def listed(home: Path) -> list[str]:
    """The bundles as lines for a person, then what is unfinished."""
    lines = []
    for path in bundles(home):
        try:
            content = read_json(path / "manifest.json")
        except OSError:  # of another user, or a link to itself
            content = None
        if not isinstance(content, dict):
            lines.append(f"{path}  damaged: its manifest.json cannot be read")
            continue
        files = [entry for entry in mappings(content.get("files")) if entry.get("sha256")]
        size = sum(whole(entry.get("bytes")) for entry in files) / (1 << 20)
        state = content.get("state", "not diagnosed")
        lines.append(f"{path}  {content.get('host', '?')}  {state}  {len(files)} files, {size:.1f} MiB")
    return [
        *lines,
        *(f"{path}  unfinished; the next collect goes on there, prune removes it" for path in unfinished(home)),
    ]


def shown(path: Path) -> str:
    """One bundle: its diagnosis, then its files with what each is for and what is missing."""
    found = diagnose(read(path))
    lines = [render(found), "", "files"]
    for entry in mappings(found.facts.manifest.get("files")):
        size = f"{entry.get('bytes')}" if entry.get("sha256") else ABSENT
        masked = f", {entry['masked']} masked" if entry.get("masked") else ""
        reason = f"  ({entry['reason']})" if entry.get("reason") else ""
        lines.append(f"  {size:>10}  {entry.get('name')}{masked}{reason}")
    if masked_as := mappings(found.facts.manifest.get("masked_as")):
        lines += ["masked", *(f"  {one.get('count')!s:>6}  {one.get('name')}" for one in masked_as)]
    return "\n".join(lines)


def compare(left: Path, right: Path) -> list[Row]:
    """What two bundles differ in, the causes first; equal values are left out, numbers are always there."""
    pair = [diagnose(read(path)) for path in (left, right)]
    tables = [dict(_values(found, path)) for found, path in zip(pair, (left, right), strict=True)]
    keys = list(dict.fromkeys([*tables[0], *tables[1]]))
    order = {section: number for number, section in enumerate(SECTIONS)}
    rows = []
    for section, name in sorted(keys, key=lambda key: (order[key[0]], key[1] if key[0] == "accept histogram" else "")):
        values = [table.get((section, name), ABSENT) for table in tables]
        if values[0] != values[1] or section in NUMBERS:
            rows.append(Row(section, name, *values))
    return rows


SECTIONS = (
    *("state", "pins", "packages", "driver", "machine", "container", "layers", "arguments", "environment"),
    *("figures", "accept histogram", "accepted, as the probe saw", "phases", "findings"),
)
NUMBERS = frozenset(SECTIONS[-5:-1])  # always side by side, and never a difference by themselves


def _values(found: Diagnosis, path: Path) -> Iterator[tuple[tuple[str, str], str]]:
    """Everything that is compared, by section and name."""
    facts = found.facts
    yield ("state", "state"), str(found.verdict.state)
    yield ("state", "why"), found.verdict.why
    for name, value in _flat(read_json(path / "pins.json"), ""):
        yield ("pins", name), value
    packages = read_json(path / "packages.json")
    packages = packages.get("packages") if isinstance(packages, dict) else None
    for name, value in sorted(packages.items()) if isinstance(packages, dict) else ():
        yield ("packages", str(name)), str(value)
    yield ("driver", "module"), facts.machine.module or ABSENT
    yield ("driver", "libcuda"), facts.machine.library or ABSENT
    yield ("machine", "kernel"), str(_mapping(facts.manifest.get("host_facts")).get("kernel", ABSENT))
    yield ("machine", "boot options"), facts.machine.command_line or ABSENT
    for line in machine.text(path / "node/container.conf").splitlines():
        name, colon, value = line.partition(": ")
        if colon:
            yield ("container", name), value
    yield from _layers(facts, path, _mapping(packages))
    for name, value in sorted(facts.arguments.items()):
        yield ("arguments", name), value
    for name, value in sorted(facts.environment.items()):
        if name not in IGNORED_ENVIRONMENT:
            yield ("environment", name), value
    yield from _numbers(found, path)
    for finding in mappings(facts.manifest.get("findings")):
        yield ("findings", f"{finding.get('code')}"), str(finding.get("message"))
    for suspect in found.suspects:
        yield ("findings", suspect.finding.code), suspect.finding.message


def _numbers(found: Diagnosis, path: Path) -> Iterator[tuple[tuple[str, str], str]]:
    """What was served and how long the start took: from the log, and from the probe's records."""
    run = found.facts.run
    figures = served(run) if run else {}
    histogram = figures.pop("accept_histogram", {})
    for name, value in figures.items():
        yield ("figures", name.replace("_", " ")), ABSENT if value is None else str(value)
    for step, count in histogram.items():
        yield ("accept histogram", step), f"{count / sum(histogram.values()):.0%}"
    seen = wiring.acceptance(_recordings(path))
    if seen.length is not None:
        yield ("accepted, as the probe saw", "accept length"), f"{seen.length:.2f}"
    for accepted, count in enumerate(seen.histogram):
        yield ("accepted, as the probe saw", f"{accepted} drafted"), f"{count / seen.verifications:.0%}"
    for phase in found.phases:
        yield ("phases", phase.name), f"{phase.seconds} s"


def _layers(facts: Facts, path: Path, packages: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], str]]:
    """The drafter's layers: as asked for, as the engine's version makes of them, and as the probe saw them."""
    ids = layer_ids(path)
    yield ("layers", "ids"), ABSENT if ids is None else str(list(ids))
    yield ("layers", "effective"), effective(facts, ids, packages)
    if seen := slices(_recordings(path)):
        yield ("layers", "as the probe saw"), str([ABSENT if one.source is None else one.source for one in seen])


@functools.lru_cache(maxsize=2)
def _recordings(path: Path) -> tuple[records.Recording, ...]:
    """What the probe recorded of every process."""
    directories = sorted({file.parent for file in (path / "probe").rglob(f"*{records.SUFFIX}")})
    return tuple(recording for directory in directories for recording in records.read(directory))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _flat(value: object, name: str) -> Iterator[tuple[str, str]]:
    """Leaves of nested mappings by their path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif value is not None:
        yield name, json.dumps(value, sort_keys=True) if isinstance(value, list) else str(value)


def layer_ids(path: Path) -> tuple[int, ...] | None:
    """The ids of the drafter's rendered config; None when the bundle has none."""
    for file in sorted((path / "config").rglob("config.json")):
        config = _mapping(read_json(file))
        found = read_ids(_mapping(config.get("eagle_config")).get(IDS), file.name, Findings(file.name))
        if found:
            return tuple(found)
    return None


def effective(facts: Facts, ids: Sequence[int] | None, packages: Mapping[str, Any]) -> str:
    """Which layers' inputs reach the drafter, by the engine's version and the target's class."""
    run, version = facts.run, str(packages.get("sglang", ""))
    if not (ids and run and run.loads and version):
        return ABSENT
    engine = descriptions.load(version.partition("+")[0]) if re.fullmatch(r"[\w.+]{1,40}", version) else None
    entry = _mapping(_mapping((engine or {}).get("eagle3")).get(run.loads[0].model))
    rule = entry.get("rule")
    try:
        return str(sorted(kept_layers(ids, str(rule)))) if rule else f"not known for {run.loads[0].model} in {version}"
    except ValueError:
        return f"not known: {rule}"


def as_text(rows: Sequence[Row], names: tuple[str, str]) -> str:
    """Two columns of values, a block for each section."""
    width = max((len(row.name) for row in rows), default=0)
    column = min(WIDE, max((len(value) for row in rows for value in (row.left, row.right)), default=0))
    column = max(column, min(WIDE, len(names[0])))
    lines = [f"{'':<{width + 4}}{_short(names[0]):<{column}}  {_short(names[1])}"]
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            lines.append(section)
        lines.append(f"  {row.name:<{width}}  {_short(row.left):<{column}}  {_short(row.right)}".rstrip())
    return "\n".join(lines)


def _short(value: str) -> str:
    value = " ".join(value.split())
    return value if len(value) <= WIDE else value[: WIDE - 1] + "…"


def prune(home: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` runs and what is unfinished; returns what was removed.

    Only folders with bundles, and those of interrupted transfers, are touched.
    """
    runs = sorted({path.parent for path in bundles(home)}, key=lambda run: run.name)
    gone = [*runs[: max(0, len(runs) - keep)], *unfinished(home)]
    for run in gone:
        shutil.rmtree(run)
    return gone


def main(arguments: list[str]) -> int:
    """``pivot bundle``: 0; `compare` 1 when something but numbers differs; 2 for what is no bundle."""
    parser = argparse.ArgumentParser("pivot bundle", description="Bundles of logs and state.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (("list", "all of them"), ("prune", "remove the runs of long ago")):
        one = commands.add_parser(name, help=words)
        one.add_argument("--home", type=Path, default=HOME, help="directory of the runs (default: artifacts)")
    commands.choices["prune"].add_argument("--keep", type=int, required=True, help="how many of the newest runs stay")
    commands.add_parser("show", help="state, suspects and files of one").add_argument("bundle", type=Path)
    both = commands.add_parser("compare", help="what differs between two")
    both.add_argument("bundles", type=Path, nargs=2, metavar="BUNDLE")
    both.add_argument("--json", action="store_true", help="for programs")
    given = parser.parse_args(arguments)
    try:
        return _run(given)
    except (BundleError, OSError) as error:
        print(f"pivot bundle: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    if given.command == "list":
        print(
            "\n".join(listed(given.home)) or f"no bundle below {given.home}: ansible-playbook deploy.yml --tags collect"
        )
    elif given.command == "show":
        print(shown(given.bundle))
    elif given.command == "prune":
        if given.keep < 1:
            print("pivot bundle: --keep needs at least 1", file=sys.stderr)
            return 2
        print("\n".join(f"removed {run}" for run in prune(given.home, given.keep)) or "nothing to remove")
    else:
        rows = compare(*given.bundles)
        if given.json:
            print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
        else:
            names = tuple(
                f"{path.parent.name}/{path.name}" if path.parent.name else path.name for path in given.bundles
            )
            print(as_text(rows, (names[0], names[1])))
        return 1 if any(row.left != row.right and row.section not in NUMBERS for row in rows) else 0
    return 0
