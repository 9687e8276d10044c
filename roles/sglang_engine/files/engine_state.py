"""What a host has of the engine. Run on the host, read only, as `python3 -I - '{"root": …, "python": …, …}'`, in one
piece with `pivot.engines.installed`.

Arguments (JSON): root, the engine's directory; python, the interpreter for releases; release, the wanted release's
id; shared, the directory for wheels that other hosts see too, or empty; path, optional, another directory to look at in
the place of `<root>/releases/<release>`, all of whose files are compared with their hashes then.
Prints one JSON object: root, python, free_bytes, shared (null if there is no such directory), current, releases,
in_use, release (null if there is none), leftovers.
"""

import fcntl
import hashlib
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

from pivot.engines import installed

ENGINE = "sglang"
PROBE = "import json, platform, sys; print(json.dumps([sys.implementation.name, platform.python_version()]))"
HEALTHY = "healthy"  # in a release's directory once a server of it has answered well
SHORT = 100  # characters of a time
SHOWN = 5  # problems of a kind that are listed one by one
PATIENCE = 60  # seconds that a change gets to end which a killed run began


def wait_for_changes(root):
    """Until nothing that engine_release.py began is under way below a root: half of it would be mistaken for damage."""
    try:
        descriptor = os.open(root, os.O_RDONLY)
    except OSError:
        return  # nothing was ever built here
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.2)
    os.close(descriptor)


