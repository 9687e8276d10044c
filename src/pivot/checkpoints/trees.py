"""What a directory holds of a model, judged by its manifest: each way of being wrong is a finding of its own."""

from __future__ import annotations

import dataclasses
import functools
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pivot.checkpoints.manifest import Manifest
from pivot.findings import Finding, Severity

NAMED = 5  # files that a finding names before it counts


@dataclasses.dataclass(frozen=True)
class Tree:
    """A directory as weights_state.py reports it (`look_at` there), and the manifest it is held to.

    files: name → (bytes, sha256 or None when it has not been hashed).
    """

    manifest: Manifest
    state: str
    kind: str
    files: Mapping[str, tuple[int, str | None]]
    odd: Mapping[str, str]
    headers: Mapping[str, str]
    incomplete: frozenset[str]

    @classmethod
    def of(cls, report: Mapping[str, Any], manifest: Manifest) -> Tree:
        """Read one directory of the report."""
        files = {name: (int(size), digest) for name, (size, digest) in report["files"].items()}
        incomplete = frozenset(report["incomplete"])
        return cls(manifest, report["state"], report["kind"], files, report["odd"], report["headers"], incomplete)

    @property
    def present(self) -> bool:
        """Whether there is a directory at all."""
        return self.state == "present"

    @functools.cached_property
    def _sized(self) -> frozenset[str]:
        return frozenset(name for name, (size, _) in self.files.items() if size == self.manifest.files[name].size)

    @functools.cached_property
    def unknown(self) -> frozenset[str]:
        """Files of the right size that have to be hashed."""
        return frozenset(name for name in self._sized if self.files[name][1] is None)

    @functools.cached_property
    def good(self) -> frozenset[str]:
        """Files that are as pinned."""
        return frozenset(name for name in self._sized if self.files[name][1] == self.manifest.files[name].sha256)

    @functools.cached_property
    def wrong(self) -> frozenset[str]:
        """Files of the right size with another content."""
        return self._sized - self.good - self.unknown

    @functools.cached_property
    def problems(self) -> frozenset[str]:
        """Files that are not there as pinned; one that has to be hashed is none."""
        return frozenset(self.manifest.files) - self.good - self.unknown

    def shorter(self, name: str) -> bool:
        """Whether a file has begun to arrive."""
        return name in self.files and self.files[name][0] < self.manifest.files[name].size


def damage(subject: str, tree: Tree, where: str, so: str, fix: str) -> list[Finding]:
    """What is wrong with a directory that was meant to hold a model, as warnings, one for each kind of damage.

    where: its path; so: what follows from it.
    """
    if not tree.present:
        message = f"{where} is {'not there' if tree.state == 'absent' else tree.kind}: {so}"
        return [Finding("WEIGHTS-HOLDER", Severity.WARNING, subject, message, fix)]
    kinds: dict[str, list[str]] = {}
    for name in sorted(tree.problems):
        code, severity, text, fix = _problem(tree, name, fix)
        kinds.setdefault(code, []).append(text)
    return [Finding(code, severity, subject, f"{where}: {_some(texts)}; {so}", fix) for code, texts in kinds.items()]


def _problem(tree: Tree, name: str, fix: str) -> tuple[str, Severity, str, str]:
    """In which way a file is wrong: the first that applies."""
    pin, (size, digest) = tree.manifest.files[name], tree.files.get(name, (-1, ""))
    torn, shards = tree.headers.get(name), tree.manifest.safetensors
    found = f"{digest!s:.12}… instead of {pin.sha256:.12}…"
    ways = [
        (name in tree.odd, "WEIGHTS-KIND", Severity.WARNING, f"{name} is {tree.odd.get(name)}", fix),
        (name in tree.wrong, "WEIGHTS-HASH", Severity.WARNING, f"{name} has sha256 {found}", fix),
        (torn, "WEIGHTS-HEADER", Severity.WARNING, f"{name} is truncated or torn: {torn}", fix),
        (name in tree.files, "WEIGHTS-SIZE", Severity.WARNING, f"{name} has {size} bytes instead of {pin.size}", fix),
        (name in tree.incomplete, "WEIGHTS-INCOMPLETE", Severity.WARNING, f"only {name}.incomplete is there", fix),
        (len(shards) > 1 and name in shards, "WEIGHTS-SHARD", Severity.WARNING, f"the shard {name} is missing", fix),
        (True, "WEIGHTS-MISSING", Severity.WARNING, f"{name} is missing", fix),
    ]
    return next((code, severity, text, fix) for applies, code, severity, text, fix in ways if applies)


def _some(texts: list[str]) -> str:
    more = len(texts) - NAMED
    return ", ".join(texts[:NAMED]) + (f" and {more} more" if more > 0 else "")


def check_source(subject: str, manifest: Manifest, source: str, names: Iterable[str]) -> list[Finding]:
    """Whether the controller's directory holds the files that are to be sent, by size (the host hashes them)."""
    findings = []
    for name in names:
        path = Path(source, name)
        pin = manifest.files[name]
        try:
            status = path.lstat()
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
            if path.with_name(f"{path.name}.incomplete").exists():
                problem = f"was never fetched to its end ({path.name}.incomplete)"
        else:
            if stat.S_ISREG(status.st_mode) and status.st_size == pin.size:
                continue
            problem = (
                f"has {status.st_size} bytes where the manifest says {pin.size}"
                if stat.S_ISREG(status.st_mode)
                else "is not a regular file"
            )
        message = f"{path} on the controller {problem}"
        fix = "fetch the pinned revision again, or write a new manifest and pin it"
        findings.append(Finding("WEIGHTS-SOURCE", Severity.ERROR, subject, message, fix))
    return findings
