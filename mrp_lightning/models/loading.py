"""Load models, configurations and tokenizers from directories, the hub and GGUF files."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import is_zipfile

import torch
from huggingface_hub import get_safetensors_metadata, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    MODEL_FOR_PRETRAINING_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import build_glob_alternation
from transformers.utils import cached_file

from mrp_lightning.environment import progress_log as log
from mrp_lightning.environment import why_no_hub, without_bars
from mrp_lightning.errors import (
    ArgumentError,
    DataError,
    FormatError,
    OptionError,
    TargetError,
    counted,
)
from mrp_lightning.models.checkpoint import (
    build_without_weights,
    directory_of,
    found_at,
    model_class,
    names_in_model,
    register_format,
    stored_names,
    weight_files,
    why_not_found,
    why_not_readable,
)
from mrp_lightning.models.classes import name_class_of_files, require_causal, require_text
from mrp_lightning.models.companions import MODULES, VOCABULARIES, directories_of_modules
from mrp_lightning.models.gguf import gguf_config, gguf_model, has_tokenizer, reading
from mrp_lightning.models.integrity import (
    check_files,
    check_values,
    explained_damage,
    misfits,
    not_loaded,
    read_pickle,
    required,
    unexpected_tensors,
)
from mrp_lightning.models.locations import find_gguf, is_path, require_model
from mrp_lightning.upstream.other_names import conversions_at_loading, dtypes_kept

_LONG = 10**9
"""The bytes of weights from which loading takes so long that a line says what is done."""


def make_config(values: dict[str, Any]) -> PreTrainedConfig:
    """Return the configuration that the values of a `config.json` describe."""
    if "model_type" not in values:
        raise OptionError(
            "`model` given as a dictionary is a transformers configuration and needs `model_type`, "
            f"such as llama. Got the keys {sorted(values)}."
        )
    check_values(values, "the dictionary")
    try:
        return AutoConfig.for_model(**values)
    except Exception as error:  # of any type, from the model's own checks
        raise FormatError(not_loaded("the dictionary", error)) from error


def load_config(
    source: str, *, attn_implementation: str | None = None, **hub: Any
) -> PreTrainedConfig:
    """Load the configuration of a model; if it is quantized, register its format.

    `architectures` is the class whose weights the files hold; see `name_class_of_files`.

    `hub` are `revision` and `trust_remote_code`.

    Raises:
        FileNotFoundError: `source` is no directory with a `config.json`, hub id or GGUF file.
        FormatError: transformers does not know the model, or may not run the code that comes with
            it; the directory holds a PEFT adapter; or the GGUF file or the configuration is
            damaged. `find_gguf` and `reading` raise more.
    """
    if file := find_gguf(source):
        return gguf_config(file)
    path = Path(source).expanduser()
    require_model(source)
    with _explained_absence(source):
        try:
            location = found_at(source)
            values = PreTrainedConfig.get_config_dict(**location, **hub)[0]
            check_values(values, source)
            if attn_implementation is not None:
                hub["attn_implementation"] = attn_implementation
            # Always passed, since transformers would otherwise ask on the terminal.
            config = AutoConfig.from_pretrained(**location, **{"trust_remote_code": False} | hub)
        except (OSError, FormatError):
            raise
        except Exception as error:  # of any type, from the model's own checks
            raise FormatError(not_loaded(source, error)) from error
    register_format(config)
    revision = hub.get("revision")
    if not path.exists():
        _fetch_modules(source, revision)
    if directory := directory_of(source, revision):
        names = _stored_names(directory) or _names_on_hub(source, revision)
        name_class_of_files(config, directory, names)
    return config


@contextmanager
def _explained_absence(source: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        local = Path(source).expanduser()
        absence = "" if local.exists() else f"there is no {local.absolute()}; "
        raise FileNotFoundError(
            f"`model`: {source} is neither a complete local model directory nor a model that the "
            "hub gives. Check the name, or download it first. "
            f"({absence}{why_not_found(source, error)})"
        ) from None  # the hub's own chain of errors is in the reason


def load_model(source: str, dtype: torch.dtype | None, **options: Any) -> PreTrainedModel:
    """Load a causal language model, and check that its weights are those of the checkpoint.

    Args:
        source: Directory, hub id or GGUF file of the model.
        dtype: Precision to load in; `None` keeps the checkpoint's, and is bfloat16 for GGUF.
        **options: `revision`, `trust_remote_code` and `attn_implementation`.

    Raises:
        TargetError: The checkpoint is quantized, lacks weights that the model needs, holds others,
            or is of a class that is no causal language model.
        FormatError: Files of the checkpoint are damaged, hold more than tensors, or do not fit its
            configuration; or its index names files elsewhere. `load_config` raises more.
    """
    if file := find_gguf(source):
        return gguf_model(file, dtype, options.get("attn_implementation"))
    config = load_config(source, **options)
    require_causal(config, source, trust_remote_code=bool(options.get("trust_remote_code")))
    return _load_pretrained(AutoModelForCausalLM, config, source, dtype, **options)


def load_text_model(source: str, dtype: torch.dtype | None, **options: Any) -> PreTrainedModel:
    """Load a model that reads text, of the class that its configuration names.

    Files of BERT and its relatives hold the heads of its pretraining, too, and name a class without
    them. Such a model is loaded as its family's class for pretraining, with a warning, so that
    nothing of the files is lost. Arguments and errors are those of `load_model` and `require_text`.
    """
    config, trust = load_config(source, **options), bool(options.get("trust_remote_code"))
    kind = model_class(config)
    require_text(build_without_weights(config, trust_remote_code=trust), kind, source)
    try:
        return _load_pretrained(kind, config, source, dtype, **options)
    except TargetError:
        whole: Any = MODEL_FOR_PRETRAINING_MAPPING.get(type(config), None)
        if whole is None or whole is kind:
            raise
        with suppress(TargetError):  # else the first error is raised, about the class that is named
            model = _load_pretrained(whole, config, source, dtype, **options)
            log.warning(
                "`model`: the files of %s hold the heads of a %s, and its config.json names %s, "
                "which lacks some of them: it is loaded, pruned and saved as the former.",
                *(source, whole.__name__, kind.__name__),
            )
            return model
        raise


def _load_pretrained(
    kind: Any, config: PreTrainedConfig, source: str, dtype: torch.dtype | None, **options: Any
) -> PreTrainedModel:
    """Load a model of a class or auto class, and check that it has the checkpoint's weights."""
    if reason := why_not_readable(config):
        raise TargetError(f"`model`: the checkpoint {source} is {reason}")
    # The loaded model's configuration will have the dtype in memory: this is the published one.
    published = config.dtype
    try:
        as_dtype(published)
    except OptionError as error:
        raise FormatError(f"`model`: config.json of {source}: {error}") from error
    directory = Path(source).expanduser()
    size = sum(file.stat().st_size for file in weight_files(directory)) if directory.is_dir() else 0
    if size > _LONG:
        log.info("Loading the %.1f GB of %s …", size / 1e9, source)
    with _explained_absence(source):
        options["dtype"] = dtype or "auto"
        model = load_checked(kind, config, source, error=TargetError, **options)
    # A checkpoint loaded in another precision is still saved in its own (see saving.py).
    model.config.dtype = published or model.dtype
    return model


