"""Names that other packages keep to themselves, and that there is no public way around.

No other file uses such a name. Each function says in which version it was seen, why it is needed,
and what takes its place once upstream offers it. Packages are imported inside the functions: who
needs torch alone loads torch alone.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# torch

COMPILED = "_orig_mod"
"""The child under which `torch.compile` keeps the module that it wraps. Seen in torch 2.13.

Hooks on the wrapper never fire, and the word is in the names of all that is inside. In its place:
whatever unwraps an `OptimizedModule`, once torch has it."""

APPLY = "_apply"
"""The method by which `to`, `half` and their like change every tensor of a module. Seen in torch
2.13.

A block that stays where it is while its model moves has one of its own. There is no hook for it."""


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, or the module itself; see `COMPILED`."""
    found: nn.Module = getattr(module, COMPILED, module)
    return found


def pads(conv: nn.Conv2d) -> list[int]:
    """The pads, as `torch.nn.functional.pad` takes them, that do what a convolution's padding does.

    Seen in torch 2.13. `conv.padding` is a pair of numbers or a word, and the word gives uneven
    pads for even kernels; torch has worked that out. In its place: `pad` with a convolution's
    `padding`, once it takes words.
    """
    return list(conv._reversed_padding_repeated_twice)


def times_changed(tensor: Tensor) -> int:
    """The number of times that a tensor was changed in place; inference mode counts none.

    Seen in torch 2.13. Layers that are given the same tensor share a Hessian, unless something was
    added to it in between. Nothing public tells that.
    """
    return 0 if tensor.is_inference() else tensor._version


def has_matrix_units() -> bool:
    """Whether this CPU has AMX, units that multiply tiles of bfloat16 numbers.

    Seen in torch 2.13. In its place: `torch.cpu.get_capabilities()["amx_tile"]`, once the oldest
    torch that is supported has it.
    """
    return torch.cpu._is_amx_tile_supported()


def float32_precision(setting: tuple[str, str]) -> str:
    """The precision in force of float32 products: none, ieee, tf32 or bf16.

    It is that of a backend and an operation, such as ("cuda", "matmul") or ("mkldnn", "all").

    Seen in torch 2.13. In its place: `torch.backends.mkldnn.fp32_precision` and its like. Of these,
    mkldnn's now sets the precision of all back-ends.
    """
    return str(torch._C._get_fp32_precision_getter(*setting))


def set_float32_precision(setting: tuple[str, str], precision: str) -> None:
    """Set the precision of float32 products; see `float32_precision`."""
    torch._C._set_fp32_precision_setter(*setting, precision)


def group_store() -> Any:
    """The store of torch's default process group, which all of its processes can read and write.

    Seen in torch 2.13. It is there without a port of its own, and in all backends. In its place: a
    public `torch.distributed.get_default_store`.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def multiply_int8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """X Wᵀ for x (tokens, columns), W = weight · scales[:, None], weight int8 (rows, columns).

    Seen in torch 2.13, where on a CPU columns that are no multiple of 16 are read beyond their end,
    and addresses that are none end the process: those of tensors read from a file may be such.
    In its place: a public product of 8 bits; torchao's layers call this one.
    """
    return torch.ops.aten._weight_int8pack_mm(aligned(x), aligned(weight), scales)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, at an address that `multiply_int8` can read from.

    It is the tensor itself while code is traced, which has no address.
    """
    at_hand = torch.compiler.is_compiling() or tensor.is_meta
    return tensor if at_hand or tensor.data_ptr() % 16 == 0 else tensor.clone()


def check(holds: Any, message: str) -> None:
    """Raise a RuntimeError where a relation of shapes does not hold, which may be symbols.

    Seen in torch 2.13. Code that `torch.compile` and `torch.export` trace cannot ask a symbol by
    `if`. In its place: a public name of `torch._check`, which torch's pages recommend.
    """
    torch._check(holds, lambda: message)


def arguments_of_cusparselt() -> set[str]:
    """The names of the arguments of `matmul_cusparselt` that this torch knows.

    Seen in torch 2.13, as the three functions below. torch's public way to cuSPARSELt,
    `to_sparse_semi_structured`, gives a subclass of tensors, which neither safetensors nor an
    operator of ours takes. In their place: public operators, once torch has them.
    """
    return {argument.name for argument in torch.ops.aten._cslt_sparse_mm.default._schema.arguments}


def compress_cusparselt(weight: Tensor) -> Tensor:
    """A 2:4 weight in cuSPARSELt's layout; see `arguments_of_cusparselt`."""
    return torch._cslt_compress(weight)


def matmul_cusparselt(
    compressed: Tensor, x: Tensor, bias: Tensor | None, **algorithm: Any
) -> Tensor:
    """(W x)ᵀ + bias for x (in, tokens); see `arguments_of_cusparselt`."""
    return torch._cslt_sparse_mm(compressed, x, bias=bias, transpose_result=True, **algorithm)


