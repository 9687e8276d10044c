"""The host's side of model_weights that takes no time: look, prepare, start, watch, receive, settle.

Standard library only, Python 3.9 or later. Usage: weights_state.py ARGUMENTS, where ARGUMENTS is a JSON object with
`action` and `root`; one JSON object is printed. What reads or writes whole models is weights_job.py's, which runs in a
transient unit, imports this file and shares its layout. In <root>/<repository>:

    <revision>/                  the release: complete and verified, or not there
    .incoming-<revision>/        files on their way
    .replaced-<revision>-<pid>/  a damaged release on its way out
    .verified-<revision>.json    what was hashed (see `Record`)

and <root>/.lock, held by whoever changes something. In <run>/<digest of root>, gone with the next boot: the job's
`spec.json`, `progress.json`, and `alive`, locked as long as the job lives.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

FORMAT = 2
FILE_MODE, DIRECTORY_MODE = 0o644, 0o755
GRACE = 5  # seconds that a receiver of an interrupted run gets to end by itself
BEGINNING = 120  # seconds that a job gets before it has said a word: it yields to everything else on a busy host
PATIENCE = 3  # seconds to wait for the lock: a look takes it for a moment
TICK = 20_000_000  # nanoseconds; coarser than the steps in which file systems count time
LARGEST_HEADER = 100_000_000  # bytes; safetensors' own limit

Wanted = Dict[str, Any]
# the host's files by name: the role puts them before this text where they have to be installed
SOURCES: Dict[str, str] = globals().get("SOURCES", {})


class RefusedError(OSError):
    """Something stands in the way; the text is a sentence."""


def sentence(error: OSError, root: str) -> str:
    """What stopped an action or the job, for a person."""
    if error.errno == errno.ENOSPC:
        return f"the volume of {root} is full: what has arrived is kept; free space there, then run again"
    return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"


def printable(value: Any) -> Any:
    """The same with bytes that are no UTF-8, as names of files may hold, written out (caf\\xe9)."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if isinstance(value, dict):
        return {key: printable(item) for key, item in value.items()}
    return [printable(item) for item in value] if isinstance(value, list) else value


# ----------------------------------------------------------------------------------------------------------------------
# what was hashed


def identity(status: os.stat_result) -> str:
    """What changes when a file's content is changed in any ordinary way."""
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


class Record:
    """Hashes by `identity`: [sha256, time of hashing in ns, id of the job].

    One is believed when the file's times lie before it was hashed, and that before now: a clock that was set back must
    not make a later change look like the file that was hashed. What the run's own job hashed is believed in any case.
    """

    def __init__(self, path: Path, job: str = "", full: bool = False) -> None:
        self.path, self.job, self.full = path, job, full
        self.entries: Dict[str, List[Any]] = {}
        with contextlib.suppress(OSError, ValueError):  # none, or torn: what cannot be read is not known
            content = json.loads(path.read_text(encoding="utf-8"))
            hashes = content.get("hashes") if isinstance(content, dict) and content.get("format") == FORMAT else None
            for key, entry in hashes.items() if isinstance(hashes, dict) else ():
                if isinstance(entry, list) and [type(part) for part in entry] == [str, int, str]:
                    self.entries[key] = entry

    def sha256(self, status: os.stat_result) -> Optional[str]:
        """The hash of a file that has not changed since; None when it has to be hashed."""
        digest, at, job = self.entries.get(identity(status), ["", 0, ""])
        if not digest:
            return None
        if self.job and job == self.job:
            return str(digest)
        settled = max(status.st_mtime_ns, status.st_ctime_ns) + TICK <= at <= time.time_ns()
        return str(digest) if settled and not self.full else None

    def add(self, status: os.stat_result, digest: str, at: int) -> None:
        """A file was hashed, beginning at `at`."""
        self.entries[identity(status)] = [digest, at, self.job]

    def carry(self, path: Path, before: os.stat_result) -> None:
        """Keep what is known of a file whose names or mode this program has just changed."""
        digest, after = self.sha256(before), path.stat()
        if digest and identity(before).rsplit(":", 1)[0] == identity(after).rsplit(":", 1)[0]:
            self.add(after, digest, max(after.st_mtime_ns, after.st_ctime_ns) + TICK)

    def write(self, files: List[Path]) -> None:
        """Write what is known of these files; the rest is forgotten."""
        known = {identity(path.stat()) for path in files if path.is_file()}
        content = {"format": FORMAT, "hashes": {key: self.entries[key] for key in self.entries if key in known}}
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text(json.dumps(content), encoding="utf-8")
        fresh.chmod(FILE_MODE)
        fresh.replace(self.path)


