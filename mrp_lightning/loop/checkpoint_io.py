"""Reading Lightning checkpoints without running what they hold."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO

from mrp_lightning.errors import FormatError
from mrp_lightning.models.damage import explained_checkpoint, why_no_checkpoint


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
        """Load a checkpoint; `weights_only` is true if it is `None`.

        Raises:
            FormatError: It is damaged, no such checkpoint, or holds what may not be unpickled.
        """
        with explained_checkpoint(path):
            content = super().load_checkpoint(path, map_location, weights_only is not False)
            if reason := why_no_checkpoint(content):
                raise FormatError(f"`ckpt_path`: {path} cannot be read: {reason}.")
            return content
