"""Windows are what the text says, the same for the same seed, and clear errors otherwise."""

import json
import re
import sysconfig
import warnings
from pathlib import Path

import pytest
import torch
from quiet import QUIET
from transformers import AutoConfig, AutoTokenizer

from mrp_lightning import CausalLM, TextDataModule, Trainer
from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_lightning.errors import DataError
from mrp_lightning.text.sources import StandardLibrary

TEXTS = [f"def function_{i}(x):\n    return x + {i}\n" * (i + 1) for i in range(12)]
TOKENIZER = AutoTokenizer.from_pretrained(STDLIB_LLAMA)


class Counted(type(TOKENIZER)):
    """The tokenizer, which keeps the texts that it is called with."""

    def __call__(self, text, *args, **options):
        self.__dict__.setdefault("texts", []).append(text)
        return super().__call__(text, *args, **options)


def module(**arguments) -> TextDataModule:
    defaults = {"sequence_length": 16, "num_samples": 5, "tokenizer": TOKENIZER}
    data = TextDataModule(**{**defaults, **arguments})
    data.setup("predict")
    return data


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    directory = tmp_path_factory.mktemp("texts")
    for i, text in enumerate(TEXTS):
        (directory / f"{i:02}.txt").write_text(text)
    return [str(path) for path in sorted(directory.iterdir())]


def test_evaluation_windows_are_the_joined_text_without_the_last_partial_one(files):
    windows = torch.cat(list(module(eval_files=files, batch_size=3).test_dataloader()))
    tokens = TOKENIZER("\n\n".join(TEXTS))["input_ids"]
    assert 0 < len(tokens) - windows.numel() < 16
    assert windows.flatten().tolist() == tokens[: windows.numel()]


@pytest.mark.parametrize("limit", [1, 40, 10**6])
def test_few_windows_of_a_long_text_are_those_of_the_whole(tmp_path, limit):
    file, counted = tmp_path / "long.txt", Counted.from_pretrained(STDLIB_LLAMA)
    file.write_text("".join(f"value_{i} = compute({i}) + 'Ünïcode' * {i}\n" for i in range(300)))
    windows = module(eval_files=str(file), tokenizer=counted).windows("test", limit)
    assert torch.equal(windows.ids, module(eval_files=str(file)).windows("test").ids[:limit])
    longest = max(map(len, counted.texts))
    assert (longest < len(file.read_text()) / 2) == (limit < 10**6)


def test_calibration_windows_are_pieces_of_the_training_text_by_the_seed_alone(files):
    windows = module(train_files=files, num_samples=40).calibration_windows()
    assert (windows.shape, windows.dtype) == ((40, 16), torch.int64)
    text = "\n\n".join([*TEXTS, *TEXTS, ""])
    assert all(TOKENIZER.decode(window) in text for window in windows)
    again = module(train_files=files, num_samples=40, batch_size=2).calibration_windows()
    assert torch.equal(windows, again)
    assert not torch.equal(windows[:5], module(train_files=files, seed=1).calibration_windows())


def test_short_documents_are_followed_by_the_next_ones(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(json.dumps({"body": f"x = {i}"}) for i in range(200)) + "\n")
    data = module(train_files=str(path), text_column="body", sequence_length=64)
    assert data.calibration_windows().shape == (5, 64)


def test_training_windows_cover_the_text_and_are_shuffled_by_seed(files):
    first, again, other = (
        torch.cat(list(module(train_files=files, batch_size=4, seed=seed).train_dataloader()))
        for seed in (0, 0, 3)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert sorted(map(tuple, first.tolist())) == sorted(map(tuple, other.tolist()))


def test_datasets_by_object_and_by_directory(files, tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"text": TEXTS})
    splits = datasets.DatasetDict({"train": table, "validation": table})
    for name in splits:
        splits[name].to_json(tmp_path / f"{name}.jsonl")
    windows = module(train_files=files, eval_files=files)
    for source in (splits, str(tmp_path), {"path": str(tmp_path)}):
        data = module(dataset=source)
        assert torch.equal(data.calibration_windows(), windows.calibration_windows())
        # Without a test split, test reads validation.
        for split in ("validation", "test") if source is splits else ("test",):
            assert torch.equal(data.windows(split).ids, windows.windows(split).ids)
    with pytest.raises(ValueError, match=r"no column 'body'\. Name one of \['text'\]"):
        module(dataset=splits, text_column="body").calibration_windows()
    del splits["train"]
    with pytest.raises(ValueError, match=r"no split 'train', but \['validation'\]"):
        module(dataset=splits).calibration_windows()


