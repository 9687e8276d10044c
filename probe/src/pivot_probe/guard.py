"""What lets a hook fail without anyone noticing but the records."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from pivot_probe.record import Recorder


class Watcher(Protocol):
    """Whatever has hooks."""

    recorder: Recorder


def guarded(method: Callable[..., None]) -> Callable[..., None]:
    """A method as a hook that never raises and never changes a result."""

    @functools.wraps(method)
    def hook(watcher: Watcher, *args: Any, **kwargs: Any) -> None:
        if watcher.recorder.ended:
            return
        try:
            method(watcher, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever a probe does wrong, the request goes on
            watcher.recorder.failure(method.__name__, error)

    return hook
