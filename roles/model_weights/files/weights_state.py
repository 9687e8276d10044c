"""The host's side of model_weights: look, prepare, publish, settle. Standard library only, Python 3.9 or later.

Usage: weights_state.py ARGUMENTS, where ARGUMENTS is a JSON object with `action`, `root` and `models`; one JSON object
is printed. Of each model it knows repository, revision and `files` (name → [size, sha256]). Layout, in
<root>/<repository>: `<revision>/` the release, `.incoming-<revision>/` files on their way, `.replaced-<revision>-*`
a damaged release on its way out, `.verified-<revision>.json` what was hashed when. Whatever is interrupted leaves the
release as it was or absent, and these names show the next run where to go on.

inspect   reads only: free bytes, and per model `release` and `incoming` (see `inspect_model`)
prepare   makes the incoming directories and links intact files of a damaged release into them
publish   hashes what was received and renames it into place; a file that fails is removed and named
settle    puts modes in order, removes leftovers, records a verification that `inspect` made
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

FORMAT = 1
CHUNK = 8 << 20
WORKERS = min(8, os.cpu_count() or 1)
FILE_MODE, DIRECTORY_MODE = 0o644, 0o755
GRACE = 5  # seconds that a receiver of an interrupted run gets to end by itself

Signature = List[int]  # size, mtime_ns, inode, ctime_ns
Wanted = Dict[str, Any]


def signature(status: os.stat_result) -> Signature:
    """What changes when a file's content is changed in any ordinary way."""
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns]


def hash_file(path: Path) -> Tuple[str, Signature]:
    """The sha256 of a file and the signature it had; OSError when it changed meanwhile."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        before = signature(os.fstat(stream.fileno()))
        while True:
            block = stream.read(CHUNK)
            if not block:
                break
            digest.update(block)
        after = signature(os.fstat(stream.fileno()))
    if before != after:
        raise OSError(f"{path} changed while it was read: something else writes to it")
    return digest.hexdigest(), after


class Model:
    """The paths of one model below the root."""

    def __init__(self, root: Path, wanted: Wanted) -> None:
        self.wanted = wanted
        self.files: Dict[str, List[Any]] = wanted["files"]
        for name in [wanted["repository"], wanted["revision"], *self.files]:
            if name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
                raise OSError(f"{name!r} is not a relative name")
        revision = wanted["revision"]
        self.base = root / wanted["repository"]
        self.release = self.base / revision
        self.incoming = self.base / f".incoming-{revision}"
        self.record = self.base / f".verified-{revision}.json"
        self.aside_prefix = f".replaced-{revision}-"

    def leftovers(self) -> List[Path]:
        """Directories of interrupted runs that a finished release no longer needs."""
        asides = sorted(self.base.glob(self.aside_prefix + "*"))
        return ([self.incoming] if self.incoming.is_dir() else []) + asides

    def recorded(self) -> Dict[str, Signature]:
        """Signatures of the last verification, if it was one of these hashes; empty when there is none."""
        try:
            record = json.loads(self.record.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(record, dict) or record.get("wanted") != self.files or record.get("format") != FORMAT:
            return {}
        files = record.get("files")
        return files if isinstance(files, dict) else {}

    def write_record(self) -> None:
        """Record the release as it stands now as verified; only called when its files have just been hashed."""
        files = {name: signature((self.release / name).lstat()) for name in self.files}
        fresh = self.record.with_name(self.record.name + ".new")
        fresh.write_text(json.dumps({"format": FORMAT, "wanted": self.files, "files": files}), encoding="utf-8")
        fresh.chmod(FILE_MODE)
        fresh.replace(self.record)


def kind(mode: int) -> str:
    """A file type in words."""
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    if stat.S_ISDIR(mode):
        return "a directory"
    return "a file" if stat.S_ISREG(mode) else "a special file"


def walk(directory: Path) -> Tuple[Dict[str, os.stat_result], List[str]]:
    """Everything below a directory that is no directory, by relative name; and the directories' relative names."""
    files: Dict[str, os.stat_result] = {}
    folders: List[str] = ["."]
    for parent, directories, names in os.walk(str(directory)):
        directories[:] = [name for name in directories if name != "__pycache__"]
        for name in [*names, *directories]:
            path = Path(parent, name)
            status = path.lstat()
            relative = path.relative_to(directory).as_posix()
            if stat.S_ISDIR(status.st_mode):
                folders.append(relative)
            else:
                files[relative] = status
    return files, folders


