"""The journal of a run over a streamed model, which reads its finished blocks from there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from mrp_lightning.journal.block_record import BlockRecord
from mrp_lightning.journal.journal import Journal
from mrp_lightning.targets.layers import Layer

if TYPE_CHECKING:
    from mrp_lightning.models.streaming import StreamedBlocks


class StreamedJournal(Journal):
    """A journal whose shards hold whole blocks, each as a file of the checkpoint is to hold it.

    Attributes:
        streamed: The blocks, which are read from the shards once these are written.
    """

    streamed: "StreamedBlocks"

    def read(self, step: int) -> BlockRecord | None:
        """The record of a step, `None` if it is still to be done."""
        record = super().read(step)
        if record is None or record.name not in self.streamed.blocks:
            return record
        told = {field.name: getattr(record, field.name) for field in fields(record)}
        return _StreamedRecord(**told, journal=self, step=step)

    def write(self, step: int, record: BlockRecord) -> None:
        """Keep what was done in a step, with all that the block holds; the block is pinned.

        Raises:
            SaveError: It cannot be written. What was kept before is whole.
        """
        if record.name not in self.streamed.blocks:
            super().write(step, record)
            return
        super().write(step, replace(record, weights=self.streamed.tensors(record.name)))
        self.streamed.read_from(record.name, self.file(step))


@dataclass(frozen=True, eq=False, kw_only=True)
class _StreamedRecord(BlockRecord):
    journal: StreamedJournal
    step: int

    def restore(
        self,
        layers: Sequence[Layer],
        before: Callable[[Layer], None],
        beside: Sequence[Layer] = (),
    ) -> None:
        """Let the block hold what the entry does, now and whenever it is read."""
        for layer in [*self.pruned(layers), *beside]:
            before(layer)
        self.journal.streamed.take(self.name, self.weights)
        self.journal.streamed.read_from(self.name, self.journal.file(self.step))