def search_cusparselt(compressed: Tensor, x: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """The `alg_id`, and maybe `split_k` and `split_k_mode`, that are fastest for these operands.

    The operator for it tells the first alone; a binding, where torch has one, tells all. See
    `arguments_of_cusparselt`.
    """
    binding = getattr(torch._C, "_cusparselt", None)
    if binding is not None and "mm_search" in dir(binding):
        return tuple(map(int, binding.mm_search(compressed, x, bias, None, None, True)[:3]))
    return (int(torch._cslt_sparse_mm_search(compressed, x, bias=bias, transpose_result=True)),)


def is_cutlass_forced() -> bool:
    """Whether torch's 2:4 tensors run on CUTLASS though cuSPARSELt is there.

    Seen in torch 2.13, whose class of them documents this attribute as the way to choose. In its
    place: an argument of `to_sparse_semi_structured`.
    """
    from torch.sparse import SparseSemiStructuredTensor

    return SparseSemiStructuredTensor._FORCE_CUTLASS


def tiles_of_sparse24(kind: Any, dtype: torch.dtype) -> tuple[int, int] | None:
    """The tile that divides a 2:4 tensor's rows and columns; `None` for dtypes that it cannot have.

    Seen in torch 2.13. Whoever does not ask first gets an error in the middle of a model. In its
    place: a public function that says whether a tensor has such a form.
    """
    rules = kind._DTYPE_SHAPE_CONSTRAINTS.get(dtype)
    return None if rules is None else (rules.sparse_min_rows, rules.sparse_min_cols)


# Lightning


def movable() -> type:
    """The class of everything that Lightning moves to a device: all that has a method `to`.

    Seen in Lightning 2.6. Batches may hold objects that are no tensors. In its place: a public name
    of it in `lightning.fabric.utilities`.
    """
    from lightning.fabric.utilities.apply_func import _TransferableDataType

    return _TransferableDataType


def in_order(callbacks: list[Any]) -> list[Any]:
    """Callbacks in the order in which a trainer calls them; it refuses those that it would.

    Seen in Lightning 2.6, whose trainer does this with the callbacks that it is made with, and
    with those of a model, but has no method for more. In its place: a method that adds callbacks,
    or `predict(callbacks=…)`.
    """
    from lightning.pytorch.trainer.connectors import callback_connector

    ordered = callback_connector._CallbackConnector._reorder_callbacks(callbacks)
    callback_connector._validate_callbacks_list(ordered)
    return ordered


def works_in_children(trainer: Any) -> bool:
    """Whether a trainer's strategy spawns or forks workers, in which the model is another one.

    Seen in Lightning 2.6, whose strategies tell it by the class of their launcher alone. In its
    place: a property of strategies or of launchers.
    """
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def strategy_as_given(trainer: Any) -> Any:
    """The word, or the object, that a trainer was given as its `strategy`.

    Seen in Lightning 2.6. A message names the strategy as the user did. In its place: a property
    of trainers.
    """
    return trainer._accelerator_connector._strategy_flag


def predict_data(trainer: Any) -> Any:
    """The datamodule or the dataloaders of the `predict` that runs.

    Seen in Lightning 2.6, whose `trainer.datamodule` is still that of an earlier call where this
    one was given dataloaders. In its place: `trainer.datamodule`, once each call sets it.
    """
    return trainer.predict_loop._data_source.instance


def unwrap_dataloaders() -> None:
    """Take away what Lightning wraps around the methods of dataloaders while it asks for one.

    Seen in Lightning 2.6, which leaves it there, for the whole process, where that raises: of
    later dataloaders it then refuses all whose `batch_size` is given by its place. In its place:
    a `finally` in `lightning.fabric.utilities.data._replace_dunder_methods`.
    """
    from lightning_utilities.core.inheritance import get_all_subclasses
    from torch.utils.data import BatchSampler, DataLoader

    for kind in (DataLoader, BatchSampler):
        for each in {kind, *get_all_subclasses(kind)}:
            for method in ("__init__", "__setattr__", "__delattr__"):
                if own := each.__dict__.get(f"__old{method}"):
                    setattr(each, method, own)
                    delattr(each, f"__old{method}")


# transformers

EXPERTS = "_experts_implementation"
"""The attribute of a configuration that says how stacked experts are multiplied. Seen in
transformers 5.23.

Its public setter, `PreTrainedModel.set_experts_implementation`, needs the model; calibration has
any module that holds experts. In its place: an attribute of that name without the underscore."""


def attention_of(config: Any) -> str | None:
    """By which attention a model computes, such as `sdpa`.

    Seen in transformers 5.23, which has a public setter, but no getter. In its place: a
    `get_attn_implementation` beside the `get_experts_implementation` of models.
    """
    name: str | None = config._attn_implementation
    return name


@contextmanager
def grouped_attention() -> Iterator[None]:
    """Let what is traced attend with as many heads of keys and values as there are.

    Seen in transformers 5.23, which repeats them for all heads of queries in a graph with a mask;
    torch's product for CPUs does not need that. In its place: an argument of the attention.
    """
    name = "TRANSFORMERS_SDPA_FORCE_GQA"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def takes_any_cache(model: Any) -> bool:
    """Whether a model generates with a cache that it is given, by whichever layers this has.

    Those that transformers lets generate with one of a fixed size do. Seen in transformers 5.23,
    where others fail in the middle of a forward. In its place: a public property of models.
    """
    return bool(model._can_compile_fullgraph)


def dtypes_kept(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtypes that transformers keeps in a model that it loads in `dtype`, by patterns of names.

    Seen in transformers 5.23. What is saved has to be what a loading would give. Nothing public
    tells it.
    """
    return model._get_dtype_plan(dtype)


def was_loaded(tensor: Tensor) -> bool:
    """Whether `from_pretrained` read a tensor from a file, or left it on the disk.

    Seen in transformers 5.23, which tells what was missing only after the quantizer had its turn.
    In its place: the report of the loading, once quantizers are given it.
    """
    return tensor.is_meta or getattr(tensor, "_is_hf_initialized", False)


def conversions_at_loading(model: Any) -> list[Any]:
    """The steps by which transformers made a model's weights of the tensors in its files.

    Seen in transformers 5.23, whose `save_pretrained` reverts them. They say which tensor of a file
    became which of the model. In its place: `transformers.core_model_loading`, once it has a
    function of the model alone.
    """
    return getattr(model, "_weight_conversions", None) or []


def from_config(kind: Any, config: Any) -> Any:
    """A model of one class by its configuration, in the configuration's dtype.

    Seen in transformers 5.23, where only the auto classes have a public `from_config`, and these
    know one class a configuration. In its place: a public one of `PreTrainedModel`.
    """
    return kind._from_config(config)


@contextmanager
def loading_weights_by(load_weights: Callable[..., Any]) -> Iterator[None]:
    """Let `from_pretrained` do all but load the weights.

    It finds the files, builds the model on the meta device, makes what no file holds (such as
    rotary tables), ties and reports. Seen in transformers 5.23. In its place: an argument that
    leaves weights where they are. The only one is accelerate's `device_map`, which writes stacked
    experts to the disk once more.

    Args:
        load_weights: Takes a model that is built, its state, the names of its files and how they
            are to be loaded, and gives what was found in them, and a second value, which is `None`.
    """
    from transformers import PreTrainedModel

    name = "_load_pretrained_model"
    own = PreTrainedModel.__dict__[name]
    setattr(PreTrainedModel, name, staticmethod(load_weights))
    try:
        yield
    finally:
        setattr(PreTrainedModel, name, own)


# huggingface_hub


@contextmanager
def hub_away() -> Iterator[None]:
    """Let what loads from the hub look only into its cache, as with `HF_HUB_OFFLINE=1`.

    Seen in huggingface_hub 2.4 and datasets 5.2, which read the variable when they are imported,
    and otherwise try each file for 24 s. In its place: `local_files_only` of `load_dataset`, once
    it asks nothing.
    """
    import datasets.config
    import huggingface_hub.constants

    places: tuple[Any, ...] = (huggingface_hub.constants, datasets.config)
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        yield
    finally:
        for place, is_offline in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = is_offline


# gguf


def bounded_gguf(file: Path) -> Any:
    """A reader of a GGUF file that stops where the file ends.

    Seen in gguf 0.19. Its own reads on behind the end, value after value, as often as the header
    says: for ever, if it says a number that is large enough. In its place: `GGUFReader`, once it
    raises there.
    """
    from gguf import GGUFReader

    class Bounded(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **more: Any) -> Any:
            found = super()._get(offset, dtype, count, *order, **more)
            if len(found) < count:
                raise ValueError(f"it ends before the {int(count):,} values at byte {offset:,}")
            return found

    return Bounded(file)


# argparse


def take_alone(parser: Any, group: str, key: str, is_value: Callable[[str], bool]) -> None:
    """Let `--group VALUE`, and `group: VALUE` in YAML, stand for the option `group.key`.

    Seen in jsonargparse 4.53, where the option of a group names a file of what is in the group. In
    its place: a public way to let it take anything else.

    Args:
        parser: The parser, to which the group was added with `sub_configs`.
        group: The name of a group of options.
        key: The one that the value is of.
        is_value: Whether a text is such a value, and not the name of a file or the text of one.
    """
    (action,) = (each for each in parser._actions if each.dest == group)
    load = action._load_config

    def load_or_take(value: Any, *more: Any) -> Any:
        return load({key: value} if isinstance(value, str) and is_value(value) else value, *more)

    action._load_config = load_or_take


def options_of(parser: Any) -> dict[str, Any]:
    """The options that a parser knows, with their dashes, and the type of each.

    Seen in Python 3.11, and in jsonargparse 4.53, whose parser is one of argparse. A message names
    the option that a mistyped one is nearest to. In its place: a public list of a parser's actions.
    """
    return {
        name: getattr(action, "_typehint", action.type)
        for action in parser._actions
        for name in action.option_strings
    }
