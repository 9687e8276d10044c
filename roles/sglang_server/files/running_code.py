"""What code the processes of an SGLang service really run. Standard library only, Python 3.9, read-only, nothing is
imported. Sent in one piece with `pivot.engines.installed`.

argv[1]: JSON {pid, python, writable: [directory]}: the main process, the interpreter that it should run, directories in
which compiled kernels may lie. Prints one JSON object, described at `look`.
"""

import json
import re
import sys
from pathlib import Path

from pivot.engines import installed

# variables that bring code from elsewhere into every Python process
VARIABLES = ("LD_PRELOAD", "PYTHONHOME", "PYTHONPATH")
CODE = re.compile(r"\.so(\.[0-9.]+)?$")
SYSTEM = ("/usr/", "/lib/", "/lib64/", "/dev/", "/run/")
# distributions whose files are read; of the others sizes are compared, which takes a tenth of the time
READ = ("sglang", "sgl_kernel", "sgl-kernel")


def siblings(pid):
    """The processes of the same unit, which have the same control groups; the main one first."""
    own = Path(f"/proc/{pid}/cgroup").read_bytes()
    found = [pid]
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            same = path.read_bytes() == own
        except OSError:
            continue  # it ended meanwhile
        if same and int(path.parent.name) != pid:
            found.append(int(path.parent.name))
    return found


def mapped(pids):
    """Paths of the libraries that processes have mapped."""
    found = set()
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        for line in text.splitlines():
            path = line[line.find("/") :] if "/" in line else ""
            if CODE.search(path.replace(" (deleted)", "")):
                found.add(path)
    return sorted(found)


def outside(path, release, bases, writable):
    """Whether a mapped library is not of the release, the system or the base interpreter, nor made at run time."""
    if path.startswith((f"{release}/", *writable)):
        return False
    if "/site-packages/" in path or "/dist-packages/" in path:
        return True
    return not path.startswith((*SYSTEM, *bases))


def virtual(release):
    """What pyvenv.cfg says: directories of the base installation, and whether its packages count too.

    The interpreter that it names may be a link to one whose libraries lie beside itself.
    """
    words = [line.partition("=")[::2] for line in installed.lines(release / "pyvenv.cfg")]
    said = {name.strip().lower(): value.strip() for name, value in words}
    named, real = Path(said.get("home", "/usr/bin")), (release / "bin/python").resolve().parent
    bases = tuple(dict.fromkeys(f"{path.parent}/" for path in (named, real) if path != release / "bin"))
    return bases, said.get("include-system-site-packages", "").lower() == "true"


def modules(directory):
    """What lies in a process's directory and would be imported before everything else."""
    try:
        entries = sorted(Path(directory).iterdir())
    except OSError:
        return []
    found = [entry for entry in entries if entry.suffix == ".py" or (entry / "__init__.py").is_file()]
    return [[str(entry), "the working directory"] for entry in found]


def differing(site):
    """Files of all distributions that are not as their RECORDs say, as [path, what]."""
    found = []
    for info in sorted(site.glob("*.dist-info")):
        name = info.name.partition("-")[0]
        try:
            package = name if name == "sglang" else ""
            found += installed.altered(site, info, package, content=name.startswith(READ))
        except (OSError, ValueError):
            found.append([f"{info.name}/RECORD", "unreadable"])
    return found


def look(pid, python, writable):
    """The answer.

    release: its directory; begins: the command line's first word; mapped: how many libraries of the release are in
    memory; outside, gone: libraries of elsewhere, and of files that are no more; altered: [path, what];
    elsewhere: [what, why]; variables: names.
    """
    release = Path(python).parent.parent
    bases, system = virtual(release)
    libraries = mapped(siblings(pid))
    own = [path for path in libraries if path.startswith(f"{release}/")]
    (site,) = [*release.glob("lib/python3*/site-packages"), Path("/nonexistent")][:1]
    raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    given = {item.partition("=")[0] for item in raw if item.partition("=")[2]}
    elsewhere = installed.elsewhere(site) + modules(Path(f"/proc/{pid}/cwd").resolve())
    return {
        "release": str(release),
        "begins": Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace"),
        "mapped": len([path for path in own if not path.endswith(" (deleted)")]),
        "outside": [path for path in libraries if outside(path, str(release), bases, writable)],
        "gone": [path.replace(" (deleted)", "") for path in own if path.endswith(" (deleted)")],
        "altered": differing(site),
        "elsewhere": elsewhere + ([[bases[0], "include-system-site-packages of pyvenv.cfg"]] if system else []),
        "variables": [name for name in VARIABLES if name in given],
    }


def main(given):
    """Print the answer, null for a process that is gone."""
    try:
        answer = look(given["pid"], given["python"], tuple(f"{path}/" for path in given["writable"]))
    except OSError:
        answer = None
    print(json.dumps(answer))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
