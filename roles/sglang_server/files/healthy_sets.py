"""The sets of release, launch configuration and drafter view with which this host's server was found healthy, and the
way back to one. Standard library only. Run on the host as `python3 -I - '{"verb": …, "kept": …, …}'`.

record   keep what the running server was started with: kept, started (what its start read), files, view, release, about
         (plain values for people), at (time)
restore  put a set's files, view and link in their places: kept, id, from (the set that is left, or null), link (that
         names the current release, where it is one). Starting the server is not done here.

Everything is in one file, for root alone: {sets: oldest first, left: ids that a rollback went away from, going: the id
that a rollback is on its way to}. API keys are not kept: a rollback leaves those of now in force. Each step is one
rename and may be repeated. Prints one JSON object.
"""

import contextlib
import grp
import hashlib
import json
import os
import pwd
import re
import stat
import sys
from pathlib import Path

MOST = 8  # sets
KEY = re.compile(r"(?m)^((?:admin-)?api-key): (.*)\n")
MARK = "healthy"  # in a release's directory: when it served well, so that its removal is thought over


def read(kept):
    """What is kept; nothing yet, or nothing that can be read, is nothing."""
    try:
        return json.loads(Path(kept).read_text())
    except (OSError, ValueError):
        return {"sets": [], "left": [], "going": None}


def write(path, text, mode, user=0, group=0):
    """Replace a file in one rename; one that is so already stays, or systemd would take its unit for a new one."""
    fresh = Path(f"{path}.new")
    fresh.unlink(missing_ok=True)
    with contextlib.suppress(OSError, ValueError):
        status = os.lstat(path)
        now = (stat.S_ISREG(status.st_mode), stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
        if now == (True, mode, user, group) and Path(path).read_text(encoding="utf-8") == text:
            return
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
        stream.write(text)
        os.fchown(stream.fileno(), user, group)
        os.fchmod(stream.fileno(), mode)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(path)


def keep(kept, history):
    """Write what is kept, in a directory of root's."""
    Path(kept).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write(kept, json.dumps(history, indent=1), 0o600)


def sha256(text):
    """The digest of a text, as a start records it of a file."""
    return hashlib.sha256(text.encode()).hexdigest()


def record(given):
    """Keep what runs as the newest set, unless a file has changed since the start: then nothing is known of it."""
    started = json.loads(Path(given["started"]).read_text())
    files = []
    for path in given["files"]:
        status, text = os.stat(path), Path(path).read_text()
        if started.get(path, sha256(text)) != sha256(text):
            return {"recorded": None, "because": f"{path} was changed after the start"}
        owner, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid).gr_name
        plain = KEY.sub(r"\1: \n", text)
        files.append({"path": path, "text": plain, "mode": status.st_mode & 0o777, "owner": owner, "group": group})
    view = look(given["view"]) if given["view"] else None
    own = {"release": given["release"], "files": files, "view": view}
    identity = sha256(json.dumps(own, sort_keys=True))[:12]
    history = read(given["kept"])
    others = [each for each in history["sets"] if each["id"] != identity and Path(each["release"]).is_dir()]
    fresh = {"id": identity, "at": given["at"], "about": given["about"], "started": started, **own}
    history["sets"] = [*others, fresh][-MOST:]
    history["left"] = [each["id"] for each in others if each["id"] in history["left"]]
    history["going"] = None
    mark(Path(given["release"]), given["at"])
    keep(given["kept"], history)
    return {"recorded": identity}


def mark(release, text):
    """Let the release itself say when it last served well, where it is one of Pivot's."""
    if (release / "release.json").is_file():
        write(release / MARK, f"{text}\n", 0o644)


def look(view):
    """A drafter's view: path, links with their targets, texts of its files."""
    entries = sorted(Path(view).iterdir())
    links = {entry.name: os.readlink(entry) for entry in entries if entry.is_symlink()}
    return {"path": view, "links": links, "texts": {e.name: e.read_text() for e in entries if e.name not in links}}


def restore(given):
    """Bring a set's files back."""
    history = read(given["kept"])
    wanted = next(each for each in history["sets"] if each["id"] == given["id"])
    history["going"] = wanted["id"]
    if given["from"] and given["from"] not in history["left"]:
        history["left"].append(given["from"])
    keep(given["kept"], history)
    if wanted["view"]:
        build(wanted["view"])
    for each in wanted["files"]:
        text = with_keys(each["text"], Path(each["path"]))
        user, group = pwd.getpwnam(each["owner"]).pw_uid, grp.getgrnam(each["group"]).gr_gid
        write(each["path"], text, each["mode"], user, group)
    if Path(given["link"]).is_symlink():
        point(Path(given["link"]), Path(wanted["release"]))
    return {"restored": wanted["id"]}


def with_keys(text, path):
    """A kept text with the API keys that the file holds now, each in its place."""
    now = {match[1]: match[0] for match in KEY.finditer(path.read_text())} if path.exists() else {}
    text = KEY.sub(lambda match: now.pop(match[1], ""), text)
    return text + "".join(now.values())


def build(view):
    """Make a view where it is missing or incomplete; nothing names it yet."""
    place = Path(view["path"])
    place.mkdir(mode=0o755, parents=True, exist_ok=True)
    place.chmod(0o755)
    for name, target in view["links"].items():
        fresh = place / f".{name}.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target)
        fresh.replace(place / name)
    for name, text in view["texts"].items():
        write(place / name, text, 0o644)


def point(link, release):
    """Let a link name a release, relative where it lies beside the releases."""
    inside = release.is_relative_to(link.parent)
    fresh = link.parent / f".{link.name}.new"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(release.relative_to(link.parent) if inside else release)
    fresh.replace(link)


def main(given):
    """Carry out one verb."""
    print(json.dumps({"record": record, "restore": restore}[given["verb"]](given)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