def test_the_embedded_text_is_split_by_path():
    splits = [StandardLibrary().local_files(name) for name in ("train", "validation", "test")]
    files = [file for split in splits for file in split]
    assert all(len(split) > 20 for split in splits)
    assert len(splits[0]) > 5 * len(splits[2])
    root = Path(sysconfig.get_paths()["stdlib"])
    assert len({*files}) == len(files)
    assert root / "argparse.py" in files
    assert not any(Path(pytest.__file__).parents[1] in file.parents for file in files)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"num_samples": 0, "batch_size": -1, "sequence_length": 1},
            r"num_samples` must be at least 1; got 0.*batch_size.*sequence_length` .* 2; got 1\.",
        ),
        ({"seed": -1}, "`seed` must be at least 0"),  # Python draws as by 1
        ({"train_files": ""}, "the name of a text file is empty"),
        ({"dataset": "a", "train_files": "b"}, "either `dataset` or `train_files`/`eval_files`"),
        (
            {"train_files": "gone/a.txt", "eval_files": ["gone/b.txt"]},
            r"no such file: gone/a\.txt; `eval_files`: .*b\.txt",
        ),
    ],
)
def test_wrong_arguments_are_refused_when_made(arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        TextDataModule(**arguments)


def test_a_text_that_cannot_fill_a_window_is_one_shorter_window(files, tmp_path):
    data = module(train_files=files, eval_files=files, sequence_length=10**6, num_samples=1)
    with pytest.warns(UserWarning, match=r"The test text has only [\d,]+ tokens: its windows"):
        windows = data.windows("test").ids
    joined = "\n\n".join(data.documents("test"))
    ids = torch.tensor(TOKENIZER(joined, add_special_tokens=False).input_ids)
    text = windows[:, -len(windows[0]) + len(data._cutter("window").prefix) :]
    assert 0 <= len(ids) - text.shape[1] <= 2 * len(TEXTS)  # the line breaks between documents
    assert (text == ids[: text.shape[1]]).all()
    with pytest.warns(UserWarning, match="The train text has only"):
        assert data.calibration_windows().shape[1] == windows.shape[1]
    with pytest.raises(DataError, match=r"`train_files`: this stage reads text"):
        module(eval_files=files).calibration_windows()
    with pytest.raises(DataError, match=r"`eval_files`: this stage reads text"):
        module(train_files=files).windows("test")
    (tmp_path / "a.txt").write_text("x = 1")
    with pytest.raises(DataError, match=r"the held-out text has only 1 token, less"):
        module(train_files=str(tmp_path), hold_out=True).windows("test")


OF_STRINGS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
OF_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{{ part.text if part.type == 'text' else '<image>' }}|{% endfor %}{% endfor %}"
)


def of_chats(path: Path, template: str | None, *contents, key: str = "messages") -> TextDataModule:
    """A module of conversations of one message each, and a tokenizer with a chat template."""
    chats = [{key: [{"role": "user", "content": content}]} for content in contents]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    tokenizer = type(TOKENIZER).from_pretrained(STDLIB_LLAMA)
    tokenizer.chat_template = template
    return module(train_files=path, tokenizer=tokenizer)


