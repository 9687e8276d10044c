"""The host's side of model_weights that takes long: fetch from the hub, hash, publish.

Standard library only, Python 3.9 or later. Usage: weights_job.py PLACE. It runs in a transient unit, so that it
outlives the play and its connection, beside weights_state.py, whose layout and lock it shares. PLACE/spec.json holds
`job` (an id), `root`, `by`, and `models`, each with what weights_state.py knows of a model and one of

    trees     directories whose files are hashed as far as that is not known, and recorded
    fetch     what to do with its incoming directory: fetch these names from `hub`, hash, rename into place

PLACE/progress.json says how far it is, and at the end `ended` (ok or failed), `error` (a sentence), `published`, and
`failed` (release → name → what is wrong). A file that did not arrive as wanted is removed.
"""

import collections
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from hashlib import sha256
from pathlib import Path
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

sys.path.insert(0, str(Path(__file__).parent))  # -I leaves it out
from weights_state import (
    DIRECTORY_MODE,
    TICK,
    Model,
    Record,
    RefusedError,
    acquire,
    everywhere,
    identity,
    kind,
    locked,
    put_modes_right,
    remove,
    sentence,
    settle_model,
    walk,
)

CHUNK = 1 << 20  # bytes; what a core's cache holds
PULSE = 0.5  # seconds between two words about the progress
WINDOW = 20  # of them, over which the rate is taken


class Progress:
    """What a person who follows the job is told: phase, bytes done and in all, bytes a second."""

    def __init__(self, path: Path, job: str) -> None:
        self.path = path
        self.told: Dict[str, Any] = {"job": job, "phase": "beginning", "done": 0, "total": 0, "rate": 0.0, "ended": ""}
        self._lock = threading.Lock()
        self._seen: Deque[Tuple[float, int]] = collections.deque(maxlen=WINDOW)

    def begin(self, phase: str, total: int) -> None:
        """A new phase."""
        self._seen.clear()
        self.told.update(phase=phase, done=0, total=total, rate=0.0)
        self.tell()

    def count(self, count: int) -> None:
        """So many bytes more; from any thread."""
        with self._lock:
            self.told["done"] += count

    def tell(self, **more: Any) -> None:
        """Write it down."""
        self._seen.append((time.monotonic(), self.told["done"]))
        (first, before), (last, now) = self._seen[0], self._seen[-1]
        self.told.update(more, rate=(now - before) / (last - first) if last > first else 0.0)
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text(json.dumps(self.told), encoding="utf-8")
        fresh.replace(self.path)


# ----------------------------------------------------------------------------------------------------------------------
# hash


def hash_file(path: Path, count: Callable[[int], None]) -> Tuple[str, os.stat_result, int]:
    """The sha256 of a file, its stat, and when hashing began; each byte is read once. OSError: it changed meanwhile."""
    digest, buffer = sha256(), bytearray(CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        before = os.fstat(stream.fileno())
        # a change within one step of the file system's clock would not be seen
        fresh = max(before.st_mtime_ns, before.st_ctime_ns) + TICK - time.time_ns()
        if 0 < fresh <= TICK:
            time.sleep(fresh / 1e9)
        at = time.time_ns()
        while True:
            got = stream.readinto(buffer)
            if not got:
                break
            digest.update(view[:got])
            count(got)
        after = os.fstat(stream.fileno())
    if identity(before) != identity(after):
        raise OSError(f"{path} changed while it was read: something else writes to it")
    return digest.hexdigest(), after, at


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))


def hash_all(model: Model, trees: List[Path], record: Record, progress: Progress) -> None:
    """Hash every file of the right size that is not known, on all cores, largest first; each is recorded when done."""
    todo = []
    for path, size in [(tree / name, size) for tree in trees for name, (size, _) in model.files.items()]:
        if path.is_file() and path.stat().st_size == size and record.sha256(path.stat()) is None:
            todo.append((size, path))
    progress.begin(f"verifying {model.key}", sum(size for size, _ in todo))
    with ThreadPoolExecutor(cores()) as pool:
        waiting = {pool.submit(hash_file, path, progress.count) for _, path in sorted(todo, reverse=True)}
        while waiting:
            ended, waiting = wait(waiting, timeout=PULSE, return_when="FIRST_COMPLETED")
            for job in ended:
                digest, status, at = job.result()
                record.add(status, digest, at)
            if ended:
                record.write(everywhere(model))
            progress.tell()


# ----------------------------------------------------------------------------------------------------------------------
# fetch


def arrived(model: Model, names: List[str]) -> int:
    """Bytes of these files in the incoming directory."""
    paths = [model.incoming / name for name in names]
    return sum(path.stat().st_size for path in paths if path.exists())


