"""The tasks of configs/zeroshot against the prompts of lm-eval's own tasks, sample by sample."""

import json
from pathlib import Path

import pytest
import yaml

pytest.importorskip("lm_eval", reason="needs the extra zeroshot")
from jinja2 import Template
from lm_eval import tasks as own_tasks

from mrp_lightning.commands.zeroshot import PAPER_TASKS, load_tasks

CONFIGS = Path(__file__).parents[2] / "configs" / "zeroshot"
OWN = Path(own_tasks.__file__).parent

GOAL, SOLUTIONS = 'Use "wool" on 5" nails?', ["Push it, gently.", "Pull\tit."]
QUESTION = {"text": ["Salt", "A rock, of iron", "Ice"], "label": ["A", "B", "C"]}
SENTENCE = "Sarah was calmer than Maria so _ spoke first."
ENDINGS = ["runs into a car.", 'says "no", and leaves.', "NA", "turns, slowly."]
LAMBADA = 'He turned to\n\n"Wait," said Shane'


def write_files(directory: Path) -> None:
    """Two samples a task, of which the second matters, in the files' own forms."""
    choices = [
        ("piqa", {"choices": SOLUTIONS, "gold": 1, "query": f"Question: {GOAL}\n"}),
        *[
            (name, {"choices": QUESTION["text"], "query": "Question: What melts?", "gold": 2})
            for name in ("arc_easy", "arc_challenge")
        ],
        (
            "winogrande",
            {
                "context_options": [SENTENCE.split("_")[0] + name for name in ("Sarah", "Maria")],
                "continuation": "spoke first.",
                "gold": 0,
            },
        ),
        ("lambada_openai", {"context": LAMBADA.rpartition(" ")[0], "continuation": "Shane"}),
    ]
    for name, row in choices:
        (directory / f"{name}.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    row = "\t".join(
        ['Sitting: A man "sits". he', "3", *[end.replace("\t", " ") for end in ENDINGS]]
    )
    (directory / "hellaswag.tsv").write_text(2 * f"{row}\n")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Prompt, choices and target of each task, as lm-eval takes them from the local files."""
    root = tmp_path_factory.mktemp("local")
    files = root / "runs" / "zeroshot"
    files.mkdir(parents=True)
    write_files(files)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", root / "cache")
        loaded = load_tasks(PAPER_TASKS, include_path=CONFIGS).loaded
    found = {}
    for task in loaded:
        assert len(list(task.eval_docs)) == 2
        sample = list(task.eval_docs)[1]
        is_choice = task.OUTPUT_TYPE == "multiple_choice"
        choices = task.doc_to_choice(sample) if is_choice else None
        found[task.config.task] = (task.doc_to_text(sample), choices, task.doc_to_target(sample))
    return found


def own(name: str) -> dict[str, str]:
    """The templates of lm-eval's own task."""
    text = (OWN / name).read_text().replace("!function", "")
    return yaml.safe_load(text)


def rendered(template: str, **sample: str) -> str:
    return Template(template).render(**sample)


def test_prompts_are_those_of_lm_evals_own_tasks(prompts):
    from lm_eval.tasks.winogrande import preprocess_winogrande as wino

    asked = rendered(own("piqa/piqa.yaml")["doc_to_text"], goal=GOAL)
    assert prompts["piqa"] == (asked, SOLUTIONS, 1)
    asked = rendered(own("arc/arc_easy.yaml")["doc_to_text"], question="What melts?")
    assert prompts["arc_easy"] == prompts["arc_challenge"] == (asked, QUESTION["text"], 2)
    lambada = own("lambada/lambada_openai.yaml")
    context, word = (
        rendered(lambada[key], text=LAMBADA) for key in ("doc_to_text", "doc_to_target")
    )
    assert prompts["lambada_openai"] == (context, None, word)
    row = {"sentence": SENTENCE, "option1": "Sarah", "option2": "Maria", "answer": "1"}
    expected = (wino.doc_to_text(row), wino.doc_to_choice(row), wino.doc_to_target(row))
    assert prompts["winogrande"] == expected
    # Quotes and words that tables take for nothing are kept.
    assert prompts["hellaswag"] == ('Sitting: A man "sits". he', ENDINGS, 3)
