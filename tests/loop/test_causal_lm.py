"""Perplexity is the model's own, models come from everywhere, checkpoints can be rebuilt."""

import math
import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quiet import QUIET
from tiny_configs import FAMILIES
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)

from callbacks import PruningCallback
from mrp_lightning import CausalLM, TextDataModule, Trainer
from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_lightning.errors import DataError, OptionError, TargetError
from mrp_lightning.loop.perplexity import token_losses
from mrp_lightning.text.sources import standard_library


def padded_batches(batch_size: int, side: str = "right") -> DataLoader:
    """Windows of which some are short; padding holds arbitrary tokens."""
    ids = torch.randint(1, 2048, (10, 12), generator=torch.Generator().manual_seed(0))
    masks = torch.arange(12) < torch.tensor([12, 5, 9, 12, 2, 7, 1, 12, 3, 11])[:, None]
    masks = (masks if side == "right" else masks.flip(1)).long()
    rows = [{"input_ids": x, "attention_mask": mask} for x, mask in zip(ids, masks, strict=True)]
    return DataLoader(rows, batch_size)


def reference_perplexity(model, loader) -> float:
    """Token by token, from the model's own logits in float64, each row without its padding."""
    losses = []
    for batch in loader:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            ids = ids[mask.bool()]
            with torch.no_grad():
                logits = model(ids[None]).logits[0].double()
            losses += (-x.log_softmax(-1)[n].item() for x, n in zip(logits, ids[1:], strict=False))
    return math.exp(sum(losses) / len(losses))


IDS = torch.arange(1, 17).view(2, 8)
ONES = torch.ones_like(IDS)


@pytest.fixture(scope="module")
def tiny(tiny_llama):
    """For tests that change nothing of it."""
    return CausalLM(tiny_llama)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"attention_mask": ONES[:, :5]}, r"`attention_mask` .* \(2, 8\), .*; got \(2, 5\)"),
        ({"attention_mask": ONES[0]}, r"`attention_mask` must be .*; got \(8,\)"),
        ({"attention_mask": ONES.tolist()}, r"`attention_mask` must be .*; got a list"),
        ({"attention_mask": torch.ones(2, 1, 8, 8)}, r"`attention_mask` .*got \(2, 1, 8, 8\)"),
        ({"attention_mask": (IDS % 8 > 5) * -1e9}, r"values from -1e\+09 to .*\(mask == 0\)\.long"),
        ({"labels": IDS[:1]}, r"`labels` must be a tensor of the shape .*; got \(1, 8\)"),
        ({"labels": IDS.roll(-1, 1)}, r"`labels` must be the `input_ids`.*; 16 are other tokens"),
        ({"labels": IDS.flip(0).where(IDS > 9, -100)}, "; 7 are other tokens"),
        ({"input_ids": IDS[:, :0]}, r"A batch holds no tokens: .* the shape \(2, 0\)"),
        ({"input_ids": IDS[:1] + 2040}, "evaluation batches hold the token id 2048.*has 2048 to"),
    ],
)
def test_masks_labels_and_tokens_that_do_not_fit_are_named(entries, message, tiny):
    batches = DataLoader([{"input_ids": IDS} | entries], batch_size=None)
    with pytest.raises(DataError, match=message):
        Trainer(**QUIET).test(tiny, batches, verbose=False)
    if "attention_mask" in entries:
        callback = PruningCallback(method="magnitude", pattern="2:4")
        with pytest.raises(DataError, match="`attention_mask`"):
            Trainer(**QUIET).predict(tiny, batches, callbacks=[callback])


def test_a_tensor_or_a_list_is_no_dataloader(tiny):
    for given_loader in (IDS, [IDS, IDS]):
        with pytest.raises(TypeError, match=r"int64 \(8,\).*`DataLoader\(windows, batch_size=4\)`"):
            Trainer(**QUIET).predict(tiny, given_loader)


def test_models_without_a_likelihood_have_no_perplexity():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("bert", vocab_size=64, intermediate_size=48, **sizes)
    loader = DataLoader(IDS, batch_size=2)
    masked = CausalLM(AutoModelForMaskedLM.from_config(config))
    with pytest.raises(TargetError, match="logits of a BertForMaskedLM depend on later tokens"):
        Trainer(**QUIET).test(masked, loader, verbose=False)
    headless = CausalLM(AutoModel.from_config(config))
    with pytest.raises(TargetError, match=r"BertModel gives no logits.*Trainer\.predict\(model"):
        Trainer(**QUIET).test(headless, loader, verbose=False)
    config.is_decoder = True
    decoder = CausalLM(AutoModelForCausalLM.from_config(config))
    (scores,) = Trainer(**QUIET).test(decoder, loader, verbose=False)
    assert math.isfinite(scores["perplexity"])


