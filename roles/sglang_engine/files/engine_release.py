"""Changes to a host's releases. Run on the host as `python3 -I - '{"verb": …, "root": …, …}'`.

Verbs: prepare (directories are there, what an interrupted build left is gone), finish (a built environment learns
its final place), publish (it moves there and becomes current), link (an existing release becomes current), remove
(releases and their logs), tidy (what builds that are over left behind goes). Prints one JSON object,
{"error": sentence} when something is in the way. Only one works on a root at a time: a publication goes on when its
play is killed, and the next run waits for its end.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import stat
import sys
import time

GRACE = 10  # seconds that a leftover process gets to end by itself


def prepare(arguments):
    """Make the directories, for everybody to read, end what an interrupted build still runs, remove what it left.

    When a play is killed, pip, the compiler or the receiver of wheels goes on here; it must not write into the next
    attempt.
    """
    root = arguments["root"]
    for path in [root] + [os.path.join(root, name) for name in ("releases", "building", "logs", "incoming")]:
        os.makedirs(path, mode=0o755, exist_ok=True)
        set_mode(path)
    for path in filter(None, [arguments["incoming"], arguments["shared"]]):
        os.makedirs(path, mode=0o755, exist_ok=True)
    building = os.path.join(root, "building") + os.sep
    receiving = [os.path.join(root, "incoming"), *filter(None, [arguments["shared"]])]
    ended = end_processes([building, *(path + os.sep for path in receiving)])
    removed = sorted(os.listdir(building))
    for name in removed:
        shutil.rmtree(os.path.join(building, name))
    if os.path.exists(arguments["log"]):
        os.unlink(arguments["log"])
    return {"ended": ended, "removed": removed}


def tidy(arguments):
    """Remove what builds left that were interrupted, or that ended just before they were tidied up."""
    root = arguments["root"]
    incoming, building = os.path.join(root, "incoming"), os.path.join(root, "building")
    ended = end_processes([building + os.sep, incoming + os.sep])
    for path in [incoming] + [os.path.join(building, name) for name in os.listdir(building)]:
        if os.path.isdir(path):
            shutil.rmtree(path)
    link = os.path.join(root, ".current.new")
    if os.path.lexists(link):
        os.unlink(link)
    return {"ended": ended}


def end_processes(paths):
    """End every process that was started with an argument below one of the paths, or works there; returns their ids."""
    found = processes(paths)
    for number in found:
        send(number, signal.SIGTERM)
    limit = time.monotonic() + GRACE
    while processes(paths) and time.monotonic() < limit:
        time.sleep(0.1)
    for number in processes(paths):
        send(number, signal.SIGKILL)
    return found


def processes(paths):
    """Ids of other processes whose command line has an argument, or whose working directory is, below one of the paths.

    The receiving rsync names its directory nowhere but works in it: that one the kernel names, without links.
    """
    found = []
    prefixes = tuple(os.fsencode(name) for path in paths for name in (path, os.path.realpath(path) + os.sep))
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open("/proc/%s/cmdline" % name, "rb") as file:
                words = file.read().split(b"\0")
            words.append(os.fsencode(os.readlink("/proc/%s/cwd" % name) + os.sep))
        except OSError:
            continue  # it ended meanwhile
        if any(word.startswith(prefixes) for word in words):
            found.append(int(name))
    return found


def send(number, what):
    """Signal a process that may have ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(number, what)


def finish(arguments):
    """Rewrite the paths that `venv` and pip wrote into scripts, and let everybody read, nobody but root write.

    An environment is built in `<root>/building` and renamed when it is whole: a release is complete or absent, also
    while an earlier one of the same name serves. Only `pyvenv.cfg` and text files in `bin` hold the path.
    """
    staging, final = arguments["staging"], arguments["final"]
    folder = os.path.join(staging, "bin")
    paths = [os.path.join(staging, "pyvenv.cfg")] + [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    rewritten = 0
    for path in paths:
        if os.path.islink(path) or not os.path.isfile(path):
            continue
        with open(path, "rb") as file:
            content = file.read()
        if b"\0" in content or os.fsencode(staging) not in content:
            continue
        with open(path, "r+b") as file:
            file.truncate()
            file.write(content.replace(os.fsencode(staging), os.fsencode(final)))
        rewritten += 1
    for parent, _, names in os.walk(staging):
        set_mode(parent)
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                set_mode(path)
    return {"rewritten": rewritten}


def set_mode(path):
    """Readable for all, executable for all where it is for the owner, writable for the owner alone."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    wanted = (mode | 0o444 | (0o111 if mode & 0o100 else 0)) & ~0o022
    if wanted != mode:
        os.chmod(path, wanted)


def publish(arguments):
    """Write release.json, move the environment to its place (a damaged one there goes), and make it current."""
    root, identity, staging = arguments["root"], arguments["id"], arguments["staging"]
    final = os.path.join(root, "releases", identity)
    with open(os.path.join(staging, "release.json"), "w", encoding="utf-8") as file:
        json.dump(arguments["record"], file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    old = os.path.join(root, "building", identity + ".old")
    shutil.rmtree(old, ignore_errors=True)  # of an interrupted attempt; a failure shows in the rename
    if os.path.lexists(final):
        os.rename(final, old)
    os.rename(staging, final)
    shutil.rmtree(old, ignore_errors=True)  # a server may have left files there; the next build removes them
    return link(arguments)


def link(arguments):
    """Let `current` point to a release, by renaming a new link over the old one."""
    root, identity = arguments["root"], arguments["id"]
    temporary = os.path.join(root, ".current.new")
    if os.path.lexists(temporary):
        os.unlink(temporary)
    os.symlink(os.path.join("releases", identity), temporary)
    os.replace(temporary, os.path.join(root, "current"))
    return {"current": identity}


def remove(arguments):
    """Remove releases with their logs, by id. Each is moved away first: half of one must not pass for a release."""
    root = arguments["root"]
    for identity in arguments["ids"]:
        if os.path.basename(identity) != identity or identity in ("", ".", ".."):
            return {"error": "'%s' is no release id" % identity}
        going = os.path.join(root, "building", identity + ".old")
        os.makedirs(os.path.dirname(going), mode=0o755, exist_ok=True)
        if os.path.lexists(going):
            shutil.rmtree(going)
        os.rename(os.path.join(root, "releases", identity), going)
        shutil.rmtree(going)
        log = os.path.join(root, "logs", identity + ".log")
        if os.path.exists(log):
            os.unlink(log)
    return {"removed": arguments["ids"]}


@contextlib.contextmanager
def locked(root):
    """Hold the root's lock."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def main(arguments):
    """Carry out one verb."""
    os.umask(0o022)  # whatever root's is: servers are no root
    verbs = {"prepare": prepare, "finish": finish, "publish": publish, "link": link, "remove": remove, "tidy": tidy}
    try:
        os.makedirs(arguments["root"], mode=0o755, exist_ok=True)
        with locked(arguments["root"]):
            result = verbs[arguments["verb"]](arguments)
    except OSError as error:
        result = {"error": str(error)}
    print(json.dumps(result))
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
