"""Pauses Python's garbage collector while a server's processes import their modules: a fifth of what that costs.

`sglang_cpu_lab.pth` calls `pause` when the interpreter starts, the plugin calls `resume` when SGLang has its modules.
"""

from __future__ import annotations

import gc
import sys

SERVERS = {"sglang.launch_server", "--multiprocessing-fork"}


def pause() -> None:
    """Begin, in the processes of a server alone."""
    if not SERVERS.isdisjoint(sys.orig_argv):
        gc.disable()


def resume() -> None:
    """Collect as always from here on."""
    gc.enable()
