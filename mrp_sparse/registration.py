"""Register the quantizer plug-ins with transformers, now or as soon as it is imported.

transformers has no discovery of plug-ins. Importing it takes seconds, so this module does not: a
finder on `sys.meta_path` waits for the module that holds the table of quantizers.
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
    """Register the packed formats with `from_pretrained`, now or once transformers is imported."""
    if _TABLE in sys.modules:
        import_module(_PLUGINS)
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        # In front, since the first finder that knows a module is the last one asked.
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Finder that loads the plug-ins right after the module with the table of quantizers."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the specification of the table's module, and `None` for any other."""
        if fullname != _TABLE:
            return None
        # Without this finder, which would ask itself without end.
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenPlugins(spec.loader, self)
        return spec


class _ThenPlugins(Loader):
    """Loader that runs a module's own loader, then imports the plug-ins."""

    def __init__(self, loader: Loader, watch: _Watch) -> None:
        self.loader, self.watch = loader, watch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module by its own loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module by its own loader; after a failure the next import tries again."""
        # 1. The module's own loader is restored, so that a reload does not come here.
        # 2. The watch goes only after success: a failed import leaves it for the next one.
        # 3. The plug-ins come last, since they import the table, which has to be complete.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        sys.meta_path.remove(self.watch)
        import_module(_PLUGINS)
