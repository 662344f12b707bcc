"""`python -m export.generate`, on the embedded model."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from export.generate import main
from export.to_sparse import main as to_sparse
from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_lightning.errors import OptionError
from mrp_sparse import decoding

PROMPT = "import os\n\ndef "


def test_what_the_model_writes_is_streamed_with_its_speed(capsys):
    main(
        [
            str(STDLIB_LLAMA),
            "--prompt",
            PROMPT,
            "--max-new-tokens",
            "12",
            "--device",
            "cpu",
            "--eager",
        ]
    )
    shown = capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(STDLIB_LLAMA)
    model = AutoModelForCausalLM.from_pretrained(STDLIB_LLAMA)
    tokens = model.generate(
        **tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=12, do_sample=False
    )
    assert tokenizer.decode(tokens[0], skip_special_tokens=True) in shown
    assert re.search(r"\[12 tokens: the first after [\d.]+ s, then [\d.]+ a second; \d+ MiB", shown)


def test_a_packed_model_is_compared_with_its_source(llama, capsys):
    to_sparse([str(llama)])
    packed = llama.with_name("llama-sparse24")
    capsys.readouterr()
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "4", "--device", "cpu", "--eager"]
    main([str(packed), "--compare", str(llama), *arguments])
    shown = capsys.readouterr().out
    assert shown.index(f"--- {llama}\n") < shown.index(f"--- {packed}\n")
    assert re.search(r"[\d.]+ times the tokens a second, 0\.\d+ of the memory", shown)


def test_mistakes_are_one_line(llama, tmp_path, capsys):
    def refused(*args: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*args, "--device", "cpu", "--eager"])
        assert ended.value.code == 2
        return capsys.readouterr().err

    for number in ("0", "-1", "many"):
        shown = refused(str(llama), "--prompt", "a", "--max-new-tokens", number)
        assert f"--max-new-tokens: expected a number from 1, got '{number}'" in shown
    assert "holds no config.json" in refused(str(tmp_path), "--prompt", "a")
    for file in llama.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer" in refused(str(llama), "--prompt", "a")
    assert torch.is_inference_mode_enabled() is False


def test_what_is_beyond_the_positions_is_refused(llama, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(llama), "--prompt", PROMPT, "--max-new-tokens", "128", "--device", "cpu"])
    assert ended.value.code == 2
    (length,) = re.findall(r"`--prompt` has (\d+) tokens", shown := capsys.readouterr().err)
    assert (
        f"128 positions, beyond which it writes nothing of sense. Give at most {128 - int(length)}"
        in shown
    )


def test_what_else_generation_would_return_keeps_no_step_from_being_compiled(monkeypatch, caplog):
    """transformers writes down that neither attentions nor states are asked for."""
    settings = json.loads((STDLIB_LLAMA / "generation_config.json").read_text())
    assert settings["output_attentions"] is False

    def asked(model, length):
        raise OptionError(f"a step of {type(model).__name__} for {length} tokens")

    monkeypatch.setattr(decoding, "CompiledStep", asked)
    main([str(STDLIB_LLAMA), "--prompt", "import", "--max-new-tokens", "3", "--device", "cpu"])
    assert "(OptionError: a step of LlamaForCausalLM for 4 tokens)" in caplog.text
