"""Builds, on the controller, the directory of wheels from which a host installs the engine without an index.

``python -m pivot.wheelhouse build`` makes or completes ``CACHE/<digest>/``; ``… lock`` remakes a lock file. A
wheelhouse in use is always complete: it is made beside its place and renamed, and every wheel is verified.
"""

from __future__ import annotations

import argparse
import ast
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from pivot import engine, findings
from pivot.engine import EngineError

FORMAT = 1
FIND_LINKS = "PIVOT_FIND_LINKS"
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

Report = Callable[[str], None]


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


def build(
    lock_path: Path, cache: Path, sources: Sequence[Path] = (), gaps_file: Path | None = None, report: Report = print
) -> Wheelhouse:
    """The wheelhouse of a lock and local distributions, made if it is missing, incomplete or changed.

    Only one build of a wheelhouse runs at a time; others wait for it. EngineError: a wheel cannot be had, or the
    wheels ask for something that neither the lock nor the gaps file has.
    """
    begin = time.monotonic()
    lock = read_lock(lock_path)
    distributions = {read_distribution(path): path for path in sources}
    digest = engine.release_digest(lock.sha256, distributions)
    place = cache / digest
    cache.mkdir(parents=True, exist_ok=True)
    with _exclusive(cache / f".{digest}.lock", report):
        manifest = _manifest_if_intact(place)
        built = manifest is None
        if manifest is None:
            gaps = read_gaps(gaps_file or gaps_path(lock_path))
            manifest = _make(lock, gaps, distributions, place, report)
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


def _make(
    lock: engine.Lock,
    gaps: engine.Gaps,
    distributions: Mapping[engine.Distribution, Path],
    place: Path,
    report: Report,
) -> dict[str, Any]:
    """Make a wheelhouse beside its place, verify it, and rename it there; what a broken attempt left is used."""
    partial = place.with_name(f".{place.name}.partial")
    wheels = partial / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    _adopt(lock, wheels, place.parent)
    missing = _missing(lock, wheels, remove_others=True)
    report(f"wheelhouse {place.name}: {len(lock.wheels) - len(missing)} of {len(lock.wheels)} locked wheels are here")
    if missing:
        download(missing, lock.target, wheels, place.parent / f"{place.name}.log", report)
        left = _missing(lock, wheels, remove_others=True)
        if left:
            raise EngineError(f"pip left out {', '.join(wheel.name for wheel in left)}; see {place.name}.log")
    local: dict[str, engine.Distribution] = {}
    for distribution, source in distributions.items():
        local[build_wheel(source, wheels).name] = distribution
        report(f"wheelhouse {place.name}: built {distribution.name} {distribution.version}")
    problems = engine.metadata_gaps((read_metadata(path) for path in sorted(wheels.iterdir())), gaps, lock.target)
    if findings.errors(problems):
        raise EngineError("the locked wheels do not fit together:\n" + findings.render(problems))
    if problems:
        report(findings.render(problems))
    manifest = _describe(lock, local, wheels)
    requirements = [wheel.line() for wheel in lock.wheels.values()]
    requirements += [
        f"{item.name}=={item.version} --hash=sha256:{manifest['files'][name]['sha256']}" for name, item in local.items()
    ]
    (partial / "requirements.txt").write_text("\n".join(requirements) + "\n", encoding="utf-8")
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    if place.exists():
        shutil.rmtree(place)
    partial.rename(place)
    return manifest


