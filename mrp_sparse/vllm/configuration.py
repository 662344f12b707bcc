"""`quantization_config` of a packed directory in vLLM, its layers, and reading it whole.

layer of vLLM                            method
all of its parts are packed              PackedMethod: multiplies with the packed tensors
some are (q of q, k and v)               PartlyPackedMethod: unpacked while they are read
none is                                  vLLM's own
head of 8 bits, and its tied embeddings  EightBitMethod
experts                                  vLLM's own: no format packs them
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from mrp_ground.errors import FormatError, first_line
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4
from mrp_sparse.formats.packed_format import NOTE, PackedFormat
from mrp_sparse.formats.settings import check_settings
from mrp_sparse.formats.sparse24 import SPARSE24
from mrp_sparse.vllm.linear import (
    EXPORT_AGAIN,
    Arrivals,
    EightBitMethod,
    PackedMethod,
    PartlyPackedMethod,
    mark,
)

log = init_logger(f"vllm.{__name__}")

_NEXT_STEP = "Run the model in transformers, or export it with `--format dense`."


class PackedConfig(QuantizationConfig):
    """`quantization_config` of a packed directory; `mrp_sparse/FORMAT.md` describes it.

    Args:
        modules: The names of the packed layers.
        head: The name of the head of 8 bits, if there is one.
        activations: The dtype to which the inputs of packed layers are rounded, if they are.

    Attributes:
        claimed: The names of the packed layers, and of the head, that layers of vLLM will read.
        is_tied: Whether the embeddings are read from the head of 8 bits, too.
    """

    form: ClassVar[PackedFormat]

    def __init__(
        self, modules: Any = (), head: str | None = None, activations: str | None = None
    ) -> None:
        super().__init__()
        self.modules = {*modules}
        self.head = head
        self.activations = activations
        self.claimed: set[str] = set()
        self.is_tied = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.modules)} packed layers)"

    @classmethod
    def get_name(cls) -> Any:
        """Return the `quant_method`."""
        return cls.form.quant_method

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the compute capability of CUDA devices, in tenths, from which it runs.

        2:4 has kernels by Triton, which supports 8.0 and later: on older devices every product
        would unpack its weight. Bitmasks are made dense on any.
        """
        return 80

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of activations that the kernels multiply."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no names: the settings are in `config.json`."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PackedConfig":
        """Return the configuration of a directory.

        Raises:
            FormatError: A key or a value is not as this version of the format writes it.
        """
        # `check_settings` skips missing keys. The default makes a file without a version one of
        # another version, which is refused.
        settings: Mapping[str, Any] = {"format_version": None, **config}
        check_settings(cls.form, settings)
        head = settings.get("head", {}).get("module")
        return cls(settings.get("modules", ()), head, settings.get("activations"))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the layers as vLLM's class of model renames them."""
        self.modules = {*hf_to_vllm_mapper.apply_list(sorted(self.modules))}
        if self.head is not None:
            (self.head,) = hf_to_vllm_mapper.apply_list([self.head])

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the method that runs a layer, and note in `claimed` the names that it will read.

        Layers that are neither linear nor a vocabulary get `None`, as does a dense vocabulary: vLLM
        then takes its own method.

        Raises:
            FormatError: vLLM stores packed layers in a module of another kind, such as experts.
        """
        if isinstance(layer, VocabParallelEmbedding):
            return self._method_of_vocabulary(layer, prefix)
        if isinstance(layer, LinearBase):
            return self._method_of_linear(prefix)
        # A module of another kind has no loader for packed tensors: the error comes here, while the
        # model is built, and not in the middle of reading.
        inside = sorted(name for name in self.modules if name.startswith(f"{prefix}."))
        if inside:
            raise FormatError(
                f"{prefix}: vLLM stores the {len(inside)} packed layers in this "
                f"{type(layer).__name__}, such as {inside[0]}, as one dense tensor. Leave them "
                "dense: export with `--skip`."
            )
        if any(word in type(layer).__name__ for word in ("MoE", "Experts")):
            log.info_once("Experts are multiplied densely: %s packs none.", self.form.quant_method)
        return None

    def _method_of_linear(self, prefix: str) -> Any:
        parent, _, name = prefix.rpartition(".")
        # vLLM's name of a merged layer (qkv_proj) is in no file: `modules` has q_proj and others.
        parts = [
            f"{parent}.{part}".removeprefix(".")
            for part in self.packed_modules_mapping.get(name, [name])
        ]
        packed = [part for part in parts if part in self.modules]
        # Parts that will be unpacked count, too: `reading` refuses packed layers without a reader.
        self.claimed.update(packed)
        if not packed:
            return UnquantizedLinearMethod()
        if len(packed) == len(parts):
            return self._packed_method()
        log.info("%s is dense: only %s of its parts are packed.", prefix, ", ".join(packed))
        return PartlyPackedMethod(self.form)

    def _packed_method(self) -> PackedMethod:
        options = [] if self.activations is None else [True]
        if options and not current_platform.is_cpu():
            log.warning_once("Activations are not rounded: on this device bitmasks are made dense.")
        return PackedMethod(self.form, *options)

    def _method_of_vocabulary(self, layer: nn.Module, prefix: str) -> Any:
        is_head = isinstance(layer, ParallelLMHead)
        if is_head and prefix in self.modules:
            self.claimed.add(prefix)
            return self._packed_method()
        if self.head is None:
            return None
        self.is_tied = _is_tied()
        # With ties the embeddings and the head read the same 8 bits. Without, only the layer of the
        # head's name has them, and the embeddings stay dense.
        if not self.is_tied and not (is_head and prefix == self.head):
            return None
        self.claimed.add(self.head)
        return EightBitMethod()


def _is_tied() -> bool:
    """Return whether the model's embeddings are tied to its head, by its own configuration.

    vLLM unties them where the files hold a head, which those of a tied head of 8 bits do.
    """
    model = get_current_vllm_config().model_config
    untied_by_files = getattr(model, "word_embeddings_untied_by_checkpoint", False)
    return untied_by_files or getattr(model.hf_config, "tie_word_embeddings", False)


# vLLM pickles configurations to its workers, so that the classes need names in this module.
class Sparse24Config(PackedConfig):
    """`quantization_config` of 2:4 weights."""

    form = SPARSE24


class BitmaskConfig(PackedConfig):
    """`quantization_config` of bitmasks."""

    form = BITMASK


class Bitmask4Config(PackedConfig):
    """`quantization_config` of bitmasks of four bits."""

    form = BITMASK4


CONFIGS = {
    config.form.quant_method: config for config in (Sparse24Config, BitmaskConfig, Bitmask4Config)
}
"""The classes of configurations by `quant_method`."""


def register() -> None:
    """Register the configurations with vLLM, and watch that every tensor gets to its place."""
    for method, config in CONFIGS.items():
        register_quantization_config(method)(config)
    _watch_reading()


@functools.cache
def _watch_reading() -> None:
    """Wrap vLLM's reading of files, once.

    vLLM hands the tensors of a checkpoint to the model's class, and checks none of a quantized
    model. So they are watched on their way, if a model is packed.
    """
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
                f"If files are damaged or missing, export it again; else: {_NEXT_STEP}"
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
