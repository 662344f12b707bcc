"""Nothing that a checkpoint brings along is run."""

import functools
import http.server
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from export.conversion.checkpoint import open_checkpoint
from export.loading import load
from export.report import _write_card
from mrp_lightning.commands.main import main
from mrp_lightning.errors import DataError, FormatError, OptionError
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.trainer import TensorsOnly, Trainer
from mrp_lightning.models.loading import (
    load_config,
    load_model,
    load_tokenizer,
    tokenizer_from_files,
)

CODE = "from pathlib import Path\nPath(__file__).with_name('ran').mkdir()\n"


@pytest.fixture
def never_asked(monkeypatch):
    """Nobody is there who could be asked whether code may run."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the terminal was asked"))


@pytest.fixture
def with_code(checkpoint):
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    directory = checkpoint(model_type="own", auto_map=auto_map)
    (directory / "own.py").write_text(CODE)
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    yield directory
    assert not (directory / "ran").exists()


def test_code_beside_a_model_is_not_run_and_the_option_is_named(with_code, never_asked):
    for read in (
        lambda: load_config(str(with_code)),
        lambda: load_model(str(with_code), None),
        lambda: load(with_code),
    ):
        with pytest.raises(FormatError, match="trust_remote_code=True"):
            read()
    with pytest.raises(FormatError, match="code of the checkpoint is never run"):
        open_checkpoint(with_code).pretrained_config()
    with pytest.raises(DataError, match="trust_remote_code=True"):
        load_tokenizer(with_code)


def test_a_checkpoint_brings_no_tokenizer_with_code(with_code, never_asked):
    files = {path.name: path.read_bytes() for path in with_code.iterdir() if path.is_file()}
    with pytest.raises(DataError, match="trust_remote_code"):
        tokenizer_from_files(files)


@pytest.mark.parametrize(
    "files",
    [{"..": b""}, {"a/../../b": b""}, {"/a": b""}, {"a/": b""}, {"": b""}, {"vocab.json": 3}, [1]],
)
def test_what_is_no_tokenizer_in_a_checkpoint_is_refused(files):
    with pytest.raises(DataError, match="no mapping of names of files to their bytes"):
        tokenizer_from_files(files)


def test_a_configuration_fetches_no_kernel(checkpoint):
    directory = checkpoint(attn_implementation="someone/kernel")
    with pytest.raises(FormatError, match="`attn_implementation` is 'someone/kernel': code"):
        load_model(str(directory), None)


def saved(path, model, more=None):
    content = {"state_dict": {}, "hyper_parameters": {"model": str(model)}, "more": more}
    torch.save(content | {"pytorch-lightning_version": "2.6.0"}, path)
    return path


def test_a_lightning_checkpoint_is_named_and_runs_nothing(tiny_llama, tmp_path, harmful, capsys):
    path = saved(tmp_path / "a.ckpt", tiny_llama, harmful)
    message = r"`ckpt_path`: .*a\.ckpt cannot be read: it is a pickle that calls posix\.mkdir"
    with pytest.raises(FormatError, match=message):
        CausalLM.load_from_checkpoint(path)
    with pytest.raises(FormatError, match=message):
        Trainer(accelerator="cpu", logger=False, barebones=True).predict(
            CausalLM(str(tiny_llama)), [torch.ones(1, 4, dtype=torch.int64)], ckpt_path=str(path)
        )
    torch.save({}, tmp_path / "empty.ckpt")
    with pytest.raises(FormatError, match="no checkpoint of Lightning, which has state_dict"):
        TensorsOnly().load_checkpoint(tmp_path / "empty.ckpt")
    pytest.importorskip("jsonargparse", reason="needs the extra `cli`")
    with pytest.raises(SystemExit):
        main(["test", "--model.model", str(tiny_llama), "--ckpt_path", str(path)])
    assert "calls posix.mkdir, which was not run" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"abc", b"PK\x03\x04"])
def test_what_is_no_lightning_checkpoint_is_named(tmp_path, content):
    path = tmp_path / "a.ckpt"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"`ckpt_path`: .*a\.ckpt cannot be read"):
        CausalLM.load_from_checkpoint(path)
    torch.save({"a": 1}, path)
    with pytest.raises(FormatError, match="no checkpoint of Lightning, which has state_dict"):
        CausalLM.load_from_checkpoint(path)


def test_objects_that_may_be_read_explain_no_other_error(tiny_llama, tmp_path):
    path = saved(tmp_path / "a.ckpt", tiny_llama, more=tmp_path)
    with pytest.raises(FormatError, match="calls pathlib"):
        CausalLM.load_from_checkpoint(path)
    with pytest.raises(OptionError, match="`learning_rate`"):
        CausalLM.load_from_checkpoint(path, weights_only=False, learning_rate="high")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(FormatError, match=r"`ckpt_path`: .*a\.ckpt cannot be read"):
        CausalLM.load_from_checkpoint(path, weights_only=False)


@pytest.mark.parametrize("weights_only", [True, None])
def test_a_checkpoint_from_a_url_runs_nothing(
    tiny_llama, tmp_path, harmful, monkeypatch, weights_only
):
    saved(tmp_path / "a.ckpt", tiny_llama, harmful)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(FormatError, match="holds more than tensors and plain containers"):
            url = f"http://127.0.0.1:{server.server_address[1]}/a.ckpt"
            CausalLM.load_from_checkpoint(url, weights_only=weights_only)
        server.shutdown()


def test_the_name_of_a_class_becomes_no_code_in_a_card(checkpoint, tmp_path):
    directory = checkpoint(architectures=["LlamaForCausalLM\nimport os; os.mkdir('x')"])
    totals = {"packed_layers": 1, "packed_fraction": 0.5625}
    report: Any = SimpleNamespace(format="packed", source=open_checkpoint(directory), totals=totals)
    report.parity = report.exported_bytes = report.head = None
    _write_card(report, tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "os.mkdir" not in card
    assert "from transformers import AutoModelForCausalLM" in card
