"""Whether the running server is the installed release: its command line, its libraries, its files, its Python's paths.

Pure: judges what `roles/sglang_server/files/running_code.py` found on a host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pivot.findings import Finding, Severity

SHOWN = 5  # of many files
REBUILD = "ansible-playbook deploy.yml builds the release anew and restarts the server"


def check(subject: str, code: Mapping[str, Any], *, meant: Collection[str] = (), probed: bool = False) -> list[Finding]:
    """Everything that is not the release.

    code: what the host found; meant: variables that the inventory sets; probed: the debug probe is on, which has a
    directory of its own on Python's path.
    """
    return [*_process(subject, code), *_files(subject, code), *_paths(subject, code, meant, probed=probed)]


def _error(code: str, subject: str, message: str, fix: str) -> Finding:
    return Finding(code, Severity.ERROR, subject, message, fix)


def _process(subject: str, code: Mapping[str, Any]) -> Iterator[Finding]:
    release = code["release"]
    again = "ansible-playbook playbooks/serve.yml restarts it from the installed release"
    if not code["begins"].startswith(f"{release}/"):
        message = f"the server's command line begins with {code['begins'] or 'nothing'}, which is not of {release}"
        yield _error("SERVER-CODE", subject, message, again)
    elif not code["mapped"]:
        message = f"the running server has no library of {release} in its memory"
        yield _error("SERVER-CODE", subject, message, again)
    if code["gone"]:
        message = f"the running server uses files of {release} that are no more: {some(code['gone'])}"
        yield _error("SERVER-CODE", subject, message, again)
    if code["outside"]:
        message = f"the running server uses libraries that are not of {release}: {some(code['outside'])}"
        yield _error("SERVER-CODE", subject, message, "see which variable or .pth file brings them in, and remove it")


def _files(subject: str, code: Mapping[str, Any]) -> Iterator[Finding]:
    if code["altered"]:
        named = some([f"{path} ({what})" for path, what in code["altered"]])
        message = f"files of the engine are not those that were published: {named}"
        yield _error("SERVER-FILE", subject, message, f"{REBUILD}; a change that is meant is a patch of the registry")


def _paths(subject: str, code: Mapping[str, Any], meant: Collection[str], *, probed: bool) -> Iterator[Finding]:
    found = [f"{what} ({why})" for what, why in code["elsewhere"]]
    found += [name for name in code["variables"] if name not in meant and not (probed and name == "PYTHONPATH")]
    if found:
        message = f"Python takes code from elsewhere too: {some(found)}"
        yield _error("SERVER-PATHS", subject, message, "remove it: a module there can stand in for one of the engine")


def some(items: Sequence[str]) -> str:
    """The first of many."""
    return ", ".join(items[:SHOWN]) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")
