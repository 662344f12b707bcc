r"""The perplexity that rounding activations to 8 bits costs, by how many columns share a scale.

    python lab/benchmarks/activations.py MODEL… [--text FILE.txt] [--windows 40] [--outliers 32]

METHOD. Each model is evaluated in float32 as it is, and with the inputs of all linear layers but
the head rounded to whole numbers from −127 to 127, with one scale for each token, and one for each
token and 64 columns. The weights are those of the files, multiplied densely: kernels take no part.
With `--outliers F` one in a hundred channels of each norm before the attention and before the
neurons is F times as large, as a few channels of OPT's are, and the columns that read it F times as
small: the same function, exactly if F is a power of two.
Perplexity is that of the first windows of 512 tokens of a text: Python's standard library, or that
of `--text`.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning import CausalLM, TextDataModule, Trainer
from mrp_sparse.formats import eight_bit

BATCH = 4
WIDTHS: dict[str, int | None] = {"one a token": None, "one for 64 columns": 64}
"""Columns that share a scale; None is all."""


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="directories or GGUF files")
    parser.add_argument("--text", default="stdlib", help="a file of text")
    parser.add_argument("--windows", type=int, default=40, help="a multiple of 4")
    parser.add_argument("--outliers", type=float, default=1.0, help="the factor of a few channels")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| model | not rounded | {' | '.join(WIDTHS)} |\n|{' --- |' * (2 + len(WIDTHS))}")
    for name in options.models:
        module = CausalLM(name, dtype="float32")
        make_outliers(module.model, options.outliers)
        text = TextDataModule(
            evaluation={"text": options.text},
            sequence_length=512,
            batch_size=BATCH,
            tokenizer=module.tokenizer,
        )
        batches = options.windows // BATCH
        plain = perplexity(module, text, batches)
        cells = [f"{plain:.3f}"]
        for width in WIDTHS.values():
            found = perplexity(module, text, batches, partial(rounded, width=width))
            cells.append(f"{found:.3f} ({found / plain - 1:+.2%})")
        print(f"| {Path(name).name} | {' | '.join(cells)} |", flush=True)


@torch.no_grad()
def make_outliers(model: Any, factor: float) -> None:
    """Multiply a few channels of all norms of a LLaMA by a factor, and divide columns by it."""
    for block in model.model.layers:
        attention, neurons = block.self_attn, block.mlp
        for norm, readers in (
            (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (block.post_attention_layernorm, (neurons.gate_proj, neurons.up_proj)),
        ):
            norm.weight[::100] *= factor
            for reader in readers:
                reader.weight[:, ::100] /= factor


def rounded(x: Tensor, width: int | None) -> Tensor:
    """Round tokens (..., columns) to 8 bits, `width` columns with a scale of their own."""
    padding = 0 if width is None else -x.shape[-1] % width
    groups = nn.functional.pad(x, (0, padding)).reshape(-1, width or x.shape[-1])
    values = eight_bit.unpack(*eight_bit.pack(groups)).view(*x.shape[:-1], -1)
    return values[..., : x.shape[-1]]


def perplexity(
    module: CausalLM,
    text: TextDataModule,
    batches: int,
    change: Callable[[Tensor], Tensor] | None = None,
) -> float:
    """Return the perplexity of a model, with `change` applied to the inputs of its layers."""
    model: Any = module.model
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]

    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return None if change is None else (change(inputs[0]), *inputs[1:])

    handles = [layer.register_forward_pre_hook(before) for layer in layers]
    trainer = Trainer(
        accelerator="cpu",
        limit_test_batches=batches,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.test(module, datamodule=text, verbose=False)
    for handle in handles:
        handle.remove()
    return float(module.evaluation["text"]["perplexity"] or 0)


if __name__ == "__main__":
    main()
