"""Published texts give the windows of SparseGPT's protocol, bit by bit, from local copies."""

import gzip
import json
import random
import re
import shlex
from pathlib import Path

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from quiet import QUIET
from special_tokens import tokenizer_with

from mrp_lightning import CausalLM, TextDataModule, Trainer
from mrp_lightning.errors import DataError
from mrp_lightning.text.sources import PUBLISHED

LENGTH = 16


PLAIN = tokenizer_with("$A")


@pytest.fixture(params=["[E] $A", "$A"], ids=["BOS", "no BOS"])
def tokenizer(request):
    """With a BOS before each text (LLaMA, OPT) or without (BLOOM)."""
    return tokenizer_with(request.param)


def data(corpora_dir, tokenizer=PLAIN, **arguments) -> TextDataModule:
    options = {"sequence_length": LENGTH, "num_samples": 12, "corpora_dir": str(corpora_dir)}
    module = TextDataModule(tokenizer=tokenizer, **{**options, **arguments})
    module.setup("predict" if module.calibration else "test")
    return module


# The protocol again, as a reader of the public scripts would write it down.


def tokens_of(text: str, tokenizer) -> torch.Tensor:
    return tokenizer(text, return_tensors="pt").input_ids[0]


def windows_in_order(stream: torch.Tensor, length: int = LENGTH) -> torch.Tensor:
    windows = [stream[start : start + length] for start in range(0, len(stream), length)]
    return torch.stack([window for window in windows if len(window) == length])


def expected_evaluation(name: str, published, tokenizer) -> torch.Tensor:
    if name == "wikitext2":
        return windows_in_order(tokens_of("\n\n".join(published["wikitext2/test"]), tokenizer))
    if name == "ptb":
        return windows_in_order(tokens_of(" ".join(published["ptb/test"]), tokenizer))
    stream = tokens_of(" ".join(published["c4/validation"][:1100]), tokenizer)
    assert len(stream) > 256 * LENGTH, "the limit is reached here"
    return windows_in_order(stream[: 256 * LENGTH])


def expected_calibration(name: str, published, tokenizer, seed: int) -> torch.Tensor:
    random.seed(seed)
    found = []
    if name in ("wikitext2", "ptb"):
        stream = tokens_of(" ".join(published[f"{name}/train"]), tokenizer)
        for _ in range(12):
            start = random.randint(0, len(stream) - LENGTH - 1)
            found.append(stream[start : start + LENGTH])
        return torch.stack(found)
    documents = (
        published["c4/train"] if name == "c4" else published["lambada/0"] + published["lambada/1"]
    )
    while len(found) < 12:
        stream = tokens_of(documents[random.randint(0, len(documents) - 1)], tokenizer)
        if len(stream) > LENGTH:
            start = random.randint(0, len(stream) - LENGTH - 1)
            found.append(stream[start : start + LENGTH])
    return torch.stack(found)


@pytest.mark.parametrize("name", ["wikitext2", "ptb", "c4"])
def test_evaluation_windows_are_those_of_the_protocol(name, published, corpora_dir, tokenizer):
    loaders = data(corpora_dir, tokenizer, evaluation=name, batch_size=3).test_dataloader()
    assert list(loaders) == [name]
    windows = torch.cat(list(loaders[name]))
    assert windows.dtype == torch.int64
    assert torch.equal(windows, expected_evaluation(name, published, tokenizer))
    assert (windows == 0).sum() == (windows[0, 0] == 0), "one BOS before the text, none inside"
    assert (windows[0, 0] == 0) == (tokenizer is not PLAIN)
    if name == "c4":
        assert windows.shape == (256, LENGTH)


