"""Layers of vLLM that multiply with packed weights, and how these are read.

A layer of vLLM may hold several of the checkpoint (`qkv_proj`), and with tensor parallelism only
some of their rows or columns. The packed tensors of each arrive one by one and in any order. Once
all of one are there, they are checked whole and cut to what this worker multiplies with; after the
last one, the rows of all parts are joined. So reading takes the memory of the packed weights and of
one layer.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from mrp_ground.errors import FormatError
from mrp_sparse.formats import eight_bit, slices
from mrp_sparse.formats.packed_format import PackedFormat
from mrp_sparse.kernels import huge_pages, library
from mrp_sparse.upstream import ask_for_amx

EXPORT_AGAIN = "Export the pruned model again."
_MARK = "_mrp_sparse_from_file"
"""Attribute of the storage of tensors that were read from a file.

Some classes of vLLM permute the rows of a weight between the file and the layer (BLOOM, Falcon).
The places of a packed weight would follow, its values would not. Views keep the mark, such as the
transpose with which GPT-2 reads its layers, and copies lose it.
"""
_SHARDS = {"q": 0, "k": 1, "v": 2}
_KNOWN = (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
"""The classes whose parts `parts_of` knows, and their subclasses that read weights like them."""


@dataclass(frozen=True)
class Part:
    """One layer of the checkpoint in a layer of vLLM, and the rows of it that this worker holds."""

    rows: int  # in the checkpoint
    begin: int  # the worker's first row
    end: int  # the row after its last
    padding: int = 0  # rows of zeros that follow, of a vocabulary that workers share evenly


def mark(tensor: Tensor) -> None:
    """Mark a tensor as read from a file."""
    setattr(tensor.untyped_storage(), _MARK, True)


def parts_of(layer: Any, sizes: Sequence[int], output_size: int) -> list[Part]:
    """Return the parts of a layer of vLLM.

    Args:
        layer: The layer.
        sizes: The rows of each part on this worker.
        output_size: The rows of all parts on all workers.
    """
    if isinstance(layer, VocabParallelEmbedding):
        shard = layer.shard_indices
        begin, end = shard.org_vocab_start_index, shard.org_vocab_end_index
        return [Part(layer.org_vocab_size, begin, end, sizes[0] - (end - begin))]
    # All rows are here: there is one worker, or the layer is replicated or split by columns.
    if sum(sizes) == output_size:
        return [Part(size, 0, size) for size in sizes]
    parts = []
    for index, size in enumerate(sizes):
        # Where workers outnumber the heads of keys and values, several hold the same head.
        # Part 0 is q, whose heads are never repeated; layers without heads lack the attribute.
        copies = getattr(layer, "num_kv_head_replicas", 1) if index else 1
        rank = layer.tp_rank // copies
        parts.append(Part(size * layer.tp_size // copies, rank * size, (rank + 1) * size))
    return parts


class Arrivals:
    """The packed tensors of a layer of vLLM while they are read.

    Args:
        layer: The layer, for messages.
        form: The format of its packed parts.
        num_parts: The number of its parts, packed or not.
        receive: `receive(parts, tensors)` is called with all packed tensors of one layer of the
            checkpoint, and the indices of its parts; returns what is wrong with them, or `None`.
    """

    def __init__(
        self,
        layer: nn.Module,
        form: PackedFormat,
        num_parts: int,
        receive: Callable[[list[int], list[Tensor]], str | None],
    ) -> None:
        self.prefix = getattr(layer, "prefix", "") or type(layer).__name__
        self.names = form.names
        self._receive = receive
        self._waiting: dict[Any, dict[str, Tensor]] = {}
        self._num_parts = num_parts
        self._missing = set(range(num_parts))
        self._wrong: list[str] = []

    def take(self, name: str, param: Any, tensor: Tensor, shard: Any = None) -> None:
        """Take one tensor of a packed part, as the `weight_loader` of a parameter."""
        del param
        # A permuted copy has the right shape and passes all checks of `why_not`: only the mark
        # shows it. It counts as arrived, so that it is not reported as missing, too.
        if not hasattr(tensor.untyped_storage(), _MARK):
            self._wrong.append(
                f"{name} is not as in the file: this class of model rearranges it while reading, "
                "or the load format is not vLLM's own"
            )
            self.arrived(shard)
            return
        waiting = self._waiting.setdefault(shard, {})
        waiting[name] = tensor if tensor.is_contiguous() else tensor.t()  # as in the file
        if len(waiting) == len(self.names):
            del self._waiting[shard]
            wrong = self._receive(self.indices(shard), [waiting[name] for name in self.names])
            self._wrong += [wrong] if wrong else []
            self.arrived(shard)

    def arrived(self, shard: Any) -> None:
        """Note that a part needs no more tensors."""
        self._missing -= set(self.indices(shard))

    def indices(self, shard: Any) -> list[int]:
        """Return the indices of the parts in a shard; the shard `None` holds all of them."""
        if shard is None:
            return list(range(self._num_parts))
        return list(shard) if isinstance(shard, tuple) else [_SHARDS.get(shard, shard)]

    def problems(self) -> list[str]:
        """Return what is wrong with the tensors, or missing, once all were read."""
        problems = [*self._wrong]
        if self._missing:
            there = {name for waiting in self._waiting.values() for name in waiting}
            names = ", ".join(name for name in self.names if name not in there)
            problems.append(f"{names} missing in the files")
        return [f"{self.prefix}: {problem}" for problem in problems]


class PackedMethod(LinearMethodBase):
    """Method of a layer of which all parts are packed: it multiplies with the packed weights.

    Args:
        form: The format of the weights.
        *options: The arguments of its operator after the bias.
    """

    def __init__(self, form: PackedFormat, *options: Any) -> None:
        self.form = form
        self.options = options

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Register empty parameters, whose loaders take the packed tensors.

        Raises:
            FormatError: The worker's columns cannot be cut out of the packed weight, or this class
                of layer reads weights in its own way.
        """
        _check_class(layer)
        # Worker r begins at column r·columns: if `columns` is a multiple of `cut`, so is this.
        columns, cut = input_size_per_partition, slices.unit(self.form)
        if columns != input_size and columns % cut:
            raise FormatError(
                f"{layer.prefix}: each of {layer.tp_size} workers would have {columns} of its "
                f"{input_size} columns, and {self.form.quant_method} is cut at multiples of {cut}. "
                "Choose another `tensor_parallel_size`."
            )
        layer.packed_parts, layer.packed_columns = {}, columns
        receive = functools.partial(
            self._receive,
            layer,
            parts_of(layer, output_partition_sizes, output_size),
            (layer.tp_rank * columns if columns != input_size else 0, columns, input_size),
            params_dtype,
        )
        layer.arrivals = Arrivals(layer, self.form, len(output_partition_sizes), receive)
        _register_empty(layer, self.form, params_dtype)

    def _receive(
        self,
        layer: Any,
        parts: list[Part],
        split: tuple[int, int, int],
        dtype: torch.dtype,
        indices: list[int],
        tensors: list[Tensor],
    ) -> str | None:
        """Keep the slices of a layer of the checkpoint that this worker multiplies with.

        `split` is the worker's first column, its number of columns and that of the whole layer.
        Return the reason if the tensors are not a packed weight of the layer's shape, else `None`.
        """
        # The weight is checked whole, since bits and values agree in number only before a cut.
        # Columns are cut before rows, which changes each row's first value: `slices.rows` computes
        # it from the bits. `first` is the part's first row in the fused weight.
        first_column, columns, all_columns = split
        shape = sum(parts[index].rows for index in indices), all_columns
        if wrong := why_not(self.form, shape, tensors):
            return wrong
        if columns != all_columns:
            tensors = slices.columns(self.form, tensors, first_column, first_column + columns)
        first, device = 0, layer.weight.device
        for index in indices:
            part = parts[index]
            rows = slices.rows(self.form, tensors, first + part.begin, first + part.end)
            first += part.rows
            layer.packed_parts[index] = [_copied(tensor, device, dtype) for tensor in rows]
            if part.padding:
                # All formats store row after row: packed zeros may follow packed rows.
                zeros = torch.zeros(part.padding, columns, dtype=dtype, device=device)
                pairs = zip(layer.packed_parts[index], self.form.pack(zeros), strict=True)
                layer.packed_parts[index] = [torch.cat(pair) for pair in pairs]
        if len(layer.packed_parts) == len(parts):
            self._join(layer)
        return None

    def _join(self, layer: Any) -> None:
        """Join the rows of all parts into the layer's parameters, and release the parts.

        This happens as soon as the last part is read, so that one layer at a time is held twice.
        """
        parts = [layer.packed_parts.pop(index) for index in sorted(layer.packed_parts)]
        for name, tensors in zip(self.form.names, zip(*parts, strict=True), strict=True):
            joined = _joined(tensors)
            setattr(layer, name, nn.Parameter(joined, requires_grad=False))
        if self.form.row_offsets is not None:
            # From the joined bits: offsets of a part would count from its own first value.
            offsets = self.form.row_offsets(getattr(layer, self.form.places))
            layer.register_buffer("weight_offsets", offsets, persistent=False)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that the layer was read whole; make bitmasks dense, unless they are on a CPU."""
        finish(layer)
        del layer.packed_parts
        if layer.weight.device.type == "cpu":
            library.load()  # before torch.compile traces the operators
            ask_for_amx()  # vLLM's attention uses it
        elif self.form.row_offsets is not None:  # only CPUs multiply with bitmasks as they are
            dense = self.form.unpack(*self._tensors(layer), layer.packed_columns)
            layer.weight = nn.Parameter(dense, requires_grad=False)
            for name in (*self.form.companions, "weight_offsets"):
                delattr(layer, name)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + bias for x (..., columns)."""
        if not hasattr(layer, self.form.places):
            return F.linear(x, layer.weight, bias)  # it was made dense
        offsets = getattr(layer, "weight_offsets", None)
        return self.form.multiply(x, self._tensors(layer), bias, *self.options, offsets=offsets)

    def _tensors(self, layer: Any) -> list[Tensor]:
        """Return the packed tensors of a layer."""
        return [getattr(layer, name) for name in self.form.names]