def fetch(model: Model, names: List[str], hub: Dict[str, Any], progress: Progress) -> None:
    """Fetch files into the incoming directory with hub_fetch.py; RefusedError with its sentence when it cannot."""
    place = progress.path.parent
    token = place / "token"
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HF_ENDPOINT": hub["endpoint"],
        "HF_HOME": str(place / "hub"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **({"HF_TOKEN_PATH": str(token)} if token.exists() else {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}),
    }
    wanted = {
        "repository": model.repository,
        "revision": model.release.name,
        "files": {name: model.files[name][0] for name in names},
        "into": str(model.incoming),
        "workers": hub["workers"],
    }
    progress.begin(f"fetching {model.key}", sum(model.files[name][0] for name in names))
    command = [hub["python"], "-I", str(Path(__file__).with_name("hub_fetch.py")), json.dumps(wanted)]
    with (place / "hub.out").open("w+") as output, contextlib.ExitStack() as stack:
        try:
            # it ends when its standard input does: with this process, however that ends
            client = stack.enter_context(
                subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output)
            )
        except OSError as error:
            raise RefusedError(f"model_weights_hub_python {hub['python']}: {error.strerror}") from error
        while client.poll() is None:
            time.sleep(PULSE / 5)
            progress.told["done"] = arrived(model, names)
            progress.tell()
        output.seek(0)
        said = output.read().strip().splitlines()
    if client.returncode:
        raise RefusedError(said[-1] if said else f"the hub's client ended with {client.returncode}")


# ----------------------------------------------------------------------------------------------------------------------
# publish


def problem(model: Model, name: str, record: Record) -> str:
    """What is wrong with an incoming file; empty when it is the wanted one."""
    path, (size, wanted) = model.incoming / name, model.files[name]
    if not os.path.lexists(str(path)):
        return "is missing"
    if not path.is_file() or (path.is_symlink() and not model.linked(path, name)):
        return f"is {kind(path.lstat().st_mode)}"
    status = path.stat()
    if status.st_size != size:
        return f"has {status.st_size} bytes instead of {size}"
    found = record.sha256(status) or ""
    return "" if found == wanted else f"has sha256 {found[:12]}… instead of {wanted[:12]}…"


def flush(paths: List[Path]) -> None:
    """Have files or directories on disk before a rename makes them the release."""
    for path in paths:
        descriptor = os.open(str(path), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def publish(model: Model, record: Record, progress: Progress) -> Dict[str, str]:
    """Verify the incoming files and rename them into place; the problems by name, empty when it was published."""
    if not model.incoming.is_dir():
        return dict.fromkeys(model.files, "is missing")
    names = list(model.files)
    put_modes_right(model.incoming, [name for name in [*names, "."] if (model.incoming / name).exists()])
    hash_all(model, [model.incoming], record, progress)
    problems = {name: text for name in names for text in [problem(model, name, record)] if text}
    for name in problems:
        path = model.incoming / name
        unfinished = path.is_file() and not path.is_symlink() and path.stat().st_size < model.files[name][0]
        if not unfinished:
            remove(path)
    if problems:
        return problems
    tidy(model)
    put_modes_right(model.incoming, walk(model.incoming)[1])
    files = [path for path in (model.incoming / name for name in names) if not path.is_symlink()]
    flush([*files, *(model.incoming / folder for folder in walk(model.incoming)[1])])
    if model.release.is_dir():
        model.release.rename(model.base / f"{model.aside_prefix}{os.getpid()}")
    model.incoming.rename(model.release)
    flush([model.base])
    settle_model(model, record)
    return {}


def tidy(model: Model) -> None:
    """Remove from the incoming directory what is no part of the model: the hub client's notes, leftovers of rsync."""
    needed = {parent.as_posix() for name in model.files for parent in Path(name).parents}
    files, folders = walk(model.incoming)
    for name in files:
        if name not in model.files:
            remove(model.incoming / name)
    for folder in folders:
        if folder not in needed:
            remove(model.incoming / folder)


# ----------------------------------------------------------------------------------------------------------------------


def work(spec: Dict[str, Any], progress: Progress) -> Dict[str, Any]:
    """Do what is to be done for each model."""
    published: List[str] = []
    failed: Dict[str, Dict[str, str]] = {}
    for wanted in spec["models"]:
        model = Model(Path(spec["root"]), wanted)
        model.base.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        record = Record(model.record, spec["job"], full=spec.get("verify") == "full")
        if "trees" in wanted:
            hash_all(model, [Path(tree) for tree in wanted["trees"]], record, progress)
            continue
        if wanted["fetch"]:
            fetch(model, wanted["fetch"], spec["hub"], progress)
        problems = publish(model, record, progress)
        if problems:
            failed[str(model.release)] = problems
        else:
            published.append(str(model.release))
    return {"published": published, "failed": failed, "ended": "failed" if failed else "ok"}


def main(place: Optional[str] = None) -> int:
    """Run the job that PLACE/spec.json describes; 0 when all of it was done."""
    os.umask(0o022)
    here = Path(place or sys.argv[1])
    spec = json.loads((here / "spec.json").read_text(encoding="utf-8"))
    who = {"by": spec["by"], "doing": "a job"}
    alive = acquire(here / "alive", who)
    progress = Progress(here / "progress.json", spec["job"])
    try:
        progress.tell()
        with locked(spec, "fetching, verifying or publishing"):
            progress.tell(**work(spec, progress))
    except OSError as error:
        progress.tell(ended="failed", error=sentence(error, spec["root"]))
    finally:
        remove(here / "token")
        os.close(alive)
    print(progress.told.get("error") or progress.told["ended"], file=sys.stderr)
    return 0 if progress.told["ended"] == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
