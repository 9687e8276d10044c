"""What a host needs so that it holds exactly the pinned files of its models.

`want` reads the inventory's entries, roles/model_weights/files/weights_state.py reports what is there, `plan` compares
and decides: verify, publish from one of the sources, put in order, or nothing. Sources in order of preference: a path
of the host that holds the model (linked, never written), the controller's directory (rsync), the Hugging Face hub.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pivot.checkpoints.manifest import Manifest, load_manifest
from pivot.checkpoints.progress import gigabytes
from pivot.checkpoints.tensors import WeightsError
from pivot.checkpoints.trees import Tree, check_source, damage
from pivot.findings import Finding, Severity

LONGEST_ARGUMENT = 131_000  # Linux takes 128 KiB an argument
SPARE_BYTES = 64 << 20  # left free on the host's file system beside the files
LOADED_BY_PATTERN = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SOURCES = ("paths", "source", "hub")


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """One model that a host has to hold, and where it can come from.

    paths: directories of the host; source: a directory of the controller, or empty; hub: whether the hub has it.
    """

    manifest: Manifest
    source: str = ""
    paths: tuple[str, ...] = ()
    hub: bool = False

    @property
    def key(self) -> str:
        """The name that reports and messages use."""
        return f"{self.manifest.repository}@{self.manifest.revision}"

    def release(self, root: str) -> str:
        """Where the release stands on a host."""
        return str(PurePosixPath(root, self.manifest.repository, self.manifest.revision))

    def incoming(self, root: str) -> str:
        """Where files of the release are received before it is published."""
        return str(PurePosixPath(root, self.manifest.repository, f".incoming-{self.manifest.revision}"))

    def for_host(self) -> dict[str, Any]:
        """What the host-side files need: names, sizes and hashes, nothing of the model itself."""
        return {
            "repository": self.manifest.repository,
            "revision": self.manifest.revision,
            "files": {name: [pin.size, pin.sha256] for name, pin in sorted(self.manifest.files.items())},
            "paths": list(self.paths),
        }


def plain(path: str) -> str:
    """A path as the host-side files write it: without doubled or trailing slashes."""
    return str(PurePosixPath(re.sub("^/+", "/", path)))


def root_of(root: str) -> str:
    """model_weights_root as all of the role uses it: names of runs and texts that are searched for hold it."""
    place = PurePosixPath(plain(root))
    if not place.is_absolute() or ".." in place.parts or place == PurePosixPath("/"):
        raise WeightsError(f"model_weights_root is {root!r}, it has to be an absolute path below /, without '..'")
    return str(place)


def want(models: Sequence[Mapping[str, Any]]) -> list[Wanted]:
    """Load the manifests of `model_weights_models`, and check that each is the one that was pinned."""
    wanted: list[Wanted] = []
    for number, model in enumerate(models, 1):
        where = f"model_weights_models, entry {number}"
        missing = [key for key in ("repository", "revision", "manifest") if not model.get(key)]
        if missing:
            raise WeightsError(f"{where}: {', '.join(missing)} missing")
        source, paths = str(model.get("source") or ""), tuple(plain(str(path)) for path in model.get("paths") or ())
        named = [("manifest", str(model["manifest"])), ("source", source), *(("paths", path) for path in paths)]
        for key, value in named:
            if value and (not PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts):
                raise WeightsError(f"{where}: {key} is {value!r}, it has to be an absolute path without '..'")
        manifest = load_manifest(Path(str(model["manifest"])))
        for key, found in (("repository", manifest.repository), ("revision", manifest.revision)):
            if model[key] != found:
                raise WeightsError(f"{where}: {key} is {model[key]!r}, but {model['manifest']} says {found!r}")
        wanted.append(Wanted(manifest, source, paths, bool(model.get("hub"))))
    keys = [item.key for item in wanted]
    if len(set(keys)) != len(keys):
        raise WeightsError(f"model_weights_models names a model twice: {', '.join(sorted(keys))}")
    return wanted


# --------------------------------------------------------------------------------------------------------------------
# steps


class Action(enum.StrEnum):
    """What a model needs: its files hashed, a release made or replaced, or only modes and leftovers put right."""

    VERIFY = "verify"
    PUBLISH = "publish"
    SETTLE = "settle"


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What one model needs, and why in words.

    trees: directories to verify. For a publication: intact, names that a damaged release holds unharmed; links, name →
    file of a path that holds the model; send and fetch, names for rsync and for the hub; wrong, names that arrived
    wrong; size, bytes to receive or to hash.
    """

    wanted: Wanted
    root: str
    action: Action
    why: str
    trees: tuple[str, ...] = ()
    intact: tuple[str, ...] = ()
    links: Mapping[str, str] = dataclasses.field(default_factory=dict)
    send: tuple[str, ...] = ()
    fetch: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    size: int = 0

    def summary(self) -> str:
        """The step as a line for people."""
        release = self.wanted.release(self.root)
        if self.action is Action.SETTLE:
            return f"{release}: {self.why}"
        if self.action is Action.VERIFY:
            return f"{release}: {self.why}, {gigabytes(self.size)} to be hashed"
        if self.links:
            holder = next(iter(self.links.values())).removesuffix("/" + next(iter(self.links)))
            return f"{release}: {self.why}, linked to {holder}"
        whence = "from the hub" if self.fetch else "from the controller"
        return f"{release}: {self.why}, {len(self.send + self.fetch)} files ({gigabytes(self.size)}) {whence}"

    def for_host(self) -> dict[str, Any]:
        """The step for the host-side files."""
        own: dict[str, Any] = {"trees": list(self.trees)} if self.action is Action.VERIFY else {}
        if self.action is Action.PUBLISH:
            own = {
                "intact": list(self.intact),
                "links": dict(self.links),
                "wrong": list(self.wrong),
                "fetch": list(self.fetch),
            }
        return {**self.wanted.for_host(), **own}


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Steps (only of models that need one) and findings; nothing is done when a finding is an error."""

    steps: tuple[Step, ...]
    findings: tuple[Finding, ...]

    def of(self, action: Action) -> list[Step]:
        """The steps of one kind; publications wait until everything that needs it is verified."""
        if action is Action.PUBLISH and any(step.action is Action.VERIFY for step in self.steps):
            return []
        return [step for step in self.steps if step.action is action]


def digest_of(root: str) -> str:
    """What unit and run directory of a root are called by, as in weights_state.py."""
    return hashlib.sha256(root.encode()).hexdigest()[:8]


def host_arguments(action: str, root: str, models: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """The one argument of files/weights_state.py: a JSON object, small enough for a command line."""
    text = json.dumps({"action": action, "root": root, "models": list(models), **options}, separators=(",", ":"))
    if len(text.encode()) > LONGEST_ARGUMENT:
        raise WeightsError(
            f"model_weights_models names too many files for one call ({len(text)} characters): split the list over "
            "several runs of the role"
        )
    return text


# --------------------------------------------------------------------------------------------------------------------
# what follows


def plan(wanted: Sequence[Wanted], report: Mapping[str, Any], us: str, verified: bool = False) -> Plan:
    """Compare what is wanted with the host's report: the steps to take, or the findings that forbid them.

    us: how this controller names itself where it holds the host's lock; verified: a job of this run has just hashed
    what an earlier plan wanted hashed.
    """
    by_key = {model["key"]: model for model in report["models"]}
    steps: list[Step] = []
    findings: list[Finding] = []
    for item in wanted:
        step, found = plan_model(item, by_key[item.key], str(report["root"]), verified)
        steps += [step] if step else []
        findings += found
    findings += _busy(report, us) + _space(steps, report) + _tools(steps, report)
    return Plan(tuple(steps), tuple(findings))


def plan_model(
    wanted: Wanted, report: Mapping[str, Any], root: str, verified: bool
) -> tuple[Step | None, list[Finding]]:
    """What one model needs, from the host's report of it."""
    path, release = wanted.release(root), Tree.of(report["release"], wanted.manifest)
    if release.state == "foreign":
        fix = f"move {path} elsewhere, or set model_weights_root to another directory"
        message = f"{path} is {release.kind}, where the release's directory has to be"
        return None, [Finding("WEIGHTS-PATH", Severity.ERROR, wanted.key, message, fix)]
    findings = _extra(wanted, report["release"]["extra"], path, replacing=bool(release.problems) and release.present)
    findings += _closed(wanted.key, {path: report["release"]} if release.present else report["paths"])
    if release.present and release.unknown:
        if not verified:
            return _verify(wanted, root, "not known to be verified", {path: release}), findings
        fix = "find what writes there (lsof), then run again"
        message = f"{_names(release.unknown)} in {path} changed while it was verified"
        return None, [*findings, Finding("WEIGHTS-CHANGING", Severity.ERROR, wanted.key, message, fix)]
    if release.present and not release.problems:
        untidy = report["release"]["modes"] or report["leftovers"]
        why = "modes or leftovers to be put in order"
        return Step(wanted, root, Action.SETTLE, why) if untidy else None, findings
    if release.present:
        fix = "nothing to do now; if it happens again, look at the host's disk and memory"
        findings += damage(wanted.key, release, path, "the release is replaced", fix)
    step, found = _receive(wanted, report, root, release, verified)
    return step, findings + found


