"""The compiler of PyTorch, imported where something is compiled, and not by each optimizer: a second of every start."""

import contextlib
import importlib
import importlib.abc
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"
_LOCK = threading.Lock()


class _Late(ModuleType):
    """Stands in for torch._dynamo: has the two functions that torch.optim calls on it, and becomes it for all others.

    As long as nothing is compiled, there is nothing to keep the compiler from, which is what both do.
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
        with _LOCK:
            if sys.modules.get(NAME) is self:
                del sys.modules[NAME]
        return getattr(importlib.import_module(NAME), name)


class _Kept(importlib.abc.Loader):
    """Loads what has been loaded: `import torch._dynamo.config` looks for it before it asks the package for its path,
    by which the package is imported, and the module with it; importlib would then execute it once more."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        with contextlib.suppress(AttributeError):  # modules of settings take no others
            module.__spec__ = self._spec

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        module = sys.modules.get(name) if name.startswith(f"{NAME}.") else None
        if module is None:
            return None
        return ModuleSpec(name, _Kept(module), is_package="__path__" in vars(module))


def import_dynamo_late() -> None:
    """Nothing where it is imported already, and on several processes, as torch.distributed does so. See
    docs/upstream.md."""
    if NAME not in sys.modules:
        sys.modules[NAME] = torch._dynamo = _Late(NAME)
        sys.meta_path.insert(0, _Kept)