def interpreter(path):
    """Implementation and version of an interpreter, and what it runs on; `error` if it cannot be used."""
    facts = {"path": path, "error": "", "implementation": "", "version": ""}
    facts["machine"] = platform.machine()
    facts["glibc"] = os.confstr("CS_GNU_LIBC_VERSION") or ""
    try:
        done = subprocess.run([path, "-I", "-c", PROBE], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            facts["implementation"], facts["version"] = json.loads(done.stdout)
        else:
            facts["error"] = "it ends with status %d" % done.returncode
    except FileNotFoundError:
        facts["error"] = "it does not exist"
    except (ValueError, TypeError):
        facts["error"] = "it is no Python: it did not answer with its version"
    except (OSError, subprocess.SubprocessError) as error:
        facts["error"] = str(error)
    return facts


def free_bytes(path):
    """What root and others may still write on the file system of a directory, or of its nearest parent."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def current(root):
    """The id of the release that `current` points to, another target's path, or None without the link."""
    try:
        target = os.readlink(os.path.join(root, "current"))
    except OSError:
        return None
    parent, name = os.path.split(os.path.normpath(os.path.join(root, target)))
    return name if parent == os.path.join(root, "releases") else target


def record_of(path):
    """A release's release.json, or None when it is missing or broken."""
    try:
        with open(os.path.join(path, "release.json"), encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def healthy(path):
    """When a server of a release was last found healthy, 0 where that is not told; empty when none ever was."""
    try:
        with open(os.path.join(path, HEALTHY), encoding="utf-8", errors="replace") as file:
            return file.read(SHORT).strip() or "0"
    except OSError:
        return ""


def releases(root):
    """Every directory under releases: id, time of building (empty without a record), when it was found healthy."""
    try:
        names = sorted(os.listdir(os.path.join(root, "releases")))
    except OSError:
        return []
    found = []
    for name in names:
        path = os.path.join(root, "releases", name)
        if os.path.isdir(path):
            built = str((record_of(path) or {}).get("built", ""))
            found.append({"id": name, "built": built, "healthy": healthy(path)})
    return found


def in_use(root):
    """Ids of releases whose files a running process has mapped."""
    prefix = os.path.realpath(os.path.join(root, "releases")) + os.sep  # as the kernel names them
    found = set()
    for pid in os.listdir("/proc"):
        if not pid.isdigit():
            continue
        try:
            with open("/proc/%s/maps" % pid, encoding="utf-8", errors="surrogateescape") as file:
                text = file.read()
        except OSError:
            continue  # ended meanwhile, or not ours to read
        start = text.find(prefix)
        while start >= 0:
            end = text.find(os.sep, start + len(prefix))
            found.add(text[start + len(prefix) : end])
            start = text.find(prefix, end)
    return sorted(found)


def leftovers(root):
    """What a build leaves that was interrupted, or that ended just before it was tidied up, relative to root."""
    found = [name for name in ("incoming", ".current.new") if os.path.lexists(os.path.join(root, name))]
    building = os.path.join(root, "building")
    if os.path.isdir(building):
        found += [os.path.join("building", name) for name in sorted(os.listdir(building))]
    return found


def site_packages(path):
    """The release's one site-packages directory, or None."""
    library = os.path.join(path, "lib")
    try:
        names = sorted(os.listdir(library))
    except OSError:
        return None
    for name in names:
        candidate = os.path.join(library, name, "site-packages")
        if name.startswith("python") and os.path.isdir(candidate):
            return candidate
    return None


def name_and_version(dist_info):
    """What a distribution's METADATA says it is."""
    fields = {}
    with open(os.path.join(dist_info, "METADATA"), encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                break
            key, _, value = line.partition(":")
            fields.setdefault(key, value.strip())
    return fields.get("Name", ""), fields.get("Version", "")


def lost_files(site, dist_info):
    """Files of a distribution's RECORD that are missing or, below site-packages, have another size; no bytecode."""
    lost = []
    for name, _, size in installed.rows(pathlib.Path(dist_info)):
        if name.endswith(".pyc"):
            continue
        try:
            status = os.stat(os.path.join(site, name))
        except OSError:
            lost.append(name)
            continue
        # scripts are rewritten when the release moves to its place
        if size and not name.startswith("..") and status.st_size != int(size):
            lost.append(name)
    return lost


def sha256(path):
    """The sha256 of a small file, in hex."""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def damage(site, dist_info, name, every):
    """What is wrong with a distribution's files, as a sentence; empty if nothing is.

    Sizes of all files, and the content of the engine's own; with `every` the content of all.
    """
    lost = lost_files(site, dist_info)
    if lost:
        return "%s: %d files missing or of another size, e.g. %s" % (name, len(lost), lost[0])
    if every or name == ENGINE:
        wrong = installed.altered(pathlib.Path(site), pathlib.Path(dist_info), ENGINE if name == ENGINE else "")
        if wrong:
            return "%s: %d files are not as published, e.g. %s (%s)" % (name, len(wrong), *wrong[0])
    return ""


def inspect(path, every=False):
    """Record, installed distributions, hashes of their RECORDs, and problems of a release directory."""
    site = site_packages(path)
    report = {"record": record_of(path), "installed": {}, "records": {}, "problems": []}
    problems = report["problems"]
    if not os.path.exists(os.path.join(path, "bin", "python")):
        problems.append("bin/python is missing, or the interpreter that it points to")
    if site is None:
        problems.append("it has no site-packages")
        return report
    damaged = []
    for entry in sorted(os.listdir(site)):
        if not entry.endswith(".dist-info"):
            continue
        dist_info = os.path.join(site, entry)
        try:
            name, version = name_and_version(dist_info)
            damaged.append(damage(site, dist_info, name, every))
            report["records"][name] = sha256(os.path.join(dist_info, "RECORD"))
        except (OSError, ValueError) as error:
            damaged.append("%s cannot be read (%s)" % (entry, error))
            continue
        report["installed"][name] = version
    damaged = [sentence for sentence in damaged if sentence]
    problems.extend(damaged[:SHOWN])
    if len(damaged) > SHOWN:
        problems.append("and %d more distributions" % (len(damaged) - SHOWN))
    return report


def printable(value):
    """The same with bytes that are no UTF-8, as names of files may hold, written out (caf\\xe9)."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if isinstance(value, dict):
        return {key: printable(item) for key, item in value.items()}
    return [printable(item) for item in value] if isinstance(value, list) else value


def main(arguments):
    """Print the state as JSON."""
    root = os.path.normpath(arguments["root"])
    wait_for_changes(root)
    path = arguments.get("path") or os.path.join(root, "releases", arguments["release"])
    state = {
        "root": root,
        "python": interpreter(arguments["python"]),
        "free_bytes": free_bytes(root),
        "shared": arguments["shared"] if not arguments["shared"] or os.path.isdir(arguments["shared"]) else None,
        "current": current(root),
        "releases": releases(root),
        "in_use": in_use(root),
        "release": inspect(path, "path" in arguments) if os.path.isdir(path) else None,
        "leftovers": leftovers(root),
    }
    print(json.dumps(printable(state)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
