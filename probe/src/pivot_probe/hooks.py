"""Installs the hooks, and says in the header which of them found their place."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from pivot_probe import targets
from pivot_probe.draft import DraftWatch
from pivot_probe.prints import DIMENSIONS, SEED
from pivot_probe.record import SCHEMA, Recorder
from pivot_probe.settings import TIME
from pivot_probe.target import TargetWatch


def install(recorder: Recorder, version: str) -> None:
    """Register every hook whose target this SGLang has, and write the header, which names those it has not."""
    state = targets.resolve()
    for name, when, hook in wanted(recorder):
        if state[name] == targets.PRESENT:
            HookRegistry.register(name, hook, when)
    recorder.write(
        "header",
        schema=SCHEMA,
        probe=version,
        pid=os.getpid(),
        time=time.strftime(TIME, time.gmtime()),
        sglang=importlib.metadata.version("sglang"),
        torch=torch.__version__,
        rows=recorder.settings.rows,
        tensor_bytes=recorder.settings.tensor_bytes,
        until=recorder.settings.until_text,
        dimensions=DIMENSIONS,
        seed=SEED,
        hooks=dict(state),
    )


def wanted(recorder: Recorder) -> list[tuple[str, HookType, Callable[..., None]]]:
    """What is hooked, when, and by what."""
    target = TargetWatch(recorder)
    drafter = DraftWatch(recorder, target)
    found: list[tuple[str, HookType, Callable[..., None]]] = []
    for name in targets.TARGETS:
        found.append((f"{name}.__init__", HookType.AFTER, target.after_target_init))
        found.append((f"{name}.forward", HookType.BEFORE, target.before_target_forward))
        found.append((f"{name}.forward", HookType.AFTER, target.after_target_forward))
    found.append((targets.PACKING, HookType.AFTER, target.after_packing))
    found.extend((f"{name}.__init__", HookType.AFTER, drafter.after_drafter_init) for name in targets.DRAFTERS)
    found.append((targets.RUNNER, HookType.BEFORE, drafter.before_runner_forward))
    found.append((targets.DRAFTING, HookType.AFTER, drafter.after_drafting))
    found.append((targets.VERIFYING, HookType.AFTER, drafter.after_verifying))
    return found
