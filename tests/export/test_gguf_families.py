"""GGUF files made without another one: read back by transformers, metadata and all."""

import itertools
import json
import shutil
from collections import Counter

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from export.to_gguf import main
from mrp_lightning import prune_weight
from mrp_lightning.records.grid_file import NAME, save_parameters

pytest.importorskip("gguf", reason="needs the extra `gguf`")
pytest.importorskip("accelerate", reason="needs the extra `gguf`")

import gguf
from gguf_files import WORDS, save_small_tokenizer, tensors_of, values_of
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

from .conftest import refusal

SIZES = {"vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
KINDS = [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("mistral", {"head_dim": 32, "sliding_window": None}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 128}),  # which transformers takes it for
    ("gemma2", {"head_dim": 256, "sliding_window": 16}),
    ("gemma3_text", {"head_dim": 256, "sliding_window": 16}),
]


@pytest.fixture
def checkpoint(tmp_path):
    """A function that writes a random model with a small tokenizer."""

    def write(kind, **config):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | config))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "bias" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.save_pretrained(tmp_path / "model")
        save_small_tokenizer(tmp_path / "model")
        return tmp_path / "model"

    return write


@pytest.mark.parametrize(("kind", "config"), KINDS, ids=str)
def test_transformers_reads_the_same_model(kind, config, checkpoint, tmp_path):
    directory = checkpoint(kind, **config)
    main([str(directory), "--type", "f32", "--out", str(tmp_path / "out.gguf")])
    ours = AutoModelForCausalLM.from_pretrained(directory).eval()
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="out.gguf", dtype=torch.float32
    )
    ids = torch.arange(3, 40)[None]
    if config.get("rope_parameters"):  # which transformers reads from no GGUF file
        factors = values_of(tensors_of(tmp_path / "out.gguf")["rope_freqs.weight"])
        stored = 5e5 ** (-torch.arange(0, 16, 2) / 16) / factors
        torch.testing.assert_close(stored, ours.model.rotary_emb.inv_freq)
        theirs.model.rotary_emb = ours.model.rotary_emb
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)
    if kind == "llama":  # of other architectures transformers expects their own way to split texts
        words = AutoTokenizer.from_pretrained(tmp_path, gguf_file="out.gguf")
        original = AutoTokenizer.from_pretrained(directory)
        assert original.get_vocab().items() <= words.get_vocab().items()
        text = "def main(argv=None):\n    return 0, 'straße'"
        assert words(text).input_ids == original(text).input_ids


@pytest.mark.parametrize(("kind", "config"), [KINDS[0], KINDS[5]], ids=str)
def test_minima_follow_the_rows_of_their_weights(kind, config, checkpoint, tmp_path):
    """Rows of attention are rearranged in some families, and so are their scales and minima."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    directory = checkpoint(kind, **config | wide)
    model = AutoModelForCausalLM.from_pretrained(directory).bfloat16()
    parameters = {}
    for name, layer in model.named_modules():
        if "_proj" in name:
            rows, columns = layer.weight.shape
            grid = "q4_1" if columns % 256 else "q4_k"
            with torch.no_grad():  # so that the scales of rows differ
                layer.weight.mul_(torch.linspace(0.2, 2, rows)[:, None])
            solution = prune_weight(layer.weight.detach(), torch.eye(columns), grid=grid)
            layer.weight.data, parameters[name] = solution.weight, solution.grid_parameters
    model.save_pretrained(directory)
    save_parameters(parameters, directory / NAME)
    main([str(directory), "--type", "auto", "--out", str(tmp_path / "out.gguf")])
    stored = gguf.GGUFReader(tmp_path / "out.gguf").tensors
    kinds = Counter(tensor.tensor_type.name for tensor in stored)
    assert kinds["Q4_K"] + kinds["Q4_1"] == len(parameters) == 7
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="out.gguf", dtype=torch.bfloat16
    ).state_dict()
    for name in parameters:
        assert torch.equal(theirs[f"{name}.weight"], model.get_submodule(name).weight), name


def test_scores_of_a_byte_fallback_tokenizer_merge_in_its_order(checkpoint, tmp_path):
    """As llama.cpp merges: the neighbours first whose union has the highest score."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens]
    )
    lines = [f"a line of words, number {i * 7} and more words to merge" for i in range(80)]
    tokenizer.train_from_iterator(lines, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    directory = checkpoint("llama", vocab_size=640)
    for file in directory.glob("token*"):
        file.unlink()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), bos_token="<s>", eos_token="</s>"
    )
    whole.save_pretrained(directory)
    main([str(directory), "--out", str(tmp_path / "out.gguf")])
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    scores = dict(zip(tokens, fields["tokenizer.ggml.scores"].contents(), strict=True))
    kinds = dict(zip(tokens, fields["tokenizer.ggml.token_type"].contents(), strict=True))
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    assert fields["tokenizer.ggml.add_space_prefix"].contents()
    assert (kinds["<unk>"], kinds["<s>"], kinds["<0x41>"], kinds["▁"]) == (2, 3, 6, 1)
    for text in ("more words to merge", "a line of 77 words"):
        pieces = list("▁" + text.replace(" ", "▁"))
        while True:
            unions = ["".join(pair) for pair in itertools.pairwise(pieces)]
            known = [union for union in unions if kinds.get(union) == 1]
            if not known:
                break
            first = unions.index(max(known, key=scores.__getitem__))
            pieces[first : first + 2] = [unions[first]]
        assert pieces == whole.tokenize(text)


def test_what_is_not_known_needs_a_file(checkpoint, tmp_path, capsys):
    out = ["--out", str(tmp_path / "out.gguf")]
    other = tmp_path / "gpt2"
    config = AutoConfig.for_model("gpt2", n_embd=16, n_head=2, n_layer=1, vocab_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    directory = checkpoint("llama")
    yarn = shutil.copytree(directory, tmp_path / "yarn")
    settings = json.loads((yarn / "config.json").read_text())
    settings["rope_parameters"] |= {"rope_type": "yarn", "factor": 2.0}
    (yarn / "config.json").write_text(json.dumps(settings))
    (directory / "tokenizer.json").unlink()
    for path, message in (
        (other, "`model_type` 'gpt2' is none of those"),
        (yarn, "`rope_type` 'yarn' is not known"),
        (directory, "has no tokenizer.json"),
    ):
        error = refusal([path, *out], capsys, command=main)
        assert message in error
        assert "--like" in error
    (directory / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    error = refusal([directory, *out], capsys, command=main)
    assert "cannot be loaded; its files are incomplete or damaged" in error
    assert not (tmp_path / "out.gguf").exists()
