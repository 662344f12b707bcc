"""Damaged files under a fuzzer that is guided by the coverage of the readers.

    python lab/trouble/fuzz.py TARGET CORPUS --seconds 60

Nothing but the documented errors may leave a reader. atheris (`pip install atheris`) mutates the
files, watches which branches of our code and of gguf they reach, and ends at the first other error,
a hang, or more memory than it allows.
"""

import argparse
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

MEMORY, SECONDS = 4096, 30
"""The MiB and the seconds that one file may take, with torch and transformers in memory."""


def targets() -> dict[str, Callable[[Path, bytes], None]]:
    """Return the readers by name: each is given a directory for files, and the damaged bytes."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save
    from torch import nn
    from transformers import LlamaConfig

    from export.conversion.checkpoint import Checkpoint, open_checkpoint
    from export.gguf.tokenizer import tokenizer_fields
    from mrp_lightning.errors import (
        DataError,
        FormatError,
        JournalError,
        OptionError,
        TargetError,
    )
    from mrp_lightning.experiments.runs import FinishedTrial
    from mrp_lightning.journal.manifest import Manifest
    from mrp_lightning.models.checkpoint import stored_names, weight_files
    from mrp_lightning.models.companions import find_companions
    from mrp_lightning.models.gguf import gguf_config
    from mrp_lightning.models.integrity import check_values, damaged_files
    from mrp_lightning.records import evaluation
    from mrp_lightning.records.block_result import BlockResult
    from mrp_lightning.records.grid_file import load_parameters
    from mrp_lightning.records.report import PruningReport
    from mrp_lightning.storage.files import MANIFEST, not_ours
    from mrp_lightning.text.documents import documents_of_files
    from mrp_sparse.own_module import load_into

    def report(directory: Path, data: bytes) -> None:
        file = directory / "pruning_report.json"
        file.write_bytes(data)
        with suppress(FormatError):
            loaded = PruningReport.load(file)
            loaded.save(directory)
            assert PruningReport.load(file) == loaded

    def scores(directory: Path, data: bytes) -> None:
        (directory / "evaluation.json").write_bytes(data)
        with suppress(FormatError):
            evaluation.read(directory)

    def trial(directory: Path, data: bytes) -> None:
        (directory / "run.json").write_bytes(data)
        with suppress(FormatError):
            FinishedTrial.load(directory / "run.json")

    def journal(directory: Path, data: bytes) -> None:
        (directory / "manifest.json").write_bytes(data)
        with suppress(JournalError):
            Manifest.load(directory)

    def block(directory: Path, data: bytes) -> None:
        file = directory / "block-00000.safetensors"
        file.write_bytes(data)
        with suppress(FormatError, SafetensorError):
            BlockResult.load(file)

    def record(directory: Path, data: bytes) -> None:
        """The bytes are the JSON in the metadata of a whole file, which `block` seldom keeps."""
        file = directory / "block-00000.safetensors"
        content = {"format": "pt", "record": data.decode(errors="replace")}
        file.write_bytes(save({"weight": torch.ones(1)}, content))
        with suppress(FormatError):
            BlockResult.load(file)

    def checksums(directory: Path, data: bytes) -> None:
        (directory / "config.json").write_text("{}")
        (directory / MANIFEST).write_bytes(data)
        not_ours(directory)

    def tensors(directory: Path, data: bytes) -> None:
        (directory / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1}')
        (directory / "model.safetensors").write_bytes(data)
        damaged = damaged_files(directory)
        with suppress(FormatError):
            for _ in open_checkpoint(directory).tensors():
                pass
            assert not damaged

    def config(directory: Path, data: bytes) -> None:
        with suppress(ValueError, RecursionError):  # json's, which its reader catches
            values = json.loads(data)
            if isinstance(values, dict):
                with suppress(FormatError):
                    check_values(values, directory)

    def packed(directory: Path, data: bytes) -> None:
        """Split the bytes at a NUL NUL: the quantization config, and the file of the tensors."""
        settings, _, content = data.partition(b"\0\0")
        (directory / "config.json").write_bytes(b'{"quantization_config": ' + settings + b"}")
        (directory / "model.safetensors").write_bytes(content)
        module = nn.Sequential(nn.Linear(16, 4))
        with suppress(FormatError):
            loaded = load_into(module, directory)
            loaded(torch.ones(2, 16))

    def gguf(directory: Path, data: bytes) -> None:
        file = directory / "a.gguf"
        file.write_bytes(data)
        with suppress(FormatError, OptionError, TargetError):
            gguf_config(file)

    def grids(directory: Path, data: bytes) -> None:
        file = directory / "grid.safetensors"
        file.write_bytes(data)
        with suppress(FormatError):
            load_parameters(file)

    def index(directory: Path, data: bytes) -> None:
        (directory / "model.safetensors.index.json").write_bytes(data)
        with suppress(FormatError):
            weight_files(directory)
        with suppress(FormatError):
            list(stored_names(directory))

    def modules(directory: Path, data: bytes) -> None:
        (directory / "modules.json").write_bytes(data)
        find_companions(directory)

    def documents(directory: Path, data: bytes) -> None:
        for name in ("a.jsonl", "a.txt"):
            (directory / name).write_bytes(data)
            with suppress(DataError):
                documents_of_files([directory / name], "text", conversation=str)

    def tokenizer(directory: Path, data: bytes) -> None:
        (directory / "tokenizer.json").write_bytes(data)
        with suppress(DataError, OptionError):
            tokenizer_fields(Checkpoint(directory, {}, [], []), LlamaConfig(vocab_size=8))

    readers = (
        report,
        scores,
        trial,
        journal,
        block,
        record,
        checksums,
        tensors,
        config,
        packed,
        gguf,
        grids,
        index,
        modules,
        documents,
        tokenizer,
    )
    return {reader.__name__: reader for reader in readers} | _of_vllm()


def _of_vllm() -> dict[str, Callable[[Path, bytes], None]]:
    """Return the reader of the plug-in in the main process of vLLM, in the latter's environment."""
    if find_spec("vllm") is None:
        return {}
    from mrp_ground.errors import FormatError
    from mrp_sparse.formats.bitmask import BITMASK
    from mrp_sparse.vllm.configuration import check_directory

    def served(directory: Path, data: bytes) -> None:
        """Split the bytes at a NUL NUL: the index, and the file of the tensors."""
        index, _, content = data.partition(b"\0\0")
        (directory / "model.safetensors.index.json").write_bytes(index)
        (directory / "model.safetensors").write_bytes(content)
        with suppress(FormatError):
            check_directory(directory, BITMASK, ["0"])

    return {"served": served}


