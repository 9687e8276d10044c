"""A published SGLang with patches: whether they apply cleanly, and the wheel that they make. Runs on the controller.

`git apply` does the work, which takes a patch as it is or not at all: a hunk may have moved, but nothing is guessed
from lines that differ. The wheel comes out the same, byte for byte, on every machine.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import io
import os
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from pivot.engines import engine
from pivot.engines.engine import EngineError
from pivot.findings import Finding, Severity
from pivot.places import file_at

PACKAGE = "sglang"
# how diffs of SGLang's own repository, where the package lies in python/, name a file; they are taken as they are
_OF_REPOSITORY = re.compile(rf"^(?:diff --git|---|\+\+\+) [a-z]/python/{PACKAGE}/", re.MULTILINE)
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip file can hold
_FILE_MODE = 0o100644
# of git's own settings none may bend what a patch means, and no repository counts: neither one around the scratch
# directory nor that of a hook which runs this
_GIT = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C"}


@dataclasses.dataclass(frozen=True, slots=True)
class Patch:
    """A patch file of the controller, whose content is the pinned one: sha256 in hex."""

    path: Path
    sha256: str


def read(entries: Iterable[Mapping[str, Any]], root: Path) -> list[Patch]:
    """The patches of a list of {file, sha256}, in order; file is relative to root. EngineError names a wrong one."""
    found = []
    for entry in entries:
        path = root / str(entry["file"])
        if file_at(path) is None:
            raise EngineError(f"the patch {path} does not exist; correct its path in sglang_engine_patches")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != entry["sha256"]:
            raise EngineError(
                f"the patch {path} is not the pinned one; review the change, then write sha256: {digest} beside it"
            )
        found.append(Patch(path, digest))
    return found


def check(subject: str, entries: object, root: Path, lock: engine.Lock, cache: Path) -> list[Finding]:
    """What forbids to build the patched release, as far as this controller can tell: one finding at most.

    entries: the variable sglang_engine_patches; cache: of wheelhouses. Where no wheelhouse holds the locked wheel yet,
    whether the patches apply is found when it arrives, before anything is built.
    """
    if not isinstance(entries, Sequence) or not all(
        isinstance(item, Mapping) and item.keys() >= {"file", "sha256"} for item in entries
    ):
        return []  # a type that is found where types are looked at
    try:
        patches = read(entries, root)
        wheel = published(lock, cache)
        if wheel and patches:
            patched_files(wheel, patches)
    except EngineError as error:
        fix = "make the patch anew against this version's own files, or take it out of sglang_engine_patches"
        return [Finding("ENGINE-PATCH", Severity.ERROR, subject, str(error), fix)]
    return []


def published(lock: engine.Lock, cache: Path) -> Path | None:
    """The locked wheel of SGLang in a cache of wheelhouses, None when none holds it."""
    wanted = lock.wheels[PACKAGE]
    for path in sorted(cache.glob(f"*/wheels/{PACKAGE}-{wanted.version}-*.whl")):
        with path.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() in wanted.hashes:
                return path
    return None


def patched_files(wheel: Path, patches: Sequence[Patch]) -> dict[str, bytes | None]:
    """What the patches make of a wheel's files: path → content, None for a file that goes. Unchanged ones are left out.

    EngineError says which patch does not apply, and in git's words where.
    """
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(prefix="pivot-patch-") as scratch:
        texts = [patch.path.read_text(encoding="utf-8", errors="replace") for patch in patches]
        before = {name: archive.read(name) for name in archive.namelist() if any(name in text for text in texts)}
        before = {name: content for name, content in before.items() if not name.endswith("/")}
        for name, content in before.items():
            target = Path(scratch) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        for patch, text in zip(patches, texts, strict=True):
            _apply(patch, text, Path(scratch), wheel)
        found = sorted(path for path in Path(scratch).rglob("*") if not path.is_dir() or path.is_symlink())
        if links := [path.relative_to(scratch) for path in found if path.is_symlink()]:
            raise EngineError(f"a patch makes {links[0]} a symbolic link, which no wheel can hold")
        after = {path.relative_to(scratch).as_posix(): path.read_bytes() for path in found}
    changes: dict[str, bytes | None] = {name: text for name, text in after.items() if before.get(name) != text}
    changes |= {name: None for name in before if name not in after}
    if outside := sorted(name for name in changes if not name.startswith(f"{PACKAGE}/")):
        raise EngineError(f"a patch changes {outside[0]}, which is no file of the package {PACKAGE}")
    return changes


def _apply(patch: Patch, text: str, place: Path, wheel: Path) -> None:
    """One patch, all of it or EngineError."""
    strip = 2 if _OF_REPOSITORY.search(text) else 1
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment = {**inherited, **_GIT, "GIT_CEILING_DIRECTORIES": str(place.parent)}
    command = ["git", "apply", f"-p{strip}", "--", str(patch.path.resolve())]
    try:
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise EngineError("patches need git on this controller: apt-get install git") from None
    if done.returncode != 0:
        said = "; ".join(line.removeprefix("error: ") for line in done.stderr.splitlines() if line.strip())
        raise EngineError(f"the patch {patch.path.name} does not apply cleanly to {wheel.name}: {said}")


def build(wheel: Path, patches: Sequence[Patch], version: str, into: Path) -> Path:
    """The wheel of a patched release, named after its version, in a directory; the published one stays as it is.

    Its RECORD and METADATA, and what SGLang says about itself, are those of the patched version. Nothing is compressed:
    that is what would differ between machines.
    """
    changes = patched_files(wheel, patches)
    try:
        _, published_version, _, _ = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        raise EngineError(f"{wheel.name} is no wheel's name") from error
    old, new = f"{PACKAGE}-{published_version}", f"{PACKAGE}-{version}"
    result = into / wheel.name.replace(old, new, 1)
    with zipfile.ZipFile(wheel) as archive:
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
        modes = {entry.filename: entry.external_attr >> 16 or _FILE_MODE for entry in entries}
        files = {name: archive.read(name) for name in modes}
    files |= {name: content for name, content in changes.items() if content is not None}
    for name in [name for name, content in changes.items() if content is None]:
        del files[name]
    _rename(files, modes, f"{old}.dist-info/", f"{new}.dist-info/")
    _set_version(files, str(published_version), version, f"{new}.dist-info/METADATA")
    record = f"{new}.dist-info/RECORD"
    files.pop(record, None)
    files[record] = _record(files, record)
    temporary = result.with_name(f".{result.name}.new")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
        for name in [*sorted(files.keys() - {record}), record]:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = modes.get(name, _FILE_MODE) << 16
            archive.writestr(entry, files[name])
    temporary.replace(result)
    return result


def _rename(files: dict[str, bytes], modes: dict[str, int], old: str, new: str) -> None:
    """Move what lies in one directory of the wheel to another."""
    for name in [name for name in files if name.startswith(old)]:
        files[new + name.removeprefix(old)] = files.pop(name)
        modes[new + name.removeprefix(old)] = modes.pop(name)


def _set_version(files: dict[str, bytes], old: str, new: str, metadata: str) -> None:
    """Let the distribution and the package say the patched version; EngineError where that cannot be done."""
    said, count = re.subn(rb"(?m)^Version: .*$", f"Version: {new}".encode(), files[metadata], count=1)
    if not count:
        raise EngineError(f"{metadata} of the published wheel names no version")
    files[metadata] = said
    own = f"{PACKAGE}/_version.py"
    if own in files:
        files[own] = files[own].replace(f"'{old}'".encode(), f"'{new}'".encode())


def _record(files: Mapping[str, bytes], record: str) -> bytes:
    """RECORD as pip wants it: path, urlsafe base64 of the sha256 without padding, size; nothing for itself."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name in sorted(files):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        writer.writerow([name, f"sha256={digest}", len(files[name])])
    writer.writerow([record, "", ""])
    return text.getvalue().encode()
