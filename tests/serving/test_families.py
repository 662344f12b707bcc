"""Families whose layers vLLM reads in ways of their own; random models in float32."""

import json
import shutil

import pytest
import torch
from served import by_transformers, engine, noise, random_model, removed, scores, two_of_four

pytest.importorskip("vllm", reason="needs vLLM: `make vllm`")

_SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = _SIZES | {"num_key_value_heads": 2, "intermediate_size": 192}
_LLAMA |= {"max_position_embeddings": 256}
FAMILIES = {
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "phi3": _LLAMA,
    "qwen2": _LLAMA | {"tie_word_embeddings": True},
    "gpt_neox": _SIZES | {"intermediate_size": 192, "max_position_embeddings": 256},
    "bloom": {"hidden_size": 128, "n_layer": 2, "n_head": 4},
    "falcon": _SIZES | {"new_decoder_architecture": False, "multi_query": True, "alibi": False},
}
PRUNINGS = {"bitmask": removed, "packed": two_of_four}


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("gpt2", "bitmask"),  # Conv1D, which vLLM transposes
        ("gpt2", "packed"),
        ("phi3", "bitmask"),  # q, k and v are one tensor in the files
        ("phi3", "packed"),
        ("qwen2", "bitmask"),  # biases, tied embeddings
        ("gpt_neox", "bitmask"),  # by transformers' class in vLLM, which has none
    ],
)
def test_a_packed_model_is_the_pruned_one(kind, form, root, packed):
    source = random_model(root / f"{kind}-{form}", kind, PRUNINGS[form], FAMILIES[kind])
    directory = packed(source, form)
    dense = scores(engine(source, dtype="float32"), noise())
    sparse = scores(engine(directory, dtype="float32"), noise())
    assert (sparse.log_probs - dense.log_probs).abs().max() < 1e-3
    assert dense.log_probs.std() > 0.1  # the weights decide something


@pytest.mark.parametrize("kind", ["bloom", "falcon"])
def test_rows_that_vllm_rearranges_are_refused(kind, root, packed):
    source = random_model(root / kind, kind, removed, FAMILIES[kind])
    with pytest.raises(ValueError, match=r"not as in the file|cannot read packed layers"):
        engine(packed(source, "bitmask"), dtype="float32")


@pytest.mark.parametrize(("structure", "sparsity"), [("blocks", 0.5), ("neurons", 0.25)])
def test_a_smaller_model_is_a_plain_one(structure, sparsity, root):
    from torch.utils.data import DataLoader

    from callbacks import MRPCallback
    from mrp_lightning import CausalLM, Trainer

    out = root / structure
    source = random_model(root / f"{structure}-dense", "qwen2", torch.clone, FAMILIES["qwen2"])
    prune = MRPCallback(structure=structure, sparsity=sparsity, save_dir=out)
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    data = DataLoader(torch.tensor(noise()), batch_size=2)
    trainer.predict(CausalLM(str(source)), data, callbacks=[prune])
    ours = scores(engine(out, dtype="float32"), noise()).log_probs
    assert (ours - by_transformers(out, noise(), torch.float32)).abs().max() < 1e-3
    assert ours.std() > 0.1


PARTS = {f"{x}_proj": ("qkv_proj", x) for x in "qkv"}
PARTS |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}


def own_loop(skipped):
    """A LLaMA with a loop over tensors of its own, as the classes for GPUs alone have one."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader
    from vllm.model_executor.models.llama import LlamaForCausalLM

    class OwnLoop(LlamaForCausalLM):
        def load_weights(self, weights):
            params = dict(self.named_parameters())
            for name, tensor in weights:
                if name.endswith(skipped):
                    continue
                *parents, part, key = name.split(".")
                fused, *shard = PARTS.get(part, (part,))
                param = params[".".join([*parents, fused, key])]
                getattr(param, "weight_loader", default_weight_loader)(param, tensor, *shard)

    return OwnLoop


@pytest.mark.parametrize("skipped", [(), "weight_bits"], ids=["reads all", "skips some"])
def test_a_class_with_its_own_loop_reads_all_or_is_refused(skipped, half, packed, tmp_path):
    from vllm import ModelRegistry

    source = packed(half, "bitmask")
    copy = shutil.copytree(source, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    name = f"OwnLoop{len(skipped)}ForCausalLM"
    (copy / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    ModelRegistry.register_model(name, own_loop(skipped))
    if skipped:
        with pytest.raises(ValueError, match=r"cannot be read whole.*\n.*weight_bits missing"):
            engine(copy)
        return
    own, usual = scores(engine(copy), noise()), scores(engine(source), noise())
    assert torch.equal(own.log_probs, usual.log_probs)
