"""Exports in the formats of others, run by their engines."""

import math

import pytest
import torch
from served import by_transformers, engine, scores, text

from mrp_lightning.embedded import STDLIB_LLAMA

pytest.importorskip("vllm", reason="needs vLLM: `make vllm`")


@pytest.fixture(scope="module")
def int4(root):
    """The embedded LLaMA on compressed-tensors' grid of four bits, without pruning."""
    from callbacks import PruningCallback
    from mrp_lightning import CausalLM, TextDataModule, Trainer

    file = root / "text.txt"
    file.write_text("def f(self, x):\n    return [x, None]\n" * 400)
    data = TextDataModule(train_files=str(file), num_samples=4, sequence_length=128)
    callback = PruningCallback(method="magnitude", grid="int4-g32", save_dir=root / "int4")
    Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).predict(
        CausalLM(STDLIB_LLAMA), datamodule=data, callbacks=[callback]
    )
    return root / "int4"


def test_few_bits_are_read_without_loss(int4, packed):
    source = scores(engine(int4), text())
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):  # registered by the first engine
        pytest.skip("vLLM's build for CPUs without AVX-512 has no product with few bits")
    exported = scores(engine(packed(int4, "compressed-tensors")), text())
    assert exported.perplexity == pytest.approx(source.perplexity, rel=3e-3)
    theirs = by_transformers(int4, text(), torch.bfloat16)
    assert exported.perplexity == pytest.approx(math.exp(-float(theirs.double().mean())), rel=3e-3)
