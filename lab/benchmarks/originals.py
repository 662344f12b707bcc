"""The original codes of SparseGPT, GPTQ and ALPS, from checkouts on disk: a layer, and a model."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.solver.patterns import Pattern, SemiStructured
from mrp_lightning.solver.problem import output_energy
from mrp_lightning.targets.plan import Plan

DAMPING = 0.01
BLOCK_SIZE = 128
TWO_OF_FOUR = SemiStructured(2, 4)


@dataclass(frozen=True)
class Original:
    """A method's own code for one layer.

    Attributes:
        pruner: Makes its object for a linear layer.
        hessian: The name of the attribute in which it sums up XXᵀ.
        prune: Prunes the layer to a pattern by what was summed up.
    """

    pruner: Callable[[nn.Linear], Any]
    hessian: str
    prune: Callable[[Any, Pattern], object]


def sparsegpt(repository: Path) -> Original:
    """SparseGPT (IST-DASLab/sparsegpt)."""
    if str(repository) not in sys.path:
        sys.path.insert(0, str(repository))
    from sparsegpt import SparseGPT  # type: ignore[import-not-found]

    def prune(pruner: Any, pattern: Pattern) -> None:
        options: dict[str, Any] = {"blocksize": BLOCK_SIZE, "percdamp": DAMPING}
        if isinstance(pattern, SemiStructured):
            options |= {"prunen": pattern.removed, "prunem": pattern.group}
        pruner.fasterprune(pattern.sparsity, **options)

    return Original(SparseGPT, "H", prune)


def gptq(repository: Path, bits: int, group: int) -> Original:
    """GPTQ (IST-DASLab/gptq): so many bits, a scale and a zero for each group of columns."""
    if str(repository) not in sys.path:
        sys.path.insert(0, str(repository))
    from gptq import GPTQ, Quantizer  # type: ignore[import-not-found]

    def pruner(layer: nn.Linear) -> Any:
        made = GPTQ(layer)
        made.quantizer = Quantizer()
        made.quantizer.configure(bits, perchannel=True, sym=False)
        return made

    def quantise(pruner: Any, _: Pattern) -> None:
        pruner.fasterquant(blocksize=BLOCK_SIZE, percdamp=DAMPING, groupsize=group)

    return Original(pruner, "H", quantise)


def alps(repository: Path) -> Original:
    """ALPS (mazumder-lab/ALPS)."""
    source = (repository / "alps.py").read_text()
    if not torch.cuda.is_available():
        source = source.replace("'cuda:0'", "'cpu'")
    names: dict[str, Any] = {}
    exec(compile(source, repository / "alps.py", "exec"), names)
    make = names["ALPS_prune"]

    def prune(pruner: Any, pattern: Pattern) -> None:
        groups = (0, 0)
        if isinstance(pattern, SemiStructured):
            groups = (pattern.group - pattern.removed, pattern.group)
        pruner.ALPS_admm(pattern.sparsity, *groups)

    return Original(lambda layer: make(layer, 1, 1), "XtX", prune)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let their code say nothing, and do without the GPU that it takes for granted."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def prune_matrix(original: Original, weight: Tensor, hessian: Tensor) -> Tensor:
    """Prune one matrix (rows, columns) to 2:4 by its Hessian."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device)
    linear.weight.data = weight.clone()
    pruner = original.pruner(linear)
    setattr(pruner, original.hessian, hessian.clone())
    with quiet():
        original.prune(pruner, TWO_OF_FOUR)
    return linear.weight.data


def relative_loss(layer: nn.Linear, weight: Tensor, hessian: Tensor) -> float:
    """‖δx‖² / ‖wx‖² of a pruned layer over its inputs, from its weight before and its Hessian."""
    weight = weight.float()
    change = layer.weight.float() - weight
    return output_energy(change, hessian) / output_energy(weight, hessian)


def prune_model(
    original: Original,
    model: nn.Module,
    windows: Sequence[Tensor],
    plan: Plan,
    parts: Callable[[str], contextlib.AbstractContextManager[None]],
    seen: Callable[[nn.Linear, Tensor, Tensor], None],
    pattern: Pattern = TWO_OF_FOUR,
) -> None:
    """Prune all blocks in order, as their `llama.py` and `opt.py` do.

    They catch what the first block is given, run each block by itself on all windows while hooks
    sum up XXᵀ for each layer, prune, and run the block once more.

    Args:
        original: Their code for a layer.
        model: A language model whose layers are all `nn.Linear`.
        windows: Batches of token ids (1, length), all of one length.
        plan: Its blocks and layers.
        parts: Tells what the time is spent on.
        seen: Called with each pruned layer, its weight before, and its Hessian.
        pattern: What to remove.
    """
    hidden, arguments = _inputs_of_first_block(model, windows, plan, parts)
    outputs = torch.zeros_like(hidden)
    for block in plan.blocks:
        layers: list[nn.Linear] = [layer.module for layer in plan.layers[block.name]]  # type: ignore[misc]
        pruners = {layer: original.pruner(layer) for layer in layers}

        def add(
            layer: nn.Module, inputs: Any, output: Any, pruners: dict[Any, Any] = pruners
        ) -> None:
            with parts("Hessians"):
                pruners[layer].add_batch(inputs[0].data, output.data)

        handles = [layer.register_forward_hook(add) for layer in layers]
        for prune in (True, False):
            with parts("forwards"):
                for i in range(len(hidden)):
                    output = block.module(hidden[i : i + 1], **arguments)
                    outputs[i] = output[0] if isinstance(output, tuple) else output
            if not prune:
                break
            for handle in handles:
                handle.remove()
            for layer, pruner in pruners.items():
                with parts("checks"):
                    before = layer.weight.data.clone(), getattr(pruner, original.hessian).clone()
                with parts("layers"), quiet():
                    original.prune(pruner, pattern)
                    pruner.free()
                with parts("checks"):
                    seen(layer, *before)
        hidden, outputs = outputs, hidden


def _inputs_of_first_block(
    model: nn.Module,
    windows: Sequence[Tensor],
    plan: Plan,
    parts: Callable[[str], contextlib.AbstractContextManager[None]],
) -> tuple[Tensor, dict[str, Any]]:
    """The hidden states (windows, length, width), and the other arguments, which are the same."""
    hidden: list[Tensor] = []
    arguments: dict[str, Any] = {}

    class Caught(Exception):  # noqa: N818
        pass

    def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(kwargs)
        hidden.append(args[0] if args else given.pop("hidden_states"))
        arguments.update(given)
        raise Caught

    handle = plan.blocks[0].module.register_forward_pre_hook(catch, with_kwargs=True)
    with parts("forwards"):
        for window in windows:
            with contextlib.suppress(Caught):
                model(input_ids=window, use_cache=False)
    handle.remove()
    return torch.cat(hidden), arguments
