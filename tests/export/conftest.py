import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensor, SparseSemiStructuredTensorCUTLASS
from torch.sparse._semi_structured_conversions import sparse_semi_structured_to_dense_cutlass
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from export.backends import SUBCLASSES
from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_lightning.records.report import LayerReport, PruningReport
from mrp_lightning.solver.patterns import SemiStructured
from mrp_lightning.targets.layers import is_linear, layers_of
from mrp_lightning.text.sources import Split, standard_library

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


@pytest.fixture(autouse=True)
def short_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare logits on the first files of the embedded text; reading all of it takes longest."""
    monkeypatch.setattr("mrp_lightning.text.sources.standard_library", lambda split: _FILES[split])


class _Files(dict[str, list[str]]):
    """The first files of each split, as many as the parity gate needs."""

    def __missing__(self, split: Split) -> list[str]:
        self[split] = list(islice(standard_library(split), 5))
        return self[split]


_FILES = _Files()


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
    for name in ("torch", "torchao"):
        available = dataclasses.replace(SUBCLASSES[name], missing=lambda device: None)
        monkeypatch.setitem(SUBCLASSES, name, available)
    yield
    library._destroy()
