"""Releases on a host that nobody needs: list them with what they occupy and who uses them, or remove some.

Standard library only, Python 3.9 or later. Usage: weights_prune.py ARGUMENTS: a JSON object with `root`, `keep` (files
and directories whose texts and links name what is wanted), `sets` (the same for what a rollback may come back to),
`paths` (from which wanted releases are linked, by repository@revision) and `remove` (repository@revision, empty to
list). One JSON object is printed: `free_bytes`, and `releases` and `leftovers` by name, with `bytes` that their removal
frees, `users`, `links` (releases that link to it) and `sets`. What has users or links when it comes to be removed
stays; a set that may come back is only told. To remove, it is run under flock on <root>/.lock.
"""

import contextlib
import json
import os
import re
import shutil
import stat
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Set, Tuple

LARGEST = 1 << 20  # bytes of a file that may name a release
HIDDEN = (".incoming-", ".replaced-")


def found(root: Path) -> Iterator[Tuple[str, Path]]:
    """Name and directory of every release below the root, and of what interrupted runs left of others.

    A release stands beside the record of its verification: nothing else that somebody keeps here is ours.
    """
    for record in sorted([*root.glob("*/.verified-*.json"), *root.glob("*/*/.verified-*.json")]):
        release = record.with_name(record.name[len(".verified-") : -len(".json")])
        if stat.S_ISDIR(mode_of(release)):
            yield printable(f"{release.parent.relative_to(root)}@{release.name}"), release
    for prefix in HIDDEN:
        for left in sorted([*root.glob(f"*/{prefix}*"), *root.glob(f"*/*/{prefix}*")]):
            yield printable(f"{left.parent.relative_to(root)}@{left.name}"), left


def printable(text: str) -> str:
    """The same with bytes that are no UTF-8, as names of files may hold, written out (caf\\xe9)."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def mode_of(path: Path) -> int:
    """The mode of what stands there itself, 0 for nothing."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def freed(directory: Path) -> int:
    """Bytes that removing a directory frees: what other names keep, and what links point to, is none of them."""
    total = 0
    for parent, folders, names in os.walk(str(directory)):
        for name in [*folders, *names]:
            status = Path(parent, name).lstat()
            total += status.st_blocks * 512 if status.st_nlink == 1 or stat.S_ISDIR(status.st_mode) else 0
    return total


def processes() -> Dict[str, Set[str]]:
    """What running processes name or have open: paths and texts, by who."""
    seen: Dict[str, Set[str]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or is none of ours to look at
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
            who = f"process {entry.name} ({command.split(chr(0))[0].rsplit('/', 1)[-1]})"
            texts = seen.setdefault(who, set())
            texts.update(command.split("\0"))
            texts.update((entry / "maps").read_text(errors="replace").split())
            for link in [entry / "cwd", *(entry / "fd").iterdir()]:
                with contextlib.suppress(OSError):
                    texts.add(os.readlink(str(link)))
    return seen


def settings(keep: List[str]) -> Dict[str, Set[str]]:
    """What files of the host name, and what links among them lead to, by file."""
    seen: Dict[str, Set[str]] = {}
    for top in map(Path, keep):
        for path in [top, *top.rglob("*")]:
            with contextlib.suppress(OSError):  # it went meanwhile
                if path.is_symlink():
                    seen[printable(str(path))] = {os.readlink(str(path))}
                elif path.is_file() and path.stat().st_size <= LARGEST:
                    seen[printable(str(path))] = {path.read_text(errors="replace")}
    return seen


def target(link: Path) -> str:
    """Where a link leads, one step of it, by the path that the kernel gives it."""
    leads = os.path.join(str(link.parent), os.readlink(str(link)))
    return os.path.join(os.path.realpath(os.path.dirname(leads)), os.path.basename(leads))


def linking(root: Path, paths: Dict[str, List[str]]) -> Dict[str, Set[str]]:
    """Where the links of releases lead, and from where the wanted ones are linked, by release."""
    leads = {name: {os.path.realpath(path) for path in given} for name, given in paths.items()}
    for name, directory in found(root):
        if not directory.name.startswith(HIDDEN):
            leads.setdefault(name, set()).update(target(path) for path in directory.rglob("*") if path.is_symlink())
    return leads


def users(directory: Path, named: Dict[str, Set[str]]) -> List[str]:
    """Who names a directory or something in it, by its path or by the one that the kernel gives it.

    Who wrote the path may have doubled a slash, as a root that ends with one does.
    """
    parts = [path.split("/") for path in {str(directory), os.path.realpath(str(directory))}]
    places = [r"/(?:\.?/)*".join(map(re.escape, names)) for names in parts]
    naming = re.compile(f"(?:{'|'.join(places)})(?![A-Za-z0-9])")  # r1 is not r10
    return sorted(who for who, texts in named.items() if any(naming.search(text) for text in texts))


def remove(directory: Path) -> None:
    """Take a directory out of sight in one step, then remove it; an interrupted removal is a leftover."""
    aside = directory
    if not directory.name.startswith(HIDDEN):
        aside = directory.with_name(f".replaced-{directory.name}-{os.getpid()}")
        directory.rename(aside)
        directory.with_name(f".verified-{directory.name}.json").unlink()
    shutil.rmtree(str(aside))


def main() -> None:
    """List, or remove what the arguments name and nobody uses."""
    arguments: Dict[str, Any] = json.loads(sys.argv[1])
    root = Path(arguments["root"])
    named, sets = {**processes(), **settings(arguments["keep"])}, settings(arguments["sets"])
    leads = linking(root, arguments["paths"])
    result: Dict[str, Any] = {"releases": {}, "leftovers": {}, "removed": []}
    for name, directory in found(root):
        using = users(directory, named)
        links = users(directory, {other: leads[other] for other in leads if other != name})
        if name in arguments["remove"] and not using and not links:
            remove(directory)
            result["removed"].append(name)
            continue
        group = "leftovers" if directory.name.startswith(HIDDEN) else "releases"
        needed = {"users": using, "links": links, "sets": users(directory, sets)}
        result[group][name] = {"bytes": freed(directory), **needed}
    space = os.statvfs(str(root)) if root.is_dir() else None
    result["free_bytes"] = space.f_bavail * space.f_frsize if space else 0
    print(json.dumps(result))


if __name__ == "__main__":
    main()
