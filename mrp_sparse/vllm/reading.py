"""Reading a packed checkpoint in vLLM: every tensor in its place, or one error before it serves.

vLLM hands the tensors of a checkpoint to the model's class, and checks none of a quantized model.
So they are watched on their way: two methods of `DefaultModelLoader` are wrapped for packed models.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from mrp_ground.errors import FormatError, first_line
from mrp_sparse.formats.packed_format import NOTE
from mrp_sparse.vllm.configuration import CONFIGS, PackedConfig
from mrp_sparse.vllm.linear import EXPORT_AGAIN, Arrivals, EightBitMethod, PackedMethod, mark

log = init_logger(f"vllm.{__name__}")

_NEXT_STEP = "Run the model in transformers, or serve the pruned one that was packed."


@functools.cache
def register() -> None:
    """Wrap vLLM's reading of files, once."""
    read, load = DefaultModelLoader.get_all_weights, DefaultModelLoader.load_weights

    @functools.wraps(load)
    def load_whole(self: Any, model: nn.Module, model_config: Any) -> None:
        # Errors of other models keep their type: this package must not change how they are read.
        if model_config.quantization not in CONFIGS:
            return load(self, model, model_config)
        try:
            return load(self, model, model_config)
        except FormatError:
            # It names the layer and the next step already.
            raise
        except Exception as error:  # classes of models have code of their own for each tensor
            raise FormatError(
                f"vLLM's {type(model).__name__} cannot read packed layers ({first_line(error)}). "
                f"{_NEXT_STEP}"
            ) from error

    @functools.wraps(read)
    def read_and_watch(self: Any, model_config: Any, model: nn.Module) -> Iterator[Any]:
        tensors = read(self, model_config, model)
        return watch(tensors, model) if model_config.quantization in CONFIGS else tensors

    DefaultModelLoader.load_weights = load_whole
    DefaultModelLoader.get_all_weights = read_and_watch


def watch(tensors: Iterable[tuple[str, Tensor]], model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a packed checkpoint, marked; then check that every layer is whole.

    Raises:
        FormatError: Packed layers have no counterpart in vLLM's model, or were not read whole; all
            are listed.
    """
    # 1. Names come first: a packed layer without a reader is an error before any tensor is read.
    # 2. Ties come before the first tensor, since they decide the name under which it is yielded.
    # 3. Only after the last tensor can one be missing, since they come in any order.
    configs = (getattr(module, "quant_config", None) for module in model.modules())
    config = next(config for config in configs if isinstance(config, PackedConfig))
    _check_names(model, config)
    head, table = _tied_head(model, config)
    for name, tensor in tensors:
        if name == NOTE:  # for readers without this package
            continue
        mark(tensor)
        # A tied head of 8 bits is stored once, under its own name.
        yield (table + name.removeprefix(head) if head and name.startswith(head) else name), tensor
    arrivals = (getattr(module, "arrivals", None) for module in model.modules())
    problems = [problem for a in arrivals if isinstance(a, Arrivals) for problem in a.problems()]
    if problems:
        # Tied layers share their arrivals, whose problems would be listed twice.
        listed = "\n".join(f"  {problem}" for problem in dict.fromkeys(problems))
        raise FormatError(f"The checkpoint cannot be read whole. {EXPORT_AGAIN}\n{listed}")
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    packed = sum(isinstance(method, PackedMethod) for method in methods)
    log.info("%d layers multiply by %s.", packed, config.get_name())


def _check_names(model: nn.Module, config: PackedConfig) -> None:
    """Raise if no layer of vLLM will read one of the packed layers."""
    expected = config.modules | ({config.head} if config.head else set())
    # In a pipeline, other layers are on other workers.
    is_whole = not any("Missing" in type(module).__name__ for module in model.modules())
    if is_whole and (unread := sorted(expected - config.claimed)):
        raise FormatError(
            f"vLLM's {type(model).__name__} has no linear layer for {len(unread)} of the packed "
            f"ones, such as {unread[0]}. {_NEXT_STEP}"
        )


def _tied_head(model: nn.Module, config: PackedConfig) -> tuple[str, str]:
    """Return the name of a head of 8 bits with tied embeddings, and theirs, each with a dot.

    Both are empty if there are none. vLLM may have built the two apart: then they are tied here.
    """
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "quant_method", None), EightBitMethod)
    }
    tables = [name for name, module in modules.items() if not isinstance(module, ParallelLMHead)]
    if config.head is None or not config.is_tied:
        return "", ""
    if not tables:
        raise FormatError(
            f"vLLM's {type(model).__name__} reads its embeddings in its own way, and not from a "
            "head of 8 bits. Export without `--head-bits`."
        )
    for module in modules.values():
        if isinstance(module, ParallelLMHead) and not hasattr(module, "tied_to"):
            module.quant_method.tie_weights(module, modules[tables[0]])
    return f"{config.head}.", f"{tables[0]}."
