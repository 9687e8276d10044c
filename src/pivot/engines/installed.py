"""What lies beside an interpreter: files against their RECORD, and what makes Python take code from elsewhere.

Read-only, nothing is imported. Standard library only, Python 3.9: sent to hosts with the programs that use it
(`pivot.program`).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import stat
import urllib.parse
from pathlib import Path

SMALL = 1 << 16  # bytes of a small file that are read
# modules that Python imports at every start when they are there, as a file of any kind or a directory
CUSTOM = ("sitecustomize", "usercustomize")


def rows(info: Path) -> list[list[str]]:
    """The rows of a RECORD: path relative to site-packages, hash as it stands there (algorithm=digest), size in bytes.

    Hash and size may be empty. OSError or ValueError when there is no RECORD that can be read.
    """
    try:
        with (info / "RECORD").open(encoding="utf-8", newline="") as stream:
            return [row for row in csv.reader(stream) if len(row) == 3]
    except csv.Error as error:
        raise ValueError(f"its RECORD is torn: {error}") from error


def record(info: Path) -> list[list[str]]:
    """The rows of a RECORD, as `rows`, without scripts outside of site-packages, which an installer rewrites."""
    return [row for row in rows(info) if not row[0].startswith(("..", "/"))]


def opened(path: Path) -> int:
    """A descriptor of a regular file; OSError for anything else. No pipe or device is waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(f"{path} is no regular file")


def digest(path: Path, algorithm: str = "sha256") -> str:
    """The hash of a file as RECORDs write it; ValueError for an algorithm that nobody has."""
    found = hashlib.new(algorithm)
    with os.fdopen(opened(path), "rb") as stream:
        while block := stream.read(1 << 20):
            found.update(block)
    return base64.urlsafe_b64encode(found.digest()).rstrip(b"=").decode()


def altered(site: Path, info: Path, package: str = "", *, content: bool = True) -> list[list[str]]:
    """Files of a distribution that are not as its RECORD says, as [path, missing, changed or added].

    info: its .dist-info directory. package: the directory of site-packages in which nothing else may lie, e.g. sglang.
    content: whether files are read, or their sizes alone are compared.
    """
    listed = record(info)
    found = []
    for path, told, size in listed:
        if not told or path.endswith(".pyc"):
            continue  # bytecode, and RECORD itself
        place = site / path
        algorithm, _, wanted = told.partition("=")
        try:
            same = not size or place.stat().st_size == int(size)
            same = same and (not content or digest(place, algorithm) == wanted)
        except OSError:
            found.append([path, "missing"])
            continue
        if not same:
            found.append([path, "changed"])
    if package:
        hashed = {path: bool(told) or path.endswith(".pyc") for path, told, _ in listed}
        lying = [path for path in files(site, package) if not hashed.get(path)]
        found += [[path, "without a hash" if path in hashed else "added"] for path in lying]
    return sorted(found)


def files(site: Path, package: str) -> list[str]:
    """What lies below a package and is no directory of its own, relative to site-packages, without caches of bytecode.

    A linked directory is one entry: what lies in it is not of this site-packages. Bytecode without a source is a module
    like any other.
    """
    found = []
    for parent, folders, names in os.walk(site / package):
        folders[:] = [name for name in folders if name != "__pycache__"]
        here = Path(parent).relative_to(site)
        found += [str(here / name) for name in names]
        found += [str(here / name) for name in folders if (site / here / name).is_symlink()]
    return found


def elsewhere(site: Path) -> list[list[str]]:
    """What makes Python take code from outside of a site-packages, as [what, why]: editable installations, lines of
    .pth files that no distribution brought, modules that are imported at every start."""
    found = []
    owned: set[str] = set()
    for info in sorted(site.glob("*.dist-info")):
        place = editable(info)
        if place:
            found.append([place, "editable installation of " + info.name.partition("-")[0]])
        try:
            owned.update(path.partition("/")[0] for path, told, _ in record(info) if told)
        except (OSError, ValueError):
            continue  # that the distribution is damaged is found where its files are looked at
    for path in sorted(site.glob("*")):
        if path.suffix == ".egg-link":
            found += [[line, path.name] for line in lines(path)[:1]]
        elif path.name in owned:
            continue
        elif path.suffix == ".pth":
            found += [[line[:200], path.name] for line in lines(path)]
        elif path.name.partition(".")[0] in CUSTOM:
            found.append([path.name, "imported at every start"])
        elif path.name.startswith("__editable__") and path.suffix == ".py":
            found.append([path.name, "finder of an editable installation"])
    return found


def editable(info: Path) -> str:
    """Where the code of an editable installation lies; empty for an ordinary one."""
    try:
        with os.fdopen(opened(info / "direct_url.json"), "rb") as stream:
            told = json.loads(stream.read(SMALL))
    except (OSError, ValueError, RecursionError):
        return ""
    kind, url = (told.get("dir_info"), str(told.get("url"))) if isinstance(told, dict) else (None, "")
    if not isinstance(kind, dict) or not kind.get("editable") or not url.startswith("file://"):
        return ""
    return urllib.parse.unquote(url[len("file://") :])


def lines(path: Path) -> list[str]:
    """The lines of a small file that say something; none of a file that cannot be read."""
    try:
        with os.fdopen(opened(path), "rb") as stream:
            text = stream.read(SMALL).decode("utf-8", "replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