def test_models_that_a_causal_lm_does_not_take_get_their_next_step(tiny_llama):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with pytest.raises(TypeError, match=r"Got OptimizedModule; give .* `model\._orig_mod`"):
        CausalLM(torch.compile(model))
    config = AutoConfig.for_model("t5", vocab_size=64, d_model=32, d_ff=48, num_layers=1, d_kv=8)
    with pytest.raises(TargetError, match="T5ForConditionalGeneration reads two texts.*`decoder_i"):
        CausalLM(AutoModelForSeq2SeqLM.from_config(config))


def test_nan_is_no_perplexity(tiny_llama):
    lm = CausalLM(tiny_llama)
    trainer = Trainer(**QUIET)
    lm.model.lm_head.register_forward_hook(lambda *_: _[2] * torch.nan)
    with pytest.raises(TargetError, match=r"logits .* hold NaN on text, but its weights are fini"):
        trainer.test(lm, padded_batches(4), verbose=False)
    with torch.no_grad():
        lm.model.model.norm.weight[5] = torch.nan
    message = r"^NaN or Inf in 1 parameter(?s:.*)\n  model\.norm\.weight: 1$"
    with pytest.raises(TargetError, match=message):
        trainer.test(lm, padded_batches(4), verbose=False)


@pytest.mark.parametrize(
    ("loop", "batch_size", "side"), [("test", 1, "right"), ("validate", 3, "left")]
)
def test_perplexity_is_that_of_the_models_own_logits(tiny, loop, batch_size, side):
    loader = padded_batches(batch_size, side)
    (logged,) = getattr(Trainer(**QUIET), loop)(tiny, loader, verbose=False)
    expected = reference_perplexity(tiny.model.eval(), loader)
    assert logged["perplexity"] == pytest.approx(expected, rel=1e-6)
    assert logged["loss"] == pytest.approx(math.log(expected), rel=1e-6)


