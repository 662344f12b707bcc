"""lm-eval's three kinds of tasks against the model's own logits, for all kinds of checkpoints."""

import math
import os
import re
import shutil

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrp_lightning import CausalLM
from mrp_lightning.commands.zeroshot import evaluate, load_tasks, summarize
from mrp_lightning.records.evaluation import accuracy, averaged, mean_accuracy

TASKS = ("continuation", "last_word", "rolling")
POSITIONS = 1024


class Scorer:
    """Log-likelihoods of one text after another, by one forward each."""

    def __init__(self, directory):
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)

    def tokens(self, text):
        return self.tokenizer(text, verbose=False)["input_ids"]

    def score(self, inputs, targets):
        """Log-likelihood in nats of `targets`, the tokens that follow the last of `inputs`."""
        with torch.no_grad():
            logits = self.model(torch.tensor([inputs])).logits[0, -len(targets) :].double()
        chosen = torch.tensor(targets)
        likelihoods = logits.log_softmax(-1).gather(1, chosen[:, None])
        return float(likelihoods.sum()), bool((logits.argmax(-1) == chosen).all())

    def after(self, context, continuation):
        """Of a continuation, and whether it is the greedy one; long contexts are cut left."""
        both = self.tokens(context + continuation)
        targets = both[len(self.tokens(context)) :]
        return self.score(both[-POSITIONS - 1 : -1], targets)

    def whole(self, text):
        """Of a text in windows of all positions; the last one reaches back to be as long."""
        tokens, total = self.tokens(text), 0.0
        everything = [self.tokenizer.bos_token_id, *tokens]
        for start in range(0, len(tokens), POSITIONS):
            end = min(start + POSITIONS, len(tokens))
            inputs = everything[max(0, end - POSITIONS) : end]
            total += self.score(inputs, tokens[start:end])[0]
        return total


def expected(directory, documents):
    scorer = Scorer(directory)
    correct, by_length = [], []
    for row in documents["continuation"]:
        scores = [scorer.after(row["context"], "\n" + choice)[0] for choice in row["choices"]]
        lengths = [len(choice) for choice in row["choices"]]
        correct.append(np.argmax(scores) == row["answer"])
        by_length.append(np.argmax(np.divide(scores, lengths)) == row["answer"])
    greedy, losses = [], []
    for row in documents["last_word"]:
        context, word = row["text"].rsplit(" ", 1)
        likelihood, is_greedy = scorer.after(context, f" {word}")
        greedy.append(is_greedy)
        losses.append(-likelihood)
    texts = [row["text"] for row in documents["rolling"]]
    nats = -sum(scorer.whole(text) for text in texts)
    num_words = sum(len(re.split(r"\s+", text)) for text in texts)
    num_bytes = sum(len(text.encode()) for text in texts)
    return {
        "continuation": {
            "acc": np.mean(correct),
            "acc_stderr": np.std(correct, ddof=1) / len(correct) ** 0.5,
            "acc_norm": np.mean(by_length),
            "acc_norm_stderr": np.std(by_length, ddof=1) / len(by_length) ** 0.5,
        },
        "last_word": {
            "acc": np.mean(greedy),
            "acc_stderr": np.std(greedy, ddof=1) / len(greedy) ** 0.5,
            "perplexity": math.exp(np.mean(losses)),
        },
        "rolling": {
            "word_perplexity": math.exp(nats / num_words),
            "byte_perplexity": math.exp(nats / num_bytes),
            "bits_per_byte": nats / num_bytes / math.log(2),
        },
    }


@pytest.fixture(scope="module")
def tasks(task_directory):
    return load_tasks(TASKS, include_path=task_directory)


def scores(directory, tasks, batch_size=4, limit=None, **options):
    model = CausalLM(directory, dtype="float32", **options)
    return summarize(evaluate(model, tasks, batch_size=batch_size, limit=limit))


@pytest.fixture(scope="module")
def found(checkpoints, tasks):
    """Figures of all checkpoints, from the same tasks."""
    return {kind: scores(directory, tasks) for kind, directory in checkpoints.items()}


@pytest.mark.parametrize("kind", ["dense", "pruned"])
def test_figures_are_those_of_the_models_own_logits(kind, found, checkpoints, task_documents):
    truth = expected(checkpoints[kind], task_documents)
    for task, metrics in truth.items():
        figures = dict(found[kind][task])
        assert figures.pop("samples") == len(task_documents[task])
        assert figures.pop("num_fewshot") == 0
        for metric, value in metrics.items():
            assert figures.pop(metric) == pytest.approx(value, rel=1e-4), metric
        # One is resampled, without a closed form; the other has a test of its own.
        assert set(figures) <= {"perplexity_stderr", "checksum"}


def test_the_samples_tell_metrics_and_models_apart(found, task_documents):
    dense, pruned = found["dense"], found["pruned"]
    for task in ("continuation", "last_word"):
        assert 0 < dense[task]["acc"] < 1
    assert 0 < dense["last_word"]["perplexity_stderr"] < dense["last_word"]["perplexity"]
    assert pruned["last_word"]["perplexity"] != dense["last_word"]["perplexity"]
    assert pruned["rolling"]["byte_perplexity"] > 1.02 * dense["rolling"]["byte_perplexity"]


