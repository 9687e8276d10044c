"""A lock from the package index's metadata alone, for an engine whose wheels are too large to download for a lock.

``python -m pivot.engines.index_lock requirements/engine/cuda-py312.in`` writes the ``.lock`` beside it: the full
resolution, with no gaps, and for every package the one wheel that pip takes on the target. Nothing is downloaded but
metadata, and nothing is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from pivot.engines import downloads, engine
from pivot.engines.engine import EngineError

# where the index is and how it is reached; any other UV_ variable could bend the resolution
_NETWORK = {"UV_CACHE_DIR", "UV_DEFAULT_INDEX", "UV_HTTP_TIMEOUT", "UV_INDEX_URL", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS"}


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """One wheel that the index offers: sha256 in hex, size in bytes (0 when the index does not say)."""

    filename: str
    sha256: str
    size: int


def tags(target: engine.Target) -> list[Tag]:
    """The wheel tags that fit a target, best first, in pip's order."""
    major, minor = (int(part) for part in target.python.split("."))
    platforms = target.platforms()
    specific = cpython_tags((major, minor), abis=[target.abi], platforms=platforms)
    return [*specific, *compatible_tags((major, minor), interpreter=target.abi, platforms=platforms)]


def best(offers: Iterable[Offer], order: Mapping[Tag, int]) -> Offer | None:
    """The offer that pip would install: the best tag, then the highest build number. None when none fits.

    order: rank by tag, 0 the best.
    """
    ranked: list[tuple[int, tuple[int, str] | tuple[()], Offer]] = []
    for offer in offers:
        try:
            _, _, build, supported = parse_wheel_filename(offer.filename)
        except InvalidWheelFilename:
            continue  # pip does not see such a file either
        ranks = [order[tag] for tag in supported if tag in order]
        if ranks:
            ranked.append((-min(ranks), build, offer))
    return max(ranked, key=lambda item: item[:2])[2] if ranked else None


def parse_pylock(text: str, source: str) -> dict[tuple[str, str], list[Offer]]:
    """The wheels that a pylock.toml (PEP 751) lists, by canonical name and version."""
    try:
        packages = tomllib.loads(text)["packages"]
        return {(engine.canonical(item["name"]), item["version"]): _offers(item) for item in packages}
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise EngineError(f"{source} is not the pylock.toml that uv writes: {error}") from error


def _offers(package: Mapping[str, Any]) -> list[Offer]:
    return [
        Offer(
            wheel.get("name") or unquote(urlsplit(wheel.get("url") or wheel["path"]).path.rpartition("/")[2]),
            wheel["hashes"]["sha256"],
            int(wheel.get("size", 0)),
        )
        for wheel in package.get("wheels", ())
    ]


def select(packages: Mapping[tuple[str, str], Sequence[Offer]], target: engine.Target) -> dict[str, Offer]:
    """The wheel of each package for a target, by ``name==version``; EngineError names every package without one."""
    order = {tag: rank for rank, tag in enumerate(tags(target))}
    chosen = {f"{name}=={version}": best(offers, order) for (name, version), offers in sorted(packages.items())}
    without = [name for name, offer in chosen.items() if offer is None]
    if without:
        glibc = ".".join(map(str, target.glibc))
        raise EngineError(
            f"no wheel for Python {target.python}, {target.machine}, glibc {glibc} of {', '.join(without)}: "
            "pin another version in the .in file"
        )
    return {name: offer for name, offer in chosen.items() if offer is not None}


def render(target: engine.Target, chosen: Mapping[str, Offer], made_from: str, day: str) -> str:
    """The lock's text. day: of the resolution, as it will stand in the head."""
    size = sum(offer.size for offer in chosen.values()) / 1e9
    head = [
        f"# target: python {target.python}, {target.machine}, glibc {'.'.join(map(str, target.glibc))}",
        f"# Made by `make lock` from {made_from} out of the index's metadata; do not edit.",
        f"# Resolved {day}: {len(chosen)} wheels, {size:.1f} GB. Never downloaded or installed by this project:",
        "# untested without a GPU.",
    ]
    pinned = sorted(chosen, key=lambda name: name.split("=="))
    lines = [f"{name} --hash=sha256:{chosen[name].sha256}" for name in pinned]
    return "\n".join([*head, *lines]) + "\n"


def lock(source: Path, day: str, *, upgrade: bool = False) -> tuple[Path, bool]:
    """Write the lock beside a .in file: its path, and whether it changed.

    Locked versions stay unless upgrade is set; an unchanged resolution keeps its day.
    """
    target = engine.parse_target(source.read_text(encoding="utf-8"), str(source))
    destination = source.with_suffix(".lock")
    before = destination.read_text(encoding="utf-8") if destination.exists() else ""
    with tempfile.TemporaryDirectory(prefix="pivot-lock-") as scratch:
        flat, pylock = Path(scratch) / "flat.txt", Path(scratch) / "pylock.toml"
        if before and not upgrade:
            flat.write_text(before, encoding="utf-8")  # uv keeps the versions that it finds in its output file
        _uv(target, source, "--no-annotate", "--no-header", "--output-file", str(flat))
        _uv(target, flat, "--no-deps", "--format", "pylock.toml", "--output-file", str(pylock))
        packages = parse_pylock(pylock.read_text(encoding="utf-8"), "uv's result")
    text = render(target, select(packages, target), source.name, day)
    if _wheels(text) == _wheels(before):
        return destination, False
    engine.parse_lock(text, str(destination))
    scratch_file = destination.with_name(destination.name + ".new")
    scratch_file.write_text(text, encoding="utf-8")
    scratch_file.replace(destination)
    return destination, True


def _wheels(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def _uv(target: engine.Target, source: Path, *more: str) -> None:
    """One run of ``uv pip compile`` for the target, bound by nothing but its arguments and the index."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is None:
        raise EngineError("uv is not installed: `make lock` needs the development requirements (run `make setup`)")
    platform = "{}-manylinux_{}_{}".format(target.machine, *target.glibc)
    command = [uv, "pip", "compile", "--quiet", "--no-config", "--only-binary", ":all:"]
    command += ["--python-version", target.python, "--python-platform", platform]
    for url in downloads.pip_setting("index-url")[:1]:
        command += ["--index-url", url]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UV_") or name in _NETWORK}
    result = subprocess.run(
        [*command, *more, str(source)], capture_output=True, text=True, check=False, env=environment
    )
    if result.returncode != 0:
        raise EngineError(f"uv found no solution for {source}:\n{result.stderr.strip()}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; errors are one sentence on standard error and exit status 1."""
    parser = argparse.ArgumentParser(prog="python -m pivot.engines.index_lock", description=__doc__)
    parser.add_argument("source", type=Path, nargs="+", help="NAME.in; writes NAME.lock beside it")
    parser.add_argument("--upgrade", action="store_true", help="newest versions that fit, instead of the locked ones")
    options = parser.parse_args(arguments)
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        for source in options.source:
            path, changed = lock(source, day, upgrade=options.upgrade)
            print(f"{path}: {'written' if changed else 'unchanged'}", flush=True)
    except (EngineError, OSError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
