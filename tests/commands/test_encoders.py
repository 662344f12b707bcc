"""`prune` takes encoders and classifiers, of the class that their config names."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertForPreTraining,
    BertModel,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from export import load as load_packed
from mrp_lightning import TextDataModule
from mrp_lightning.commands.main import main
from mrp_lightning.loop.text_model import TextModel, mean_cosine

SMALL = ["--num-samples=4", "--sequence-length=16", "--accelerator=cpu", "--eval-samples=5"]
MODULES = [
    {"idx": k, "name": str(k), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for k, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling")])
]
POOLING = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
LETTERS = "abcdefgh"
WORDS = {word: k for k, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS])}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    """A sentence encoder, as sentence-transformers saves one."""
    directory = tmp_path_factory.mktemp("models") / "encoder"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    sizes["initializer_range"] = 0.5  # so that the outputs change
    config = BertConfig(vocab_size=16, num_hidden_layers=2, max_position_embeddings=24, **sizes)
    BertModel(config).save_pretrained(directory)
    words = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(word, WORDS[word]) for word in ("[CLS]", "[SEP]")]
    words.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    named = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(directory)
    (directory / "modules.json").write_text(json.dumps(MODULES))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 24}')
    return directory


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    letters = torch.randint(8, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(LETTERS[k] for k in letters))
    return tmp_path / "text.txt"


@torch.no_grad()
def expected_cosine(dense, pruned, tokenizer, text: Path) -> float:
    """By the models' own forward on [CLS] … [SEP] of the held-out end of the text."""
    (held_out,) = TextDataModule([text], hold_out=True).documents("test")
    ids = tokenizer(held_out, add_special_tokens=False)["input_ids"]
    cosines = []
    for k in range(5):
        window = torch.tensor([[2, *ids[14 * k : 14 * (k + 1)], 3]])
        outputs = [model.eval()(window).last_hidden_state[0] for model in (dense, pruned)]
        cosines.append(F.cosine_similarity(*outputs, dim=-1).mean())
    return float(torch.stack(cosines).mean())


def test_a_sentence_encoder_is_pruned_with_all_that_lies_beside_it(encoder, text, capsys):
    main(["prune", str(encoder), "--pattern=2:4", f"--text={text}", "--out=out", *SMALL])
    shown = capsys.readouterr().out
    dense, pruned = AutoModel.from_pretrained(encoder), AutoModel.from_pretrained("out")
    assert type(pruned) is BertModel
    layers = [n for n, module in pruned.encoder.named_modules() if isinstance(module, nn.Linear)]
    assert len(layers) == 2 * 6
    for name in layers:
        weight = pruned.encoder.get_submodule(name).weight
        assert ((weight.reshape(-1, 4) == 0).sum(1) == 2).all(), name
    assert torch.equal(pruned.pooler.dense.weight, dense.pooler.dense.weight)

    tokenizer = AutoTokenizer.from_pretrained("out")
    cosine = expected_cosine(dense, pruned, tokenizer, text)
    assert 0.5 < cosine < 0.9999
    (printed,) = re.findall(r"│ 2:4 by JM +│ +([\d.]+) │", shown)
    assert float(printed) == pytest.approx(cosine, abs=1e-4)
    recorded = json.loads(Path("out/evaluation.json").read_text())
    (scores,) = recorded["similarity"].values()
    assert scores == {"cosine": pytest.approx(cosine, abs=1e-5), "context": 16, "windows": 5}
    assert not recorded["perplexity"]

    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        assert Path("out", name).read_text() == (encoder / name).read_text()
    assert "perplexity" not in shown
    assert "zeroshot" not in shown


