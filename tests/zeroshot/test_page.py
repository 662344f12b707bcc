"""What docs/evaluate.md shows runs, with local tasks and models in place of the named ones."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from mrp_lightning.commands.main import main
from mrp_lightning.records.evaluation import read

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```\w*\n(.*?)^```$", (ROOT / "docs" / "evaluate.md").read_text(), flags=re.M | re.S
)


def block(beginning: str) -> str:
    (found,) = (text for text in BLOCKS if text.startswith(beginning))
    return found


@pytest.fixture
def here(tmp_path, monkeypatch, checkpoint) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    checkpoint("pruned").rename("runs/opt-125m-2of4")
    return tmp_path


def test_the_command_and_the_task_of_the_page(here, task_directory):
    task = yaml.safe_load(block("task: my_lambada"))
    task["dataset_kwargs"]["data_files"]["test"] = str(task_directory / "last_word.jsonl")
    Path("my_lambada.yaml").write_text(yaml.safe_dump(task))
    _, command = block("pip install").splitlines()
    local = ["--tasks=my_lambada", "--include-path=.", "--limit=3", "--device=cpu"]
    main([*shlex.split(command)[1:], *local])
    assert set(read("runs/opt-125m-2of4").zeroshot["my_lambada"]) >= {"acc", "perplexity"}


def test_from_python(here, task_directory):
    code = block("from mrp_lightning import").replace('.to("cuda")', "")
    exec(code.replace('["piqa"]', f'["last_word"], include_path={str(task_directory)!r}'), {})
    assert "acc" in read("runs/opt-125m-2of4").zeroshot["last_word"]
