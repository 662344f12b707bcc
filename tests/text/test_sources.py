"""Documents of files are what the files say, or an error names the place."""

import gzip
import json
import os
import re
import time

import huggingface_hub
import pytest

from mrp_lightning.errors import DataError
from mrp_lightning.text import sources
from mrp_lightning.text.documents import documents_of_files, expanded
from mrp_lightning.text.sources import DatasetText, TextFiles


def test_a_line_of_json_ends_where_json_says(tmp_path):
    """U+2028, U+0085 and the like may stand inside a string; str.splitlines cuts there."""
    texts = ["one\u2028two", "three\x85four", "five\u2029six", "seven\n\r eight\x1c"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path = tmp_path / "lines.jsonl"
    path.write_bytes("\r\n".join([*lines, "", "  "]).encode())
    assert documents_of_files([path], "text") == texts
    plain = tmp_path / "plain.txt"
    plain.write_text(texts[0], encoding="utf-8")
    assert documents_of_files([plain, path], "text") == [texts[0], *texts]


@pytest.mark.parametrize(
    ("line", "got"),
    [
        ('{"text": 5}', "int there"),
        ('{"text": null}', "NoneType there"),
        ('{"text": ["a"]}', "list there"),
        ('{"txt": "a", "id": 1}', "the keys ['id', 'txt']"),
        ('["text"]', '["text"]'),
        ('"text"', '"text"'),
        ('{"text": "a', '{"text": "a (Unterminated string'),
        ('{"text": ' + "[" * 100_000, '{"text": [...] (maximum recursion depth'),
    ],
)
def test_a_line_without_a_text_is_named(tmp_path, line, got):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    message = f"{path}, line 3 is no object with a text under the key 'text' (`text"
    with pytest.raises(DataError, match=f"{re.escape(message)}.*Got {re.escape(got)}"):
        documents_of_files([path], "text")


def test_byte_order_marks_and_surrogates(tmp_path):
    """A mark is no text; a pair of surrogates is its character, and half of one U+FFFD."""
    lines = [r'{"text": "half \ud83d of"}', r'{"text": "\ud83d\ude42 whole"}']
    files = {"a.jsonl": "\n".join(lines), "b.txt": "plain \ufeff inside", "c.csv": "text\nrow\n"}
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
    texts = ["half \ufffd of", "🙂 whole", "plain \ufeff inside", "row"]
    assert documents_of_files([tmp_path / name for name in files], "text") == texts


def test_brackets_in_the_name_of_a_directory_are_no_pattern(tmp_path):
    directory = tmp_path / "a [b]*?"
    directory.mkdir()
    for name in ("1.txt", "2.txt", "[3].txt"):
        (directory / name).write_text(name)
    for pattern, names in (("[12].txt", "12"), ("[3].txt", ""), ("*.txt", "123"), ("**/1*", "1")):
        matched = expanded({"train_files": [directory / pattern]})["train_files"]
        expected = names or "3"  # the file that has the name, and not what the pattern matches
        assert [next(filter(str.isdigit, file.name)) for file in matched] == sorted(expected)


LATIN = '{"text": "café"}'.encode("latin-1")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", LATIN, "at offset 13 is 0xe9"),
        ("latin.jsonl", LATIN, "at offset 13 is 0xe9"),
        (
            "text.gz",
            gzip.compress(b"A text, and not a short one. " * 20, mtime=0),
            "Unpack a compressed fi",
        ),
        ("zero", b"text\r\n\0more", "at offset 6 is 0x00"),
        ("image", b"\x89PNG", "at offset 0 is 0x89"),
    ],
)
def test_a_file_that_is_not_utf_8_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    start = re.escape(f"{tmp_path / name} must be UTF-8 text")
    with pytest.raises(DataError, match=f"{start}.*{message}"):
        documents_of_files([tmp_path / name], "text")


