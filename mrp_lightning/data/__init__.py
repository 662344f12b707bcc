"""The data module turns texts into the batches that a trainer reads."""