def load_checked(
    kind: Any,
    config: PreTrainedConfig,
    source: str,
    /,
    *,
    error: type[ArgumentError] = FormatError,
    **options: Any,
) -> PreTrainedModel:
    """Load a model, and check that it has the weights of its files, and no others.

    Args:
        kind: The class or auto class.
        config: The configuration, whose model must not be larger than the files.
        source: The directory or hub id.
        error: The error that is raised if weights do not fit the model.
        **options: Options of `from_pretrained`. With `trust_remote_code` no size is checked.

    Raises:
        FormatError: The files are damaged, or cannot be of the model.
    """
    directory = Path(source).expanduser()
    if not options.get("trust_remote_code"):  # trusted code may build a model of any size
        # Without weights: a wrong configuration could ask for any amount of memory.
        expected = build_without_weights(config, kind=kind)
        if directory.is_dir():  # the hub's files are not downloaded yet
            check_files(directory, expected)
    with explained_damage(source, options.get("revision")):
        model, loading = _read_weights(kind, source, **options)
    # transformers only warns of them, and computes with random weights where some are missing.
    unexpected = loading["unexpected_keys"]
    if problem := misfits(source, model, loading) or unexpected_tensors(source, model, unexpected):
        raise error(f"`model`: {problem}")
    return model


def _read_weights(kind: Any, source: str, **options: Any) -> tuple[PreTrainedModel, Any]:
    """Return a model, without a pooler if the files lack one, and how the files fit it."""
    # Wrong shapes are reported by the caller, by name.
    options |= {**found_at(source), "output_loading_info": True, "ignore_mismatched_sizes": True}
    with without_bars():
        model, loading = kind.from_pretrained(**options)
    missing = loading["missing_keys"]
    if missing and not required(type(model), missing):
        log.warning(
            "`model`: the files of %s hold a %s without its pooler: it is loaded, pruned and saved "
            "without one.",
            *(source, type(model).__name__),
        )
        with without_bars():
            model, loading = kind.from_pretrained(add_pooling_layer=False, **options)
    return model, loading


