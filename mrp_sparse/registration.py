"""The quantizer plug-ins are entered into transformers' table as soon as that is loaded.

transformers finds no plug-ins by itself. It takes seconds to load, and the plug-ins build on it:
neither is loaded here, and both come in the order that the user imports them in.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_TABLE = "transformers.quantizers.auto"
_PLUGINS = "mrp_sparse.huggingface"


def register() -> None:
    """Let `from_pretrained` know the packed formats, now or once transformers is loaded."""
    if _TABLE in sys.modules:
        import_module(_PLUGINS)
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Find the module with the table where the other finders do, and have the plug-ins follow."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """The specification of the table's module, of no other."""
        if fullname != _TABLE:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenPlugins(spec.loader, self)
        return spec


class _ThenPlugins(Loader):
    """Load a module as its own loader does, then the plug-ins."""

    def __init__(self, loader: Loader, watch: _Watch) -> None:
        self.loader, self.watch = loader, watch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Make the module as its own loader does."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module under its own loader; where that fails, the next import tries again."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        sys.meta_path.remove(self.watch)
        import_module(_PLUGINS)
