import ctypes
import functools
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensor, SparseSemiStructuredTensorCUTLASS
from torch.sparse._semi_structured_conversions import sparse_semi_structured_to_dense_cutlass
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from export import loading, packing
from export.to_sparse import main
from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_lightning.records.report import PruningReport
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.solver.patterns import SemiStructured
from mrp_lightning.targets.layers import is_linear, layers_of

HERE = Path(__file__).parent


def cpu_flags() -> set[str]:
    """What Linux says that this CPU has."""
    cpuinfo = Path("/proc/cpuinfo")
    return set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()


# The instructions that `has_avx512` of the kernels asks for.
needs_vectors = pytest.mark.skipif(
    not {"avx512_vbmi2", "avx512_bf16", "avx512bw", "avx512vl"} <= cpu_flags(),
    reason="needs a CPU with AVX-512",
)
HAS_TILES = {"amx_tile", "amx_int8", "amx_bf16"} <= cpu_flags()
VECTORS, PORTABLE, TILES, AVX2 = 1, 2, 3, 4
"""`Way` in operators.cpp. Tests that take `TILES` use the fixture `tiles`."""
IN_TILES = pytest.param(TILES, marks=needs_vectors, id="tiles" if HAS_TILES else "emulated-tiles")


@pytest.fixture(scope="session")
def _emulated_tiles(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if platform.machine() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("needs an x86-64 CPU and g++")
    built = tmp_path_factory.mktemp("emulated") / "tiles.so"
    options = ["-std=c++20", "-O3", "-fPIC", "-shared"]
    subprocess.run(["g++", *options, HERE / "emulated_tiles.cpp", "-o", built], check=True)
    library = ctypes.CDLL(str(built))
    for function in (library.instructions, library.configurations):
        function.restype = ctypes.c_int64
    return library


@pytest.fixture
def tiles(_emulated_tiles: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """Tiles (AMX): those of the CPU, or an emulation. Every thread must have released them."""
    _emulated_tiles.install()
    yield _emulated_tiles
    _emulated_tiles.remove_again()
    assert _emulated_tiles.configurations() == 0


SIZES = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "word_embed_proj_dim": 32,
        "max_position_embeddings": 128,
    },
}


def keep_two_of_four(weight: Tensor) -> Tensor:
    """Zero the two smallest of every four columns."""
    return weight.masked_fill(SemiStructured(2, 4).select(weight.abs(), 0), 0.0)


def refusal(
    args: list[Any], capsys: pytest.CaptureFixture[str], status: int = 2, command: Any = main
) -> str:
    """Run an export that must be refused; return what it writes to standard error."""
    with pytest.raises(SystemExit) as ended:
        command([str(arg) for arg in args])
    assert ended.value.code == status
    return capsys.readouterr().err


def write_report(directory: Path, layers: Mapping[str, tuple[int, ...]], **config: Any) -> None:
    """Write a report that says that the layers of these shapes were pruned."""
    rows = [LayerReport(name=name, shape=shape) for name, shape in layers.items()]
    PruningReport({"method": "magnitude"} | config, rows).save(directory)


def onto_grid(weight: Tensor, bits: int = 4) -> Tensor:
    """Kept weights as codes times a scale of five significant bits for each 64 columns."""
    largest = 2 ** (bits - 1)
    groups = weight.float().split(64, dim=1)
    scales = [group.abs().amax(1, keepdim=True).clamp_min(1e-6) / largest for group in groups]
    parts = [torch.frexp(scale) for scale in scales]
    scales = [torch.ldexp((part * 32).round() / 32, exponent) for part, exponent in parts]
    codes = [group / scale for group, scale in zip(groups, scales, strict=True)]
    signed = [code.sign() * code.abs().round().clamp(1, largest) for code in codes]
    whole = [code * scale for code, scale in zip(signed, scales, strict=True)]
    return torch.cat(whole, dim=1).to(weight.dtype)


def logits(directory: Path, ids: Tensor, **options: Any) -> Tensor:
    """The logits of a model that transformers loads."""
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(directory, **options)(ids).logits


