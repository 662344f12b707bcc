"""`mrp-lightning layers MODEL`: list the layers that would be pruned."""

from collections.abc import Sequence
from typing import Any

from mrp_lightning.commands.command import CommandParser, add_model_options, check_model


def main(args: Sequence[str] | None = None) -> None:
    """Print the listing as a table, or as JSON.

    Raises:
        TargetError: The files hold more blocks than the configuration makes. `make_pattern`,
            `load_config` and `make_plan` raise more.
    """
    parser = _parser()
    options = parser.parse_args(args)
    check_model(options.model, options.gguf_file)
    # Imported late, since help and wrong options need not wait for torch.
    from mrp_lightning.commands.listing import listing_of, write_listing

    with parser.options_in_messages():
        listing = listing_of(options)
    write_listing(listing, as_json=options.json)


def _parser() -> Any:
    parser = CommandParser(
        "mrp-lightning layers",
        "List what would be pruned and what would stay dense, and why. No weights are "
        "needed: of the model only the configuration is read.",
    )
    add_model_options(parser)
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--pattern", help="N:M, as for the callback")
    amount.add_argument("--sparsity", type=float, help="fraction of the weights, as there")
    for name in ("targets", "ignore", "blocks"):
        parser.add_argument(f"--{name}", nargs="+", metavar="NAME", help="as for the callback")
    parser.add_argument("--skip-indivisible", action="store_true", help="as for the callback")
    parser.add_argument("--json", action="store_true", help="print every layer as JSON")
    return parser