def _receive(
    wanted: Wanted, report: Mapping[str, Any], root: str, release: Tree, verified: bool
) -> tuple[Step | None, list[Finding]]:
    """A release has to be made: what has to be verified first, or where its files come from."""
    manifest = wanted.manifest
    incoming = Tree.of(report["incoming"], manifest)
    holders = {path: Tree.of(report["paths"][path], manifest) for path in wanted.paths}
    usable = {path: tree for path, tree in holders.items() if tree.present and not tree.problems}
    holder = next(iter(usable), "")
    open_questions = {wanted.incoming(root): incoming} if incoming.unknown else {}
    if holder and usable[holder].unknown and not release.present:
        open_questions = {holder: usable[holder]}
    if open_questions and not verified:
        return _verify(wanted, root, "to be verified before it is published", open_questions), []
    findings = []
    for path, tree in holders.items():
        if path != holder:
            fix = f"complete it, or remove {path} from the entry's paths"
            findings += damage(wanted.key, tree, path, "it is not used", fix)
    why = "damaged" if release.present else "interrupted before" if incoming.files else "missing"
    intact = release.good - incoming.good
    if holder:
        links = {name: f"{holder}/{name}" for name in sorted(manifest.files.keys() - intact)}
        return Step(wanted, root, Action.PUBLISH, why, intact=tuple(sorted(intact)), links=links), findings
    here = incoming.good | incoming.unknown
    due = tuple(sorted(manifest.files.keys() - intact - here))
    partial = {name: incoming.files[name][0] for name in due if incoming.shorter(name)}
    step = Step(
        wanted, root, Action.PUBLISH, why, intact=tuple(sorted(intact - here)), wrong=tuple(sorted(incoming.wrong))
    )
    size = sum(manifest.files[name].size for name in due) - sum(partial.values())
    problems = check_source(wanted.key, manifest, wanted.source, due) if wanted.source else []
    if due and wanted.hub and (problems or not wanted.source):
        return dataclasses.replace(step, fetch=due, size=size), findings
    if due and not wanted.source:
        fix = f"give the entry of model_weights_models one of {', '.join(SOURCES)}"
        message = "files are missing, and nothing says where they come from"
        problems = [Finding("WEIGHTS-SOURCE", Severity.ERROR, wanted.key, message, fix)]
    return dataclasses.replace(step, send=due, size=size), findings + problems


