"""Reading Lightning checkpoints without running what they hold."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO


class TensorsOnly(TorchCheckpointIO):
    """Take tensors and plain containers from checkpoints, unless all is asked for by name.

    Lightning unpickles a checkpoint with all that it holds, code too, where it is given by a URL.
    """

    def load_checkpoint(
        self,
        path: Any,
        map_location: Callable | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint; `weights_only` is true if it is `None`."""
        return super().load_checkpoint(path, map_location, weights_only is not False)