def change(directory: Path, **tensors: Tensor | None) -> None:
    """Replace tensors of a file; `None` removes one."""
    held = load_file(directory / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors", {"format": "pt"})


@pytest.fixture(autouse=True)
def _short_library(short_library: None) -> None:
    """Compare logits on little text; a command in a process of its own reads all of it."""


@pytest.fixture(scope="session")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes a random model, 2:4 in its blocks, to a new directory."""

    def write(
        kind: str = "llama",
        *,
        dtype: torch.dtype = torch.bfloat16,
        max_shard_size: str = "5GB",
        tokenizer: bool = True,
        **config: Any,
    ) -> Path:
        torch.manual_seed(0)
        options: dict[str, Any] = {"vocab_size": 2048, "pad_token_id": 0, "bos_token_id": 0}
        if kind == "llama":
            options |= {"num_attention_heads": 4, "num_key_value_heads": 2}
            options |= {"max_position_embeddings": 128, "tie_word_embeddings": True}
        if kind == "opt":
            options |= {"num_attention_heads": 4}
        options |= SIZES[kind] | {"eos_token_id": 0} | config
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options), dtype=dtype)
        for name, module in model.named_modules():
            if is_linear(module) and "lm_head" not in name:
                (layer,) = layers_of(name, module)
                layer.write_(keep_two_of_four(layer.weight))
        directory = tmp_path_factory.mktemp("pruned") / kind
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        if tokenizer:
            AutoTokenizer.from_pretrained(STDLIB_LLAMA).save_pretrained(directory)
        return directory

    return write


@pytest.fixture(scope="session")
def _llama(pruned: Callable[..., Path]) -> Path:
    return pruned()


@pytest.fixture
def llama(_llama: Path, tmp_path: Path) -> Path:
    """A pruned LLaMA in a directory of the test's own, with room beside it."""
    return Path(shutil.copytree(_llama, tmp_path / "llama"))


def thin_out(directory: Path, sparsity: float = 0.6, *, four_bits: bool = False) -> None:
    """Zero this part of every layer of `pruned`, in no pattern, and one row; all of one stays."""
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(directory / "model.safetensors")
    shapes = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and not any(table in name for table in ("embed", "wte", "wpe")):
            dense = torch.randn(tensor.shape, generator=generator)
            kept = torch.rand(tensor.shape, generator=generator) >= sparsity
            kept[0], kept[1] = False, True
            dense *= kept
            tensor.copy_(onto_grid(dense) if four_bits else dense)
            shapes[name.removesuffix(".weight")] = tuple(tensor.shape)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    if four_bits:
        write_report(directory, shapes, bits=4, group_size=64)


SUFFIXES = {"packed": "sparse24", "bitmask": "bitmask", "bitmask4": "bitmask4"}


@dataclass(frozen=True)
class Exported:
    """A pruned LLaMA in a directory of the test's own, and its export in one of the formats."""

    form: str
    source: Path

    @property
    def packed(self) -> Path:
        return self.source.with_name(f"llama-{SUFFIXES[self.form]}")


@pytest.fixture(scope="session")
def exports(
    _llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Path], Exported]:
    @functools.cache
    def exported(form: str) -> Path:
        root = tmp_path_factory.mktemp(form)
        source = shutil.copytree(_llama, root / "llama")
        if form != "packed":
            thin_out(source, four_bits=form == "bitmask4")
        main([str(source), "--activations", "exact"])
        return root

    return lambda form, target: Exported(
        form, Path(shutil.copytree(exported(form), target / "exported") / "llama")
    )


@pytest.fixture(params=SUFFIXES)
def exported(request: pytest.FixtureRequest, exports: Any, tmp_path: Path) -> Exported:
    """A LLaMA and its export, in each of the packed formats."""
    return exports(request.param, tmp_path)


@pytest.fixture
def ids() -> Tensor:
    """Tokens (2, 16)."""
    return torch.randint(1, 2048, (2, 16), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def torch_subclass_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CUTLASS' layout is the one that torch can also write on a CPU; its products are ours."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    dense = sparse_semi_structured_to_dense_cutlass
    library.impl("_sparse_semi_structured_mm", lambda a, m, b, *, out_dtype=None: dense(a, m) @ b)
    library.impl(
        "_sparse_semi_structured_addmm",
        lambda i, a, m, b, *, alpha=1, beta=1, out_dtype=None: (
            beta * i[:, None] + alpha * (dense(a, m) @ b)
        ),
    )
    monkeypatch.setattr(SparseSemiStructuredTensor, "_FORCE_CUTLASS", True)
    monkeypatch.setattr(
        SparseSemiStructuredTensorCUTLASS,
        "_validate_device_dim_dtype_shape",
        classmethod(lambda cls, tensor: None),
    )
    for module in (loading, packing):
        monkeypatch.setattr(module, "torchao_missing", lambda device: None)
    yield
    library._destroy()
