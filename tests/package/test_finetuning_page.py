"""What docs/module.md shows runs, with a tiny model and few steps."""

import re
import shlex
from pathlib import Path

from mrp_lightning.commands.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "module.md").read_text().partition("## Fine-tuning")[2]


def test_the_page_is_a_way_through(tiny_llama, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("import this\n" * 1500)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.M | re.S)
    commands = [line for name, text in blocks if not name for line in joined(text)]
    assert [words[:2] for words in commands] == [
        ["mrp-lightning", name] for name in ("predict", "fit", "test", "export")
    ]
    tiny = ["--data.train_files=text.txt", "--data.eval_files=text.txt"]
    tiny += ["--data.sequence_length=64", "--data.num_samples=2", "--trainer.logger=false"]
    for _, command, *options in commands:
        if command == "export":
            main([command, *options])
            continue
        options = [word.replace("configs/", f"{ROOT}/configs/") for word in options]
        options = [str(tiny_llama) if "embedded" in word else word for word in options]
        steps = ["--trainer.max_steps=2"] if command == "fit" else []
        main([command, *options, *tiny, *steps])
    assert "14 2:4 layers" in capsys.readouterr().out

    (code,) = [text for name, text in blocks if name == "python"]
    code = code.replace("max_steps=300", "max_steps=1").replace("=512", "=64")
    code = code.replace("TextDataModule(", 'TextDataModule("text.txt", ')
    exec(code.replace("Trainer(", 'Trainer(accelerator="cpu", logger=False, '), {})
    assert Path("runs/finetune/tuned/pruning_report.json").is_file()


def joined(text: str) -> list[list[str]]:
    """The commands of a block, each with its continuation lines."""
    return [shlex.split(line) for line in text.replace("\\\n", " ").splitlines() if line]
