"""The table of lab/results/models.md: every family of `families.py`, pruned and compared.

    python lab/benchmarks/models.py --markdown lab/results/models.md

Without `--markdown` it prints; with names of families, only their rows.
"""

import argparse
import logging
import platform
import re
import sys
from pathlib import Path

import torch
import transformers
from full_forwards import CheckedRun, prune_and_compare
from rich.progress import track
from tiny_configs import FAMILIES
from torch import nn
from transformers.utils import logging as transformers_logging

from mrp_lightning.targets.blocks import Block

COLUMNS = ["family", "blocks", "walk", "pruned in each block", "left dense in each block", "error"]
TEXT = """\
# Model families

This page shows what `predict` prunes in each family of models, how it runs the blocks one by one
(the *walk*), and how far the walk is from the model's own forward. It is written by

```
python lab/benchmarks/models.py --markdown lab/results/models.md
```

with Python {python}, torch {torch}, transformers {transformers}, on tiny random models
(`lab/benchmarks/families.py`), which are pruned to 2:4 by SM. `tests/families/` checks the same.

* **walk**: `inject` runs the model's own forward, in which stubs that return stored hidden states
  replace the blocks before the current one. `rerun` runs all blocks before it again. The right one
  is found by trying `inject` on one batch of each kind, such as one with an image and one without.
  A model without repeated blocks is calibrated in one pass over the dense model.
* **error**: every time that the walk runs a block, its input and output are compared with those in
  a full forward of a second model with the same weights. The figure is the largest distance,
  relative to ‖output − input‖ of the block, in three settings: padded batches of different lengths,
  the same without padding, and with padding but without a cache where there is one. *0* means equal
  bits.
* Layers outside the blocks, such as heads, stay dense unless `targets` names them. Embeddings and
  norms always stay dense. `python -m mrp_lightning layers --model X` lists all layers of a model.

{table}

## Other models

Blocks are the members of the outermost `ModuleList`s that hold linear layers, in the order in which
the first batch runs them. Name blocks that are in a `Sequential`, a `ModuleDict` or attributes in
`blocks`; otherwise the model has no blocks and is calibrated in one dense pass. Some models are
refused, with a message that says what was found: a block runs more than once in a forward (ALBERT),
a forward runs no block, or a batch runs blocks in another order than the first batch, or blocks
that the first batch does not run. A batch may leave blocks out. But which blocks run must not
depend on the values of hidden states, since the walk does not always have them as they are in a
full forward.
"""


def row(family: str) -> list[str]:
    """Prune a family in all settings, and return its row of the table."""
    settings: list[dict[str, bool]] = [{}, {"padding": False}]
    if FAMILIES[family].auto == "AutoModelForCausalLM":
        settings.append({"use_cache": False})
    runs = [prune_and_compare(family, **setting) for setting in settings]
    first = runs[0]
    error = max(run.error for run in runs)
    return [
        family,
        ", ".join(f"`{name}`" for name in _classes([b.module for b in first.plan.blocks])),
        first.listener.walk or "",
        _names(first, [r.name for r in first.rows if r.skipped is None]),
        _names(first, [r.name for r in first.rows if r.skipped is not None]),
        f"{error:.0e}" if error else "0",
    ]


def markdown(rows: list[list[str]]) -> str:
    """Return the table."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _classes(modules: list[nn.Module]) -> list[str]:
    return list(dict.fromkeys(type(module).__name__ for module in modules))


def _names(run: CheckedRun, layers: list[str]) -> str:
    """Layers by their place in a block: `mlp.{up_proj, down_proj}`."""
    groups: dict[str, dict[str, None]] = {}
    for name in layers:
        path = _inside(name, run.plan.blocks)
        parent, _, leaf = re.sub(r"(?<=\.)\d+(?=\.)", "*", path).rpartition(".")
        groups.setdefault(parent, {})[leaf] = None
    return ", ".join(_join(parent, list(leaves)) for parent, leaves in groups.items())


def _inside(name: str, blocks: list[Block]) -> str:
    (block,) = [b.name for b in blocks if name.startswith(f"{b.name}.")]
    return name.removeprefix(f"{block}.")


def _join(parent: str, leaves: list[str]) -> str:
    if not parent:
        return ", ".join(f"`{leaf}`" for leaf in leaves)
    joined = leaves[0] if len(leaves) == 1 else f"{{{', '.join(leaves)}}}"
    return f"`{parent}.{joined}`"


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--markdown", type=Path, help="write the whole page here")
    options = parser.parse_args()
    logging.getLogger("mrp_lightning").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    show = track(options.families, "pruning", disable=not sys.stderr.isatty(), transient=True)
    table = markdown([row(family) for family in show])
    if options.markdown is None:
        print(table)
        return
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    text = TEXT.replace("{table}", table).replace("{python}", platform.python_version())
    for name, version in versions.items():
        text = text.replace(f"{{{name}}}", version)
    options.markdown.write_text(text)


if __name__ == "__main__":
    main()
