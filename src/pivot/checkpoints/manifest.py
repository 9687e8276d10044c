"""Manifests: what a model directory holds, written once (`pivot manifest`) and pinned.

sha256 and size of every file, the config, and the header of every safetensors file. Names in them come from other
people and become paths on hosts, so they are checked here.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pivot.checkpoints.tensors import WeightsError, with_values

FORMAT = 1
CHUNK = 8 << 20
POINTER = b"version https://git-lfs.github.com/spec/"  # how git stands in for a large file
LARGEST_CONFIG, LARGEST_MANIFEST = 16 << 20, 512 << 20
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


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


def _check_complete(directory: Path, paths: Mapping[str, Path]) -> None:
    """WeightsError when a download never ended, or an index names files that are not there."""
    # where the hub's own client keeps what it has begun
    for path in [*sorted(directory.glob(".cache/huggingface/**/*.incomplete")), *paths.values()]:
        if path.name.endswith(".incomplete"):
            raise WeightsError(f"{path} was never fetched to its end: fetch it again, or remove what is left of it")
    for name, path in paths.items():
        with path.open("rb") as stream:
            if stream.read(len(POINTER)) == POINTER:
                raise WeightsError(f"{path} only points to its content: git lfs pull fetches it")
        if not name.endswith(".index.json"):
            continue
        index = _read_json(path, LARGEST_MANIFEST, str(path))
        shards = index.get("weight_map") if isinstance(index, Mapping) else None
        if not isinstance(shards, Mapping) or not all(isinstance(shard, str) for shard in shards.values()):
            raise WeightsError(f"{path} is no index of shards: fetch it again")
        beside = Path(name).parent
        absent = sorted({shard for shard in shards.values() if (beside / shard).as_posix() not in paths})
        if absent:
            raise WeightsError(f"{path} names {len(absent)} files that are not there, {absent[0]} among them")


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
    _check_complete(directory, paths)
    headers = with_values({name: path for name, path in paths.items() if name.endswith(".safetensors")})
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
