"""The quantizer plug-ins with which `from_pretrained` reads packed directories.

The packed tensor is called `weight`, so that loading without a plug-in fails with a size mismatch;
under any other name transformers would put random weights in its place.

`import_after` imports this module right after `transformers.quantizers.auto`, while transformers
may still be loading: it may import only modules of transformers that are loaded by then, no models.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from mrp_ground.errors import FormatError, OptionError
from mrp_sparse.eight_bit_head import EightBitLinear, Head
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4
from mrp_sparse.formats.packed_format import NOTE
from mrp_sparse.formats.settings import check_settings
from mrp_sparse.formats.sparse24 import SPARSE24
from mrp_sparse.packed_linear import (
    Bitmask4Linear,
    BitmaskLinear,
    PackedLinear,
    Sparse24Linear,
    is_packable,
    round_activations,
    weight_matrix,
)
from mrp_sparse.upstream import ignore_unexpected, was_loaded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


class PackedConfig(QuantizationConfigMixin):
    """`quantization_config` in the `config.json` of a packed directory; the arguments are its keys.

    See `FORMAT.md`. All may be missing: transformers also makes a configuration without arguments.
    With `quant_method`, as files have it, `format_version` is needed, too.

    Raises:
        FormatError: A key or a value is not as this version of the format writes it.
    """

    layer: ClassVar[type[PackedLinear]]
    # On the instance only if given, since `to_dict` writes all that is there.
    head: dict[str, Any] | None = None
    activations: str | None = None

    def __init__(
        self,
        modules: Sequence[str] | Mapping[str, int] = (),
        format_version: int | None = None,
        quant_method: str | None = None,
        head: Mapping[str, Any] | None = None,
        activations: str | None = None,
        **unknown: Any,
    ) -> None:
        form = self.layer.FORMAT
        settings = {"format_version": format_version, "quant_method": quant_method, "head": head}
        settings |= {"activations": activations}
        # A file names its method: without a version beside it, it is one of another version.
        needed = {"format_version"} if quant_method is not None else set()
        present = {k: value for k, value in settings.items() if value is not None or k in needed}
        check_settings(form, {"modules": modules, **present, **unknown})
        if head is not None:
            self.head = {key: head[key] for key in ("module", "format_version")}
        if activations is not None:
            self.activations = activations
        self.quant_method: Any = form.quant_method
        self.format_version = form.version
        self.modules: Any = modules if modules else {} if form.counted else []

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of elements of `weight` by name of the layer; 0 where its shape suffices."""
        return dict(self.modules) if self.layer.FORMAT.counted else dict.fromkeys(self.modules, 0)


