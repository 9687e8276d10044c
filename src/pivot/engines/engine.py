"""The engine as pinned: lock files, gaps, and the release that they make.

Pure: paths, processes and the network belong to `pivot.engines.wheelhouse`, hosts to the role `sglang_engine`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from pivot.findings import Finding, Severity

_TARGET = re.compile(r"^#\s*target:\s*python (\d+\.\d+), (\w+), glibc (\d+)\.(\d+)\s*$", re.MULTILINE)
_LOCKED = re.compile(r"^([A-Za-z0-9][\w.-]*)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})+)$")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
# glibc versions at which older tags of the manylinux standard, and their aliases, were fixed
_OLDEST_GLIBC_MINOR = 5
_ALIASES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


def canonical(name: str) -> str:
    """A package name as PEP 503 compares it: lower case, with single dashes."""
    return str(canonicalize_name(name))


class EngineError(ValueError):
    """A lock, gaps or state file that cannot be used; the text says which, where and what would be right."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """The interpreter and platform that a lock is made for: python "3.11", machine "x86_64", glibc (2, 36)."""

    python: str
    machine: str
    glibc: tuple[int, int]

    @property
    def abi(self) -> str:
        """CPython's ABI tag, e.g. cp311."""
        return "cp" + self.python.replace(".", "")

    def platforms(self) -> list[str]:
        """Platform tags of wheels that run there, newest first."""
        major, newest = self.glibc
        tags: list[str] = []
        for minor in range(newest, _OLDEST_GLIBC_MINOR - 1, -1):
            tags.append(f"manylinux_{major}_{minor}_{self.machine}")
            if minor in _ALIASES:
                tags.append(f"{_ALIASES[minor]}_{self.machine}")
        return [*tags, f"linux_{self.machine}"]

    def markers(self) -> dict[str, str]:
        """The environment in which a wheel's requirements are to be read (PEP 508), without `extra`."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }


@dataclasses.dataclass(frozen=True, slots=True)
class LockedWheel:
    """One line of a lock: hashes are sha256 in hex; a finished lock has exactly one."""

    name: str
    version: str
    hashes: tuple[str, ...]

    def line(self) -> str:
        """The line as pip reads it."""
        return " ".join([f"{self.name}=={self.version}", *(f"--hash=sha256:{value}" for value in self.hashes)])


@dataclasses.dataclass(frozen=True, slots=True)
class Lock:
    """A parsed lock file: wheels by canonical name; sha256 of its text."""

    source: str
    target: Target
    wheels: Mapping[str, LockedWheel]
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True)
class Distribution:
    """A source tree of this project that is installed beside the locked wheels; tree is its `tree_sha256`."""

    name: str
    version: str
    tree: str


@dataclasses.dataclass(frozen=True, slots=True)
class Gaps:
    """What a lock leaves out or replaces on purpose: absent {name: reason}, replaced {name: (version, reason)}."""

    source: str
    absent: Mapping[str, str]
    replaced: Mapping[str, tuple[str, str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Metadata:
    """What a wheel says about itself: requires are its Requires-Dist lines."""

    name: str
    version: str
    requires: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """The release that a host should run: id as the directory is called; patches their sha256 in order; installed
    {canonical name: version}."""

    id: str
    version: str
    accelerator: str
    digest: str
    lock_sha256: str
    target: Target
    distributions: tuple[Distribution, ...]
    patches: tuple[str, ...]
    installed: Mapping[str, str]


def parse_target(text: str, source: str) -> Target:
    """The `# target:` line of a lock or of its .in file."""
    match = _TARGET.search(text)
    if match is None:
        raise EngineError(
            f"{source}: no line like '# target: python 3.11, x86_64, glibc 2.36', which says what the wheels are for"
        )
    python, machine, major, minor = match.groups()
    return Target(python, machine, (int(major), int(minor)))


def parse_lock(text: str, source: str) -> Lock:
    """A lock file: the `# target:` line, comments, and one `name==version --hash=sha256:…` per wheel."""
    target = parse_target(text, source)
    wheels: dict[str, LockedWheel] = {}
    joined = text.replace("\\\n", " ")  # continued lines, as uv writes them
    for line in (raw.strip() for raw in joined.splitlines()):
        if not line or line.startswith("#"):
            continue
        match = _LOCKED.match(line)
        if match is None:
            raise EngineError(
                f"{source}: '{line[:100]}' is not of the form name==version --hash=sha256:<64 hex digits>;"
                " remake the lock with `make lock`"
            )
        name = canonical(match[1])
        if name in wheels:
            raise EngineError(f"{source}: {name} is locked twice; remake the lock with `make lock`")
        wheels[name] = LockedWheel(name, match[2], tuple(_HASH.findall(match[3])))
    if not wheels:
        raise EngineError(f"{source}: no wheel is locked; remake the lock with `make lock`")
    return Lock(source, target, wheels, hashlib.sha256(text.encode()).hexdigest())


def render_lock(target: Target, wheels: Iterable[LockedWheel], made_from: str) -> str:
    """The text of a lock file, sorted by name."""
    major, minor = target.glibc
    head = [
        f"# target: python {target.python}, {target.machine}, glibc {major}.{minor}",
        f"# Made by `make lock` from {made_from} and its gaps file; do not edit.",
    ]
    return "\n".join([*head, *(wheel.line() for wheel in sorted(wheels, key=lambda item: item.name))]) + "\n"


def parse_gaps(data: object, source: str) -> Gaps:
    """A gaps file, as loaded from YAML: `absent: {name: reason}`, `replaced: {name: {version, reason}}`."""
    if not isinstance(data, dict) or set(data) - {"absent", "replaced"}:
        raise EngineError(f"{source}: a gaps file is a mapping with the keys 'absent' and 'replaced' only")
    absent: dict[str, str] = {}
    for name, reason in _mapping(data, "absent", source).items():
        if not isinstance(reason, str) or not reason.strip():
            raise EngineError(f"{source}: absent.{name} needs its reason as text")
        absent[canonical(str(name))] = reason
    replaced: dict[str, tuple[str, str]] = {}
    for name, entry in _mapping(data, "replaced", source).items():
        if not isinstance(entry, dict) or set(entry) != {"version", "reason"}:
            raise EngineError(f"{source}: replaced.{name} needs exactly 'version' and 'reason'")
        version, reason = entry["version"], entry["reason"]
        if not isinstance(version, str) or not isinstance(reason, str) or not reason.strip():
            raise EngineError(f"{source}: replaced.{name}: 'version' and 'reason' are texts; quote the version")
        replaced[canonical(str(name))] = (version, reason)
    both = sorted(set(absent) & set(replaced))
    if both:
        raise EngineError(f"{source}: {', '.join(both)} cannot be both absent and replaced")
    return Gaps(source, absent, replaced)


def _mapping(data: dict[Any, Any], key: str, source: str) -> dict[Any, Any]:
    """data[key] as a mapping; a missing or empty one is empty."""
    value = data.get(key) or {}
    if not isinstance(value, dict):
        raise EngineError(f"{source}: '{key}' must be a mapping from package names")
    return value


def tree_sha256(files: Mapping[str, str]) -> str:
    """The hash of a tree from {relative path with slashes: sha256 of the file}, independent of order and metadata."""
    return hashlib.sha256("".join(f"{path}\0{files[path]}\n" for path in sorted(files)).encode()).hexdigest()


def release_digest(lock_sha256: str, distributions: Iterable[Distribution], patches: Sequence[str] = ()) -> str:
    """Twelve hex digits that change with the lock, with every local distribution's source and with the patches.

    patches: their sha256, in the order in which they are applied. The source counts, not the built wheel: compression
    differs between machines, the release should not.
    """
    lines = [lock_sha256]
    lines += [f"{item.name}=={item.version} {item.tree}" for item in sorted(distributions, key=lambda it: it.name)]
    lines += [f"patch {digest}" for digest in patches]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def patched_version(version: str, patches: Sequence[str]) -> str:
    """The version of a patched SGLang: the published one with a local label (PEP 440) that changes with the patches.

    patches: their sha256, in order; without any it is the published version.
    """
    if not patches:
        return version
    label = "pivot" + hashlib.sha256("\n".join(patches).encode()).hexdigest()[:8]
    return f"{version}{'.' if '+' in version else '+'}{label}"


def wanted_release(
    version: str, accelerator: str, lock: Lock, distributions: Sequence[Distribution], patches: Sequence[str] = ()
) -> Release:
    """The release of SGLang `version` that a lock, local distributions and patches make, patches being their sha256 in
    order; EngineError if the lock differs."""
    locked = lock.wheels.get("sglang")
    if locked is None or locked.version != version:
        have = "no sglang" if locked is None else f"sglang {locked.version}"
        raise EngineError(f"{lock.source} locks {have}, and version {version} is asked for: pass the lock of {version}")
    if "pip" not in lock.wheels:
        raise EngineError(
            f"{lock.source} locks no pip, which installs the release: add it to the .in file; `make lock`"
        )
    for wheel in lock.wheels.values():
        if len(wheel.hashes) != 1:
            raise EngineError(f"{lock.source}: {wheel.name} has {len(wheel.hashes)} hashes, one is right; `make lock`")
    installed = {wheel.name: wheel.version for wheel in lock.wheels.values()}
    for item in distributions:
        name = canonical(item.name)
        if name in installed:
            raise EngineError(f"the local distribution {item.name} is also in {lock.source}: only one can be installed")
        installed[name] = item.version
    own = installed["sglang"] = patched_version(version, patches)
    digest = release_digest(lock.sha256, distributions, patches)
    return Release(
        id=f"{own}-{accelerator}-{digest}",
        version=own,
        accelerator=accelerator,
        digest=digest,
        lock_sha256=lock.sha256,
        target=lock.target,
        distributions=tuple(distributions),
        patches=tuple(patches),
        installed=dict(sorted(installed.items())),
    )


def metadata_gaps(wheels: Iterable[Metadata], gaps: Gaps, target: Target) -> list[Finding]:
    """What the wheels ask for and the set does not have: each must be named in the gaps file, and nothing else."""
    present = {canonical(wheel.name): wheel for wheel in wheels}
    wanted = _requirements(present, target)
    findings: list[Finding] = []
    used: set[str] = set()
    for asker, requirement in wanted:
        name = canonical(requirement.name)
        have = present.get(name)
        if have is None:
            used.add(name)
            if name not in gaps.absent:
                findings.append(_gap(asker, requirement, f"{name} is not locked", gaps.source))
        elif not requirement.specifier.contains(have.version, prereleases=True):
            used.add(name)
            if gaps.replaced.get(name, ("", ""))[0] != have.version:
                findings.append(_gap(asker, requirement, f"{name} {have.version} is locked", gaps.source))
    return findings + [
        Finding(
            "ENGINE-GAP-STALE",
            Severity.WARNING,
            name,
            f"{gaps.source} names a gap that no locked wheel has",
            f"remove {name} from {gaps.source}",
        )
        for name in sorted((set(gaps.absent) | set(gaps.replaced)) - used)
    ]


def _gap(asker: str, requirement: Requirement, fact: str, source: str) -> Finding:
    return Finding(
        "ENGINE-GAP",
        Severity.ERROR,
        asker,
        f"asks for '{requirement}', but {fact}",
        f"lock what it asks for, or name the gap with its reason in {source}",
    )


def _requirements(present: Mapping[str, Metadata], target: Target) -> list[tuple[str, Requirement]]:
    """(name of the asking wheel, requirement) for all that applies to the target, extras followed."""
    found: list[tuple[str, Requirement]] = []
    seen: set[tuple[str, str]] = set()
    queue = [(name, "") for name in sorted(present)]
    while queue:
        name, extra = queue.pop(0)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        environment = {**target.markers(), "extra": extra}
        for text in present[name].requires:
            try:
                requirement = Requirement(text)
            except InvalidRequirement as error:
                raise EngineError(f"the wheel of {name} has a requirement that cannot be read: {error}") from error
            marker = requirement.marker
            if marker is not None and not marker.evaluate(environment):
                continue
            if extra and (marker is None or marker.evaluate({**environment, "extra": ""})):
                continue  # asked for without the extra, so already listed
            found.append((name, requirement))
            wanted = canonical(requirement.name)
            if wanted in present:
                queue += [(wanted, item) for item in sorted(requirement.extras)]
    return found
