"""What an SGLang service is on this host: files, unit, main process, last start. Read-only.

argv[1]: JSON {unit, user, python, started, files: [path], modes: [path], texts: [path], space: [directory], launch,
views, environment: [name], own: [name], named: [path], caches, healthy}; prints one JSON object. `environment` names
variables whose values are wanted: of no other one the value leaves the host; `own` are those that the unit itself sets.
Secrets are masked in `texts`, and of a variable that holds one the digest is given. `named` are files that the
settings name, `caches` the directory with those of compiled kernels, one a release, `healthy` the file of sets that
were found healthy.
"""

import grp
import hashlib
import json
import os
import pathlib
import pwd
import re
import stat
import subprocess
import sys

from pivot.bundles.redact import Redactor
from pivot.bundles.secret_names import secret_name

MILESTONES = re.compile(
    r"Load weight (begin|end)|fired up and ready|[Gg]raph.*(begin|end)|Error|Exception|error:|sigquit|watchdog"
)

# beginnings of variables that concern the engine
FAMILIES = ("SGLANG_", "SGL_", "NCCL_", "HF_", "CUDA_", "TORCH", "OMP_", "PYTORCH_", "FLASHINFER_", "TRANSFORMERS_")


def digest(path):
    """Content of a file, or for a directory: of its links' targets and its files. None when it is missing."""
    path = pathlib.Path(path)
    if path.is_dir():
        parts = [
            f"{entry.name} -> {os.readlink(entry)}" if entry.is_symlink() else f"{entry.name} {digest(entry)}"
            for entry in sorted(path.iterdir())
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
    if not path.is_file():
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()


def text(path):
    """Content of a small text file with secrets masked, None when it is missing."""
    try:
        content = pathlib.Path(path).read_text()
    except OSError:
        return None
    return Redactor().text(re.sub(r"(?m)^((?:admin-)?api-key): .*$", r'\1: "********"', content))


def told(name, value):
    """A variable's value; of one that is secret, by its name or in its value, only what tells whether it is another."""
    if not secret_name(name) and Redactor().text(value) == value:
        return value
    return "sha256:" + hashlib.sha256(value.encode()).hexdigest()


def free_bytes(path):
    """What may still be written where a directory is or will be."""
    path = pathlib.Path(path)
    while not path.is_dir():
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def running_view(views, launch):
    """The drafter view that launch.yaml names now."""
    found = re.search(re.escape(views) + r"/\w+", text(launch) or "")
    return found.group(0) if found else "/nonexistent"


def mode(path):
    """Owner, group and permissions as `root:sglang 0640`, None when it is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    try:
        owner, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        owner, group = status.st_uid, status.st_gid
    return f"{owner}:{group} {stat.S_IMODE(status.st_mode):04o}"


def show(unit):
    """A selection of `systemctl show`."""
    names = "LoadState,ActiveState,SubState,MainPID,UnitFileState,NRestarts,DropInPaths,InvocationID,NeedDaemonReload"
    names += ",ExecMainStartTimestampMonotonic,ActiveEnterTimestampMonotonic,Result,SupplementaryGroups"
    output = subprocess.run(
        ["systemctl", "show", unit, "--property", names], stdout=subprocess.PIPE, universal_newlines=True, check=False
    ).stdout
    return dict(line.partition("=")[::2] for line in output.splitlines())


def process(pid, started, names, own):
    """Command line, wanted variables and what the start recorded, of the running main process."""
    base = pathlib.Path("/proc", str(pid))
    try:
        command = base.joinpath("cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        raw = base.joinpath("environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    environment = dict(item.partition("=")[::2] for item in raw if item)
    try:
        record = json.loads(pathlib.Path(started).read_text())
    except (OSError, ValueError):
        record = None
    return {
        "pid": pid,
        "argv": command,
        "environment": {name: told(name, environment[name]) for name in names if name in environment},
        "others": sorted(
            name for name in environment if name.startswith(FAMILIES) and name not in names and name not in own
        ),
        "started": record,
    }


def seen(path, user, more=()):
    """Kind of a path (file, directory, other, missing), and whether a user may read it: None for no such user.

    more: names of groups that the unit gives besides the user's own.
    """
    try:
        status = os.stat(path)
    except OSError:
        return {"kind": "missing", "readable": False}
    kind = "file" if stat.S_ISREG(status.st_mode) else "directory" if stat.S_ISDIR(status.st_mode) else "other"
    try:
        account = pwd.getpwnam(user)
        groups = [*os.getgrouplist(user, account.pw_gid), *(grp.getgrnam(name).gr_gid for name in more)]
    except KeyError:
        return {"kind": kind, "readable": None}
    needed = os.R_OK | os.X_OK if kind == "directory" else os.R_OK
    return {"kind": kind, "readable": granted(path, needed, account.pw_uid, account.pw_gid, groups)}


def granted(path, needed, uid, gid, groups):
    """Whether the kernel lets a user have it, access control lists included: a child that becomes that user asks."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups(groups)
            os.setgid(gid)
            os.setuid(uid)
            code = 0 if os.access(path, needed) else 1
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def journal(invocation):
    """Milestones and errors of the current or last start as [unix time, message], at most 400."""
    if not invocation:
        return []
    command = [
        "journalctl",
        f"_SYSTEMD_INVOCATION_ID={invocation}",
        "--output=json",
        "--output-fields=MESSAGE",
        "-n",
        "20000",
    ]
    output = subprocess.run(command, stdout=subprocess.PIPE, universal_newlines=True, check=False).stdout
    found = []
    for number, line in enumerate(output.splitlines()):
        entry = json.loads(line)
        message = entry.get("MESSAGE")
        if isinstance(message, list):  # lines with control characters come as byte arrays
            message = bytes(message).decode(errors="replace")
        # launch arguments are printed in full, with the API key among them
        if message and "server_args=" not in message and (number == 0 or MILESTONES.search(message)):
            found.append([int(entry["__REALTIME_TIMESTAMP"]) / 1e6, message[:400]])
    return found[:400]


def engine(python):
    """The interpreter with `current`-like links resolved, and the version of sglang beside it."""
    venv = pathlib.Path(python).parent.parent
    if not os.access(python, os.X_OK):
        return {"python": None, "version": None}
    real = venv.resolve()
    found = sorted(real.glob("lib/python3*/site-packages/sglang-*.dist-info"))
    version = found[0].name[len("sglang-") : -len(".dist-info")] if found else None
    return {"python": str(real / "bin" / pathlib.Path(python).name), "version": version}


def left_caches(caches, releases):
    """Directories of compiled kernels whose release is no more."""
    try:
        return sorted(entry.name for entry in pathlib.Path(caches).iterdir() if not (releases / entry.name).exists())
    except OSError:
        return []  # none were ever compiled


def healthy(path):
    """The sets that were found healthy, without the texts of their files; with what of each is missing now."""
    try:
        kept = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError):
        return {"sets": [], "left": [], "going": None}
    for each in kept["sets"]:
        del each["files"]
        view = each["view"] or {"path": None, "links": {}}
        needed = [each["release"], each["about"]["model"], *view["links"].values()]
        each["missing"] = [place for place in needed if not os.path.exists(place)]
        each["view"] = view["path"]
    return kept


