"""What a pinned engine is: a description, read from the source inside an SGLang wheel, never imported or installed.

One small JSON a version stands in ``data/engines``. What the source does not say plainly is null or named under
``unknown``; how layer ids become layers is looked up by the shape of the code (`pivot.engines.engine_models`) in tables
that a person has verified, so that an unknown shape is a finding and never a guess.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from pivot.engines.engine_flags import read_environment, read_flags
from pivot.engines.engine_models import read_config_types, read_drafters, read_hooks, read_models, read_reader
from pivot.engines.engine_source import DescriptionError, Source

FORMAT = 1
DATA = Path(__file__).parents[1] / "data"


def describe(wheel: Path) -> dict[str, Any]:
    """The description of the SGLang in a wheel. DescriptionError says what could not be read."""
    source = Source(wheel)
    try:
        return _describe(source)
    except RecursionError as error:
        raise DescriptionError(f"{wheel} has source that is nested deeper than any program") from error


def _describe(source: Source) -> dict[str, Any]:
    version = source.version
    return {
        "format": FORMAT,
        "engine": "sglang",
        "version": version,
        "flags": read_flags(source),
        "environment": read_environment(source),
        **read_models(source),
        "ids": read_reader(source),
        "drafters": read_drafters(source),
        "config_types": read_config_types(source),
        "hooks": read_hooks(source),
    }


def render(description: Mapping[str, Any]) -> str:
    """A description as it is kept: sorted, one line a top-level key."""
    lines = [
        f"{json.dumps(key)}:{json.dumps(description[key], sort_keys=True, separators=(',', ':'))}"
        for key in sorted(description)
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def load(version: str, folder: Path = DATA / "engines") -> dict[str, Any] | None:
    """The kept description of a version, None when there is none. DescriptionError when it is damaged.

    A patched SGLang (a version with a local label) is described by the published one.
    """
    version = version.partition("+")[0]
    if not re.fullmatch(r"[0-9A-Za-z.+-]+", version):
        return None
    path = folder / f"sglang-{version}.json"
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DescriptionError(f"{path.name} cannot be read: {error}; describe the wheel again") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise DescriptionError(f"{path.name} is no description of format {FORMAT}; describe the wheel again")
    return description


def versions_with(variable: str, folder: Path = DATA / "engines") -> list[str]:
    """The described versions of SGLang that read an environment variable, oldest first."""
    return [version for version, names in _variables(folder) if variable in names]


@functools.cache
def _variables(folder: Path) -> tuple[tuple[str, frozenset[str]], ...]:
    found = []
    for path in folder.glob("sglang-*.json"):
        version = path.stem.removeprefix("sglang-")
        description = load(version, folder) or {}
        found.append((version, frozenset((description.get("environment") or {}).get("variables") or ())))
    return tuple(sorted(found, key=lambda item: Version(item[0])))


def faults(version: str, facts: Iterable[str], path: Path = DATA / "engine_faults.yml") -> list[dict[str, str]]:
    """The known faults of a version that the facts of a deployment meet.

    facts: words of the data file's ``when`` lists. An entry without ``when`` holds for every deployment.
    """
    try:
        wanted = Version(version)
    except InvalidVersion:
        return []
    given = set(facts)
    return [
        entry
        for entry in _known_faults(path)
        if SpecifierSet(entry["versions"]).contains(wanted, prereleases=True) and set(entry.get("when", [])) <= given
    ]


@functools.cache
def _known_faults(path: Path) -> tuple[dict[str, Any], ...]:
    return tuple(yaml.safe_load(path.read_text(encoding="utf-8"))["faults"])


def main(arguments: Sequence[str] | None = None) -> int:
    """``pivot engine describe WHEEL [--out FILE]``."""
    parser = argparse.ArgumentParser(prog="pivot engine", description="What a pinned engine is.")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("describe", help="read an SGLang wheel, without importing or installing it")
    command.add_argument("wheel", type=Path)
    command.add_argument("--out", type=Path, help="file to write (default: standard output)")
    parsed = parser.parse_args(arguments)
    try:
        text = render(describe(parsed.wheel))
        if parsed.out is None:
            sys.stdout.write(text)
        else:
            parsed.out.write_text(text, encoding="utf-8")
    except (DescriptionError, OSError) as error:
        print(f"pivot engine: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
