"""Builds, on the controller, the directory of wheels from which a host installs the engine without an index.

``python -m pivot.engines.wheelhouse build`` makes or completes ``CACHE/<digest>/``; ``… lock`` remakes a lock file. A
wheelhouse in use is always complete: it is made beside its place and renamed, and every wheel is verified.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import email.parser
import fcntl
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from pivot import findings
from pivot.engines import downloads, engine, patches
from pivot.engines.downloads import Report
from pivot.engines.engine import EngineError

FORMAT = 1
DEFAULT_CACHE = Path(".cache/wheelhouse")
_NOT_SHIPPED = ("__pycache__", "build", "dist", "tests")
_EPOCH = "315532800"  # 1980-01-01, the earliest time a zip file can hold: wheels come out the same every time

# where uv's index is and how it is reached; any other UV_ variable could bend a resolution
_UV_NETWORK = {
    "UV_CACHE_DIR",
    "UV_DEFAULT_INDEX",
    "UV_HTTP_TIMEOUT",
    "UV_INDEX_URL",
    "UV_NATIVE_TLS",
    "UV_SYSTEM_CERTS",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Wheelhouse:
    """A finished wheelhouse: size in bytes, wheels counted, built whether this call made it."""

    path: Path
    digest: str
    wheels: int
    size: int
    built: bool


def read_lock(path: Path) -> engine.Lock:
    """The lock at a path; EngineError names what is wrong with it."""
    return engine.parse_lock(_read(path, "lock file"), str(path))


def read_gaps(path: Path) -> engine.Gaps:
    """The gaps file at a path; a lock without one has no gaps."""
    if not path.exists():
        return engine.Gaps(str(path), {}, {})
    try:
        data = yaml.safe_load(_read(path, "gaps file")) or {}
    except yaml.YAMLError as error:
        raise EngineError(f"{path} is no valid YAML: {error}") from error
    return engine.parse_gaps(data, str(path))


def read_distribution(directory: Path) -> engine.Distribution:
    """Name, version and tree hash of a local source distribution; its version must stand in pyproject.toml."""
    source = directory / "pyproject.toml"
    try:
        project = tomllib.loads(_read(source, "local distribution"))["project"]
        name, version = str(project["name"]), str(project["version"])
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise EngineError(f"{source} must give project.name and project.version: {error}") from error
    tree = engine.tree_sha256({path: sha256(directory / path) for path in source_files(directory)})
    return engine.Distribution(name, version, tree)


def source_files(directory: Path) -> list[str]:
    """What a local distribution is built from: not hidden files, what building leaves behind, tests and check_*.py.

    A changed check must not make a new release of the engine.
    """
    found: list[str] = []
    for parent, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not _ignored(name)]
        found += [
            (Path(parent) / name).relative_to(directory).as_posix()
            for name in names
            if not name.startswith(".") and not fnmatch.fnmatch(name, "check_*.py")
        ]
    return sorted(found)


def _ignored(folder: str) -> bool:
    return folder in _NOT_SHIPPED or folder.startswith(".") or folder.endswith(".egg-info")


def gaps_path(lock: Path) -> Path:
    """Where a lock's gaps file lies: cpu-py311.lock has cpu-py311.gaps.yml."""
    return lock.with_suffix(".gaps.yml")


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise EngineError(f"the {what} {path} cannot be read: {reason}") from error