# ----------------------------------------------------------------------------------------------------------------------
# where things are


class Model:
    """The paths of one model below the root."""

    def __init__(self, root: Path, wanted: Wanted) -> None:
        self.files: Dict[str, List[Any]] = wanted["files"]
        self.paths: List[str] = wanted.get("paths", [])
        for name in [wanted["repository"], wanted["revision"], *self.files]:
            if name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
                raise RefusedError(f"{name!r} is not a relative name")
        self.repository, revision = wanted["repository"], wanted["revision"]
        self.key = f"{self.repository}@{revision}"
        self.base = root / self.repository
        self.release = self.base / revision
        self.incoming = self.base / f".incoming-{revision}"
        self.record = self.base / f".verified-{revision}.json"
        self.aside_prefix = f".replaced-{revision}-"

    def leftovers(self) -> List[Path]:
        """Directories of interrupted runs that a finished release no longer needs."""
        asides = sorted(self.base.glob(self.aside_prefix + "*"))
        return ([self.incoming] if self.incoming.is_dir() else []) + asides

    def linked(self, path: Path, name: str) -> bool:
        """Whether an entry is a link that a release may hold: to the same name in a path that holds the model."""
        return os.readlink(str(path)) in [str(Path(holder, name)) for holder in self.paths]


def kind(mode: int) -> str:
    """A file type in words."""
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    if stat.S_ISDIR(mode):
        return "a directory"
    return "a file" if stat.S_ISREG(mode) else "a special file"


def walk(directory: Path) -> Tuple[List[str], List[str]]:
    """Relative names of everything below a directory that is no directory, and of the directories, itself included."""
    files: List[str] = []
    folders = ["."]
    for parent, directories, names in os.walk(str(directory)):
        directories[:] = [name for name in directories if name != "__pycache__"]
        for name in [*names, *directories]:
            path = Path(parent, name)
            (folders if stat.S_ISDIR(path.lstat().st_mode) else files).append(path.relative_to(directory).as_posix())
    return files, folders


def remove(path: Path) -> None:
    """Remove one of our own entries, whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(str(path))
    elif path.is_symlink() or path.exists():
        path.unlink()


def place_of_run(arguments: Dict[str, Any]) -> Path:
    """The directory of the job for this root."""
    return Path(arguments["run"], hashlib.sha256(arguments["root"].encode()).hexdigest()[:8])


# ----------------------------------------------------------------------------------------------------------------------
# the lock


def holder(path: Path) -> Optional[Dict[str, Any]]:
    """Who holds a lock, as it wrote itself; None when nobody does."""
    with contextlib.suppress(FileNotFoundError), path.open("r", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                return dict(json.loads(stream.read()))
            except ValueError:
                return {"by": "somebody", "doing": "something", "pid": 0}
    return None


def acquire(path: Path, who: Dict[str, Any]) -> int:
    """Lock a file and write into it who has it; the descriptor holds it, also in what this process becomes."""
    path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    descriptor = os.open(str(path), os.O_RDWR | os.O_CREAT, 0o644)
    limit = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > limit:
                other = holder(path) or {}
                os.close(descriptor)
                raise RefusedError(
                    f"{other.get('by', 'another run')} is at work in {path.parent} ({other.get('doing', 'unknown')}, "
                    f"process {other.get('pid', 'unknown')}): wait until it has ended, then run again"
                ) from None
            time.sleep(0.05)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps({**who, "pid": os.getpid()}).encode())
    return descriptor


@contextlib.contextmanager
def locked(arguments: Dict[str, Any], doing: str) -> Iterator[None]:
    """Hold the root's lock."""
    descriptor = acquire(Path(arguments["root"], ".lock"), {"by": arguments.get("by", "a run"), "doing": doing})
    try:
        yield
    finally:
        os.close(descriptor)