def test_a_packed_checkpoint_gives_the_figures_of_the_pruned_one(found):
    assert found["packed"] == found["pruned"]


def test_tasks_run_on_the_models_device(second, checkpoints, tasks):
    options = {"dtype": "float32", "attn_implementation": "eager"}
    model = CausalLM(checkpoints["packed"], **options).to(second)
    there = summarize(evaluate(model, tasks, batch_size=4, limit=3))
    same_but_for_rounding(there, scores(checkpoints["packed"], tasks, limit=3))


def test_the_batch_size_changes_nothing_but_rounding(found, checkpoints, tasks):
    same_but_for_rounding(scores(checkpoints["dense"], tasks, batch_size=1), found["dense"])


def same_but_for_rounding(found, expected):
    assert found.keys() == expected.keys()
    for task, figures in found.items():
        assert figures == pytest.approx(expected[task], rel=1e-4)


def test_a_task_with_solved_examples_has_none_here(found, checkpoints, task_directory, tmp_path):
    content = (task_directory / "last_word.yaml").read_text()
    (tmp_path / "shown.yaml").write_text(
        content.replace("task: last_word", "task: shown") + "\nnum_fewshot: 2\n"
    )
    shown = scores(checkpoints["dense"], load_tasks(["shown"], include_path=tmp_path))["shown"]
    same_but_for_rounding({"last_word": shown}, {"last_word": found["dense"]["last_word"]})


def test_a_checksum_is_that_of_a_tasks_requests(found, tasks, task_directory, tmp_path):
    by_task = {task: scores["checksum"] for task, scores in found["dense"].items()}
    assert by_task == {task: scores["checksum"] for task, scores in found["pruned"].items()}
    assert by_task == tasks.checksums()
    assert len(set(by_task.values())) == len(TASKS)

    # Another wording of the same samples is another task.
    shutil.copytree(task_directory, tmp_path / "tasks")
    path = tmp_path / "tasks" / "continuation.yaml"
    task = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**task, "target_delimiter": " = "}))
    again = load_tasks(TASKS, include_path=tmp_path / "tasks").checksums()
    assert [task for task in TASKS if again[task] != by_task[task]] == ["continuation"]


def test_the_mean_takes_the_accuracies_that_papers_report():
    figures = {"acc": 0.25, "acc_norm": 0.5}
    assert accuracy("hellaswag", figures) == accuracy("arc_challenge", figures) == 0.5
    assert accuracy("piqa", figures) == accuracy("arc_easy", figures) == 0.25
    zeroshot = {"hellaswag": figures, "piqa": figures, "wikitext": {"word_perplexity": 20.0}}
    assert mean_accuracy(zeroshot) == 0.375
    assert mean_accuracy({"wikitext": {"word_perplexity": 20.0}}) is None
    # SparseGPT's row of Mamba-130M in the paper's table, and its average there.
    row = {"lambada_openai": 35.65, "hellaswag": 32.37, "piqa": 60.88}
    row |= {"arc_easy": 41.88, "arc_challenge": 23.38, "winogrande": 51.62}
    percent = {task: {"acc": value, "acc_norm": value} for task, value in row.items()}
    assert mean_accuracy(percent) == pytest.approx(40.963, abs=1e-3)


def test_members_of_a_group_are_in_its_mean_and_not_in_that_of_all(
    checkpoints, task_directory, tmp_path
):
    shutil.copytree(task_directory, tmp_path / "tasks")
    average = {"metric": "acc", "aggregation": "mean", "weight_by_size": False}
    pair = {"task": ["continuation", "last_word"], "aggregate_metric_list": [average]}
    (tmp_path / "tasks" / "pair.yaml").write_text(yaml.safe_dump({"group": "pair", **pair}))
    tasks = load_tasks(["pair"], include_path=tmp_path / "tasks")
    found = scores(checkpoints["dense"], tasks, limit=4)
    accuracies = [found[name]["acc"] for name in ("continuation", "last_word")]
    assert found["pair"]["acc"] == pytest.approx(sum(accuracies) / 2)
    assert [found[name].get("depth") for name in ("pair", "continuation")] == [None, 1]
    assert list(averaged(found)) == ["pair"]
    assert found["pair"]["samples"] == 8
    nested = {"results": {k: {"acc,none": 0.5} for k in "abcd"}, "n-samples": {}, "n-shot": {}}
    nested["group_subtasks"] = {"a": ["b", "c"], "b": ["d"], "unscored": ["a"], "c": []}
    depths = {name: scores.get("depth") for name, scores in summarize(nested).items()}
    assert depths == {"a": None, "b": 1, "c": 1, "d": 2}


def test_no_process_is_forked(checkpoints, tasks, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a fork can hang where torch has started threads")

    monkeypatch.setattr("multiprocessing.Pool", refuse)
    found = scores(checkpoints["dense"], tasks, limit=4)
    assert found["last_word"]["perplexity_stderr"] > 0
    assert "DISABLE_MULTIPROC" not in os.environ
