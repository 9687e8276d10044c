"""Thin adapter: decisions of `pivot.engines.engine` and `pivot.engines.wheelhouse` as filters."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

from pivot import findings
from pivot.bundles.redact import Redactor
from pivot.bundles.secret_names import secret_name
from pivot.engines import engine, patches, releases, sending, wheelhouse
from pivot.transfer import TransferError


def _release(settings: Mapping[str, Any]) -> engine.Release:
    """The release that settings ask for: version, accelerator, lock, lock_sha256, distributions, patches, and root, the
    directory of the patches."""
    path = Path(settings["lock"])
    if not path.is_file():
        others = ", ".join(sorted(item.name for item in path.parent.glob("*.lock"))) or "none"
        raise engine.EngineError(
            f"there is no lock for the accelerator {settings['accelerator']}: {path} does not exist (locks there:"
            f" {others}); set sglang_engine_accelerator, or sglang_engine_lock to a lock of your own"
        )
    lock = wheelhouse.read_lock(path)
    if settings.get("lock_sha256") and settings["lock_sha256"] != lock.sha256:
        raise engine.EngineError(
            f"the sha256 of {path} is {lock.sha256}, and sglang_engine_lock_sha256 is {settings['lock_sha256']}:"
            " one of them was changed without the other"
        )
    distributions = [wheelhouse.read_distribution(Path(item)) for item in settings["distributions"]]
    applied = [item.sha256 for item in patches.read(settings["patches"], Path(settings["root"]))]
    return engine.wanted_release(str(settings["version"]), str(settings["accelerator"]), lock, distributions, applied)


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with errors as Ansible shows them: one sentence."""

    def wrapper(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except (engine.EngineError, TransferError) as error:
            raise AnsibleFilterError(str(error)) from error

    return wrapper


def release(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Id and digest of the wanted release, and what installing it needs; error is why there is none, or empty."""
    try:
        wanted = _release(settings)
    except engine.EngineError as error:
        return {"error": str(error)}
    return {
        "error": "",
        "id": wanted.id,
        "digest": wanted.digest,
        "lock_sha256": wanted.lock_sha256,
        "packages": len(wanted.installed),
        "pip": f"pip-{wanted.installed['pip']}-py3-none-any.whl",
        "python": wanted.target.python,
    }


def patch_files(entries: Sequence[Mapping[str, Any]], root: str) -> list[dict[str, str]]:
    """Patches as `pivot.engines.wheelhouse build` takes them: their paths absolute, each with its sha256."""
    return [{"file": str(item.path), "sha256": item.sha256} for item in patches.read(entries, Path(root))]


def plan(
    state: Mapping[str, Any], settings: Mapping[str, Any], subject: str, keep: int | str, free_gib: float | str
) -> dict[str, Any]:
    """What to do on a host, from what files/engine_state.py printed there; findings only matter for an installation."""
    wanted = _release(settings)
    made = releases.plan(wanted, state, int(keep))  # extra variables of the command line are texts
    problems = (
        releases.host_findings(wanted, state, subject, int(float(free_gib) * 2**30)) if made.action == "install" else []
    )
    return {
        "id": wanted.id,
        "action": made.action,
        "reasons": list(made.reasons),
        "remove": list(made.remove),
        "leftovers": list(state["leftovers"]),
        "findings": [item.as_dict() for item in problems],
    }


def built_problems(state: Mapping[str, Any], settings: Mapping[str, Any], imported: Mapping[str, Any]) -> str:
    """Why a freshly built release must not be published, as text; empty if nothing forbids it.

    imported: what files/engine_imports.py printed.
    """
    wanted, built = _release(settings), state["release"]
    if built is None:
        return "it is not there"
    texts = [str(problem) for problem in built["problems"]]
    fit = releases.architecture_findings(wanted.id, imported["architectures"], imported["cards"])
    found = findings.render([*releases.installed_findings(wanted, built["installed"], wanted.id), *fit])
    return "\n".join([*texts, *([found] if found else [])])


def record(
    state: Mapping[str, Any], settings: Mapping[str, Any], imported: Mapping[str, Any], built: str
) -> dict[str, Any]:
    """What release.json of a freshly built release holds; built is the time in UTC."""
    wanted = _release(settings)
    return {
        "format": 1,
        "id": wanted.id,
        "version": wanted.version,
        "accelerator": wanted.accelerator,
        "built": built,
        "python": state["python"]["version"],
        "lock_sha256": wanted.lock_sha256,
        "patches": list(wanted.patches),
        "distributions": [
            {"name": item.name, "version": item.version, "tree": item.tree} for item in wanted.distributions
        ],
        "installed": state["release"]["installed"],
        "records": state["release"]["records"],
        "imported": imported["versions"],
        "plugins": imported["plugins"],
    }


def told(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without a secret, by name or in a value, as a proxy's password: a task's stand on command lines."""
    masked = Redactor()
    return {
        name: value
        for name, value in environment.items()
        if not secret_name(name) and masked.text(str(value)) == str(value)
    }


def send(source: str, incoming: str, shared: str, pip: str, connection: Mapping[str, Any]) -> dict[str, list[str]]:
    """The rsync calls that send a wheelhouse: shared, which may be empty, and own."""
    return sending.commands(source, incoming, shared, pip, connection)


class FilterModule:
    """Filters about the engine."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names as the role uses them."""
        filters: Sequence[Callable[..., Any]] = (release, patch_files, plan, built_problems, record, told, send)
        return {f"pivot_engine_{function.__name__}": _guarded(function) for function in filters}