# ----------------------------------------------------------------------------------------------------------------------
# look


def header_problem(path: Path) -> str:
    """What a safetensors file's header says against its size; empty when they agree."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 <= length <= min(LARGEST_HEADER, size - 8):
            return "its header is cut off, or it is no safetensors file"
        try:
            entries = json.loads(stream.read(length))
            entries.pop("__metadata__", None)
            promised = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
            return "its header is damaged"
    return "" if size == promised else f"its header promises {promised} bytes, it has {size}"


def look_at(directory: Path, model: Model, record: Record, follow: bool) -> Dict[str, Any]:
    """What stands in a directory, without reading data.

    state: absent, present, or foreign (`kind` is there instead); files: wanted name → [size, sha256 or null]; odd:
    wanted name → what it is instead of a file; headers: wanted safetensors of another size → what the header says;
    incomplete: downloads that never ended; closed: wanted names behind links, or where follow is set, that others
    cannot read. follow: links to files are as good as files.
    """
    found: Dict[str, Any] = {"state": "absent", "kind": "", "files": {}, "odd": {}, "headers": {}, "incomplete": []}
    found["closed"] = []
    try:
        mode = directory.stat().st_mode if follow else directory.lstat().st_mode
    except OSError:
        return found
    if not stat.S_ISDIR(mode):
        return {**found, "state": "foreign", "kind": kind(mode)}
    found["state"] = "present"
    for name, (size, _) in model.files.items():
        path = directory / name
        if not os.path.lexists(str(path)):
            continue
        links = path.is_symlink()
        if not path.is_file() or (links and not follow and not model.linked(path, name)):
            found["odd"][name] = "a dangling link" if links and not path.exists() else kind(path.lstat().st_mode)
            continue
        status = path.stat()
        found["files"][name] = [status.st_size, record.sha256(status)]
        if (links or follow) and closed(path):
            found["closed"].append(name)
        if status.st_size != size and name.endswith(".safetensors"):
            found["headers"][name] = header_problem(path)
    found["incomplete"] = [name for name in model.files if (directory / f"{name}.incomplete").exists()]
    return found


def closed(path: Path) -> bool:
    """Whether others cannot read a file where it really is; its directory counts too."""
    place = path.resolve()
    return not (place.stat().st_mode & 0o004 and place.parent.stat().st_mode & 0o001)


def bad_modes(directory: Path, names: List[str]) -> List[str]:
    """Files and directories that the service cannot read, or that others can change; links have no mode."""
    wrong = []
    for name in names:
        mode = (directory / name).lstat().st_mode
        needed = 0o055 if stat.S_ISDIR(mode) else 0o044
        if not stat.S_ISLNK(mode) and (mode & needed != needed or mode & 0o022):
            wrong.append(name)
    return wrong


def look_model(model: Model, record: Record) -> Dict[str, Any]:
    """The report of one model, as pivot.checkpoints.weights reads it."""
    release = look_at(model.release, model, record, follow=False)
    files, folders = walk(model.release) if release["state"] == "present" else ([], [])
    release["extra"] = sorted(name for name in files if name not in model.files)
    release["modes"] = bad_modes(model.release, [*sorted(release["files"]), *folders])
    return {
        "key": model.key,
        "release": release,
        "incoming": look_at(model.incoming, model, record, follow=False),
        "paths": {path: look_at(Path(path), model, record, follow=True) for path in model.paths},
        "leftovers": [path.name for path in model.leftovers()],
    }


def free_bytes(root: Path) -> int:
    """Bytes free for ordinary users where `root` is or will be."""
    place = root
    while not place.exists():
        place = place.parent
    space = os.statvfs(str(place))
    return space.f_bavail * space.f_frsize


def look(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Report on every model, reading nothing but names, stats and headers. job: a job whose hashes are believed."""
    root, full, job = Path(arguments["root"]), arguments.get("verify") == "full", arguments.get("job", "")
    models = [Model(root, wanted) for wanted in arguments["models"]]
    if root.exists() and not root.is_dir():
        raise RefusedError(f"{root} is {kind(root.lstat().st_mode)}, where a directory has to be")
    return {
        "root": str(root),
        "free_bytes": free_bytes(root),
        "tools": [tool for tool in ("rsync", "systemd-run") if shutil.which(tool)],
        "holder": holder(root / ".lock"),
        "job": watch({**arguments, "seconds": 0}),
        "models": [look_model(model, Record(model.record, job, full)) for model in models],
    }