@pytest.mark.parametrize(
    ("base", "named"), [("mpnet", "MPNetForMaskedLM"), ("qwen3", "Qwen3ForCausalLM")]
)
def test_an_embedding_model_is_pruned_and_packed_as_the_base_model_that_its_files_hold(
    base, named, encoder, text, capsys, caplog
):
    """As published: the config.json still names the class that was trained before."""
    shutil.copytree(encoder, "dense")  # with its tokenizer and modules
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    sizes |= {"vocab_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 24}
    config = AutoConfig.for_model(base, **sizes, pad_token_id=1, num_key_value_heads=2, head_dim=8)
    dense = AutoModel.from_config(config)
    dense.save_pretrained("dense")
    values = json.loads(Path("dense/config.json").read_text()) | {"architectures": [named]}
    Path("dense/config.json").write_text(json.dumps(values))
    main(["prune", "dense", "--sparsity=0.5", f"--text={text}", "--out=out", *SMALL])
    assert f"names {named}, and its files hold no weight of that head" in caplog.text
    kind = type(dense).__name__
    assert json.loads(Path("out/config.json").read_text())["architectures"] == [kind]
    main(["export", "out"])
    pruned, packed = AutoModel.from_pretrained("out"), load_packed("out-bitmask")
    assert type(packed) is type(pruned) is type(dense)
    states = pruned.state_dict()
    assert states.keys() == dense.state_dict().keys()
    assert sum(int((x == 0).sum()) for x in states.values()) > 8000  # half of the blocks' weights
    ids = torch.tensor([[2, 4, 5, 11, 3]])
    with torch.no_grad():
        expected = pruned(ids).last_hidden_state
        assert torch.allclose(packed(ids).last_hidden_state, expected, atol=1e-5)
    for result in ("out", "out-bitmask"):
        for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
            assert Path(result, name).read_text() == (encoder / name).read_text()


@pytest.mark.parametrize("kind", ["BertModel", "T5EncoderModel"])
def test_an_encoder_without_pooler_or_decoder_is_pruned_and_packed(kind, encoder, text):
    """Sentence encoders that average hidden states, and the encoders of text-to-image models."""
    shutil.copytree(encoder, "dense")
    if kind == "BertModel":
        dense = BertModel.from_pretrained("dense", add_pooling_layer=False)
    else:
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        dense = T5EncoderModel(T5Config(vocab_size=16, **sizes, n_positions=24))
    dense.save_pretrained("dense")
    main(["prune", "dense", "--pattern=2:4", f"--text={text}", "--out=out", *SMALL])
    main(["export", "out"])
    weights = load_file("out/model.safetensors")
    assert weights.keys() == load_file("dense/model.safetensors").keys()
    groups = [x.reshape(-1, 4) for x in weights.values() if x.ndim == 2]
    assert sum(bool(((x == 0).sum(1) == 2).all()) for x in groups) == 2 * 6
    pruned, ids = type(dense).from_pretrained("out").eval(), torch.tensor([[2, 4, 5, 11, 3]])
    packed = load_packed("out-sparse24")
    assert type(packed) is type(dense)
    with torch.no_grad():
        outputs = [model(ids).last_hidden_state for model in (pruned, packed)]
    assert torch.allclose(*outputs, atol=1e-5)


def test_sentence_transformers_loads_the_result(encoder, text):
    reason = "the package that reads these directories is not installed"
    library = pytest.importorskip("sentence_transformers", reason=reason)
    main(["prune", str(encoder), "--pattern=2:4", f"--text={text}", "--out=out", *SMALL])
    (vector,) = library.SentenceTransformer("out", device="cpu").encode(["a b h"])
    with torch.no_grad():
        hidden = BertModel.from_pretrained("out")(torch.tensor([[2, 4, 5, 11, 3]]))
    assert torch.allclose(torch.tensor(vector), hidden.last_hidden_state[0].mean(0), atol=1e-5)


def test_a_tied_classifier_keeps_its_head(tiny_llama, text, capsys):
    shutil.copytree(tiny_llama, "dense")
    dense = LlamaForSequenceClassification.from_pretrained("dense", num_labels=3)
    dense.save_pretrained("dense")
    main(["prune", "dense", "--sparsity=0.5", f"--text={text}", "--out=out", *SMALL])
    pruned = LlamaForSequenceClassification.from_pretrained("out")
    assert torch.equal(pruned.score.weight, dense.score.weight)
    share = (pruned.model.layers[0].mlp.up_proj.weight == 0).float().mean()
    assert float(share) == 0.5
    assert "mean cosine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text=text.txt", "--sequence-length=25"], "25 tokens, and the model reads 24"),
        (["--text=text.txt", "--gguf=out.gguf"], "`--gguf`: a BertModel predicts no next token"),
        ([], "`--text`: the model .* cannot write the text"),
    ],
)  # fmt: skip
def test_what_an_encoder_cannot_do_is_refused_before_work(encoder, text, options, message, capsys):
    with pytest.raises(SystemExit):
        main(["prune", str(encoder), "--pattern=2:4", "--accelerator=cpu", *options])
    ended = capsys.readouterr()
    assert re.search(message, ended.err)
    assert "Evaluating" not in ended.out


def test_heads_of_pretraining_are_kept_though_the_config_names_a_class_without_them(
    encoder, tmp_path, caplog
):
    """bert-base-uncased names BertForMaskedLM, and its files hold a pooler and a second head."""
    whole = BertForPreTraining(BertConfig.from_pretrained(encoder))
    whole.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values |= {"architectures": ["BertForMaskedLM"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    loaded = TextModel(tmp_path).model
    assert type(loaded) is BertForPreTraining
    expected = whole.cls.seq_relationship.weight.bfloat16()
    assert torch.equal(loaded.cls.seq_relationship.weight, expected)
    assert "names BertForMaskedLM, which lacks some of them" in caplog.text
    assert "are float32, and the configuration says bfloat16" in caplog.text


def test_cosines_are_of_the_features_of_each_token():
    a, b = torch.randn(2, 3, 4, 8, dtype=torch.float64).unbind(0)
    expected = [
        (x @ y) / (x.norm() * y.norm())
        for x, y in zip(*(x.view(-1, 8) for x in (a, b)), strict=True)
    ]
    assert mean_cosine(a, b) == pytest.approx(float(sum(expected) / 12))
    one = torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0], [-1.0]])  # a ranking model's
    assert mean_cosine(*one) == pytest.approx(0.0)


def test_a_window_ends_as_a_text_of_the_tokenizer_does(encoder):
    model = TextModel(encoder)
    assert model.longest == 24
    ids = torch.tensor([[2, 4, 5]])
    with torch.no_grad():
        expected = model.model(torch.tensor([[2, 4, 5, 3]])).last_hidden_state
        assert torch.equal(model.predict_step(ids, 0), expected)
        padded = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        assert model.predict_step(padded, 0).shape[1] == 3  # the caller's own texts