def test_perplexity_is_exact_in_bfloat16():
    """Rounding the logits to bfloat16 is the model's; nothing is rounded after them."""
    lm, total = CausalLM(STDLIB_LLAMA, dtype="bfloat16"), 0.0
    text = "".join(islice(standard_library("test"), 4))
    windows = torch.tensor(lm.tokenizer(text)["input_ids"])[: 4 * 96].view(4, 96)
    for batch in windows.split(3):
        with torch.inference_mode():
            logits = lm.model.eval()(batch).logits
        assert logits.dtype == torch.bfloat16
        chosen = logits.double().log_softmax(-1)[:, :-1].gather(2, batch[:, 1:, None])
        total -= chosen.sum().item()
    Trainer(**QUIET).test(lm, DataLoader(windows, 3), verbose=False)
    found = lm.evaluation["text"]
    assert found["loss"] == pytest.approx(total / (4 * 95), rel=1e-6)
    assert found["loss"] < 4, "the text is one that the model knows"


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    left=st.booleans(),
    scale=st.floats(0.1, 100),
    seed=st.integers(0, 99),
)
def test_token_losses_are_those_of_a_float64_softmax(lengths, left, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(len(lengths), 9, 13, generator=generator)
    ids = torch.randint(13, (len(lengths), 9), generator=generator)
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if left else mask
    losses, predicted = token_losses(logits, ids, mask.long())
    log_probabilities = logits.double().log_softmax(-1)
    for row, length in enumerate(lengths):
        assert predicted[row].sum() == length - 1
        start = 9 - length if left else 0
        for position in range(start + 1, start + length):
            expected = -log_probabilities[row, position - 1, ids[row, position]]
            torch.testing.assert_close(
                losses[row, position - 1].double(), expected, rtol=1e-5, atol=1e-5 * scale
            )
    assert (losses[~predicted] == 0).all()


def test_several_texts_are_told_apart(tiny, caplog):
    lm = tiny
    texts = {"wikitext2": padded_batches(3), "b.txt": padded_batches(4, "left")}
    trainer = Trainer(**QUIET)
    with caplog.at_level("INFO"):
        logged = trainer.test(lm, texts, verbose=False)
    expected = [{f"loss/{name}", f"perplexity/{name}"} for name in texts]
    assert [{*found} for found in logged] == expected
    for name, loader in texts.items():
        expected = reference_perplexity(lm.model.eval(), loader)
        found = lm.evaluation[name]
        assert found["perplexity"] == pytest.approx(expected, rel=1e-6)
        assert found["loss"] == pytest.approx(math.log(expected), rel=1e-6)
        assert (found["context"], found["windows"], found["tokens"]) == (12, 10, 64)
        assert trainer.callback_metrics[f"perplexity/{name}"].item() == found["perplexity"]
        shown = f"{name}: perplexity {found['perplexity']:.3f} (context 12, 10 windows, 64 "
        assert shown in caplog.text
    again = trainer.test(lm, list(texts.values()), verbose=False)
    assert again[1]["perplexity/1"] == logged[1]["perplexity/b.txt"]
    assert sorted(lm.evaluation) == ["0", "1"]


def test_every_kind_of_batch_gives_the_same_logits(tiny):
    lm = tiny.eval()
    ids = torch.randint(1, 2048, (2, 6))
    expected = lm.model(ids).logits
    for batch in (ids, (ids, "label"), [ids], {"input_ids": ids}):
        assert torch.equal(lm.predict_step(batch, 0), expected)
    for batch, got in (
        ({"ids": ids}, "NoneType"),
        (ids.float(), r"torch.float32 \(2, 6\).*DataLoader\(windows, batch_size=4\)"),
        (["a text", "another"], r"str\. Text is tokenized first, as by a `TextDataModule`"),
    ):
        with pytest.raises(TypeError, match=f"A batch must be .* Got .* {got}"):
            lm.predict_step(batch, 0)


def test_models_come_from_paths_configurations_and_objects(tiny_llama):
    from_path = CausalLM(tiny_llama)
    assert from_path.tokenizer.vocab_size == 2048
    config = AutoConfig.from_pretrained(tiny_llama)
    hf = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert CausalLM(hf).model is hf
    assert CausalLM(config).model.num_parameters() == hf.num_parameters()
    new = CausalLM({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9})
    assert new.tokenizer is None
    assert new.model.config.model_type == "gpt2"
    narrow = CausalLM(str(tiny_llama), dtype="bfloat16").model
    assert (narrow.dtype, narrow.config.dtype) == (torch.bfloat16, torch.float32)
    assert hf.config._attn_implementation == "sdpa"
    CausalLM(hf, attn_implementation="eager")
    assert hf.config._attn_implementation == "eager"


def test_models_that_cannot_be_had(tiny_llama, tiny, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`model`: there is no directory \./absent in /"):
        CausalLM("./absent")
    with pytest.raises(FileNotFoundError, match=r"holds no config.json"):
        CausalLM(tmp_path)
    sought = rf"neither a complete local model directory nor .* no {Path.cwd()}/someone/something;"
    with pytest.raises(FileNotFoundError, match=sought):
        CausalLM("someone/something")
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    with pytest.raises(FileNotFoundError, match="neither a complete local model directory nor"):
        CausalLM(tmp_path)
    with pytest.raises(TypeError, match="Got Linear; another module needs its own LightningModule"):
        CausalLM(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"needs `model_type`.*\['hidden_size'\]"):
        CausalLM({"hidden_size": 8})
    with pytest.raises(ValueError, match="`dtype` must be a floating type .* Got 'int8'"):
        CausalLM(tiny_llama, dtype="int8")
    with pytest.raises(ValueError, match="`revision` needs `model` to be a hub id; this model is"):
        CausalLM(tiny.model, revision="main")
    with pytest.raises(FileNotFoundError, match="`tokenizer`: ./absent gives no tokenizer"):
        CausalLM(tiny_llama, tokenizer="./absent")
    with pytest.raises(OptionError, match="`tokenizer` must be .* got Linear"):
        CausalLM(tiny_llama, tokenizer=torch.nn.Linear(2, 2))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny.model.config)
    with pytest.raises(TargetError, match=r"on the meta device.* and \d+ more\. Load it with"):
        CausalLM(model)


def test_a_checkpoint_holds_its_tokenizer(tiny_llama, tmp_path, monkeypatch):
    source = tmp_path / "source"
    shutil.copytree(tiny_llama, source)
    tokenizer, file = AutoTokenizer.from_pretrained(source), tmp_path / "lm.ckpt"
    tokenizer.add_tokens(["<mine>"])
    tokenizer.chat_template = "{{ messages }}"
    lm, trainer = CausalLM(source, tokenizer=tokenizer), Trainer(**QUIET)
    assert lm.tokenizer is TextDataModule(tokenizer=tokenizer).tokenizer is tokenizer
    trainer.strategy.connect(lm)
    trainer.save_checkpoint(file)
    shutil.rmtree(source)
    monkeypatch.chdir(tmp_path)
    text = "def f(x):\n    return x<mine>"
    rebuilt = CausalLM.load_from_checkpoint(file, weights_only=True)
    assert rebuilt.tokenizer(text).input_ids == lm.tokenizer(text).input_ids
    assert lm.tokenizer(text).input_ids[-1] == 2048
    assert rebuilt.tokenizer.chat_template == "{{ messages }}"
    other = CausalLM(AutoConfig.from_pretrained(tiny_llama).to_dict() | {"_name_or_path": ""})
    Trainer(**QUIET).test(other, padded_batches(4), ckpt_path=str(file), verbose=False)
    assert other.tokenizer(text).input_ids == lm.tokenizer(text).input_ids
    other.tokenizer = None
    windows = TextDataModule(eval_files=__file__, sequence_length=16, batch_size=8)
    trainer = Trainer(**QUIET, limit_test_batches=1)
    trainer.test(other, datamodule=windows, ckpt_path=str(file), verbose=False)
    assert windows.tokenizer is other.tokenizer is not None


def test_a_schedule_needs_the_number_of_steps(tiny_llama):
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(1, 33).repeat(4, 1))

    trainers = Trainer(**QUIET, max_time="00:00:00:05"), Trainer(**QUIET, max_epochs=1)
    data = DataLoader(torch.arange(1, 33).repeat(4, 1), 4), DataLoader(Endless(), 4)
    for trainer, loader in zip(trainers, data, strict=True):
        with pytest.raises(ValueError, match="number is not known. Give `trainer.max_steps`"):
            trainer.fit(CausalLM(tiny_llama), loader)