def check(path: Path, status: Optional[os.stat_result], pin: List[Any], known: Optional[Signature]) -> Tuple[str, Any]:
    """Compare one file with its pin: ("", signature) when it is right, else (what is wrong, None)."""
    size, wanted = pin
    if status is None:
        return "is missing", None
    if not stat.S_ISREG(status.st_mode):
        return f"is {kind(status.st_mode)}", None
    if status.st_size != size:
        return f"has {status.st_size} bytes instead of {size}", None
    if known == signature(status):
        return "", known
    found, seen = hash_file(path)
    return ("", seen) if found == wanted else (f"has sha256 {found[:12]}… instead of {wanted[:12]}…", None)


def check_all(
    directory: Path, present: Dict[str, os.stat_result], names: Dict[str, List[Any]], known: Dict[str, Signature]
) -> Dict[str, Tuple[str, Any]]:
    """`check` for many files, several at a time (hashing leaves the interpreter free)."""
    with ThreadPoolExecutor(WORKERS) as pool:
        jobs = {
            name: pool.submit(check, directory / name, present.get(name), pin, known.get(name))
            for name, pin in names.items()
        }
        return {name: job.result() for name, job in jobs.items()}


def bad_modes(directory: Path, names: List[str], folders: List[str]) -> List[str]:
    """Files and directories that the service cannot read, or that others can change."""
    wrong = []
    for name in [*names, *folders]:
        mode = (directory / name).lstat().st_mode
        needed = 0o055 if stat.S_ISDIR(mode) else 0o044
        if mode & needed != needed or mode & 0o022:
            wrong.append(name)
    return wrong


def inspect_release(model: Model, full: bool) -> Dict[str, Any]:
    """State of the published release.

    state: absent, present, or foreign (something else is in its place: `kind`); problems: name → what is wrong;
    good: names that are right; extra: names that nobody wants; recorded: everything was known without hashing;
    signatures: of the good files; modes: names with wrong modes.
    """
    result: Dict[str, Any] = {
        "state": "absent",
        "kind": "",
        "problems": {},
        "good": [],
        "extra": [],
        "recorded": False,
        "signatures": {},
        "modes": [],
    }
    try:
        mode = model.release.lstat().st_mode
    except FileNotFoundError:
        return result
    if not stat.S_ISDIR(mode):
        result.update(state="foreign", kind=kind(mode))
        return result
    known = model.recorded()
    present, folders = walk(model.release)
    checked = check_all(model.release, present, model.files, {} if full else known)
    good = sorted(name for name, (problem, _) in checked.items() if not problem)
    result.update(
        state="present",
        problems={name: problem for name, (problem, _) in checked.items() if problem},
        good=good,
        extra=sorted(name for name in present if name not in model.files),
        recorded=all(known.get(name) == seen for name, (_, seen) in checked.items()),
        signatures={name: checked[name][1] for name in good},
        modes=bad_modes(model.release, good, folders),
    )
    return result


def inspect_incoming(model: Model, released: bool) -> Dict[str, Any]:
    """Files an interrupted run left: `files` name → size of partial ones, `good` names that are complete and right."""
    files: Dict[str, int] = {}
    good: List[str] = []
    if model.incoming.is_dir() and not model.incoming.is_symlink() and not released:
        present, _ = walk(model.incoming)
        whole = {name: pin for name, pin in model.files.items() if name in present and present[name].st_size == pin[0]}
        checked = check_all(model.incoming, present, whole, {})
        good = sorted(name for name, (problem, _) in checked.items() if not problem)
        files = {
            name: present[name].st_size
            for name, pin in model.files.items()
            if name in present and stat.S_ISREG(present[name].st_mode) and present[name].st_size < pin[0]
        }
    return {"files": files, "good": good}


def inspect_model(model: Model, full: bool) -> Dict[str, Any]:
    """The report of one model, as pivot.weights.plan reads it."""
    release = inspect_release(model, full)
    complete = release["state"] == "present" and not release["problems"]
    return {
        "repository": model.wanted["repository"],
        "revision": model.wanted["revision"],
        "release": release,
        "incoming": inspect_incoming(model, complete),
        "leftovers": [path.name for path in model.leftovers()],
    }


def free_bytes(root: Path) -> int:
    """Bytes free for ordinary users where `root` is or will be."""
    place = root
    while not place.exists():
        place = place.parent
    space = os.statvfs(str(place))
    return space.f_bavail * space.f_frsize


