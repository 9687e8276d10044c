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
# modules that Python imports at every start when they are there
CUSTOM = ("sitecustomize.py", "usercustomize.py")


def record(info: Path) -> list[tuple[str, str, int]]:
    """The rows of a RECORD that name a hash: path relative to site-packages, sha256 as it stands there, size in bytes.

    Left out are bytecode, and scripts outside of site-packages, which an installer rewrites. OSError or ValueError
    when there is none that can be read.
    """
    with (info / "RECORD").open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.reader(stream) if len(row) == 3]
    return [
        (path, digest.partition("=")[2], int(size))
        for path, digest, size in rows
        if digest.startswith("sha256=") and not path.startswith(("..", "/")) and not path.endswith(".pyc")
    ]


def opened(path: Path) -> int:
    """A descriptor of a regular file; OSError for anything else. No pipe or device is waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(f"{path} is no regular file")


def digest(path: Path) -> str:
    """The sha256 of a file as RECORDs write it."""
    found = hashlib.sha256()
    with os.fdopen(opened(path), "rb") as stream:
        while block := stream.read(1 << 20):
            found.update(block)
    return base64.urlsafe_b64encode(found.digest()).rstrip(b"=").decode()


def altered(site: Path, info: Path, package: str = "", *, content: bool = True) -> list[list[str]]:
    """Files of a distribution that are not as its RECORD says, as [path, missing, changed or added].

    info: its .dist-info directory. package: the directory of site-packages in which nothing else may lie, e.g. sglang.
    content: whether files are read, or their sizes alone are compared.
    """
    rows = record(info)
    found = []
    for path, wanted, size in rows:
        place = site / path
        try:
            same = place.stat().st_size == size and (not content or digest(place) == wanted)
        except OSError:
            found.append([path, "missing"])
            continue
        if not same:
            found.append([path, "changed"])
    if package:
        known = {path for path, _, _ in rows}
        found += [[path, "added"] for path in files(site, package) if path not in known]
    return sorted(found)


def files(site: Path, package: str) -> list[str]:
    """The files below a package, relative to site-packages, without bytecode."""
    found = []
    for parent, folders, names in os.walk(site / package):
        folders[:] = [name for name in folders if name != "__pycache__"]
        here = Path(parent).relative_to(site)
        found += [str(here / name) for name in names if not name.endswith(".pyc")]
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
            owned.update(path for path, _, _ in record(info) if "/" not in path)
        except (OSError, ValueError):
            continue  # that the distribution is damaged is found where its files are looked at
    for path in sorted(site.glob("*")):
        if path.suffix == ".egg-link":
            found += [[line, path.name] for line in lines(path)[:1]]
        elif path.name in owned:
            continue
        elif path.suffix == ".pth":
            found += [[line[:200], path.name] for line in lines(path)]
        elif path.name in CUSTOM:
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