def as_dtype(name: torch.dtype | str | None) -> torch.dtype | None:
    """Return the floating dtype of a name such as `bfloat16`; dtypes and `None` as they are."""
    if name is None or isinstance(name, torch.dtype):
        return name
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise OptionError(
            f"`dtype` must be a floating type such as float32 or bfloat16. Got {name!r}."
        )
    return dtype


def stored_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype in which a model was published and is stored; if unknown, that in memory."""
    return as_dtype(model.config.dtype) or model.dtype


def wider_dtypes(
    model: PreTrainedModel, dtype: torch.dtype, *, as_published: bool
) -> dict[str, torch.dtype]:
    """Return the dtypes of weights that are stored wider than `dtype`, by name.

    These are weights that transformers keeps in float32 when it loads a model in `dtype` and, with
    `as_published`, weights that are wider in the source's files, if these still exist.
    """
    dtypes: dict[str, torch.dtype] = {}
    # Weights that transformers keeps wide would be widened again from a narrow file, with lost
    # digits. Those that are wider in the source go last, so that the files decide.
    if kept := dtypes_kept(model, dtype):
        pattern, groups, _ = build_glob_alternation(list(kept))
        for name in model.state_dict():
            if (match := pattern.search(name)) and match.lastgroup:
                dtypes[name] = kept[groups[match.lastgroup]]
    if as_published:
        dtypes |= {
            name: x.dtype
            for name, x in _published(model)
            if x.dtype.itemsize > max(dtype.itemsize, torch.bfloat16.itemsize)
        }
    return dtypes


def cast(
    state: dict[str, Tensor], dtype: torch.dtype, wider: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Return floating tensors in `dtype` or, by name, in a wider one.

    Tensors that share memory still share it afterwards, so that ties survive.
    """
    # Ties are by memory, not by name: `tensor.to` alone would give each name its own copy, and a
    # tied weight would be stored twice. If any name of a tied tensor is wide, all are.
    memory: dict[str, Any] = {
        name: (x.data_ptr(), x.shape, x.stride(), x.dtype) for name, x in state.items()
    }
    dtypes = {memory[name]: wider[name] for name in state if name in wider}
    cast: dict[Any, Tensor] = {}
    result = {}
    for name, tensor in state.items():
        key = memory[name]
        # Empty tensors have no memory: all of them have the address 0, and are not tied.
        if key not in cast or not tensor.numel():
            wanted = dtypes.get(key, dtype) if tensor.is_floating_point() else tensor.dtype
            cast[key] = tensor.to(wanted)
        result[name] = cast[key]
    return result


def warn_of_rounding(model: PreTrainedModel) -> None:
    """Warn if a model that was loaded in the dtype of its configuration lost digits of its files.

    float32 tensors whose values are those of 16 bits lose none. The values are read up to the first
    tensor that does: the rest may be more than memory holds. bfloat16 has more exponents than
    float16 and fewer digits, so that either of them rounds the other.
    """
    state = model.state_dict()
    rounded = 0
    loses_digits = False
    kinds: set[tuple[torch.dtype, torch.dtype]] = set()
    for name, tensor in _published(model):
        dtype = state[name].dtype if name in state else tensor.dtype
        if _rounds(dtype, tensor.dtype):
            rounded += 1
            kinds.add((tensor.dtype, dtype))
            loses_digits = loses_digits or not torch.equal(tensor, tensor.to(dtype).to(tensor))
    if loses_digits:
        stored, dtypes = (
            " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in kind}))
            for kind in zip(*kinds, strict=True)
        )
        log.warning(
            "`model`: %s in the files of %s %s %s, and the configuration says %s: all are rounded "
            "to it, here and in what is saved. `dtype: %s` (`--dtype %s`) keeps them.",
            *(counted(rounded, "tensor"), model.name_or_path, "is" if rounded == 1 else "are"),
            *(stored, dtypes, *(2 * [stored.rpartition(" ")[2]])),
        )


