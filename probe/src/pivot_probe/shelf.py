"""Whole states of chosen forwards, as safetensors files of bounded size."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pivot_probe.journal import occupied

SUFFIX = ".safetensors"
HEADER = 4096


class Whole:
    """All rows of every layer's input, and of the last layer's output, of one forward of the target.

    states: [layers + 1, rows, width] in the host's memory, filled as the layers run; bytes: what its file takes.
    """

    def __init__(self, layers: int, like: torch.Tensor) -> None:
        """like: a layer's input, [rows, width]."""
        self.bytes = size(layers, like)
        self.states = torch.empty((layers + 1, *like.shape), dtype=like.dtype)
        self._missing = set(range(layers + 1))

    def take(self, index: int, state: torch.Tensor) -> None:
        """Copy one layer's input, or under index `layers` the last one's output."""
        self.states[index].copy_(state)
        self._missing.discard(index)

    @property
    def lack(self) -> str:
        """What is missing, empty when nothing is."""
        return f"the inputs of layers {sorted(self._missing)} were not seen" if self._missing else ""


def size(layers: int, like: torch.Tensor) -> int:
    """Bytes of the file of a forward with inputs like this one, tokens and header included."""
    return (layers + 1) * int(like.nbytes) + 16 * int(like.shape[0]) + HEADER


class Shelf:
    """The tensor files of one process. stem: how their names begin; max_bytes: of all such files in the directory."""

    def __init__(self, directory: Path, stem: str, max_bytes: int) -> None:
        self._directory = directory
        self._stem = stem
        self._max_bytes = max_bytes
        self._promised: weakref.WeakSet[Whole] = weakref.WeakSet()  # a record that is lost takes its promise along

    def reserve(self, layers: int, like: torch.Tensor) -> Whole | str:
        """Room for a forward with inputs like this one, or why there is none."""
        needed = size(layers, like)
        promised = sum(whole.bytes for whole in tuple(self._promised))
        left = self._max_bytes - occupied(self._directory, SUFFIX) - promised
        if needed > left:
            limit = f"PIVOT_PROBE_TENSOR_BYTES={self._max_bytes}"
            return f"it would take {needed} bytes, and {max(left, 0)} of {limit} are left"
        whole = Whole(layers, like)
        self._promised.add(whole)
        return whole

    def store(self, number: int, whole: Whole, beside: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> str:
        """Write a file that is there whole or not at all; returns its name. OSError says why it could not be."""
        path = self._directory / f"{self._stem}-{number}{SUFFIX}"
        partial = path.with_suffix(".partial")
        try:
            save_file({"states": whole.states, **beside}, str(partial), dict(about))
            partial.chmod(0o640)
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):  # not even begun, or on a volume that is gone
                partial.unlink()
            raise OSError(f"writing {path.name} failed: {error}") from error
        finally:
            self._promised.discard(whole)
        return path.name