class EightBitMethod(PackedMethod):
    """Method of a layer of 8 bits: multiply with it as a head, or look up embeddings in it."""

    def __init__(self) -> None:
        super().__init__(eight_bit.EIGHT_BIT)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Return the embeddings (..., columns) of token ids (...)."""
        return eight_bit.unpack(layer.weight[input_], layer.weight_scales[input_])

    def tie_weights(self, layer: ParallelLMHead, embed_tokens: Any) -> ParallelLMHead:
        """Let a head use the tensors of the embeddings, which are read under their name."""
        layer.tied_to = (embed_tokens,)  # in a tuple, so that it is no submodule of the head
        # The parameters are still empty. Their loaders fill the table, and the head takes its
        # tensors in `process_weights_after_loading`.
        for name in ("weight", "weight_scales"):
            setattr(layer, name, getattr(embed_tokens, name))
        layer.arrivals = embed_tokens.arrivals
        return layer

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that all was read; a tied head takes the tensors of its embeddings."""
        (table,) = getattr(layer, "tied_to", (layer,))
        # vLLM calls this for the table and for the head, in either order. The first call finishes
        # the table and deletes `packed_parts`; the second only assigns.
        if hasattr(table, "packed_parts"):
            super().process_weights_after_loading(table)
        layer.weight, layer.weight_scales = table.weight, table.weight_scales
        for name in ("arrivals", "packed_parts"):
            layer.__dict__.pop(name, None)


