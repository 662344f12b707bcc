"""A report as a table for a terminal: a row for each layer, and what they come to."""

from collections.abc import Iterable
from io import StringIO

from mrp_lightning.records.rows import LayerReport

_WIDTH = 100


def listing(layers: Iterable[LayerReport], totals: dict[str, object]) -> str:
    """The layers of a report with their losses, in lines of at most 100 characters.

    Args:
        layers: Its rows; those that are left dense say why.
        totals: Its `totals`.
    """
    from rich.console import Console  # only where a report is shown
    from rich.table import Table

    table = Table()
    table.add_column("layer", overflow="fold")
    for column in ("shape", "sparsity", "relative loss", "seconds"):
        table.add_column(column, justify="right")
    for row in layers:
        shape = " × ".join(map(str, row.shape))
        if row.skipped is not None:
            table.add_row(row.name, shape, "dense", row.skipped, "")
        else:
            numbers = (_number(row.relative_loss, ".3g"), _number(row.seconds, ".1f"))
            table.add_row(row.name, shape, _number(row.sparsity, ".1%"), *numbers)
    table.add_section()
    loss, seconds = _number(totals["relative_loss"], ".3g"), _number(totals["seconds"], ".1f")
    weights, sparsity = f"{totals['weights']:,}", _number(totals["sparsity"], ".1%")
    table.add_row(f"{totals['layers']} layers", weights, sparsity, loss, seconds)
    text = StringIO()
    Console(file=text, width=_WIDTH).print(table)
    return text.getvalue().rstrip("\n")


def _number(value: object, style: str) -> str:
    return "" if value is None else format(value, style)