def _rounds(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Return whether a floating dtype lacks values of another one: digits, or large or small ones.

    `torch.promote_types`, which would give a dtype for both, refuses float8.
    """
    own, other = torch.finfo(dtype), torch.finfo(stored)
    is_short = own.eps > other.eps or own.max < other.max
    return is_short or own.smallest_normal > other.smallest_normal


def _published(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors of the source, by the names of the weights that they make."""
    # The source may have been deleted or replaced, or be a name that the hub does not know.
    with suppress(FormatError, OSError, SafetensorError):
        # Conversions are stateful, so each use takes a copy.
        name_in_model = names_in_model(model, deepcopy(conversions_at_loading(model)))
        for name, tensor in _stored(model):
            if tensor.is_floating_point():
                yield name_in_model(name)[0], tensor


def _stored(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the files of a loaded model, memory-mapped: only used ones are read."""
    directory = directory_of(model.name_or_path or "")
    for file in weight_files(directory) if directory else ():
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                yield from ((name, opened.get_tensor(name)) for name in [*opened.keys()])
        elif is_zipfile(file):  # older pickles cannot be memory-mapped
            content = read_pickle(file)
            yield from ((name, x) for name, x in content.items() if isinstance(x, Tensor))


def _fetch_modules(source: str, revision: str | None) -> None:
    """Download the modules that sentence-transformers runs after a model, which a copy needs."""
    with suppress(OSError):  # there is no such file, or no hub
        options: Any = {"revision": revision, "local_files_only": why_no_hub() is not None}
        modules = Path(str(cached_file(source, MODULES, **options)))
        wanted = [f"{name}/*" for name in directories_of_modules(modules.parent)]
        snapshot_download(source, allow_patterns=["*sentence*.json", *wanted], **options)


def _names_on_hub(source: str, revision: str | None) -> Iterable[str]:
    """Return the names of the tensors in a hub repository's safetensors files; none without any."""
    if Path(source).expanduser().exists() or why_no_hub():
        return []
    with suppress(HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError):
        return get_safetensors_metadata(source, revision=revision).weight_map
    return []


def _stored_names(directory: Path) -> Iterable[str]:
    """Return the names of the tensors in a directory; none if a file is missing or damaged."""
    with suppress(Exception):  # of any type: the unpickler checks no file
        match weight_files(directory):
            case [file] if is_zipfile(file):
                return [*read_pickle(file)]
        return [*stored_names(directory)]
    return []


def load_tokenizer(source: str | os.PathLike[str] | PreTrainedTokenizerBase, **hub: Any) -> Any:
    """Load the tokenizer of a directory, hub id or GGUF file; return a tokenizer unchanged.

    Raises:
        FileNotFoundError: There is no tokenizer.
        DataError: The tokenizer cannot be loaded. `find_gguf` and `reading` raise more.
    """
    if isinstance(source, PreTrainedTokenizerBase):
        return source
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            "`tokenizer` must be a tokenizer of transformers, or the directory or hub id of one. "
            f"Got {type(source).__name__}."
        )
    if file := find_gguf(str(source)):
        try:
            with reading(file) as location:
                return AutoTokenizer.from_pretrained(**location, trust_remote_code=False)
        except FormatError as error:
            if has_tokenizer(file):
                raise
            raise _nothing_at(file, "It holds only weights.") from error
    path = Path(source).expanduser()
    if not path.exists() and is_path(str(source)):
        raise _nothing_at(source, "There is no such directory.")
    try:
        # Always passed, since transformers would otherwise ask on the terminal.
        return AutoTokenizer.from_pretrained(
            **found_at(source), **{"trust_remote_code": False} | hub
        )
    except OSError as error:
        raise _nothing_at(source, why_not_found(source, error)) from None
    except Exception as error:  # of any type: tokenizers do not check their files
        raise DataError(
            f"`tokenizer`: the tokenizer of {source} cannot be loaded; its files are incomplete or "
            f"damaged, or need an option. ({error})"
        ) from error


def _nothing_at(source: str | os.PathLike[str], reason: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"`tokenizer`: {source} gives no tokenizer. Name the directory or hub id of one. ({reason})"
    )


def find_tokenizer(source: str, **hub: Any) -> Any:
    """Load the tokenizer stored with a model by `load_tokenizer`, `None` without one.

    A directory has one if it holds a file `tokenizer*` or a vocabulary (`VOCABULARIES`).
    """
    path = Path(source).expanduser()
    if path.is_dir() and find_gguf(source) is None:
        has_files = any(path.glob("tokenizer*")) or any((path / n).is_file() for n in VOCABULARIES)
        return load_tokenizer(path, **hub) if has_files else None
    try:
        return load_tokenizer(source, **hub)
    except FileNotFoundError:
        return None


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """Return the files of a tokenizer for a Lightning checkpoint: bytes, by path with `/`."""
    with TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        # Further chat templates are in a directory of their own.
        files = [path for path in sorted(Path(directory).rglob("*")) if path.is_file()]
        return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def tokenizer_from_files(files: dict[str, bytes]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `tokenizer_files`, without running code in the files."""
    # The names come from a checkpoint, so each of their parts is a bare name: `../x` or an absolute
    # path would write outside of the temporary directory.
    is_right = isinstance(files, dict) and all(
        isinstance(name, str)
        and all(part and Path(part).name == part != ".." for part in name.split("/"))
        and isinstance(content, bytes)
        for name, content in files.items()
    )
    if not is_right:
        raise DataError(
            "The checkpoint's tokenizer is no mapping of names of files to their bytes. Name a "
            "tokenizer with `tokenizer`, and load the model's weights alone."
        )
    with TemporaryDirectory() as directory:
        for name, content in files.items():
            file = Path(directory, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return load_tokenizer(directory)