def write_seeds(name: str, corpus: Path, inputs: Path) -> None:
    """Write whole files of the kind that a target reads into its corpus."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save, save_file

    from mrp_sparse.formats import bitmask, bitmask4, sparse24

    corpus.mkdir(parents=True, exist_ok=True)
    run = inputs / "pruned" / "out"
    seeds: list[bytes] = []
    files = {"report": "pruning_report.json", "checksums": ".mrp_files.json"}
    if name in files:
        seeds = [(run / files[name]).read_bytes()]
    elif name == "config":
        seeds = [(run / "config.json").read_bytes()]
    elif name == "gguf":
        seeds = [_small_gguf(inputs)]
    elif name == "tensors":
        seeds = [save({"weight": torch.arange(12.0).view(3, 4), "bias": torch.ones(3)})]
    elif name in ("journal", "block"):
        pattern = "manifest.json" if name == "journal" else "block-*.safetensors"
        seeds = [file.read_bytes() for file in (inputs / "journal").glob(f".out.partial/{pattern}")]
    elif name == "record":
        for file in (inputs / "journal").glob(".out.partial/block-*.safetensors"):
            with safe_open(file, "pt") as opened:
                seeds.append(opened.metadata()["record"].encode())
    elif name == "trial":
        seeds = [next((inputs / "swept").rglob("run.json")).read_bytes()]
    elif name == "scores":
        seeds = [next((inputs / "swept").rglob("evaluation.json")).read_bytes()]
    elif name == "served":
        parts = {"0.weight": torch.ones(32), "0.weight_bits": torch.full((4, 2), 85).byte()}
        index_of = {"weight_map": dict.fromkeys(parts, "model.safetensors")}
        seeds = [json.dumps(index_of).encode() + b"\0\0" + save(parts)]
    elif name == "packed":
        weight = torch.arange(64.0).view(4, 16) % 17 - 8
        weight = weight * (torch.arange(16) % 4 < 2)
        for form in (sparse24.SPARSE24, bitmask.BITMASK, bitmask4.BITMASK4):
            values, *others = form.pack(weight)
            parts = {"0.weight": values, "0.bias": torch.zeros(4)}
            parts |= dict(zip([f"0.{key}" for key in form.companions], others, strict=True))
            modules = {"0": values.numel()} if form.counted else ["0"]
            content = {"quant_method": form.quant_method, "format_version": 1, "modules": modules}
            file = corpus / "seed.safetensors"
            save_file(parts, file)
            for more in ({}, {"activations": "int8"}):  # refused where the form cannot round
                seeds.append(json.dumps(content | more).encode() + b"\0\0" + file.read_bytes())
            file.unlink()
    elif name == "documents":
        seeds = [b'{"text": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n', b"x = 1\n"]
    elif name == "tokenizer":
        seeds = [_SMALL_TOKENIZER]
    elif name == "modules":
        seeds = [b'[{"idx": 1, "name": "1", "path": "1_Pooling", "type": "models.Pooling"}]']
    elif name == "index":
        seeds = [b'{"metadata": {"total_size": 8}, "weight_map": {"a.weight": "modules.json"}}']
    elif name == "grids":
        seeds = [save({"0.scales": torch.ones(4, 1), "0.minima": torch.zeros(4, 1)})]
    for index, seed in enumerate(seeds):
        (corpus / f"seed{index}").write_bytes(seed)


_SMALL_TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": "<s>", "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "model": {"type": "BPE", "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": ["a b"]},
    }
).encode()


def counts(output: str) -> tuple[int, int]:
    """Return how many files were read, and how many branches they reached, by libFuzzer's lines."""
    lines = re.findall(r"^#(\d+)\s.*?cov: (\d+)", output, flags=re.M)
    return (int(lines[-1][0]), int(lines[-1][1])) if lines else (0, 0)