def _verify(wanted: Wanted, root: str, why: str, trees: Mapping[str, Tree]) -> Step:
    size = sum(wanted.manifest.files[name].size for tree in trees.values() for name in tree.unknown)
    return Step(wanted, root, Action.VERIFY, why, trees=tuple(trees), size=size)


def _names(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _closed(subject: str, trees: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Findings for files of somebody else, to which a release is or would be linked, that a server may not read."""
    return [
        Finding(
            "WEIGHTS-CLOSED",
            Severity.WARNING,
            subject,
            f"{_names(frozenset(tree['closed']))} of {path} can be read by root, their owner and their group alone",
            "chmod -R o+rX where the files really are, or let the server's user have their group",
        )
        for path, tree in trees.items()
        if tree["closed"]
    ]


def _extra(wanted: Wanted, names: Sequence[str], path: str, replacing: bool) -> list[Finding]:
    """Findings for files that stand in a release and that nobody pinned."""
    findings = []
    for name in names:
        loaded = name.endswith(LOADED_BY_PATTERN)
        if replacing:
            message = f"{name} stands in a damaged release, and would be lost when the release is replaced"
        elif loaded:
            message = f"{name} stands in the release, and the engine loads every file of that kind"
        else:
            message = f"{name} stands in the release, but no manifest names it"
        severity = Severity.ERROR if replacing or loaded else Severity.WARNING
        findings.append(Finding("WEIGHTS-EXTRA", severity, wanted.key, message, f"move {path}/{name} elsewhere"))
    return findings


def _busy(report: Mapping[str, Any], us: str) -> list[Finding]:
    """Somebody else holds the lock, and it is no job that could be followed."""
    holder = report["holder"]
    if not holder or holder["by"] == us or report["job"].get("alive"):
        return []
    message = f"{holder['by']} is at work there ({holder['doing']}, process {holder['pid']} of the host)"
    fix = "wait until it has ended, then run again"
    return [Finding("WEIGHTS-BUSY", Severity.ERROR, str(report["root"]), message, fix)]


def _space(steps: Sequence[Step], report: Mapping[str, Any]) -> list[Finding]:
    needed = sum(step.size for step in steps if step.action is Action.PUBLISH)
    free = int(report["free_bytes"])
    if not needed or needed + SPARE_BYTES <= free:
        return []
    message = (
        f"{gigabytes(needed)} are to be received (and {gigabytes(SPARE_BYTES)} stay free), but only {gigabytes(free)} "
        "are free"
    )
    fix = "free space there (playbooks/prune.yml), or set model_weights_root to a larger file system"
    return [Finding("WEIGHTS-SPACE", Severity.ERROR, str(report["root"]), message, fix)]


def _tools(steps: Sequence[Step], report: Mapping[str, Any]) -> list[Finding]:
    root, tools, findings = str(report["root"]), report["tools"], []
    if any(step.send for step in steps) and "rsync" not in tools:
        message, fix = "the host has no rsync, which receives the files", "install the package rsync on the host"
        findings.append(Finding("WEIGHTS-RSYNC", Severity.ERROR, root, message, fix))
    if any(step.action is not Action.SETTLE for step in steps) and "systemd-run" not in tools:
        message = "the host has no systemd-run, which keeps verification and publication at work without a connection"
        findings.append(Finding("WEIGHTS-SYSTEMD", Severity.ERROR, root, message, "use a host that systemd runs"))
    return findings
