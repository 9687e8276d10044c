"""Raw lxc.* lines in a container's file on its Proxmox node. Standard library only.

argv[1]: JSON {do: gather | apply, vmid, remove: [[key, value]], add: [[key, value]]}; gather only reads. Prints a JSON
object: lines (above the first section), lock (of the configuration), interrupted (the copy that a killed write left),
changed, and problem with detail where it could not be done (`pivot.pve.proxmox_raw.answered` has the sentences).

/etc/pve is pmxcfs: it takes no other mode and no other owner, so that nothing that puts a file into place works there,
and PVE's own lock file is what keeps PVE from writing meanwhile. So the file is written in place: first the whole new
text, filled up with empty lines to the length of the old one, then it is cut. Both are whole configurations. A copy of
both texts lies outside /etc/pve while that goes on, and the next run finishes what a killed one began.
"""

import fcntl
import json
import os
import pathlib
import re
import sys
import time

CONFIGS = pathlib.Path("/etc/pve/lxc")
LOCKS = pathlib.Path("/run/lock/lxc")  # PVE's own
COPIES = pathlib.Path("/var/lib/pivot")
LOCK_SECONDS = 10  # as PVE
# as pve-container reads them: [name] begins a snapshot, [pve:pending] what waits for a restart
SECTION = re.compile(r"\[.*\]\s*")
RAW = re.compile(r"(lxc\.[a-z0-9_.-]+)(?::|\s*=)\s*(.*?)\s*")
LOCK = re.compile(r"lock:\s*(\S+)\s*")


class ProblemError(Exception):
    """What stands in the way: a word for the controller, and details."""


def lines_of(text):
    """Lines above the first section, each with its newline, and the rest as it is."""
    lines = text.split("\n")
    first = next((number for number, line in enumerate(lines) if SECTION.fullmatch(line)), None)
    if first is None:
        return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else []), ""
    return [line + "\n" for line in lines[:first]], "\n".join(lines[first:])


def parsed(line):
    """A raw line as [key, value], None for any other."""
    match = RAW.fullmatch(line.rstrip("\n"))
    return list(match.groups()) if match else None


def edited(text, remove, add):
    """The text without some raw lines and with others, which come last above the first section."""
    head, rest = lines_of(text)
    kept = [line for line in head if parsed(line) not in remove]
    there = [parsed(line) for line in kept]
    end = max((number for number, line in enumerate(kept, 1) if line.strip()), default=0)
    if end:
        kept[end - 1] = kept[end - 1].rstrip("\n") + "\n"
    fresh = [f"{key}: {value}\n" for key, value in add if [key, value] not in there]
    return "".join([*kept[:end], *fresh, *kept[end:]]) + rest


def padded(old, new):
    """What the first of the two writes puts there: the new text, no shorter than the old one."""
    return new + b"\n" * (len(old) - len(new))


def write(path, old, new):
    """Bring a file from one text to another, in place and without a moment in which it is no configuration."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        rest, offset = padded(old, new), 0
        while rest:
            done = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[done:], offset + done
        if len(new) < len(old):
            os.ftruncate(descriptor, len(new))
    finally:
        os.close(descriptor)


def between(old, new, now):
    """Whether a text is what a write from old to new leaves when it is killed."""
    whole = padded(old, new)
    return any(now == whole[:done] + old[done:] for done in range(len(whole) + 1))


class Container:
    """One container's file. A text is bytes wherever it is compared or written."""

    def __init__(self, vmid):
        self.path = CONFIGS / f"{vmid}.conf"
        self.lock = LOCKS / f"pve-config-{vmid}.lock"
        self.copy = COPIES / f"lxc-{vmid}.json"

    def read(self):
        """The file as it is."""
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            raise ProblemError("missing", str(self.path)) from None

    def state(self, text):
        """What the controller wants to know of a text."""
        head, _ = lines_of(text.decode("utf-8", "surrogateescape"))
        locks = [match.group(1) for line in head if (match := LOCK.fullmatch(line))]
        return {
            "lines": [line for line in map(parsed, head) if line],
            "lock": locks[-1] if locks else "",
            "interrupted": str(self.copy) if self.copy.exists() else "",
        }

    def locked(self):
        """PVE's lock of this configuration, until the descriptor is closed."""
        self.lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ProblemError("locked", str(self.lock)) from None
                time.sleep(0.1)
            else:
                return descriptor

    def finish(self):
        """Bring what a killed write began to its end; whether that changed the file."""
        try:
            texts = json.loads(self.copy.read_text())
            old, new = (texts[name].encode("utf-8", "surrogateescape") for name in ("before", "after"))
        except FileNotFoundError:
            return False
        except (ValueError, KeyError):  # killed while the copy was made: the file itself was not yet touched
            self.copy.unlink()
            return False
        now = self.read()
        if now not in (old, new) and not between(old, new, now):
            raise ProblemError("interrupted", str(self.copy))
        self.settle(now, new)
        return now != new

    def replace(self, old, new):
        """Keep both texts outside /etc/pve and write the new one."""
        COPIES.mkdir(mode=0o700, parents=True, exist_ok=True)
        both = {"before": old, "after": new}
        text = json.dumps({name: value.decode("utf-8", "surrogateescape") for name, value in both.items()})
        with open(os.open(self.copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        self.settle(old, new)

    def settle(self, old, new):
        """Write and look whether it is there; the copy of both texts goes away only then, or where nothing happened."""
        try:
            write(self.path, old, new)
        except OSError as error:
            why = error.strerror or str(error)
            if self.read() != old:
                raise ProblemError("broken", why, str(self.copy)) from None
            self.copy.unlink()
            raise ProblemError("refused", why) from None
        if self.read() != new:
            raise ProblemError("unverified", str(self.copy))
        self.copy.unlink()

    def apply(self, remove, add):
        """Edit the file under PVE's lock; whether that changed it."""
        descriptor = self.locked()
        try:
            finished = self.finish()
            old = self.read()
            lock = self.state(old)["lock"]
            if lock:
                raise ProblemError("locked", lock)
            new = edited(old.decode("utf-8", "surrogateescape"), remove, add).encode("utf-8", "surrogateescape")
            if new != old:
                self.replace(old, new)
            return finished or new != old
        finally:
            os.close(descriptor)


def answer(request):
    """What is printed."""
    container = Container(int(request["vmid"]))
    said = {"changed": False, "problem": "", "detail": [], "lines": [], "lock": "", "interrupted": ""}
    try:
        if request["do"] == "apply":
            said["changed"] = container.apply(request.get("remove", []), request.get("add", []))
        said.update(container.state(container.read()))
    except ProblemError as problem:
        word, *detail = problem.args
        said.update(problem=word, detail=detail)
    return said


if __name__ == "__main__":
    print(json.dumps(answer(json.loads(sys.argv[1]))))