def reason(output: str) -> str:
    """Return the error at which a fuzzer ended, and the bytes that led to it."""
    lines = output.splitlines()
    marks = ("Uncaught Python exception", "ERROR: ")
    start = next((i for i, line in enumerate(lines) if any(mark in line for mark in marks)), -20)
    return " ".join(lines[start:])[-1500:]


def _small_gguf(inputs: Path) -> bytes:
    import gguf

    file = inputs / "small.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in {"block_count": 1, "context_length": 16, "embedding_length": 8}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.feed_forward_length", 16)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_token_list(["a", "b"])
    import numpy as np

    writer.add_tensor("token_embd.weight", np.ones((2, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.read_bytes()


def main() -> None:
    """Fuzz one reader until the time is over; the status is not 0 after an undocumented error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    import atheris

    with atheris.instrument_imports(
        include=["mrp_lightning", "mrp_sparse", "mrp_ground", "export", "gguf"]
    ):
        target = targets()[options.target]
    directory = Path(tempfile.mkdtemp())
    stderr = os.dup(2)

    def one(data: bytes) -> None:
        for file in directory.iterdir():
            file.unlink()
        sys.stderr = io.StringIO()
        try:
            target(directory, data)
        finally:
            sys.stderr = os.fdopen(os.dup(stderr), "w")

    limits = [f"-max_total_time={options.seconds}", f"-rss_limit_mb={MEMORY}"]
    limits += [f"-timeout={SECONDS}", "-max_len=20000", f"-artifact_prefix={options.corpus}/../"]
    atheris.Setup([sys.argv[0], *limits, str(options.corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