@pytest.mark.parametrize("left_over", [0, -1], ids=["one less shows", "one more shows"])
def test_only_the_first_documents_of_c4_are_read(published, corpora_dir, left_over):
    """Fewer than 256 windows, of which the last ends where the text does, or just beyond it."""
    stream = tokens_of(" ".join(published["c4/validation"][:1100]), PLAIN)
    lengths = range(len(stream) // 200, len(stream))
    length = next(k for k in lengths if (len(stream) - left_over * 4) % k < 4)
    module = data(corpora_dir, evaluation="c4", sequence_length=length)
    windows = torch.cat(list(module.test_dataloader()["c4"]))
    assert torch.equal(windows, windows_in_order(stream, length))
    assert len(windows) < 256


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_calibration_windows_are_those_of_the_protocol(name, published, corpora_dir, tokenizer):
    module = data(corpora_dir, tokenizer, calibration=name, seed=2)
    expected = expected_calibration(name, published, tokenizer, 2)
    assert torch.equal(torch.cat(list(module.predict_dataloader())), expected)


def test_each_text_gets_its_own_perplexity(corpora_dir, tiny_llama):
    names = ["wikitext2", "ptb", "c4"]
    options = {"sequence_length": LENGTH, "batch_size": 7, "corpora_dir": str(corpora_dir)}
    texts = TextDataModule(evaluation=names, **options)
    lm = CausalLM(tiny_llama)
    trainer = Trainer(**QUIET)
    logged = trainer.test(lm, datamodule=texts, verbose=False)
    assert list(lm.evaluation) == names
    for name, found, values in zip(names, lm.evaluation.values(), logged, strict=True):
        assert values == {f"loss/{name}": found["loss"], f"perplexity/{name}": found["perplexity"]}
        windows = torch.cat(list(texts.test_dataloader()[name]))
        with torch.inference_mode():
            log_probabilities = lm.model(windows).logits.double().log_softmax(-1)[:, :-1]
        loss = -log_probabilities.gather(2, windows[:, 1:, None]).mean().item()
        assert found["loss"] == pytest.approx(loss, rel=1e-6)
        assert found["context"] == LENGTH
        assert (found["windows"], found["tokens"]) == (len(windows), len(windows) * (LENGTH - 1))
    (alone,) = trainer.test(lm, datamodule=TextDataModule(evaluation="ptb", **options))
    assert alone["perplexity"] == pytest.approx(logged[1]["perplexity/ptb"])
    assert list(lm.evaluation) == ["ptb"]
    assert trainer.validate(lm, datamodule=texts, verbose=False) == logged


def test_what_is_missing_is_said_with_the_commands_that_download_it(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError) as caught:
        data(tmp_path, evaluation=["ptb", "wikitext2"])
    message = str(caught.value)
    assert f"`corpora_dir`: {tmp_path} lacks files of ptb, wikitext2" in message
    first, second = message.split("Download them: ")[1].split(" && ")
    assert shlex.split(first) == [
        *("hf", "download", "ptb-text-only/ptb_text_only", "penn_treebank/test/0000.parquet"),
        *("--repo-type", "dataset", "--revision", "refs/convert/parquet"),
        *("--local-dir", str(tmp_path / "ptb-text-only/ptb_text_only")),
    ]
    assert "Salesforce/wikitext" in second
    with pytest.raises(FileNotFoundError, match="lacks files of lambada") as caught:
        data(tmp_path, calibration="lambada")
    assert "train-00000-of-00002.parquet plain_text/train-00001-of" in str(caught.value)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="did not give the files of c4") as caught:
        TextDataModule(calibration="c4").setup("predict")
    message, revision = str(caught.value), PUBLISHED["c4"].revision
    command = "hf download allenai/c4 en/c4-train.00000-of-01024.json.gz --repo-type dataset "
    assert f"{command}--revision {revision}." in message
    assert "`corpora_dir: DIR`" in message