def test_fit_learns_and_its_checkpoint_can_be_rebuilt(tiny_llama, tmp_path):
    text = torch.arange(1, 33).repeat(4, 1)
    lm = CausalLM(tiny_llama, learning_rate=1e-2, warmup_steps=2)
    trainer = Trainer(**QUIET, max_epochs=30)
    before = Trainer(**QUIET).test(lm, DataLoader(text, 4), verbose=False)[0]["loss"]
    trainer.fit(lm, DataLoader(text, 4))
    after = Trainer(**QUIET).test(lm, DataLoader(text, 4), verbose=False)[0]["loss"]
    assert after < before / 2

    trainer.save_checkpoint(tmp_path / "lm.ckpt")
    hyper_parameters = torch.load(tmp_path / "lm.ckpt", weights_only=True)["hyper_parameters"]
    assert "trust_remote_code" not in hyper_parameters
    rebuilt = CausalLM.load_from_checkpoint(tmp_path / "lm.ckpt")
    assert rebuilt.tokenizer is not None
    assert rebuilt.learning_rate == 1e-2
    for name, tensor in lm.model.state_dict().items():
        assert torch.equal(tensor, rebuilt.model.state_dict()[name]), name


@pytest.mark.parametrize("loop", ["test", "validate"])
def test_offload_brings_each_block_to_the_device_and_changes_no_figure(
    tiny_llama, tiny, loop, monkeypatch
):
    """Also after an error, which has to undo it."""
    moves: list[str] = []
    lm = CausalLM(tiny_llama, offload=True)
    bad = DataLoader([torch.tensor([1, 5000])])  # beyond the vocabulary
    with pytest.raises(DataError, match="token id 5000"):
        getattr(Trainer(**QUIET), loop)(lm, bad, verbose=False)
    names = {block: name for name, block in lm.model.model.layers.named_children()}
    for block in names:

        def moved(device, to=block.to, name=names[block], **_):
            moves.append(name)
            return to(device)

        monkeypatch.setattr(block, "to", moved)
    loader = padded_batches(4)
    logged = getattr(Trainer(**QUIET), loop)(lm, loader, verbose=False)
    assert logged == getattr(Trainer(**QUIET), loop)(tiny, loader, verbose=False)
    assert moves.count("0") == moves.count("1") >= 2 * len(loader)
    assert not any(block._forward_pre_hooks or "_apply" in block.__dict__ for block in names)


@pytest.mark.parametrize(
    ("family", "precision", "dtype"),
    [("llama", "16-true", "float16"), ("deepseek_v3", "bf16-true", "bfloat16")],
)
def test_a_precision_keeps_what_transformers_keeps(family, precision, dtype, tmp_path):
    """Frequencies of rotary positions and biases of routers stay float32, as with `dtype`."""
    kind = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind.model_type, **kind.config))
    for name, buffer in model.named_buffers():
        if "bias" in name:
            buffer.normal_()
    model.save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    module = CausalLM(tmp_path)
    ids = torch.arange(4, 60)[None]
    logits = Trainer(precision=precision, **QUIET).predict(module, DataLoader(ids))
    tensors = dict(module.model.named_parameters()) | dict(module.model.named_buffers())
    for name, expected in [*reference.named_parameters(), *reference.named_buffers()]:
        assert tensors[name].dtype == expected.dtype, name
        assert torch.equal(tensors[name], expected), name
    with torch.no_grad():
        assert torch.equal(logits[0], reference(ids).logits)