def test_one_split_in_place_of_all_is_named(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the extra data")
    with pytest.raises(DataError, match=r"splits by name.*Got a Dataset\. Leave out `split`"):
        DatasetText(datasets.Dataset.from_dict({"text": ["a", "b"]}), "text").documents("train")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    asked = {"path": "text", "data_files": str(tmp_path / "a.txt"), "cache_dir": str(tmp_path)}
    assert list(DatasetText(dict(asked), "text").documents("train")) == ["one", "two"]
    with pytest.raises(DataError, match="Got a Dataset"):
        DatasetText({**asked, "split": "train"}, "text").documents("train")


def test_a_dataset_that_is_not_there_is_told_at_once(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="needs the extra data")
    asked = []
    monkeypatch.setattr(sources, "why_no_hub", lambda: "the hub is away")
    for place in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(place, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", asked.append)  # between tries, which would take 24 s
    message = r"^`dataset`: nobody/nothing cannot be loaded \(the hub is away\)\. .*: self`\)\.$"
    with pytest.raises(DataError, match=message):
        DatasetText("nobody/nothing", "text").documents("train")
    assert asked == []
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '[{"body": "one"}, {"body": "two"}]'),
        ("a.JSON", '{"body": "one"}\n{"body": "two"}'),
        ("a.csv", "body,id\none,1\ntwo,2\n"),
        ("a.tsv", "body\tid\none\t1\ntwo\t2\n"),
    ],
)
def test_a_table_is_read_by_its_column(tmp_path, name, content):
    pytest.importorskip("datasets", reason="needs the extra data")
    (tmp_path / name).write_text(content)
    files = TextFiles(evaluation=[tmp_path / name], column="body")
    assert list(files.documents("test")) == ["one", "two"]
    with pytest.raises(DataError, match=rf"^`eval_files`: .*{name}, row 1 is no .*Got the keys"):
        TextFiles(evaluation=[tmp_path / name]).documents("test")


def test_a_damaged_table_is_named(tmp_path):
    (tmp_path / "a.parquet").write_text("this is no table")
    with pytest.raises(DataError, match=r"^`eval_files`: .*a\.parquet cannot be read as parquet"):
        TextFiles(evaluation=[tmp_path / "a.parquet"]).documents("test")


def test_directories_and_wildcards_stand_for_files(tmp_path):
    folder = tmp_path / "text"
    contents = {
        "b.txt": b"one",
        "a.md": "é".encode() * 5000,  # the first 8192 bytes end within a character
        "deep/c.jsonl": b'{"text": "two"}',
        "deep/table.csv": b"text\nthree\n",
        ".git/config": b"hidden",
        "deep/.hidden.txt": b"hidden",
        "picture.png": b"\x89PNG\r\n",
        "zeros.bin": b"a\0b",
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    names = ["a.md", "b.txt", "deep/c.jsonl", "deep/table.csv"]
    paths = [folder, folder / "*.txt", folder / "**" / "*.jsonl"]
    matches = [folder / name for name in [*names, "b.txt", "deep/c.jsonl"]]
    assert expanded({"train_files": paths, "eval_files": []}) == {
        "train_files": matches,
        "eval_files": [],
    }
    (folder / "[1].txt").write_text("a name with brackets is a name")
    assert expanded({"x": [folder / "[1].txt"]}) == {"x": [folder / "[1].txt"]}
    (tmp_path / "empty").mkdir()
    message = r"^`x`: no such file: .*\*\.rst; .*empty is a directory without text files and "
    message += r"tables; `y`: no such file: .*gone\.$"
    with pytest.raises(FileNotFoundError, match=message):
        expanded({"x": [folder / "*.rst", tmp_path / "empty"], "y": [tmp_path / "gone"]})
    os.mkfifo(tmp_path / "pipe")  # as `<(zcat text.gz)` is one
    with pytest.raises(FileNotFoundError, match="pipe is a pipe or a device, .*`--text -`"):
        expanded({"x": [tmp_path / "pipe"]})


@pytest.mark.parametrize(
    ("content", "is_json"),
    [
        ('[{"text": "one"},\n {"text": "two"}]', True),
        ('{\n"text": "one"}', True),
        ('\n{"text": "one"}\n{"text": "two"}', True),
        ("[1]\nA text with a footnote", False),
        ("[links](a) and {braces}", False),
        ("{}\nnothing", False),
        ("[" * 100_000, False),
    ],
)
def test_json_in_a_text_file_is_named(tmp_path, content, is_json):
    path = tmp_path / "text.txt"
    path.write_text(content)
    if is_json:
        with pytest.raises(DataError, match=r"text\.txt is JSON, .* \.jsonl with .* key 'body'"):
            documents_of_files([path], "body")
    else:
        assert documents_of_files([path], "body") == [content]