def _describe(lock: engine.Lock, local: Mapping[str, engine.Distribution], wheels: Path) -> dict[str, Any]:
    """The manifest: what the wheelhouse was made from, and each wheel's hash, size and time."""
    files: dict[str, Any] = {}
    for path in sorted(wheels.iterdir()):
        status = path.stat()
        files[path.name] = {"sha256": sha256(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}
        if path.name in local:
            files[path.name]["source_tree"] = local[path.name].tree
    return {"format": FORMAT, "lock_sha256": lock.sha256, "files": files}


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
            raise EngineError(f"the wheel of {source} cannot be built: {_last_line(result.stderr)}")
        (wheel,) = out.glob("*.whl")
        target = into / wheel.name
        shutil.move(wheel, target)
        return target


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def download(
    wanted: Iterable[engine.LockedWheel], target: engine.Target, into: Path, log: Path, report: Report
) -> None:
    """Download wheels for another interpreter; those of local builds (`+cpu`) first, as they are missing most often."""
    ordered = sorted(wanted, key=lambda wheel: "+" not in wheel.version)
    local = [wheel for wheel in ordered if "+" in wheel.version]
    log.write_text("", encoding="utf-8")
    for group in (local, ordered[len(local) :]):
        if group:
            _pip_download(group, target, into, log, report)


def _pip_download(
    wheels: Sequence[engine.LockedWheel], target: engine.Target, into: Path, log: Path, report: Report
) -> None:
    """One run of pip; its output goes to the log, its progress to report every few seconds."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--progress-bar", "off"]
    command += ["--no-deps", "--require-hashes", "--only-binary=:all:", "--dest", str(into)]
    command += ["--implementation", "cp", "--python-version", target.python, "--abi", target.abi]
    for platform in target.platforms():
        command += ["--platform", platform]
    for place in extra_find_links():
        command += ["--find-links", place]
    begin = last = time.monotonic()
    with tempfile.NamedTemporaryFile("w", prefix="pivot-lock-", suffix=".txt", encoding="utf-8") as requirements:
        requirements.write("".join(wheel.line() + "\n" for wheel in wheels))
        requirements.flush()
        lines: list[str] = []
        with (
            log.open("a", encoding="utf-8") as output,
            subprocess.Popen(
                [*command, "--requirement", requirements.name],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ) as process,
        ):
            started = 0
            for line in process.stdout or ():
                output.write(line)
                lines.append(line)
                started += line.startswith("Collecting ")
                if time.monotonic() - last > 5:
                    last = time.monotonic()
                    report(f"  wheel {started} of {len(wheels)}, {last - begin:.0f} s (log: {log})")
    if process.returncode != 0:
        raise EngineError(_explain("".join(lines), wheels, target, log))


def _explain(output: str, wheels: Sequence[engine.LockedWheel], target: engine.Target, log: Path) -> str:
    """One sentence for what pip said."""
    match = re.search(r"No matching distribution found for ([A-Za-z0-9._-]+)", output)
    if match:
        name = engine.canonical(match[1])
        version = next((wheel.version for wheel in wheels if wheel.name == name), "?")
        return (
            f"no wheel of {name} {version} for Python {target.python} was found in {_sources()};"
            f" set {FIND_LINKS} to a directory or page that holds it and run again (pip's output: {log})"
        )
    if "DO NOT MATCH THE HASHES" in output:
        match = re.search(r"^\s+([A-Za-z0-9._-]+)==\S+ from (\S+)", output, re.MULTILINE)
        which = f"{match[1]} from {_without_password(match[2])}" if match else "a wheel"
        return f"{which} is not the locked file, its sha256 differs: the source changed, or the lock is stale ({log})"
    return f"pip could not download the wheels: {_without_password(_last_line(output))} (its output: {log})"


def extra_find_links() -> list[str]:
    """Directories and pages with wheels from PIVOT_FIND_LINKS, separated by spaces."""
    return os.environ.get(FIND_LINKS, "").split()


def pip_setting(name: str) -> list[str]:
    """The values of a pip option from its configuration files and environment, e.g. find-links; may be empty."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    found: list[str] = []
    for line in result.stdout.splitlines():
        key, separator, value = line.partition("=")
        if separator and key.rpartition(".")[2] == name and key.split(".")[0] in {":env:", "global", "download"}:
            found += str(ast.literal_eval(value)).split()
    return list(dict.fromkeys(found))


def _sources() -> str:
    """Where pip looked, for an error message."""
    places = [*extra_find_links(), *pip_setting("find-links"), *pip_setting("extra-index-url")]
    known = ", ".join(_without_password(place) for place in dict.fromkeys(places))
    return "the package index" + (f" and {known}" if known else " (no find-links are configured)")


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]+@", "//***@", text)


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
        download(missing, target, wheels, cache / f"lock-{destination.stem}.log", report)
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
        for place in dict.fromkeys([*extra_find_links(), *pip_setting("find-links")]):
            command += ["--find-links", place]
        for url in pip_setting("index-url")[:1]:
            command += ["--index-url", url]
        bound = {name: value for name, value in os.environ.items() if name[:3] != "UV_" or name in _UV_NETWORK}
        result = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False, env=bound)
        if result.returncode != 0:
            raise EngineError(
                f"uv found no solution for {source} (looked in {_sources()}; set {FIND_LINKS} for more):\n"
                + _without_password(result.stderr.strip())
            )
        head = f"# target: python {target.python}, {target.machine}, glibc {major}.{minor}\n"
        return head + out.read_text(encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; errors are one sentence on standard error and exit status 1."""
    parser = argparse.ArgumentParser(prog="python -m pivot.wheelhouse", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    builder = verbs.add_parser("build", help="make or complete the wheelhouse of a lock")
    builder.add_argument("--lock", type=Path, required=True, help="the lock file")
    builder.add_argument("--gaps", type=Path, help="its gaps file (beside the lock: NAME.gaps.yml)")
    builder.add_argument("--out", type=Path, default=DEFAULT_CACHE, help=f"where wheelhouses lie ({DEFAULT_CACHE})")
    builder.add_argument("--distribution", type=Path, action="append", default=[], help="a local distribution to add")
    locker = verbs.add_parser("lock", help="remake lock files from their .in files")
    locker.add_argument("source", type=Path, nargs="+", help="NAME.in; writes NAME.lock beside it")
    locker.add_argument("--out", type=Path, default=DEFAULT_CACHE, help=f"where wheels are kept ({DEFAULT_CACHE})")
    locker.add_argument("--upgrade", action="store_true", help="newest versions that fit, instead of the locked ones")
    options = parser.parse_args(arguments)

    def report(text: str) -> None:
        print(text, flush=True)

    try:
        if options.verb == "build":
            house = build(options.lock, options.out, options.distribution, options.gaps, report)
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