def sha256(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class _Order:
    """What a wheelhouse is made of; distributions with the directory of each."""

    lock: engine.Lock
    gaps: engine.Gaps
    distributions: Mapping[engine.Distribution, Path]
    patches: Sequence[patches.Patch]

    @property
    def digest(self) -> str:
        """Of the release that it is for."""
        return engine.release_digest(self.lock.sha256, self.distributions, [patch.sha256 for patch in self.patches])


def build(
    lock_path: Path,
    cache: Path,
    sources: Sequence[Path] = (),
    gaps_file: Path | None = None,
    report: Report = print,
    applied: Sequence[patches.Patch] = (),
) -> Wheelhouse:
    """The wheelhouse of a lock, local distributions and patches, made if it is missing, incomplete or changed.

    Only one build of a wheelhouse runs at a time; others wait for it. EngineError: a wheel cannot be had, a patch does
    not apply, or the wheels ask for something that neither the lock nor the gaps file has.
    """
    begin = time.monotonic()
    gaps = read_gaps(gaps_file or gaps_path(lock_path))
    order = _Order(read_lock(lock_path), gaps, {read_distribution(path): path for path in sources}, applied)
    digest = order.digest
    place = cache / digest
    cache.mkdir(parents=True, exist_ok=True)
    with _exclusive(cache / f".{digest}.lock", report):
        manifest = _manifest_if_intact(place)
        built = manifest is None
        if manifest is None:
            manifest = _make(order, place, report)
    files = manifest["files"]
    size = sum(entry["size"] for entry in files.values())
    took = f" in {time.monotonic() - begin:.0f} s" if built else ""
    report(f"wheelhouse {digest}: {len(files)} wheels, {size / 1e6:.0f} MB, {'built' if built else 'ready'}{took}")
    return Wheelhouse(place, digest, len(files), size, built)


@contextlib.contextmanager
def _exclusive(path: Path, report: Report) -> Iterator[None]:
    """Hold an advisory lock; says so when another build has it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another build of this wheelhouse is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _manifest_if_intact(place: Path) -> dict[str, Any] | None:
    """The manifest of a finished wheelhouse whose files still have their recorded sizes and times, else None.

    Hashes were verified when it was made; reading 500 MB again on every deploy would buy nothing.
    """
    try:
        manifest: dict[str, Any] = json.loads((place / "manifest.json").read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT or not (place / "requirements.txt").is_file():
            return None
        for name, entry in manifest["files"].items():
            status = (place / "wheels" / name).stat()
            if (status.st_size, status.st_mtime_ns) != (entry["size"], entry["mtime_ns"]):
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # unreadable is the same as absent: it is made anew, from the wheels that verify
    return manifest


def _make(order: _Order, place: Path, report: Report) -> dict[str, Any]:
    """Make a wheelhouse beside its place, verify it, and rename it there; what a broken attempt left is used."""
    partial = place.with_name(f".{place.name}.partial")
    wheels = partial / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    _fetch(order, wheels, place, report)
    made = {}  # wheels of this project's own making, by file name: their line of requirements.txt, where they are from
    for distribution, source in order.distributions.items():
        made[build_wheel(source, wheels).name] = (f"{distribution.name}=={distribution.version}", distribution.tree)
        report(f"wheelhouse {place.name}: built {distribution.name} {distribution.version}")
    if order.patches:
        wheel, line = _patched(order, wheels, place.parent)
        made[wheel.name] = (line, ", ".join(patch.sha256 for patch in order.patches))
        report(f"wheelhouse {place.name}: built {line}")
    metadata = [read_metadata(path) for path in sorted(wheels.iterdir())]
    problems = engine.metadata_gaps(metadata, order.gaps, order.lock.target)
    if findings.errors(problems):
        raise EngineError("the locked wheels do not fit together:\n" + findings.render(problems))
    if problems:
        report(findings.render(problems))
    files = _describe(wheels)
    for name, (_, source_tree) in made.items():
        files[name]["source"] = source_tree
    published = [
        wheel.line() for wheel in order.lock.wheels.values() if not (order.patches and wheel.name == patches.PACKAGE)
    ]
    own = [f"{line} --hash=sha256:{files[name]['sha256']}" for name, (line, _) in made.items()]
    (partial / "requirements.txt").write_text("\n".join([*published, *own]) + "\n", encoding="utf-8")
    manifest = {"format": FORMAT, "lock_sha256": order.lock.sha256, "files": files}
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    if place.exists():
        shutil.rmtree(place)
    partial.rename(place)
    return manifest


def _fetch(order: _Order, wheels: Path, place: Path, report: Report) -> None:
    """Bring every locked wheel. Where there are patches SGLang's comes first, and they have to apply to it."""
    lock, log = order.lock, place.parent / f"{place.name}.log"
    _adopt(lock, wheels, place.parent)
    missing = _missing(lock, wheels, remove_others=True)
    report(f"wheelhouse {place.name}: {len(lock.wheels) - len(missing)} of {len(lock.wheels)} locked wheels are here")
    if order.patches:
        first = [wheel for wheel in missing if wheel.name == patches.PACKAGE]
        if first:
            downloads.download(first, lock.target, wheels, log, report)
        patches.patched_files(_engine_wheel(wheels), order.patches)
        missing = [wheel for wheel in missing if wheel not in first]
    if missing:
        downloads.download(missing, lock.target, wheels, log, report)
        left = _missing(lock, wheels, remove_others=True)
        if left:
            raise EngineError(f"pip left out {', '.join(wheel.name for wheel in left)}; see {place.name}.log")


def _engine_wheel(wheels: Path) -> Path:
    return next(path for path in sorted(wheels.iterdir()) if _parse(path)[0] == patches.PACKAGE)


def _patched(order: _Order, wheels: Path, cache: Path) -> tuple[Path, str]:
    """The wheel of the patched SGLang and its name==version. The published one leaves the wheelhouse, not the cache."""
    version = engine.patched_version(
        order.lock.wheels[patches.PACKAGE].version, [item.sha256 for item in order.patches]
    )
    original = _engine_wheel(wheels)
    wheel = patches.build(original, order.patches, version, wheels)
    kept = cache / "published" / "wheels" / original.name
    kept.parent.mkdir(parents=True, exist_ok=True)
    original.replace(kept)
    return wheel, f"{patches.PACKAGE}=={version}"


def _describe(wheels: Path) -> dict[str, Any]:
    """Hash, size and time of each wheel, by file name."""
    files: dict[str, Any] = {}
    for path in sorted(wheels.iterdir()):
        status = path.stat()
        files[path.name] = {"sha256": sha256(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    return files


def _adopt(lock: engine.Lock, wheels: Path, cache: Path) -> None:
    """Link wheels that other wheelhouses of the cache already have; the caller verifies them."""
    for candidate in sorted(cache.glob("*/wheels/*.whl")):
        name, version = _parse(candidate)
        locked = lock.wheels.get(name)
        target = wheels / candidate.name
        if locked is not None and locked.version == version and not target.exists():
            try:
                target.hardlink_to(candidate)
            except OSError:  # a file system without links, or another one
                shutil.copy2(candidate, target)


def _missing(lock: engine.Lock, wheels: Path, *, remove_others: bool) -> list[engine.LockedWheel]:
    """The locked wheels that are not there with a locked hash; whatever else lies there is removed on request."""
    missing = dict(lock.wheels)
    for path in sorted(wheels.iterdir()):
        name, _ = _parse(path)
        if name in missing and sha256(path) in missing[name].hashes:
            del missing[name]
        elif remove_others:
            path.unlink()
    return list(missing.values())


def _parse(path: Path) -> tuple[str, str]:
    """(canonical name, version) from a wheel's file name; empty for other files."""
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename:
        return "", ""
    return str(name), str(version)


def read_metadata(wheel: Path) -> engine.Metadata:
    """What a wheel says about itself; EngineError for a file that is no wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(item for item in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", item))
            message = email.parser.BytesHeaderParser().parsebytes(archive.read(name))
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        raise EngineError(f"{wheel} cannot be read as a wheel; delete it and try again") from error
    return engine.Metadata(message["Name"], message["Version"], tuple(message.get_all("Requires-Dist") or ()))


def build_wheel(source: Path, into: Path) -> Path:
    """Build a local distribution from a clean copy, so that the result depends on its files alone."""
    with tempfile.TemporaryDirectory(prefix="pivot-wheel-") as scratch:
        copy, out = Path(scratch) / "source", Path(scratch) / "out"
        for relative in source_files(source):
            target = copy / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((source / relative).read_bytes())
            target.chmod(0o644)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
        command += ["--no-index", "--no-build-isolation", "--wheel-dir", str(out), str(copy)]
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "SOURCE_DATE_EPOCH": _EPOCH}
        )
        if result.returncode != 0:
            raise EngineError(f"the wheel of {source} cannot be built: {downloads.last_line(result.stderr)}")
        (wheel,) = out.glob("*.whl")
        target = into / wheel.name
        shutil.move(wheel, target)
        return target


def lock(source: Path, cache: Path, *, upgrade: bool = False, report: Report = print) -> Path:
    """Remake the lock beside a .in file: resolve without the gaps, download, keep each wheel's own hash.

    Locked versions stay unless upgrade is set. EngineError: no solution, a wheel that is not to be had, or a gaps
    file that does not describe the result exactly.
    """
    target = engine.parse_target(_read(source, "requirements file"), str(source))
    destination = source.with_suffix(".lock")
    gaps = read_gaps(gaps_path(destination))
    cache.mkdir(parents=True, exist_ok=True)
    resolved = engine.parse_lock(_resolve(source, destination, gaps, target, upgrade=upgrade), f"uv's lock of {source}")
    wheels = cache / f".lock-{destination.stem}" / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    _adopt(resolved, wheels, cache)
    missing = _missing(resolved, wheels, remove_others=True)
    report(f"{destination}: {len(resolved.wheels)} packages, {len(missing)} wheels to download")
    if missing:
        downloads.download(missing, target, wheels, cache / f"lock-{destination.stem}.log", report)
    problems = engine.metadata_gaps((read_metadata(path) for path in sorted(wheels.iterdir())), gaps, target)
    if problems:
        raise EngineError(f"{gaps.source} does not describe the wheels:\n{findings.render(problems)}")
    locked = [engine.LockedWheel(*_parse(path), (sha256(path),)) for path in sorted(wheels.iterdir())]
    text = engine.render_lock(target, locked, source.name)
    changed = not destination.exists() or destination.read_text(encoding="utf-8") != text
    if changed:
        scratch = destination.with_name(destination.name + ".new")
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(destination)
    report(f"{destination}: {len(locked)} wheels, {'written' if changed else 'unchanged'}")
    return destination


def _resolve(source: Path, destination: Path, gaps: engine.Gaps, target: engine.Target, *, upgrade: bool) -> str:
    """What uv makes of a .in file, with hashes of every platform's wheels."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is None:
        raise EngineError("uv is not installed: `make lock` needs the development requirements (run `make setup`)")
    with tempfile.TemporaryDirectory(prefix="pivot-lock-") as scratch:
        out, excludes, overrides = (Path(scratch) / name for name in ("out.txt", "excludes.txt", "overrides.txt"))
        if destination.exists() and not upgrade:
            shutil.copy(destination, out)  # uv keeps the versions that it finds there
        excludes.write_text("".join(f"{name}\n" for name in gaps.absent), encoding="utf-8")
        overrides.write_text("".join(f"{k}=={v[0]}\n" for k, v in gaps.replaced.items()), encoding="utf-8")
        major, minor = target.glibc
        command = [uv, "pip", "compile", "--quiet", "--no-config", "--generate-hashes", "--no-annotate", "--no-header"]
        command += ["--only-binary", ":all:", "--python-version", target.python]
        command += ["--python-platform", f"{target.machine}-manylinux_{major}_{minor}"]
        command += ["--excludes", str(excludes), "--overrides", str(overrides), "--output-file", str(out)]
        for place in dict.fromkeys([*downloads.extra_find_links(), *downloads.pip_setting("find-links")]):
            command += ["--find-links", place]
        for url in downloads.pip_setting("index-url")[:1]:
            command += ["--index-url", url]
        bound = {name: value for name, value in os.environ.items() if name[:3] != "UV_" or name in _UV_NETWORK}
        result = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False, env=bound)
        if result.returncode != 0:
            raise EngineError(
                f"uv found no solution for {source} (looked in {downloads.sources()}; set {downloads.FIND_LINKS} for"
                f" more):\n{downloads.without_password(result.stderr.strip())}"
            )
        head = f"# target: python {target.python}, {target.machine}, glibc {major}.{minor}\n"
        return head + out.read_text(encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; errors are one sentence on standard error and exit status 1."""
    parser = argparse.ArgumentParser(prog="python -m pivot.engines.wheelhouse", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    builder = verbs.add_parser("build", help="make or complete the wheelhouse of a lock")
    builder.add_argument("--lock", type=Path, required=True, help="the lock file")
    builder.add_argument("--gaps", type=Path, help="its gaps file (beside the lock: NAME.gaps.yml)")
    builder.add_argument("--out", type=Path, default=DEFAULT_CACHE, help=f"where wheelhouses lie ({DEFAULT_CACHE})")
    builder.add_argument("--distribution", type=Path, action="append", default=[], help="a local distribution to add")
    builder.add_argument("--patches", default="[]", metavar="JSON", help="of SGLang, in order: [{file, sha256}]")
    locker = verbs.add_parser("lock", help="remake lock files from their .in files")
    locker.add_argument("source", type=Path, nargs="+", help="NAME.in; writes NAME.lock beside it")
    locker.add_argument("--out", type=Path, default=DEFAULT_CACHE, help=f"where wheels are kept ({DEFAULT_CACHE})")
    locker.add_argument("--upgrade", action="store_true", help="newest versions that fit, instead of the locked ones")
    options = parser.parse_args(arguments)

    def report(text: str) -> None:
        print(text, flush=True)

    try:
        if options.verb == "build":
            applied = patches.read(json.loads(options.patches), Path())
            house = build(options.lock, options.out, options.distribution, options.gaps, report, applied)
            print(json.dumps({**dataclasses.asdict(house), "path": str(house.path.resolve())}))
        else:
            for source in options.source:
                lock(source, options.out, upgrade=options.upgrade, report=report)
    except EngineError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
