"""Private names of transformers, and the import of plug-ins right after one of its modules.

transformers has no discovery of plug-ins, and importing it takes seconds. Its quantizer plug-ins
are therefore imported by a finder on `sys.meta_path`, after transformers' own table of quantizers.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def is_conv1d(module: "nn.Module") -> bool:
    """Return whether the module is the `Conv1D` of GPT-2, by the name of its class."""
    name = ("transformers.pytorch_utils", "Conv1D")
    return any((kind.__module__, kind.__name__) == name for kind in type(module).__mro__)


def attention_of(config: Any) -> str | None:
    """Return the name of a model's attention implementation, such as `sdpa`.

    Seen in transformers 5.23, which has a public setter, but no getter. Replacement: a
    `get_attn_implementation` beside the `get_experts_implementation` of models.
    """
    name: str | None = config._attn_implementation
    return name


def import_after(module: str, follower: str) -> None:
    """Import `follower` now if `module` has been imported, else right after `module` is.

    A second call with the same names does nothing. `follower` may import the executed `module`.
    """
    if module in sys.modules:
        import_module(follower)
    elif _Watch(module, follower) not in sys.meta_path:
        # In front, since no finder is asked after the first one that knows the module.
        sys.meta_path.insert(0, _Watch(module, follower))


@dataclass(frozen=True)
class _Watch(MetaPathFinder):
    """Finder that imports `follower` right after `module`."""

    module: str
    follower: str

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the specification of the watched module, and `None` for any other."""
        if fullname != self.module:
            return None
        # Only later finders are asked: an earlier watch of the same module asks this one.
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in later)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        """Let the loader of the watched module import the follower when it has executed it."""
        execute = loader.exec_module

        def execute_and_follow(module: ModuleType) -> None:
            # The watch goes only after the success of both: a failed import leaves it for the next
            # one, which would else succeed without the follower.
            loader.exec_module = execute
            execute(module)
            import_module(self.follower)
            sys.meta_path.remove(self)

        loader.exec_module = execute_and_follow
