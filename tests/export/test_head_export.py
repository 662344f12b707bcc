"""A head of 8 bits in files, against the same head made when the model is loaded."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from quiet import QUIET
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import export
from callbacks import MRPCallback
from export.generate import main as generate
from export.to_sparse import main
from mrp_lightning import Trainer
from mrp_lightning.errors import FormatError, OptionError
from mrp_sparse.eight_bit_head import EightBitLinear, round_head

from .conftest import refusal

TENSORS = {"lm_head.weight", "lm_head.weight_scales"}
TABLE = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def _sources(pruned, tmp_path_factory):
    """Pruned LLaMAs with tied and with free embeddings, and their exports."""
    sources = {}
    for tied in (True, False):
        source = pruned(tie_word_embeddings=tied)
        root = tmp_path_factory.mktemp("head")
        sources[tied] = shutil.copytree(source, root / "llama")
        main([str(root / "llama"), "--head-bits", "8", "--device", "cpu"])
    return sources


@pytest.fixture
def source(request, _sources, tmp_path):
    """A source with its export beside it, in directories of the test's own."""
    original = Path(_sources[getattr(request, "param", True)])
    return shutil.copytree(original.parent, tmp_path / "both") / "llama"


both = pytest.mark.parametrize("source", [True, False], ids=["tied", "free"], indirect=True)


@pytest.fixture
def packed(source):
    return source.with_name("llama-sparse24")


def settings(packed, **head):
    """Change what `config.json` says of the head."""
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["head"] |= head
    (packed / "config.json").write_text(json.dumps(config))
    return config


def test_scores_of_the_whole_head_are_not_those_of_the_rounded_one(source, capsys):
    scores = source / "evaluation.json"
    scores.write_text(json.dumps({"perplexity": {"text": {"perplexity": 9.0}}}))
    main([str(source), "--head-bits", "8", "--device", "cpu", "--overwrite"])
    assert "evaluation.json not copied" in " ".join(capsys.readouterr().out.split())
    main([str(source), "--out", str(source.with_name("exact")), "--device", "cpu"])
    copies = [source.with_name(name) / scores.name for name in ("llama-sparse24", "exact")]
    assert [copy.exists() for copy in copies] == [False, True]
    assert scores.exists()


@both
def test_the_files_hold_what_loading_would_make(source, packed, ids):
    before, after = (load_file(path / "model.safetensors") for path in (source, packed))
    config, old = (json.loads((path / "config.json").read_text()) for path in (packed, source))
    tied = old["tie_word_embeddings"]
    assert after.keys() >= TENSORS
    assert (TABLE in after) == (not tied)
    assert config.pop("quantization_config")["head"] == {"module": "lm_head", "format_version": 1}
    assert config == old
    expected = AutoModelForCausalLM.from_pretrained(source).eval()
    weight = expected.lm_head.weight.detach().clone()
    values = after["lm_head.weight"].double() * after["lm_head.weight_scales"].double()[:, None]
    step = after["lm_head.weight_scales"].double()[:, None]
    assert bool(((values - weight.double()).abs() <= 0.51 * step + 127 * step / 256).all())
    round_head(expected)
    found, loading = AutoModelForCausalLM.from_pretrained(packed, output_loading_info=True)
    assert not any(loading.values()), loading
    with torch.no_grad():
        assert torch.equal(found.eval()(ids).logits, expected(ids).logits)
        wide = export.load(packed, dtype=torch.float32)
        assert wide.lm_head.weight.dtype == torch.int8
        assert wide(ids).logits.dtype == torch.float32
    assert isinstance(export.load(packed).lm_head, EightBitLinear)
    half = weight.nbytes // 2 - after["lm_head.weight_scales"].nbytes
    gone = sum(t.nbytes for t in before.values()) - sum(t.nbytes for t in after.values())
    blocks = json.loads((packed / "export_report.json").read_text())["totals"]
    blocks = blocks["packed_layers_dense_bytes"] - blocks["packed_layers_packed_bytes"]
    assert gone == blocks + half


def test_what_it_costs_is_told(packed):
    report = json.loads((packed / "export_report.json").read_text())
    assert report["parity"]["text"]["bit_equal"]
    assert not report["parity"]["head"]["bit_equal"]
    assert 0 < report["parity"]["head"]["divergence"] < 0.01
    assert report["head"]["packed_bytes"] == 2048 * (32 + 2)
    assert report["head"]["dense_bytes"] == 2048 * 64
    assert "before that, 8 bits for the head: perplexity: " in (packed / "README.md").read_text()


@both
def test_it_is_saved_again_and_made_dense(packed, ids, tmp_path):
    model = export.load(packed)
    model.save_pretrained(tmp_path / "again")
    before, after = (load_file(p / "model.safetensors") for p in (packed, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with torch.no_grad():
        expected = export.load(tmp_path / "again")(ids).logits
        tied = model.config.tie_word_embeddings
        dense = model.dequantize()
        assert type(dense.lm_head) is nn.Linear
        assert (dense.lm_head.weight is dense.get_input_embeddings().weight) == tied
        found = dense(ids).logits
    assert float((found - expected).norm() / expected.norm()) < 0.01
    dense.save_pretrained(tmp_path / "dense")
    assert not any(AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", output_loading_info=True
    )[1].values())  # fmt: skip


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="needs the extra `device-map`"
)
@pytest.mark.parametrize("source", [False], ids=["free"], indirect=True)
def test_a_head_on_the_disk_cannot_be_made_dense(packed, tmp_path):
    model = export.load(
        packed,
        device_map={"model": "cpu", "lm_head": "disk"},
        offload_folder=tmp_path / "offload",
        offload_buffers=True,
    )
    assert model.lm_head.weight.is_meta
    with pytest.raises(OptionError, match="offloaded cannot be made dense"):
        model.dequantize()
    assert isinstance(model.lm_head, EightBitLinear)


