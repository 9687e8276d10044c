"""Model files: manifests, and what it takes to have exactly these files on a host.

A manifest says what a model directory holds: sha256 and size of every file, the config and the header of every
safetensors file. It is written once, on a machine that has the weights (`pivot manifest`), and pinned. On
the host a release stands in ``<root>/<repository>/<revision>/``; beside it, hidden, the directory that receives files
and the record of the last verification. `plan` compares manifests with what the host reports and decides.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import hashlib
import json
import math
import os
import re
import stat
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pivot import vocabulary
from pivot.findings import Finding, Severity, plain
from pivot.transfer import rsync_to

FORMAT = 1
CHUNK = 8 << 20
LARGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
LARGEST_SIZE = 1 << 50  # bytes of a file, numbers of a tensor
LARGEST_MAP = vocabulary.MOST * 8  # bytes of d2t or t2d whose values are looked at
LARGEST_CONFIG, LARGEST_MANIFEST = 16 << 20, 512 << 20
LONGEST_ARGUMENT = 131_000  # Linux takes 128 KiB an argument
SPARE_BYTES = 64 << 20  # left free on the host's file system beside the files
LOADED_BY_PATTERN = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class WeightsError(ValueError):
    """A model directory, manifest or setting that cannot be used; the text is one sentence for a person."""

    def __init__(self, text: str) -> None:
        super().__init__(plain(text))


@dataclasses.dataclass(frozen=True, slots=True)
class FilePin:
    """One file of a model: sha256 in lower-case hex, size in bytes."""

    sha256: str
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """What a model directory holds; `safetensors` maps file → tensor → dtype, shape and, of d2t and t2d, values."""

    repository: str
    revision: str
    files: Mapping[str, FilePin]
    config: Mapping[str, Any]
    safetensors: Mapping[str, Mapping[str, Any]]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(pin.size for pin in self.files.values())

    def as_dict(self) -> dict[str, Any]:
        """The manifest as it is kept in JSON, files and tensors sorted by name."""
        return {
            "format": FORMAT,
            "repository": self.repository,
            "revision": self.revision,
            "files": {name: dataclasses.asdict(self.files[name]) for name in sorted(self.files)},
            "config": self.config,
            "safetensors": {name: self.safetensors[name] for name in sorted(self.safetensors)},
        }


def check_name(name: object, where: str) -> str:
    """Return `name` when it is a plain relative file name; WeightsError otherwise.

    Refused: absolute names, ``..`` and ``.`` parts, hidden parts, backslashes and control characters. Manifests
    come from other people, and their names become paths on hosts.
    """
    if not isinstance(name, str) or not name or not name.isprintable() or "\\" in name:
        raise WeightsError(f"{where}: the file name {name!r} is not a plain printable name")
    parts = name.split("/")
    if any(not part or part.startswith((".", "-", "~")) for part in parts):
        raise WeightsError(
            f"{where}: the file name {name!r} has to be relative, without empty or hidden parts and without '..'"
        )
    return name


def check_repository(repository: object, where: str) -> str:
    """Return `repository` when it reads ``name`` or ``owner/name``; WeightsError otherwise."""
    if not isinstance(repository, str) or not _REPOSITORY.fullmatch(repository):
        raise WeightsError(f"{where}: the repository {repository!r} has to read 'name' or 'owner/name'")
    return repository


def check_revision(revision: object, where: str) -> str:
    """Return `revision` when it is one plain word (a commit or content hash); WeightsError otherwise."""
    if not isinstance(revision, str) or not _REVISION.fullmatch(revision):
        raise WeightsError(f"{where}: the revision {revision!r} has to be one word of letters, digits, '.', '_', '-'")
    return revision


def hash_file(path: Path) -> str:
    """The sha256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


def content_revision(files: Mapping[str, FilePin]) -> str:
    """The revision of a source that has none of its own: 40 hex digits over names, sizes and hashes.

    sha256 over one line per file, sorted by name: ``<sha256> <size> <name>\\n``, cut to 40 digits. Equal contents
    have equal revisions wherever they are.
    """
    lines = [f"{files[name].sha256} {files[name].size} {name}\n" for name in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:40]