def test_the_cache_of_the_hub_is_enough(published, tmp_path, monkeypatch, write_corpora):
    """As `hf download` leaves it, without a network."""
    revision = PUBLISHED["c4"].revision
    commit = "0123456789abcdef0123456789abcdef01234567"
    ptb = tmp_path / "datasets--ptb-text-only--ptb_text_only"
    branch = ptb / "refs" / PUBLISHED["ptb"].revision
    branch.parent.mkdir(parents=True)
    branch.write_text(commit)
    folders = {
        "c4": f"datasets--allenai--c4/snapshots/{revision}",
        "ptb": f"{ptb.name}/snapshots/{commit}",
    }
    write_corpora(tmp_path, folders)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    names = ["c4", "ptb"]
    options = {"sequence_length": LENGTH, "tokenizer": PLAIN, "num_samples": 12}
    module = TextDataModule(calibration="c4", evaluation=names, **options)
    loaders = module.test_dataloader()
    for name in names:
        expected = expected_evaluation(name, published, PLAIN)
        assert torch.equal(torch.cat(list(loaders[name])), expected)
    expected = expected_calibration("c4", published, PLAIN, 0)
    assert torch.equal(module.calibration_windows(), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"calibration": "C4"}, r"`calibration`: 'C4' unknown. .* c4, lambada, ptb, wikitext2"),
        (
            {"evaluation": ["c4", "lambada", "x"]},
            r"'lambada' unknown, 'x' unknown. Expected stdlib, c4, ptb, wikite",
        ),
        ({"calibration": "c4", "dataset": "a"}, "not several of them"),
        ({"evaluation": "c4", "eval_files": "a"}, "not several of them"),
        ({"corpora_dir": "a"}, r"needs `calibration` or `evaluation`"),
    ],
)
def test_wrong_arguments_are_refused_when_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        TextDataModule(**arguments)


def test_a_stage_without_its_text_is_refused(corpora_dir):
    options = {"corpora_dir": str(corpora_dir)}
    for stage in ("test", "validate"):
        with pytest.raises(DataError, match=r"`evaluation` is needed here"):
            TextDataModule(calibration="c4", **options).setup(stage)
    with pytest.raises(DataError, match=r"`calibration` is needed here"):
        TextDataModule(evaluation="c4", **options).setup("predict")
    with pytest.raises(DataError, match=r"`fit` trains on `train_files`"):
        TextDataModule(calibration="c4", **options).setup("fit")
    with pytest.raises(DataError, match="the wikitext2 text has only .* less than one window"):
        data(corpora_dir, evaluation="wikitext2", sequence_length=10**5).test_dataloader()


def test_copies_of_another_form_are_refused(tmp_path):
    path = tmp_path / "ptb" / "penn_treebank" / "test" / "0000.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"text": ["no such column"]}), path)
    with pytest.raises(DataError, match=r"expected the column 'sentence' in .*Got \['text'\]"):
        data(tmp_path, evaluation="ptb").test_dataloader()
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match=re.escape(f"{path} cannot be read as parquet")):
        data(tmp_path, evaluation="ptb").test_dataloader()
    shard = tmp_path / "c4" / "en" / "c4-train.00000-of-01024.json.gz"
    shard.parent.mkdir(parents=True)
    row = json.dumps({"text": " ".join(map(str, range(1000)))}) + "\n"
    shard.write_bytes(gzip.compress(row.encode())[:-200])
    with pytest.raises(DataError, match=re.escape(f"{shard} cannot be read as json")):
        data(tmp_path, calibration="c4").calibration_windows()


def test_the_page_on_data_names_what_is_read():
    page = (Path(__file__).parents[2] / "lab" / "paper.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+)$", page, flags=re.M))
    assert sorted(rows) == sorted(PUBLISHED)
    for name, corpus in PUBLISHED.items():
        for fact in (corpus.revision, *corpus.train, *corpus.test):
            assert f"`{fact}`" in rows[name]
        assert f"[{corpus.repository}](https://huggingface.co/datasets/" in rows[name]
    known = {(corpus.repository, corpus.revision) for corpus in PUBLISHED.values()}
    pattern = r"^hf download (\S+) --repo-type dataset --revision (\S+) "
    commands = re.findall(pattern, page, flags=re.M)
    assert len(commands) == len(known)
    assert set(commands) == known