def main():
    """Gather and print."""
    given = json.loads(sys.argv[1])
    unit = show(given["unit"])
    pid = int(unit.get("MainPID", "0") or 0)
    try:
        pwd.getpwnam(given["user"])
        user = True
    except KeyError:
        user = False
    drop_ins = [pathlib.Path(path).name for path in unit.get("DropInPaths", "").split()]
    found = engine(given["python"])
    release = pathlib.Path(found["python"] or given["python"]).parent.parent
    result = {
        "engine": found,
        "release": digest(release / "release.json"),
        "caches": left_caches(given["caches"], release.parent),
        "healthy": healthy(given["healthy"]),
        "user": user,
        "files": {path: digest(path) for path in given["files"]},
        "modes": {path: mode(path) for path in given["modes"]},
        "texts": {path: text(path) for path in given["texts"]},
        "free_bytes": {path: free_bytes(path) for path in given["space"]},
        "views": sorted(os.listdir(given["views"])) if os.path.isdir(given["views"]) else [],
        "view": text(pathlib.Path(running_view(given["views"], given["launch"]), "config.json")),
        "unit": unit,
        "drop_ins": drop_ins,
        "running": process(pid, given["started"], given["environment"], given["own"]) if pid else None,
        "journal": journal(unit.get("InvocationID")),
        "named": {
            path: seen(path, given["user"], unit.get("SupplementaryGroups", "").split()) for path in given["named"]
        },
        "interpreter": sys.executable,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