def inspect(root: Path, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Read-only report of every model."""
    full = arguments.get("verify") == "full"
    return {
        "root": str(root),
        "free_bytes": free_bytes(root),
        "rsync": shutil.which("rsync") is not None,
        "models": [inspect_model(Model(root, wanted), full) for wanted in arguments["models"]],
    }


def remove(path: Path) -> None:
    """Remove one of our own hidden entries, whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(str(path))
    elif path.is_symlink() or path.exists():
        path.unlink()


def working_in(directory: Path) -> List[int]:
    """Ids of processes whose working directory this is: rsync works where it receives."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(str(entry / "cwd")) == str(directory):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def end_receivers(directory: Path) -> None:
    """End what still receives for a run that was killed: it would write into the release once that is in place."""
    limit = time.monotonic() + GRACE
    number = signal.SIGTERM
    while True:
        found = working_in(directory)
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        time.sleep(0.1)
        if time.monotonic() > limit:
            number = signal.SIGKILL


def prepare_model(model: Model, intact: List[str], send: List[str]) -> None:
    """Make the incoming directory ready for rsync.

    intact: good files of a damaged release; send: what rsync brings. A whole file among those is wrong, and goes:
    rsync would pass over it when its size and time look right.
    """
    model.base.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    end_receivers(model.incoming)
    if model.incoming.is_symlink() or not model.incoming.is_dir():
        remove(model.incoming)
    model.incoming.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    present, _ = walk(model.incoming)
    for name, status in present.items():
        wanted = model.files[name][0] if name in model.files and stat.S_ISREG(status.st_mode) else -1
        if status.st_size > wanted or (name in send and status.st_size == wanted):
            (model.incoming / name).unlink()
    for name in intact:
        target = model.incoming / name
        target.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        remove(target)
        os.link(str(model.release / name), str(target))


def prepare(root: Path, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Prepare every model of the arguments."""
    for wanted in arguments["models"]:
        prepare_model(Model(root, wanted), wanted["intact"], wanted["send"])
    return {"prepared": len(arguments["models"])}


def put_modes_right(directory: Path, names: List[str], folders: List[str]) -> None:
    """Everyone may read, only the owner may write."""
    for name in names:
        (directory / name).chmod(FILE_MODE)
    for name in folders:
        (directory / name).chmod(DIRECTORY_MODE)


def flush(paths: List[Path]) -> None:
    """Have files or directories on disk before a rename makes them the release."""
    for path in paths:
        descriptor = os.open(str(path), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def publish_model(model: Model) -> Dict[str, str]:
    """Verify the incoming files and rename them into place; the problems by name, empty when it was published."""
    present, folders = walk(model.incoming)
    checked = check_all(model.incoming, present, model.files, {})
    problems = {name: problem for name, (problem, _) in checked.items() if problem}
    for name in problems:
        remove(model.incoming / name)
    if problems:
        return problems
    for name in present:
        if name not in model.files:
            (model.incoming / name).unlink()
    put_modes_right(model.incoming, sorted(model.files), folders)
    flush([model.incoming / name for name in [*sorted(model.files), *folders]])
    if model.release.is_dir():
        model.release.rename(model.base / f"{model.aside_prefix}{os.getpid()}")
    model.incoming.rename(model.release)
    flush([model.base])
    # first the leftovers: removing a hard link changes the change time that the record holds
    for path in model.leftovers():
        remove(path)
    model.write_record()
    return {}


def publish(root: Path, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Publish every model of the arguments; `failed` names the files that did not arrive as wanted."""
    published: List[str] = []
    failed: Dict[str, Dict[str, str]] = {}
    for wanted in arguments["models"]:
        model = Model(root, wanted)
        problems = publish_model(model)
        if problems:
            failed[str(model.release)] = problems
        else:
            published.append(str(model.release))
    return {"published": published, "failed": failed}


def settle(root: Path, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Modes, leftovers and record of releases that `inspect` found good and that have not changed since."""
    for wanted in arguments["models"]:
        model = Model(root, wanted)
        for name, seen in wanted["signatures"].items():
            if signature((model.release / name).lstat()) != seen:
                raise OSError(f"{model.release / name} changed after it was verified: run again")
        _, folders = walk(model.release)
        wrong = set(bad_modes(model.release, sorted(model.files), folders))
        put_modes_right(
            model.release,
            [name for name in sorted(model.files) if name in wrong],
            [name for name in folders if name in wrong],
        )
        for path in model.leftovers():
            remove(path)
        model.write_record()
    return {"settled": len(arguments["models"])}


ACTIONS = {"inspect": inspect, "prepare": prepare, "publish": publish, "settle": settle}


def main() -> None:
    """Run one action; an operating system error becomes `error`, one sentence."""
    os.umask(0o022)
    arguments = json.loads(sys.argv[1])
    try:
        result = ACTIONS[arguments["action"]](Path(arguments["root"]), arguments)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        result = {"error": f"{error.strerror or error}{where}"}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
