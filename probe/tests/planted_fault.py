"""An SGLang plugin that makes every hook of the probe raise, so that a test can see nobody notice.

It has to be loaded with the probe; SGLang imports all plugins before it starts the first.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from pivot_probe import guard

VARIABLE = "PIVOT_PROBE_TEST_PLANT"


def _raising(method: Callable[..., None]) -> Callable[..., NoReturn]:
    @functools.wraps(method)
    def planted(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError("planted by a test")

    return planted


def _guarded(method: Callable[..., None], original: Callable[..., Any] = guard.guarded) -> Any:
    """The probe's guard around a method that raises; what installs the other hooks works as ever."""
    return original(method if method.__name__.endswith("_init") else _raising(method))


if os.environ.get(VARIABLE) == "hooks":
    guard.guarded = _guarded
if not torch.cuda.is_available():
    # Kimi's drafter calls it whatever the device is, and without one torch raises
    torch.cuda.synchronize = lambda *_args: None


def register() -> None:
    """What is to be done was done on import, before the probe's own hooks are made."""