@pytest.mark.parametrize("key", ["messages", "text"])
def test_conversations_are_read_by_the_chat_template(key, tmp_path):
    path, questions = tmp_path / "chats.jsonl", [f"question {i}" for i in range(3)]
    with pytest.raises(DataError, match=r"^`tokenizer`: .*has no chat template"):
        of_chats(path, None, *questions, key=key).documents("train")
    data = of_chats(path, "{{ bos_token }}" + OF_STRINGS, *questions, key=key)
    assert data.documents("train") == [f"<user>{question}" for question in questions]


def test_conversations_of_sharegpt_have_the_roles_of_templates(tmp_path):
    said = [("system", "be kind"), ("human", "one"), ("gpt", "two"), ("tool", "three")]
    chat = {"id": 7, "conversations": [{"from": name, "value": text} for name, text in said]}
    data = of_chats(tmp_path / "chats.jsonl", OF_STRINGS, "unread")
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat))
    assert data.documents("train") == ["<system>be kind<user>one<assistant>two<tool>three"]
    chat["conversations"][1] = {"from": "human"}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat))
    with pytest.raises(DataError, match=r"line 1 .* 'messages' or 'conversations'. Got list there"):
        data.documents("train")


@pytest.mark.parametrize(
    ("template", "text"), [(OF_STRINGS, "<user>one\n1\ntwo"), (OF_PARTS, "<user>one\n1|two|")]
)
def test_parts_of_a_message_are_its_text(template, text, tmp_path):
    """They are given to a template as they are, and as one text if it takes strings alone."""
    parts = [{"type": "text", "text": part} for part in ("one\n1", "two")]
    assert of_chats(tmp_path / "a.jsonl", template, parts).documents("train") == [text]
    image = {"type": "image", "url": "x.png"}
    data = of_chats(tmp_path / "b.jsonl", template, [*parts, image])
    if template == OF_PARTS:
        assert data.documents("train") == [text + "<image>|"]
    else:
        with pytest.raises(DataError, match="parts of the kinds image"):
            data.documents("train")


@pytest.mark.parametrize("content", ["", "\n\t \n" * 10_000])
def test_white_space_is_no_text(tmp_path, content):
    path = tmp_path / "text.txt"
    path.write_text(content)
    data = module(train_files=str(path), eval_files=str(path))
    for windows in (data.calibration_windows, lambda: data.windows("test").ids):
        with pytest.raises(DataError, match="text is empty, or white space alone"):
            windows()


def test_more_windows_than_the_text_has(files):
    """They are said to repeat each other, and limited; to count them takes but a sample."""
    there = sum(len(TOKENIZER(text).input_ids) for text in TEXTS)
    fits = there // 16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(train_files=files, num_samples=fits).calibration_windows()
    message = rf"{fits + 1} windows of 16 tokens.* about {there:,}, enough for {fits} windo"
    with pytest.warns(UserWarning, match=message):
        windows = module(train_files=files, num_samples=fits + 1).calibration_windows()
    assert windows.shape == (fits + 1, 16)
    counted = Counted.from_pretrained(STDLIB_LLAMA)
    many = module(train_files=files, num_samples=10**7, tokenizer=counted)
    with pytest.warns(UserWarning, match=rf"10,000,000 windows .*\. Give .*num_samples: {fits}`"):
        windows = many.calibration_windows()
    assert len(windows) == 16 * there // 16
    sampled = sum(text in TEXTS for text in counted.texts)
    assert len(TEXTS) <= sampled <= len(TEXTS) + 3  # those that fill the first window


def test_the_tokens_of_a_long_text_are_estimated(tmp_path):
    lines = [f"def function_{i}(x):\n    return x + {i}\n" for i in range(2000)]
    there = len(TOKENIZER("".join(lines)).input_ids)
    (tmp_path / "a.txt").write_text("".join(lines))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in lines))
    for name in ("a.txt", "b.jsonl"):
        data = module(train_files=str(tmp_path / name), num_samples=100, sequence_length=512)
        with pytest.warns(UserWarning, match="100 windows of 512 tokens") as warned:
            data.calibration_windows()
        (message,) = (str(each.message) for each in warned if "100 w" in str(each.message))
        told = int(re.search(r"about ([\d,]+)", message)[1].replace(",", ""))
        assert told == pytest.approx(there, rel=0.1)


