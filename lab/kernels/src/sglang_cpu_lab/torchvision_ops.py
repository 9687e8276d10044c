"""Declares the operators that torchvision's Python files expect from its C++ library.

`sglang_cpu_lab.pth` calls `install` when the interpreter starts. PyPI's torchvision is built for CUDA; its
library does not load beside a CPU build of PyTorch, and importing torchvision then fails on the missing schemas of
two operators. SGLang only needs the import to work. Nothing else is loaded until torchvision is asked for.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_libraries: list[object] = []  # a library's definitions end with the object


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; declares the operators at the first sign of `import torchvision`, then steps aside."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """None, always: the ordinary finders go on to import torchvision."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch  # noqa: PLC0415 - takes seconds, and most programs started here never need it

            library = torch.library.Library("torchvision", "DEF")
            for name in OPERATORS:
                library.define(name + _SCHEMA)
            _libraries.append(library)
        return None


def install() -> None:
    """Watch for torchvision, once."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())
