"""The compiler of PyTorch, imported where something is compiled, and not by each optimizer: a second of every start."""

import importlib
import sys
from types import ModuleType
from typing import Any

import torch


class _Late(ModuleType):
    """Stands in for torch._dynamo: has the two functions that torch.optim calls on it, and becomes it for all others.

    Without the compiler, there is nothing to keep it from, which is what both do.
    """

    @staticmethod
    def disable(function: Any, *_: Any, **__: Any) -> Any:
        return function

    @staticmethod
    def graph_break() -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # inspect asks each module for these; imports, for its path
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_dynamo_late() -> None:
    """Nothing where it is imported already. See docs/upstream.md."""
    if "torch._dynamo" not in sys.modules:
        sys.modules["torch._dynamo"] = torch._dynamo = _Late("torch._dynamo")
