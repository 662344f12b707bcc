"""`quantization_config` of a packed directory in vLLM, and which method runs each of its layers.

layer of vLLM                            method
all of its parts are packed              PackedMethod: multiplies with the packed tensors
some are (q of q, k and v)               PartlyPackedMethod: unpacked while they are read
none is                                  vLLM's own
head of 8 bits, and its tied embeddings  EightBitMethod
experts                                  vLLM's own: no format packs them
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from mrp_ground.errors import FormatError, first_line
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4
from mrp_sparse.formats.packed_format import PackedFormat
from mrp_sparse.formats.settings import check_settings
from mrp_sparse.formats.sparse24 import SPARSE24
from mrp_sparse.vllm.linear import (
    EXPORT_AGAIN,
    EightBitMethod,
    PackedMethod,
    PartlyPackedMethod,
    why_not,
)

log = init_logger(f"vllm.{__name__}")


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

    def maybe_update_config(self, model_name: str, *_: Any, **__: Any) -> None:
        """Check the files of a local directory; vLLM calls this once, before it starts workers.

        Raises:
            FormatError: Packed layers are damaged or missing.
        """
        # A model of the hub is fetched by the workers, which check what they read.
        if Path(model_name).is_dir():
            check_directory(Path(model_name), self.form, self.modules)

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
    """Register the configurations with vLLM."""
    for method, config in CONFIGS.items():
        register_quantization_config(method)(config)


def check_directory(directory: Path, form: PackedFormat, modules: Iterable[str]) -> None:
    """Raise, before the workers start, if a directory does not hold packed layers whole.

    The workers check each layer whole while they read it (`linear.py`), but an error there comes
    among the tracebacks of several processes. Here headers, the places of the values and scales are
    read, and no values: that shows files that are cut off or missing, and places that do not fit
    their values.

    Args:
        directory: The checkpoint. Without safetensors files there is nothing to check: vLLM itself
            reports that.
        form: The format of the layers.
        modules: Their names.

    Raises:
        FormatError: Files or tensors are damaged or missing; all are listed.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}  # by the names of their tensors
        problems = []
        for path in _files(directory):
            try:
                file = stack.enter_context(safe_open(path, "pt"))
                files |= dict.fromkeys(file.keys(), file)
            # ValueError: a zero byte in the name of a file.
            except (OSError, ValueError, SafetensorError) as error:
                problems.append(f"{path.name}: {first_line(error)}")
        # Tensors of a file that cannot be opened would be listed as missing, one by one.
        if files and not problems:
            problems = [*_problems(files, form, sorted(modules))]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise FormatError(f"{directory} cannot be read whole. {EXPORT_AGAIN}\n{listed}")


def _files(directory: Path) -> list[Path]:
    """Return the files that vLLM will read: those of the index, or else all."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    try:
        names = sorted({*json.loads(index.read_text("utf-8"))["weight_map"].values()})
        return [directory / name for name in names]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise FormatError(f"{index} is damaged ({first_line(error)}). {EXPORT_AGAIN}") from error


def _problems(files: dict[str, Any], form: PackedFormat, modules: list[str]) -> Iterator[str]:
    """Yield what is wrong with packed layers; `files` are open, by the names of their tensors."""
    for module in modules:
        names = {name: f"{module}.{name}" for name in form.names}
        if missing := [name for name, full in names.items() if full not in files]:
            yield f"{module}: {', '.join(missing)} missing in the files"
            continue
        # Tensors are views of the mapped files: values that nothing accesses are never read.
        tensors = {name: files[full].get_tensor(full) for name, full in names.items()}
        places = tensors[form.places]
        if places.ndim != 2:
            yield f"{module}: {form.places} has {places.ndim} dimensions, expected 2"
            continue
        # A byte of places is eight columns. The last may be fewer, which only the model knows: the
        # workers check that.
        shape = places.shape[0], 8 * places.shape[1]
        if wrong := why_not(form, shape, [*tensors.values()]):
            yield f"{module}: {wrong}"
