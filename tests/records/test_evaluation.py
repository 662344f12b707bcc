"""What `evaluation.json` keeps, and what it refuses to read."""

import json
import os

import pytest

from mrp_lightning.errors import FormatError
from mrp_lightning.records.evaluation import NAME, Evaluation, read, record
from mrp_lightning.storage.files import MANIFEST

WIKITEXT = {"perplexity": 5.47, "loss": 1.7, "context": 2048, "windows": 166, "tokens": 339802}
LAMBADA = {"acc": 0.74, "acc_stderr": 0.006, "samples": 5153, "num_fewshot": 0}


def test_sections_texts_and_tasks_are_added_to_each_other(tmp_path):
    run = tmp_path / "new" / "run"
    path = record(run, perplexity={"wikitext2": WIKITEXT}, model="there")
    record(run, perplexity={"c4": WIKITEXT | {"perplexity": 7.0}})
    record(run, zeroshot={"lambada_openai": LAMBADA})
    assert path == run / NAME
    found = read(run)
    assert found.perplexity == {"wikitext2": WIKITEXT, "c4": WIKITEXT | {"perplexity": 7.0}}
    assert found.zeroshot == {"lambada_openai": LAMBADA}
    assert found.model == "there"
    assert {"mrp_lightning", "torch"} <= set(found.versions)
    assert {file.name for file in run.iterdir()} == {NAME, MANIFEST}


def test_the_same_task_is_replaced(tmp_path):
    record(tmp_path, zeroshot={"piqa": {"acc": 0.1}}, model="first")
    record(tmp_path, zeroshot={"piqa": {"acc": 0.2}}, model="second")
    assert read(tmp_path).zeroshot == {"piqa": {"acc": 0.2}}
    assert read(tmp_path).model == "second"


def test_what_is_not_finite_is_null(tmp_path):
    infinite = {"perplexity": float("inf"), "loss": 800.0, "acc": float("nan")}
    path = record(tmp_path, perplexity={"wikitext2": infinite})
    json.loads(path.read_text(), parse_constant=pytest.fail)
    assert read(tmp_path).perplexity["wikitext2"] == {
        "perplexity": None,
        "loss": 800.0,
        "acc": None,
    }


def test_a_failing_write_leaves_the_file_as_it_was(tmp_path):
    before = record(tmp_path, perplexity={"wikitext2": WIKITEXT}).read_text()
    with pytest.raises(TypeError, match="not JSON serializable"):
        record(tmp_path, zeroshot={"piqa": {"acc": object()}})
    assert (tmp_path / NAME).read_text() == before
    assert {file.name for file in tmp_path.iterdir()} == {NAME, MANIFEST}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "`format_version` is None, but this version of mrp-lightning reads 1"),
        ('{"format_version": 2}', "`format_version` is 2"),
        (
            '{"format_version": 1, "zeroshot": [], "model": 3, "perplexity": {"c4": {"x": true}}}',
            r"`perplexity.c4.x` is True, expected a valid number\n  `zeroshot` is \[\], expected "
            r"an object\n  `model` is 3, expected a valid string\Z",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_kept(tmp_path, content, message):
    (tmp_path / NAME).write_text(content)
    for use in (read, lambda directory: record(directory, zeroshot={"piqa": LAMBADA})):
        with pytest.raises(FormatError, match=message) as error:
            use(tmp_path)
        assert str(tmp_path / NAME) in str(error.value)
    assert (tmp_path / NAME).read_text() == content


def test_a_file_of_one_section_is_read(tmp_path):
    (tmp_path / NAME).write_text('{"format_version": 1, "zeroshot": {"piqa": {"acc": 0.5}}}')
    assert read(tmp_path) == Evaluation(zeroshot={"piqa": {"acc": 0.5}})
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "absent")


def test_a_pipe_in_its_place_is_refused(tmp_path):
    os.mkfifo(tmp_path / "evaluation.json")
    with pytest.raises(FormatError, match=r"evaluation\.json is no file\. Move it away"):
        record(tmp_path, perplexity={})
