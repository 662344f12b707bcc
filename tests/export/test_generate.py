"""`python -m export.generate`, on the embedded model."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig

from export import continuation
from export.generate import main
from mrp_lightning.embedded import STDLIB_LLAMA

from .conftest import refusal

PROMPT = "import os\n\ndef "


def test_what_the_model_writes_is_streamed_with_its_speed(capsys):
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "12", "--device", "cpu", "--eager"]
    main([str(STDLIB_LLAMA), *arguments])
    shown = capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(STDLIB_LLAMA)
    model = AutoModelForCausalLM.from_pretrained(STDLIB_LLAMA)
    tokens = model.generate(
        **tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=12, do_sample=False
    )
    assert tokenizer.decode(tokens[0], skip_special_tokens=True) in shown
    assert re.search(r"\[12 tokens: the first after [\d.]+ s, then [\d.]+ a second; \d+ MiB", shown)


def test_a_packed_model_is_compared_with_its_source(exports, tmp_path, capsys):
    made = exports("packed", tmp_path)
    llama, packed = made.source, made.packed
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "4", "--device", "cpu", "--eager"]
    main([str(packed), "--compare", str(llama), *arguments])
    shown = capsys.readouterr().out
    assert shown.index(f"--- {llama}\n") < shown.index(f"--- {packed}\n")
    assert re.search(r"[\d.]+ times the tokens a second, 0\.\d+ of the memory", shown)


def test_mistakes_are_one_line(llama, tmp_path, capsys):
    def refused(*args: str) -> str:
        return refusal([*args, "--device", "cpu", "--eager"], capsys, command=main)

    for number in ("0", "-1", "many"):
        shown = refused(str(llama), "--prompt", "a", "--max-new-tokens", number)
        assert f"`--max-new-tokens`: expected a number from 1, got '{number}'" in shown
    for prompt in ("", "a\udcff"):
        shown = refused(str(llama), "--prompt", prompt)
        assert "`--prompt`: expected the beginning of a text, in UTF-8; got" in shown
    assert "holds no config.json" in refused(str(tmp_path), "--prompt", "a")
    for file in llama.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer" in refused(str(llama), "--prompt", "a")
    assert torch.is_inference_mode_enabled() is False


def test_what_is_beyond_the_positions_is_refused(llama, capsys):
    args = [llama, "--prompt", PROMPT, "--max-new-tokens", "128", "--device", "cpu"]
    shown = refusal(args, capsys, command=main)
    (length,) = re.findall(r"`--prompt` has (\d+) tokens", shown)
    assert (
        f"128 positions, beyond which it writes nothing of sense. Give at most {128 - int(length)}"
        in shown
    )


def text_of(model, tokenizer, count):
    tokens = model.generate(
        **tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=count, do_sample=False
    )
    return tokens[0, -count:].tolist()


class Recorded(continuation.TimedStreamer):
    """Records tokens, too."""

    def put(self, value):
        self.__dict__.setdefault("tokens", []).extend(value.flatten().tolist())
        super().put(value)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Lets `write` take the way of a GPU; dynamo compiles the step there without a compiler."""
    compiled = []

    def backend(graph, inputs, **_):
        compiled.append(graph)
        return graph.forward

    kind = type(AutoModelForCausalLM.from_pretrained(STDLIB_LLAMA))
    config = CompileConfig(fullgraph=True, backend=backend)
    config._compile_all_devices = True
    valid = kind._valid_auto_compile_criteria

    def criteria(self, inputs, generation_config):
        generation_config.compile_config = config
        return valid(self, inputs, generation_config)

    monkeypatch.setattr(kind, "_valid_auto_compile_criteria", criteria)
    monkeypatch.setattr(continuation, "_is_on_gpu", lambda model: True)
    yield compiled
    torch.compiler.reset()


def test_a_gpu_compiles_the_step_around_a_static_cache(as_on_a_gpu, exports, tmp_path, caplog):
    """The whole step is one graph, with our operators in it, and writes what plain steps write."""
    directory = exports("packed", tmp_path).packed
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    streamer = Recorded(tokenizer)
    tokens = dict(tokenizer(PROMPT, return_tensors="pt"))
    speed = continuation.write(model, tokens, streamer, 12, compiled=True)
    assert "could not be compiled" not in caplog.text
    assert speed.tokens == 12
    assert streamer.tokens[-12:] == text_of(model, tokenizer, 12)
    assert as_on_a_gpu
    operators = {str(node.target) for graph in as_on_a_gpu for node in graph.graph.nodes}
    assert any("mrp_lightning.linear24" in operator for operator in operators)


def test_where_the_step_cannot_be_compiled_a_warning_says_so(monkeypatch, llama, caplog):
    monkeypatch.setattr(continuation, "_is_on_gpu", lambda model: True)
    model = AutoModelForCausalLM.from_pretrained(llama).eval()
    generate = model.generate

    def failing(*args, **options):
        if options.get("cache_implementation") == "static":
            raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")
        return generate(*args, **options)

    monkeypatch.setattr(model, "generate", failing)
    tokenizer = AutoTokenizer.from_pretrained(llama)
    streamer = Recorded(tokenizer)
    continuation.write(
        model, dict(tokenizer(PROMPT, return_tensors="pt")), streamer, 3, compiled=True
    )
    assert "could not be compiled (RuntimeError: Failed to find C compiler.)" in caplog.text
    assert streamer.tokens[-3:] == text_of(
        AutoModelForCausalLM.from_pretrained(llama), tokenizer, 3
    )