# ----------------------------------------------------------------------------------------------------------------------
# prepare, receive, settle


def working_in(directory: Path) -> List[int]:
    """Ids of processes whose working directory this is: rsync works where it receives."""
    found = []
    place = os.path.realpath(str(directory))  # as the kernel names it
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if os.readlink(str(entry / "cwd")) == place:
                found.append(int(entry.name))
    return found


def end_receivers(directory: Path) -> None:
    """End what still receives for a run that was killed: it would write into the release once that is in place."""
    limit = time.monotonic() + GRACE
    while True:
        found = working_in(directory)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if time.monotonic() < limit else signal.SIGKILL)
        time.sleep(0.1)


def prepare_model(model: Model, wanted: Wanted) -> None:
    """Make the incoming directory ready.

    intact: good files of a damaged release, linked from there; links: name → file of a path that holds the model;
    wrong: whole files that are known to be wrong. Those go, and what nobody wants; a shorter file is continued.
    """
    record = Record(model.record)
    if model.incoming.is_symlink() or not model.incoming.is_dir():
        remove(model.incoming)
    model.incoming.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    for name in walk(model.incoming)[0]:
        path = model.incoming / name
        size = path.lstat().st_size if stat.S_ISREG(path.lstat().st_mode) else -1
        due = model.files[name][0] if name in model.files and name not in wanted["wrong"] else -1
        if not 0 <= size <= due:
            remove(path)
    for name in [*wanted["intact"], *wanted["links"]]:
        target, source = model.incoming / name, model.release / name
        target.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        remove(target)
        if name in wanted["links"]:
            target.symlink_to(wanted["links"][name])
        elif source.is_symlink():
            target.symlink_to(os.readlink(str(source)))
        else:
            before = source.lstat()
            os.link(str(source), str(target))
            record.carry(target, before)
    record.write(everywhere(model))


def everywhere(model: Model) -> List[Path]:
    """All places where files of a model may stand."""
    places = [model.release, model.incoming, *map(Path, model.paths)]
    return [place / name for place in places for name in model.files]


