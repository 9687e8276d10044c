"""Thin adapter: decisions of `pivot.checkpoints.weights` as filters."""

import functools
import getpass
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

from pivot.checkpoints import weights, weights_prune, weights_send
from pivot.checkpoints.tensors import WeightsError
from pivot.transfer import TransferError


def sentences(function: Callable[..., Any]) -> Callable[..., Any]:
    """Errors of settings as Ansible's own."""

    @functools.wraps(function)
    def wrapped(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (WeightsError, TransferError) as error:
            raise AnsibleFilterError(str(error)) from error

    return wrapped


def us() -> str:
    """How this controller names itself where it holds a host's lock."""
    return f"{getpass.getuser()}@{socket.gethostname()}:{Path.cwd()}"


@sentences
def root_of(setting: str) -> str:
    """The directory that model_weights_root names, in the one spelling that the role uses."""
    return weights.root_of(setting)


@sentences
def looking(models: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], job: str) -> str:
    """The argument of the gather task: what the host is asked about. settings: root, run, verify; job: this run's."""
    wanted = [item.for_host() for item in weights.want(models)]
    return weights.host_arguments(
        "look", settings["root"], wanted, run=settings["run"], verify=settings["verify"], job=job
    )


@sentences
def plan(
    report: Mapping[str, Any], models: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], job: str
) -> dict[str, Any]:
    """What follows from the host's report: findings, a summary, and the arguments of each further task.

    settings: root, run, verify, connection, hub; job: the id of this run's
    verification, when there was one.
    """
    made = weights.plan(weights.want(models), report, us(), verified=bool(job))
    steps = {action: made.of(action) for action in weights.Action}
    publish = steps[weights.Action.PUBLISH]
    root = settings["root"]
    common = {"run": settings["run"], "by": us(), "verify": settings["verify"]}
    sending = [step for step in publish if step.send]
    new = secrets.token_hex(4)

    def call(action: str, wanted: Sequence[weights.Step], **more: Any) -> str:
        return weights.host_arguments(action, root, [step.for_host() for step in wanted], **common, **more)

    return {
        "findings": [finding.as_dict() for finding in made.findings],
        "summary": [step.summary() for step in made.steps],
        "job": new,
        "follow": bool(report["job"].get("alive")),
        "watch": {"root": root, "run": settings["run"]},
        "token": f"{settings['run']}/{weights.digest_of(root)}/token" if any(step.fetch for step in publish) else "",
        "verify": call("start", steps[weights.Action.VERIFY], job=new),
        "prepare": call("prepare", publish),
        "publish": call("start", publish, job=new, hub=settings["hub"]),
        "settle": call("settle", steps[weights.Action.SETTLE]),
        "counts": {str(action): len(of) for action, of in steps.items()},
        "sends": [transfer(step, settings) for step in sending],
    }


def transfer(step: weights.Step, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `pivot.checkpoints.weights_send` needs for one model."""
    connection, root = settings["connection"], settings["root"]
    run = f"{settings['run']}/{weights.digest_of(root)}"
    receive = weights.host_arguments("receive", root, [], by=us(), doing=step.wanted.key)
    names = weights_send.place_of(destination(connection), root) / "names"
    return {
        "key": step.wanted.key,
        "root": root,
        "size": step.size,
        "names": list(step.send),
        "argv": weights_send.rsync_command(
            step.wanted.source,
            step.wanted.incoming(root),
            connection,
            ["python3", "-I", f"{run}/weights_state.py", receive],
            names,
        ),
    }


@sentences
def pruning(settings: Mapping[str, Any], remove: Sequence[str]) -> str:
    """The argument of weights_prune.py. settings: root, models, keep, sets."""
    paths = {item.key: list(item.paths) for item in weights.want(settings["models"]) if item.paths}
    keep, sets = list(settings["keep"]), list(settings["sets"])
    return weights.host_arguments("prune", settings["root"], [], keep=keep, sets=sets, paths=paths, remove=list(remove))


@sentences
def prune(report: Mapping[str, Any], settings: Mapping[str, Any], host: str) -> dict[str, Any]:
    """What can go and what is to go. settings: models, wanted (paths), confirmed, root."""
    models = [item.key for item in weights.want(settings["models"])]
    wanted = [*models, *weights_prune.keys(settings["wanted"], settings["root"])]
    made = weights_prune.decide(wanted, report, settings["confirmed"], host)
    findings = [finding.as_dict() for finding in made.findings]
    return {"summary": weights_prune.summary(made, host), "remove": list(made.remove), "findings": findings}


def destination(connection: Mapping[str, Any]) -> str:
    """What the sender of a host is called by."""
    return f"{connection.get('ansible_host') or connection['inventory_hostname']}:{connection.get('ansible_port', '')}"


class FilterModule:
    """Filters about model files."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names as the role uses them."""
        return {
            "pivot_weights_root": root_of,
            "pivot_weights_looking": looking,
            "pivot_weights_plan": plan,
            "pivot_weights_destination": destination,
            "pivot_weights_pruning": pruning,
            "pivot_weights_prune": prune,
        }
