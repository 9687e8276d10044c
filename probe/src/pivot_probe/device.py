"""What can be said of the device and the process a hook runs in."""

from __future__ import annotations

import torch

_CUDA = torch.cuda.is_available()


def capturing() -> bool:
    """True while a CUDA graph is captured or a graph compiled: nothing may be read then."""
    return bool(torch.compiler.is_compiling() or (_CUDA and torch.cuda.is_current_stream_capturing()))


def rank() -> int:
    """This process's rank, 0 where nothing is distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    return 0