def prepare(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Prepare every model of the arguments. Receivers of this controller's own, killed runs are ended first."""
    root = Path(arguments["root"])
    install(arguments)
    other = holder(root / ".lock")
    if other is None or other.get("by") == arguments["by"]:
        for wanted in arguments["models"]:
            end_receivers(Model(root, wanted).incoming)
    with locked(arguments, "preparing"):
        for wanted in arguments["models"]:
            prepare_model(Model(root, wanted), wanted)
    return {"prepared": len(arguments["models"])}


def receive(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Become rsync's receiving side, with the lock: `rsync --rsync-path` calls this with the rest of its words."""
    who = {"by": arguments["by"], "doing": f"receiving {arguments['doing']}"}
    os.set_inheritable(acquire(Path(arguments["root"], ".lock"), who), True)
    os.execvp("rsync", ["rsync", *sys.argv[2:]])  # noqa: S606 - it takes this process's place


def settle(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Modes and leftovers of releases that are verified."""
    with locked(arguments, "putting in order"):
        for wanted in arguments["models"]:
            settle_model(Model(Path(arguments["root"]), wanted))
    return {"settled": len(arguments["models"])}


def put_modes_right(directory: Path, names: List[str]) -> None:
    """Files and directories that everybody may read and only the owner may write."""
    for name in bad_modes(directory, names):
        (directory / name).chmod(DIRECTORY_MODE if (directory / name).is_dir() else FILE_MODE)


def settle_model(model: Model, record: Optional[Record] = None) -> None:
    """Put modes right and remove leftovers; what is known of the release stays known."""
    record = record or Record(model.record)
    before = {name: (model.release / name).stat() for name in model.files if (model.release / name).is_file()}
    put_modes_right(model.release, [*before, *walk(model.release)[1]])
    for path in model.leftovers():
        remove(path)
    for name, status in before.items():
        record.carry(model.release / name, status)
    record.write(everywhere(model))


# ----------------------------------------------------------------------------------------------------------------------
# the job


def install(arguments: Dict[str, Any]) -> Path:
    """Write the host's files, this one among them, where rsync and the job find them; the job's directory."""
    place = place_of_run(arguments)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in SOURCES.items():
        fresh = place / f"{name}.new"
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(place / name)
    return place


def start(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Start weights_job.py in a transient unit; `job` is its id."""
    place = install(arguments)
    if holder(place / "alive"):
        raise RefusedError(f"a job for {arguments['root']} began meanwhile: run again, which follows it")
    told = place / "progress.json"
    told.unlink(missing_ok=True)
    (place / "spec.json").write_text(json.dumps(arguments), encoding="utf-8")
    # a server on the same machine goes first
    unit = f"pivot-weights-{place.name}"
    command = ["systemd-run", "--quiet", "--collect", f"--unit={unit}", "--property=Nice=10", "--service-type=exec"]
    command += ["python3", "-I", str(place / "weights_job.py"), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RefusedError(f"the job could not be started: {done.stderr.strip()}")
    limit = time.monotonic() + BEGINNING
    while not told.exists() and time.monotonic() < limit and active(unit):
        time.sleep(0.05)
    if not told.exists():
        raise RefusedError(f"the job did not begin: journalctl -u {unit}")
    return {"started": arguments["job"]}


def active(unit: str) -> bool:
    """Whether a unit is at work."""
    return subprocess.run(["systemctl", "is-active", "--quiet", unit], check=False).returncode == 0


def watch(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """The job's progress, after `seconds` or when it has ended; `alive` says which. Empty: there was none."""
    place = place_of_run(arguments)
    limit = time.monotonic() + arguments["seconds"]
    while holder(place / "alive") and time.monotonic() < limit:
        time.sleep(0.05)
    alive = holder(place / "alive") is not None
    try:
        told = dict(json.loads((place / "progress.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
    return {**told, "alive": alive, "unit": f"pivot-weights-{place.name}"}


ACTIONS = {action.__name__: action for action in (look, prepare, receive, settle, start, watch)}


def main() -> None:
    """Run one action; an operating system error becomes `error`, one sentence."""
    os.umask(0o022)
    arguments = json.loads(sys.argv[1])
    try:
        result = ACTIONS[arguments["action"]](arguments)
    except OSError as error:
        result = {"error": sentence(error, arguments["root"])}
        if arguments["action"] == "receive":
            sys.exit(result["error"])
    print(json.dumps(printable(result)))


if __name__ == "__main__":
    main()