class PackedQuantizer(HfQuantizer):
    """Quantizer that replaces layers by packed ones before transformers loads the weights."""

    quantization_config: PackedConfig
    requires_calibration = True  # weights that are not packed cannot be packed while loading

    def _process_model_before_weight_loading(
        self, model: "PreTrainedModel", **_: Any
    ) -> "PreTrainedModel":
        pack_modules(model, self.quantization_config)
        ignore_unexpected(model, NOTE)
        return model

    def _process_model_after_weight_loading(
        self, model: "PreTrainedModel", **_: Any
    ) -> "PreTrainedModel":
        # Problems are collected, so that one error names every damaged layer.
        damaged = []
        for name, layer in self._layers(model).items():
            # A tensor that no file held is uninitialised memory, which may look valid.
            if missing := _missing(layer, (*layer.FORMAT.names, "bias")):
                damaged += [f"{name}.{key} (missing, or of another shape)" for key in missing]
                continue
            layer.weight.requires_grad_(False)
            # Loading may write into existing tensors, which `__setattr__` does not see.
            layer.derive()
            offloaded = layer.weight.is_meta or layer.places.is_meta
            if not offloaded and (damage := layer.damage()):
                damaged.append(f"{name}.{layer.FORMAT.places} ({damage})")
        if damaged:
            raise FormatError(
                f"The checkpoint is damaged or incomplete: {', '.join(damaged)}. Export the pruned "
                "model again."
            )
        return expand_bitmasks(model)

    def _layers(self, model: nn.Module) -> dict[str, PackedLinear]:
        """Return the packed layers by name, a head of 8 bits among them."""
        head = self.quantization_config.head
        names = [*self.quantization_config.counts, *([] if head is None else [head["module"]])]
        layers = {name: model.get_submodule(name) for name in names}
        return {name: layer for name, layer in layers.items() if isinstance(layer, PackedLinear)}

    def dequantize(
        self, model: "PreTrainedModel", dtype: torch.dtype | str | None = None
    ) -> "PreTrainedModel":
        """Replace the packed layers, and the head, in place by the dense layers of the class.

        All weights are cast to a `dtype`, or to that of a name; by default they keep theirs.
        """
        # Not by the base class: it casts the packed layers alone, by default to the dtype in which
        # the model was loaded, and a model whose layers differ in it cannot run.
        kind: Any = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        layers = self._layers(model)
        if any(t.is_meta for layer in layers.values() for t in layer.state_dict().values()):
            raise OptionError(
                "Weights that are offloaded cannot be made dense: load the model without disk "
                "offload (`device_map`, `offload_folder`), then dequantize it."
            )
        # Only the class knows the kind of each layer, `nn.Linear` or `Conv1D`, and its ties. On the
        # meta device a second model takes no memory.
        with torch.device("meta"):
            original = type(model)(model.config)
        for name, packed in layers.items():
            if isinstance(packed, EightBitLinear):
                Head.of(original).put_dense(model, original)
            else:
                model.set_submodule(name, packed.give(original.get_submodule(name)))
        self.remove_quantization_config(model)
        if kind is not None:
            nn.Module.to(model, kind)  # PreTrainedModel.to has another signature
        return model

    def get_state_dict_and_metadata(
        self, model: "PreTrainedModel"
    ) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """Return the tensors that `save_pretrained` writes, with `NOTE`, and empty metadata.

        If any is offloaded, `None` takes their place: transformers then collects them itself.
        """
        state = model.state_dict()
        is_offloaded = any(tensor.is_meta for tensor in state.values())
        return (None if is_offloaded else {**state, NOTE: torch.empty(0)}), {}

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Return True: `save_pretrained` writes the packed tensors as they are."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Packed weights are frozen."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Operators have fake kernels, and unpacking waits for no value, as CUDA graphs require."""
        return True


@register_quantization_config(SPARSE24.quant_method)
class Sparse24Config(PackedConfig):
    """`quantization_config` of 2:4 weights: `modules` is a list of names."""

    layer = Sparse24Linear


@register_quantization_config(BITMASK4.quant_method)
class Bitmask4Config(PackedConfig):
    """`quantization_config` of bitmasks of four bits: `modules` maps names to numbers of bytes."""

    layer = Bitmask4Linear


@register_quantization_config(BITMASK.quant_method)
class BitmaskConfig(PackedConfig):
    """`quantization_config` of bitmasks: `modules` maps names to numbers of kept values."""

    layer = BitmaskLinear


CONFIGS: dict[str, type[PackedConfig]] = {
    config.layer.FORMAT.quant_method: config
    for config in (Sparse24Config, BitmaskConfig, Bitmask4Config)
}
"""The classes of configurations by `quant_method`."""
for _method in CONFIGS:
    register_quantizer(_method)(PackedQuantizer)


@torch.no_grad()
def expand_bitmasks(model: "PreTrainedModel") -> "PreTrainedModel":
    """Make a model dense, in place, if bitmasks or its head of 8 bits are not on a CPU.

    Only CPUs multiply with these as they are stored. Elsewhere each is unpacked once, one layer
    after the other, and the model takes the memory of the dense one. 2:4 layers stay packed, unless
    the model has a head of 8 bits. Where layers are offloaded, all of them stay packed.
    """
    kinds = (BitmaskLinear, Bitmask4Linear, EightBitLinear)
    layers = [layer for layer in model.modules() if isinstance(layer, kinds)]
    slow = [layer for layer in layers if layer.weight.device.type != "cpu"]
    if slow and not any(layer.weight.is_meta for layer in layers):
        log.warning(
            "The model is made dense: %d packed layers (%s) are on %s, and only CPUs multiply with "
            "them as they are. It takes the memory of the dense model, and rounds no activations.",
            len(slow),
            ", ".join(sorted({type(layer).__name__ for layer in slow})),
            slow[0].weight.device,
        )
        model.dequantize()
    return model


def _missing(layer: PackedLinear, names: Sequence[str]) -> list[str]:
    """Return the names of the layer's tensors that no file held; it may have no bias."""
    tensors = {name: getattr(layer, name) for name in names}
    return [name for name, t in tensors.items() if t is not None and not was_loaded(t)]


def pack_modules(model: nn.Module, config: PackedConfig) -> None:
    """Replace linear layers, and the head, in place by uninitialised packed ones of their shape.

    Raises:
        FormatError: `misfits` finds problems, or the head does not fit. The model is unchanged.
    """
    # All checks precede the first replacement: an error leaves the model as it was, and `Head`
    # still sees the dense head and its ties.
    modules = dict(model.named_modules())
    problems, head = misfits(modules, config), None
    try:
        if config.head is not None:
            head, name = Head.of(model), config.head["module"]
            if head.name != name:
                problems["head"] = f"{name}: the head of {type(model).__name__} is {head.name}"
            elif name in config.counts:
                problems["head"] = f"{name}: both a packed layer and the head of 8 bits"
    except OptionError as error:
        problems["head"] = str(error)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems.values())
        raise FormatError(
            f"`quantization_config` does not fit {type(model).__name__}. The class must be "
            f"the one that was exported; else export the pruned model again:\n{listed}"
        )
    for name, count in config.counts.items():
        model.set_submodule(name, config.layer.like(modules[name], count=count))
    if config.activations is not None:
        round_activations(model)
    if head is not None:
        linear: Any = model.get_submodule(head.name)
        head.put(model, EightBitLinear.like(linear))


def misfits(modules: Mapping[str, nn.Module], config: PackedConfig) -> dict[str, str]:
    """Return, by name, the problems of layers: missing, not linear, wrong shape or count."""
    problems = {}
    for name, count in config.counts.items():
        if name not in modules or not is_packable(modules[name]):
            problems[name] = f"{name}: the module has no linear layer of this name"
            continue
        rows, columns = weight_matrix(modules[name]).shape
        if reason := config.layer.FORMAT.why_not((rows, columns)):
            problems[name] = f"{name}: {reason}"
        # A damaged count must not allocate more elements than the dense weight has.
        elif count > rows * columns:
            problems[name] = f"{name}: {count:,} values are kept of {rows}×{columns} weights"
    return problems