def list_files(directory: Path) -> dict[str, Path]:
    """The regular files under `directory` by relative name; hidden entries are left out, links refused."""
    if not directory.is_dir():
        raise WeightsError(f"{directory} is not a directory: give the one that holds config.json and the weights")
    found: dict[str, Path] = {}
    for parent, folders, names in os.walk(directory):
        folders[:] = sorted(folder for folder in folders if not folder.startswith(".") and folder != "__pycache__")
        for name in sorted([*names, *folders]):
            path = Path(parent, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                raise WeightsError(f"{path} is a symbolic link: copy the model with `cp -L`, so that files are files")
            if name in names and not name.startswith("."):
                if not stat.S_ISREG(mode):
                    raise WeightsError(f"{path} is not a regular file: only files can be published")
                relative = check_name(path.relative_to(directory).as_posix(), str(directory))
                found[relative] = path
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensors:
    """A header: name → dtype and shape, and the bytes of the file that each tensor takes, from and to."""

    entries: Mapping[str, dict[str, Any]]
    places: Mapping[str, tuple[int, int]]


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a safetensors file, name → dtype and shape, without reading their data.

    WeightsError when the header is unreadable, or does not fit the file's size (a truncated download).
    """
    return dict(_read_tensors(path).entries)


def _read_tensors(path: Path) -> _Tensors:
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if length < 0 or length > min(LARGEST_HEADER, size - 8):
            raise WeightsError(f"{path} is not a safetensors file, or it is truncated: fetch it again")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {name: _tensor(name, entry, path) for name, entry in sorted(header.items())}
        spans = sorted((entry["data_offsets"][0], entry["data_offsets"][1], name) for name, entry in header.items())
    except WeightsError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise WeightsError(f"{path} has an unreadable safetensors header: fetch it again") from error
    end = 0
    for first, last, name in spans:
        if first != end:
            raise WeightsError(f"{path}: tensor {name} begins at {first}, where {end} is due: fetch it again")
        end = last
    if 8 + length + end != size:
        raise WeightsError(f"{path} has {size} bytes where its header needs {8 + length + end}: fetch it again")
    begin = 8 + length
    return _Tensors(tensors, {name: (begin + first, begin + last) for first, last, name in spans})


def _tensor(name: str, entry: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """One header entry, checked: the bytes between its offsets are those of its dtype and shape."""
    if not name.isprintable():
        raise WeightsError(f"{path} has a tensor whose name cannot be printed, {name[:80]!a}: fetch it again")
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise WeightsError(f"{path}: tensor {name} has the unknown dtype {dtype!r}")
    numbers = [*shape, start, end]
    if not all(type(number) is int and 0 <= number < LARGEST_SIZE for number in numbers):
        raise WeightsError(f"{path}: tensor {name} has sizes that no tensor has: fetch it again")
    if (end - start) * 8 != bits * math.prod(shape):
        raise WeightsError(f"{path}: tensor {name} has {end - start} bytes, which {dtype} {shape} does not take")
    return {"dtype": dtype, "shape": list(shape)}


def _with_values(paths: Mapping[str, Path]) -> dict[str, dict[str, dict[str, Any]]]:
    """The headers of a model's files: file → tensor → dtype, shape, and values of d2t and t2d (`vocabulary.facts`)."""
    read = {name: _read_tensors(path) for name, path in paths.items()}
    maps = {
        tensor.rpartition(".")[2]: (file, tensor)
        for file, tensors in read.items()
        for tensor in tensors.entries
        if vocabulary.is_map(tensor)
    }
    found = {name: dict(tensors.entries) for name, tensors in read.items()}
    raw: dict[str, bytes] = {}
    for kind, (file, tensor) in maps.items():
        begin, end = read[file].places[tensor]
        if end - begin <= LARGEST_MAP:
            with paths[file].open("rb") as stream:
                stream.seek(begin)
                raw[kind] = stream.read(end - begin)
    marks = raw.get("t2d") if maps.get("t2d") and _dtype(found, maps["t2d"]) == "BOOL" else None
    for kind, values in raw.items():
        file, tensor = maps[kind]
        facts = vocabulary.facts(_dtype(found, maps[kind]), values, marks if kind == "d2t" else None)
        if facts is not None:
            found[file][tensor] = {**found[file][tensor], "values": facts}
    return found


def _dtype(headers: Mapping[str, Mapping[str, Mapping[str, Any]]], place: tuple[str, str]) -> str:
    return str(headers[place[0]][place[1]]["dtype"])


def build_manifest(directory: Path, repository: str, revision: str | None = None) -> Manifest:
    """Hash a model directory. Without `revision` the content's own is taken (see `content_revision`)."""
    where = str(directory)
    check_repository(repository, where)
    paths = list_files(directory)
    if "config.json" not in paths:
        raise WeightsError(f"{directory} has no config.json: it is not a model directory")
    config = _read_json(paths["config.json"], LARGEST_CONFIG, str(paths["config.json"]))
    if not isinstance(config, Mapping):
        raise WeightsError(f"{paths['config.json']} is no JSON object: fetch it again")
    try:
        json.dumps(config, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise WeightsError(f"{paths['config.json']} holds half a character: fetch it again") from error
    headers = _with_values({name: path for name, path in paths.items() if name.endswith(".safetensors")})
    files = {name: FilePin(hash_file(path), path.stat().st_size) for name, path in paths.items()}
    return Manifest(
        repository=repository,
        revision=check_revision(revision, where) if revision is not None else content_revision(files),
        files=files,
        config=config,
        safetensors=headers,
    )


def render_manifest(manifest: Manifest) -> str:
    """The manifest as JSON text with one line per file and per tensor, so that differences can be read."""
    data = manifest.as_dict()
    parts = []
    for key, value in data.items():
        if key in {"files", "safetensors"}:
            parts.append(f' "{key}": {_lines(value, depth=1 if key == "files" else 2)}')
        else:
            parts.append(f' "{key}": {json.dumps(value, ensure_ascii=False, sort_keys=True)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(value: Mapping[str, Any], depth: int, indent: int = 1) -> str:
    """JSON of nested mappings, broken into lines down to `depth`."""
    if depth == 0 or not value:
        return json.dumps(value, ensure_ascii=False)
    space = " " * (indent + 1)
    inner = [
        f"{space}{json.dumps(key, ensure_ascii=False)}: {_lines(item, depth - 1, indent + 1)}"
        for key, item in value.items()
    ]
    return "{\n" + ",\n".join(inner) + "\n" + " " * indent + "}"


def parse_manifest(data: object, where: str) -> Manifest:
    """Check manifest data; `where` names its source in messages."""
    if not isinstance(data, Mapping):
        raise WeightsError(f"{where}: a manifest is a JSON object")
    if data.get("format") != FORMAT:
        raise WeightsError(f"{where}: manifest format {data.get('format')!r} is not {FORMAT}: write it again")
    files = data.get("files")
    if not isinstance(files, Mapping) or not files:
        raise WeightsError(f"{where}: the manifest lists no files")
    pins: dict[str, FilePin] = {}
    for name, entry in files.items():
        check_name(name, where)
        sha256, size = (entry.get("sha256"), entry.get("size")) if isinstance(entry, Mapping) else (None, None)
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise WeightsError(f"{where}: {name} has no sha256 of 64 hex digits")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise WeightsError(f"{where}: {name} has no size in bytes")
        pins[name] = FilePin(sha256, size)
    config, headers = data.get("config"), data.get("safetensors")
    if not isinstance(config, Mapping) or not isinstance(headers, Mapping):
        raise WeightsError(f"{where}: the manifest needs 'config' and 'safetensors', each a mapping")
    return Manifest(
        repository=check_repository(data.get("repository"), where),
        revision=check_revision(data.get("revision"), where),
        files=pins,
        config=config,
        safetensors=headers,
    )


def load_manifest(path: Path) -> Manifest:
    """Read and check a manifest file."""
    return parse_manifest(_read_json(path, LARGEST_MANIFEST, f"the manifest {path}"), str(path))


def _read_json(path: Path, largest: int, what: str) -> object:
    """A file of at most `largest` bytes as JSON; WeightsError in one sentence otherwise."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(largest + 1)
        if len(raw) <= largest:
            return json.loads(raw.decode("utf-8"))
    except OSError as error:
        raise WeightsError(f"{what} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise WeightsError(f"{what} is not JSON: {error}") from error
    except RecursionError as error:
        raise WeightsError(f"{what} is not JSON that anybody wrote: it is nested without an end") from error
    raise WeightsError(f"{what} has more than {largest} bytes, which none of its kind has")


def release_path(root: str, repository: str, revision: str) -> str:
    """Where a release stands on a host."""
    return str(PurePosixPath(root, repository, revision))


def incoming_path(root: str, repository: str, revision: str) -> str:
    """Where files of a release are received before they are published."""
    return str(PurePosixPath(root, repository, f".incoming-{revision}"))


# --------------------------------------------------------------------------------------------------------------------
# what is wanted, what the host says, what follows


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """One model that a host has to hold; `source` is the controller's directory."""

    manifest: Manifest
    source: str

    @property
    def key(self) -> str:
        """The name that reports and messages use."""
        return f"{self.manifest.repository}@{self.manifest.revision}"

    def for_host(self) -> dict[str, Any]:
        """What the host-side file needs: names, sizes and hashes, nothing of the model itself."""
        return {
            "repository": self.manifest.repository,
            "revision": self.manifest.revision,
            "files": {name: [pin.size, pin.sha256] for name, pin in sorted(self.manifest.files.items())},
        }


def want(models: Sequence[Mapping[str, Any]]) -> list[Wanted]:
    """Load the manifests of `model_weights_models`, and check that each is the one that was pinned."""
    wanted: list[Wanted] = []
    for number, model in enumerate(models, 1):
        where = f"model_weights_models, entry {number}"
        missing = [key for key in ("repository", "revision", "source", "manifest") if not model.get(key)]
        if missing:
            raise WeightsError(f"{where}: {', '.join(missing)} missing")
        for key in ("source", "manifest"):
            if not Path(str(model[key])).is_absolute():
                raise WeightsError(f"{where}: {key} is {model[key]!r}, it has to be an absolute path")
        manifest = load_manifest(Path(str(model["manifest"])))
        for key, found in (("repository", manifest.repository), ("revision", manifest.revision)):
            if model[key] != found:
                raise WeightsError(f"{where}: {key} is {model[key]!r}, but {model['manifest']} says {found!r}")
        wanted.append(Wanted(manifest, str(model["source"])))
    keys = [item.key for item in wanted]
    if len(set(keys)) != len(keys):
        raise WeightsError(f"model_weights_models names a model twice: {', '.join(sorted(keys))}")
    return wanted


class Action(enum.StrEnum):
    """What a model needs: a release made or replaced, or only record, modes and leftovers of a good one."""

    PUBLISH = "publish"
    SETTLE = "settle"


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What one model needs, and why in words.

    send: names of files for rsync, `size` their bytes less what has already arrived; intact: names that a damaged
    release holds unharmed; signatures: what `settle` records, from the host's report.
    """

    wanted: Wanted
    root: str
    action: Action
    why: str
    send: tuple[str, ...] = ()
    size: int = 0
    intact: tuple[str, ...] = ()
    signatures: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)

    @property
    def incoming(self) -> str:
        """The host's directory that receives the files."""
        return incoming_path(self.root, self.wanted.manifest.repository, self.wanted.manifest.revision)

    def summary(self) -> str:
        """The step as a line for people."""
        release = release_path(self.root, self.wanted.manifest.repository, self.wanted.manifest.revision)
        if self.action is Action.SETTLE:
            return f"{release}: {self.why}"
        return f"{release}: {self.why}, {len(self.send)} files ({_mib(self.size)}) to send"

    def for_host(self) -> dict[str, Any]:
        """The step for the host-side file."""
        return {
            **self.wanted.for_host(),
            "intact": list(self.intact),
            "send": list(self.send),
            "signatures": dict(self.signatures),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Steps (only of models that need one) and findings; nothing is done when a finding is an error."""

    steps: tuple[Step, ...]
    findings: tuple[Finding, ...]

    def of(self, action: Action) -> list[Step]:
        """The steps of one kind."""
        return [step for step in self.steps if step.action is action]


def host_arguments(action: str, root: str, models: Sequence[Mapping[str, Any]], **options: str) -> str:
    """The one argument of files/weights_state.py: a JSON object, small enough for a command line."""
    place = PurePosixPath(root)
    if not place.is_absolute() or ".." in place.parts or place == PurePosixPath("/"):
        raise WeightsError(f"model_weights_root is {root!r}, it has to be an absolute path below /, without '..'")
    text = json.dumps({"action": action, "root": root, "models": list(models), **options}, separators=(",", ":"))
    if len(text.encode()) > LONGEST_ARGUMENT:
        raise WeightsError(
            f"model_weights_models names too many files for one call ({len(text)} characters): split the list over "
            "several runs of the role"
        )
    return text


def check_source(wanted: Wanted, names: Iterable[str]) -> list[Finding]:
    """Whether the controller's directory holds the files that are to be sent, by size (the host hashes them)."""
    findings = []
    for name in names:
        path = Path(wanted.source, name)
        pin = wanted.manifest.files[name]
        try:
            status = path.lstat()
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        else:
            if stat.S_ISREG(status.st_mode) and status.st_size == pin.size:
                continue
            problem = (
                f"has {status.st_size} bytes where the manifest says {pin.size}"
                if stat.S_ISREG(status.st_mode)
                else "is not a regular file"
            )
        findings.append(
            Finding(
                code="WEIGHTS-SOURCE",
                severity=Severity.ERROR,
                subject=wanted.key,
                message=f"{path} on the controller {problem}",
                fix="fetch the pinned revision again, or write a new manifest and pin it",
            )
        )
    return findings


def _extra(wanted: Wanted, report: Mapping[str, Any], replacing: bool) -> list[Finding]:
    """Findings for files that stand in a release and that nobody pinned."""
    findings = []
    for name in report["release"]["extra"]:
        loaded = name.endswith(LOADED_BY_PATTERN)
        if replacing:
            message = f"{name} stands in a damaged release, and would be lost when the release is replaced"
        elif loaded:
            message = f"{name} stands in the release, and the engine loads every file of that kind"
        else:
            message = f"{name} stands in the release, but no manifest names it"
        path = release_path(report["root"], wanted.manifest.repository, wanted.manifest.revision)
        findings.append(
            Finding(
                code="WEIGHTS-EXTRA",
                severity=Severity.ERROR if replacing or loaded else Severity.WARNING,
                subject=wanted.key,
                message=message,
                fix=f"move {path}/{name} elsewhere",
            )
        )
    return findings


def plan_model(wanted: Wanted, report: Mapping[str, Any]) -> tuple[Step | None, list[Finding]]:
    """What one model needs, from the host's report of it (see files/weights_state.py for its shape)."""
    manifest, release, incoming = wanted.manifest, report["release"], report["incoming"]
    path = release_path(report["root"], manifest.repository, manifest.revision)
    if release["state"] == "foreign":
        blocked = Finding(
            code="WEIGHTS-PATH",
            severity=Severity.ERROR,
            subject=wanted.key,
            message=f"{path} is {release['kind']}, where the release's directory has to be",
            fix=f"move {path} elsewhere, or set model_weights_root to another directory",
        )
        return None, [blocked]
    problems = [f"{name} {problem}" for name, problem in sorted(release["problems"].items())]
    complete = release["state"] == "present" and not problems
    findings = _extra(wanted, report, replacing=release["state"] == "present" and bool(problems))
    if complete:
        if release["recorded"] and not release["modes"] and not report["leftovers"]:
            return None, findings
        why = "modes or leftovers to be put in order" if release["recorded"] else "verification to be recorded"
        return Step(wanted, report["root"], Action.SETTLE, why, signatures=release["signatures"]), findings
    if problems:
        findings.append(
            Finding(
                code="WEIGHTS-DAMAGED",
                severity=Severity.WARNING,
                subject=wanted.key,
                message=f"{path} is damaged and will be replaced: {'; '.join(problems)}",
                fix="nothing to do now; if it happens again, look at the host's disk and memory",
            )
        )
    # at hand: what the damaged release holds unharmed, and what an interrupted run has received whole
    intact = tuple(name for name in release["good"] if name not in incoming["good"])
    send = tuple(name for name in sorted(manifest.files) if name not in {*intact, *incoming["good"]})
    size = sum(manifest.files[name].size - incoming["files"].get(name, 0) for name in send)
    interrupted = incoming["files"] or incoming["good"]
    why = "damaged" if problems else "interrupted before" if interrupted else "missing"
    findings += check_source(wanted, send)
    return Step(wanted, report["root"], Action.PUBLISH, why, send=send, size=size, intact=intact), findings


def plan(wanted: Sequence[Wanted], report: Mapping[str, Any]) -> Plan:
    """Compare what is wanted with the host's report: the steps to take, or the findings that forbid them."""
    by_key = {f"{model['repository']}@{model['revision']}": model for model in report["models"]}
    steps: list[Step] = []
    findings: list[Finding] = []
    for item in wanted:
        step, found = plan_model(item, {**by_key[item.key], "root": report["root"]})
        steps += [step] if step else []
        findings += found
    needed = sum(step.size for step in steps)
    if needed and needed + SPARE_BYTES > report["free_bytes"]:
        findings.append(
            Finding(
                code="WEIGHTS-SPACE",
                severity=Severity.ERROR,
                subject=report["root"],
                message=f"{_mib(needed)} are to be received (and {_mib(SPARE_BYTES)} stay free), but only "
                f"{_mib(report['free_bytes'])} are free",
                fix="free space there, or set model_weights_root to a larger file system",
            )
        )
    if any(step.send for step in steps) and not report["rsync"]:
        findings.append(
            Finding(
                code="WEIGHTS-RSYNC",
                severity=Severity.ERROR,
                subject=report["root"],
                message="the host has no rsync, which receives the files",
                fix="install the package rsync on the host",
            )
        )
    return Plan(tuple(steps), tuple(findings))


def _mib(count: int) -> str:
    """Bytes for people."""
    return f"{count / (1 << 20):.1f} MiB"


# --------------------------------------------------------------------------------------------------------------------
# sending


def rsync_command(source: str, destination: str, connection: Mapping[str, Any]) -> list[str]:
    """The rsync call that sends the files named on its standard input, one a line.

    `connection` holds Ansible's variables of the host: ansible_host, ansible_port, ansible_user, ansible_connection,
    ansible_ssh_private_key_file, ansible_ssh_common_args, ansible_ssh_extra_args; unset ones are left out or empty.
    Interrupted files are kept and continued; nothing on the host is ever deleted. TransferError: see `rsync_to`.
    """
    options = ["--recursive", "--times", "--chmod=D755,F644", "--partial", "--files-from=-"]
    return rsync_to(source, destination, connection, options)


# --------------------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """`pivot manifest DIR [--repository NAME] [--revision R] [--output FILE]`: write a manifest."""
    parser = argparse.ArgumentParser(prog="pivot manifest", description="Write the manifest of a model directory.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--repository", help="name on the hosts (default: the directory's last two names, owner/model)")
    parser.add_argument("--revision", help="the source's own commit (default: a hash of the contents)")
    parser.add_argument("--output", type=Path, help="file to write (default: standard output)")
    parsed = parser.parse_args(arguments)
    try:
        repository = parsed.repository or "/".join(parsed.directory.absolute().parts[-2:])
        text = render_manifest(build_manifest(parsed.directory, repository, parsed.revision))
        if parsed.output is None:
            sys.stdout.write(text)
        else:
            parsed.output.parent.mkdir(parents=True, exist_ok=True)
            parsed.output.write_text(text, encoding="utf-8")
    except (WeightsError, OSError) as error:
        print(f"pivot manifest: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