def test_generation_takes_it_as_it_is(packed, capsys):
    arguments = ["--prompt", "import os", "--max-new-tokens", "3", "--device", "cpu", "--eager"]
    generate([str(packed), *arguments, "--head-bits", "8"])
    assert "[a head of 8 bits: it is stored so]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        (
            "weight",
            lambda t: t.fill_(-128),
            r"lm_head.weight_scales \(65536 numbers are below -127",
        ),
        ("weight", lambda t: t.short(), r"lm_head.weight_scales \(expected int8"),
        ("weight", lambda t: t[:-1].clone(), "lm_head.weight"),
        ("weight_scales", lambda t: t.fill_(float("nan")), "2048 scales are not positive"),
        ("weight_scales", lambda t: t[:-1].clone(), "lm_head.weight_scales"),
        ("weight_scales", lambda _: None, "lm_head.weight_scales"),
        ("weight", lambda _: None, "lm_head.weight"),
    ],
)
def test_damaged_files_are_refused(source, packed, name, spoil, message, capsys):
    tensors = load_file(packed / "model.safetensors")
    spoilt = spoil(tensors.pop(f"lm_head.{name}"))
    tensors |= {} if spoilt is None else {f"lm_head.{name}": spoilt}
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=message):
        export.load(packed)
    again = [str(source), "--check-only", "--head-bits", "8", "--device", "cpu"]
    assert f"lm_head.{name}: " in refusal(again, capsys, status=1)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"format_version": 2}, "head.format_version` is 2, but .* reads 1"),
        ({"module": "model.norm"}, "model.norm: the head of LlamaForCausalLM is lm_head"),
        ({"module": 3}, "head"),
        ({"format_version": None}, "head"),
    ],
)
def test_settings_that_do_not_fit_are_refused(packed, head, message):
    settings(packed, **head)
    with pytest.raises(FormatError, match=message) as error:
        export.load(packed)
    assert "quantization_config.modules" not in str(error.value)  # the packed layers are right


def test_a_head_that_is_packed_twice_is_refused(packed):
    config = settings(packed)
    config["quantization_config"]["modules"].append("lm_head")
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="both a packed layer and the head"):
        export.load(packed)


def test_what_has_no_such_form_is_refused(source, pruned, capsys, tmp_path, monkeypatch):
    bits = ["--head-bits", "8"]
    monkeypatch.setattr("export.packing.torchao_missing", lambda _: None)
    shown = refusal([source, "--format", "torchao", *bits], capsys)
    assert "not for `--format torchao`" in shown
    odd = pruned(hidden_size=24, intermediate_size=64, num_attention_heads=3, num_key_value_heads=3)
    shown = refusal([odd, "--out", str(tmp_path / "odd"), *bits], capsys)
    assert "a multiple of 16, got 24" in shown
    assert not (tmp_path / "odd").exists()


def test_a_head_that_differs_from_the_table_that_it_is_tied_to_is_refused(llama, capsys):
    file = llama / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": -tensors[TABLE]}, file, {"format": "pt"})
    shown = refusal([llama, "--head-bits", "8"], capsys)
    assert f"holds a lm_head.weight that differs from its {TABLE}" in shown
    assert "`tie_word_embeddings`" in shown


def test_a_module_of_ones_own_has_no_such_head(packed):
    with pytest.raises(
        FormatError, match="lm_head: a head of 8 bits is for models of transformers"
    ):
        export.load_into(nn.Sequential(nn.Linear(16, 8)), packed)


@pytest.mark.parametrize(("tied", "bits"), [(True, 4), (False, None)], ids=["tied", "free"])
def test_a_head_on_a_grid_is_packed_with_its_model(tied, bits, tmp_path):
    """It stays as it is, or is rounded to 8 bits where that is asked for."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 160}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied)).bfloat16()
    run = tmp_path / "run"
    callback = MRPCallback(pattern="2:4", bits=bits, head_grid="q4_0", save_dir=run)
    windows = torch.randint(3, 60, (8, 16), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(**QUIET)
    loader = torch.utils.data.DataLoader(windows, batch_size=2)
    trainer.predict(model, loader, callbacks=[callback])
    head_bits = [] if tied else ["--head-bits", "8"]
    main([str(run), "--device", "cpu", "--out", str(tmp_path / "packed"), *head_bits])
    report = json.loads((tmp_path / "packed" / "export_report.json").read_text())
    assert report["format"] == ("bitmask4" if bits else "packed")
    head = AutoModelForCausalLM.from_pretrained(run).lm_head
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").lm_head
    expected = head if tied else EightBitLinear.from_linear(head)
    assert torch.equal(packed.weight, expected.weight)