def test_the_text_of_python_is_announced(files, caplog):
    caplog.set_level("INFO")
    for stage in ("predict", "test"):
        module(train_files=files, eval_files=files).setup(stage)
        assert "No text was given" not in caplog.text
        module().setup(stage)
        assert f"No text was given: `{stage}` reads the source code of Python's" in caplog.text
        caplog.clear()


def test_a_tokenizer_is_needed(files):
    with pytest.raises(ValueError, match=r"`tokenizer`: .* without a tokenizer"):
        module(train_files=files, tokenizer=None).calibration_windows()


@pytest.mark.parametrize("has_alibi", [False, True])
def test_the_window_is_checked_against_the_positions_of_the_model(files, has_alibi):
    """Attention that is biased by distance has no positions to run out of."""
    sizes = {"vocab_size": 2048, "hidden_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 24}
    lm = CausalLM(AutoConfig.for_model("falcon", **sizes, alibi=has_alibi), tokenizer=TOKENIZER)
    data = TextDataModule(files, num_samples=2, sequence_length=25, batch_size=2)
    if has_alibi:
        (logits,) = Trainer(**QUIET).predict(lm, datamodule=data)
        assert logits.shape[:2] == (2, 25)
    else:
        message = r"`sequence_length`: .* 25 tokens, .* only 24 positions. Give 24"
        with pytest.raises(ValueError, match=message):
            Trainer(**QUIET).predict(lm, datamodule=data)


GPT2 = {"vocab_size": 2048, "n_embd": 8, "n_layer": 1, "n_head": 2}


def test_windows_are_of_the_tokenizer_of_the_model_that_runs(files):
    other = TOKENIZER.train_new_from_iterator(TEXTS, 300)
    config = AutoConfig.for_model("gpt2", **GPT2, n_positions=24)
    data, trainer, windows = TextDataModule(files, num_samples=2), Trainer(**QUIET), []
    for own in (TOKENIZER, other):
        trainer.predict(CausalLM(config, tokenizer=own), datamodule=data)
        windows.append(data.calibration_windows())
        alone = module(train_files=files, num_samples=2, sequence_length=24, tokenizer=own)
        assert torch.equal(windows[-1], alone.calibration_windows())
    assert not torch.equal(*windows)


@pytest.mark.usefixtures("short_library")
def test_the_default_window_fits_the_model():
    trainer, data = Trainer(**QUIET), TextDataModule(num_samples=1, tokenizer=TOKENIZER)
    assert data.sequence_length == 2048
    for positions, expected in ((24, 24), (4096, 2048)):
        lm = CausalLM(AutoConfig.for_model("gpt2", **GPT2, n_positions=positions))
        trainer.strategy.connect(lm)
        data.trainer = trainer
        data.setup("predict")
        assert data.calibration_windows().shape == (1, expected)


def test_files_on_this_machine_are_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("data/train.jsonl", "data/deep/test.json.gz", "other.jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    listed = {Path("data/train.jsonl"), Path("data/deep/test.json.gz")}
    assert {*TextDataModule(dataset="data").local_files("test")} == listed
    wildcard = {"path": "json", "data_files": {"train": "data/*.jsonl", "test": ["other.jsonl"]}}
    given = TextDataModule(dataset=wildcard).local_files("predict")
    assert {*given} == {Path("data/train.jsonl"), Path("other.jsonl")}
    assert TextDataModule(dataset="someone/corpus").local_files("predict") == []
    assert TextDataModule(calibration="c4").local_files("predict") == []
    copies = TextDataModule(calibration="c4", corpora_dir="data")
    with pytest.raises(FileNotFoundError, match="hf download allenai/c4"):
        copies.local_files("predict")