class PartlyPackedMethod(UnquantizedLinearMethod):
    """Method of a layer of which some parts are packed: these are unpacked while they are read.

    Args:
        form: The format of the packed parts.
    """

    def __init__(self, form: PackedFormat) -> None:
        super().__init__()
        self.form = form

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register the dense weight, and empty parameters for the companions of packed parts.

        Raises:
            FormatError: This class of layer reads weights in its own way.
        """
        _check_class(layer)
        load = extra["weight_loader"]
        sizes = input_size_per_partition, output_partition_sizes, input_size, output_size
        super().create_weights(layer, *sizes, params_dtype, **extra)
        dense = layer.weight
        parts = parts_of(layer, output_partition_sizes, output_size)

        def receive(indices: list[int], tensors: list[Tensor]) -> str | None:
            shape = sum(parts[index].rows for index in indices), input_size
            if wrong := why_not(self.form, shape, tensors):
                return wrong
            # vLLM names a part of q, k and v by its letter, and any other by its index.
            letters = {index: letter for letter, index in _SHARDS.items()}
            is_qkv = isinstance(layer, QKVParallelLinear)
            shards = [letters[index] if is_qkv else index for index in indices]
            weight = self.form.unpack(*tensors, input_size)
            heights = [parts[index].rows for index in indices]
            for shard, rows in zip(shards, weight.split(heights), strict=True):
                load(dense, rows, shard)
            return None

        # `weight` names the packed values in one file and the dense part in another. The dense
        # parameter keeps this name, and its loader `take` distinguishes the two.
        arrivals = Arrivals(layer, self.form, len(output_partition_sizes), receive)
        layer.arrivals = arrivals
        _register_empty(layer, self.form, params_dtype)
        layer.weight = dense

        def take(param: Any, tensor: Tensor, shard: Any = None) -> None:
            # Packed values are 1-D, half as wide, or integers: none is floating with all columns.
            is_dense = tensor.is_floating_point() and tensor.shape[1:] == (input_size,)
            if not is_dense:
                arrivals.take("weight", param, tensor, shard)
                return
            load(param, tensor, *(() if shard is None else (shard,)))
            arrivals.arrived(shard)

        dense.weight_loader = take

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the dense weight as vLLM does; see `finish`."""
        finish(layer)
        for name in self.form.companions:
            delattr(layer, name)
        super().process_weights_after_loading(layer)


def why_not(form: PackedFormat, shape: tuple[int, int], tensors: Sequence[Tensor]) -> str | None:
    """Return why these tensors are not a packed weight of a shape, `None` if they are."""
    if reason := form.why_not(shape):
        return reason
    # The files may have another floating dtype than the layer: `_copied` casts, so that the
    # format's shapes and integer dtypes are compared alone. On the meta device this takes no
    # memory.
    dtype = next((x.dtype for x in tensors if x.is_floating_point()), torch.float32)
    with torch.device("meta"):
        expected = form.empty(shape, tensors[0].numel(), dtype)
    for name, tensor, other in zip(form.names, tensors, expected, strict=True):
        if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
            return (
                f"{name} is {tuple(tensor.shape)} in {tensor.dtype}, expected "
                f"{tuple(other.shape)} in {other.dtype}"
            )
    damage = form.damage(*tensors, shape[1])
    return f"damaged, {damage}" if damage else None


def finish(layer: Any) -> None:
    """Raise a `FormatError` if a layer was not read whole; else delete its `arrivals`."""
    if problems := layer.arrivals.problems():
        raise FormatError(f"{'; '.join(problems)}. {EXPORT_AGAIN}")
    del layer.arrivals


def _register_empty(layer: Any, form: PackedFormat, dtype: torch.dtype) -> None:
    """Register an empty parameter for each stored tensor, with a loader that collects its parts.

    vLLM calls the loaders with slices of the checkpoint's tensors, which `layer.arrivals` collects
    until a layer is whole.
    """
    for name, tensor in zip(form.names, form.empty((0, 0), 0, dtype), strict=True):
        param: Any = nn.Parameter(torch.empty(0, dtype=tensor.dtype), requires_grad=False)
        param.weight_loader = functools.partial(layer.arrivals.take, name)
        # A class that rearranges rows finds their dimension here, does so, and is then refused by
        # `take`. Without it the class would pass unnoticed, as one that rearranges nothing.
        param.output_dim, param.input_dim = 0, 1
        layer.register_parameter(name, param)


def _check_class(layer: Any) -> None:
    # A subclass that overrides `weight_loader` fails this identity; one that inherits it passes.
    if not any(type(layer).weight_loader is known.weight_loader for known in _KNOWN):
        raise FormatError(
            f"{layer.prefix}: a {type(layer).__name__} reads its weights in its own way, which "
            "packed ones do not allow. Leave this layer dense: export with `--skip`."
        )


def _copied(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a copy, floating ones in `dtype`: a tensor that was read may be a view of a file."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return huge_pages.empty(tensor.shape, kind, device).copy_(tensor)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts, one after the other."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    shape = sum(map(len, tensors)), *first.shape[1:]
    # The parts share a dtype: `out` would cast silently.
    return torch.cat([*tensors], out=huge_pages.empty(shape, first.dtype, first.device))
