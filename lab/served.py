"""Models that are served, and what vLLM computes with them."""

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_lightning.targets.layers import layers_of
from mrp_sparse.packed_linear import is_packable

WINDOW = 128


def removed(weight: Tensor) -> Tensor:
    """Zero the smaller half of the weights."""
    return weight * (weight.abs() > weight.abs().float().median())


def two_of_four(weight: Tensor) -> Tensor:
    """Return a copy with the two smallest magnitudes of each row's every four columns zeroed."""
    groups = weight.unflatten(1, (-1, 4))
    kept = torch.zeros_like(groups).scatter_(2, groups.abs().topk(2).indices, 1.0)
    return (groups * kept).flatten(1)


def four_bits(weight: Tensor) -> Tensor:
    """Zero the smaller half, and round the others to codes −8 to 8 times a power of two."""
    columns = weight.shape[1]
    groups = torch.nn.functional.pad(removed(weight), (0, -columns % 64)).unflatten(1, (-1, 64))
    scales = groups.abs().amax(2, keepdim=True).clamp_min(1e-6).log2().ceil().exp2() / 8
    codes = (groups / scales).round()
    codes = torch.where((codes == 0) & (groups != 0), groups.sign(), codes)
    return (codes * scales).flatten(1)[:, :columns].to(weight.dtype)


def embedded(directory: Path, prune: Callable[[Tensor], Tensor]) -> Path:
    """Write the embedded LLaMA with each layer of its blocks changed."""
    model = AutoModelForCausalLM.from_pretrained(STDLIB_LLAMA)
    AutoTokenizer.from_pretrained(STDLIB_LLAMA).save_pretrained(directory)
    return write(directory, model, prune)


def random_model(
    directory: Path, kind: str, prune: Callable[[Tensor], Tensor], config: Mapping[str, Any]
) -> Path:
    """Write a random model in float32 with each layer of its blocks changed."""
    torch.manual_seed(0)
    settings = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings | dict(config)))
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases start at zero, which hides whether they are read
            parameter.data += 0.1 * torch.randn_like(parameter)
    return write(directory, model, prune)


def write(directory: Path, model: Any, prune: Callable[[Tensor], Tensor]) -> Path:
    """Change all linear layers but the head and experts, and write a model in several files."""
    for name, module in model.named_modules():
        if is_packable(module) and name != "lm_head":
            (layer,) = layers_of(name, module)
            layer.write_(prune(layer.weight))
    model.save_pretrained(directory, max_shard_size="1MB")
    return directory


def export(source: Path, target: Path, form: str, *options: str) -> Path:
    """Export a directory by the command."""
    from export.to_sparse import main

    if not target.exists():
        main([str(source), "--format", form, "--out", str(target), *options])
    return target


@functools.cache
def engine(directory: Path, **options: Any) -> Any:
    """Start vLLM in this process, once for each model.

    All engines live on: the last reference to one takes the parallel groups of the others along.
    """
    from vllm import LLM

    settings = {
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "max_model_len": WINDOW + 1,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 64,
        "skip_tokenizer_init": True,
    }
    return LLM(str(directory), **settings | options)


@dataclass(frozen=True)
class Scores:
    """The scores that an engine computes with a model.

    Attributes:
        log_probs: Of each token of all windows but their first.
        greedy: The tokens that continue the first window's beginning.
    """

    log_probs: Tensor
    greedy: list[int]

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss."""
        return math.exp(-float(self.log_probs.double().mean()))


def scores(llm: Any, windows: Sequence[Sequence[int]]) -> Scores:
    """Let vLLM score windows of tokens, and continue the first one."""
    from vllm import SamplingParams

    every = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": list(window)} for window in windows]
    log_probs = [
        table[token].logprob
        for window, output in zip(
            windows, llm.generate(prompts, every, use_tqdm=False), strict=True
        )
        for token, table in zip(window[1:], output.prompt_logprobs[1:], strict=True)
    ]
    greedy = SamplingParams(max_tokens=16, temperature=0, detokenize=False, ignore_eos=True)
    begin = [{"prompt_token_ids": list(windows[0][:16])}]
    (output,) = llm.generate(begin, greedy, use_tqdm=False)
    return Scores(torch.tensor(log_probs), list(output.outputs[0].token_ids))


def scores_elsewhere(
    directories: Sequence[Path], windows: Sequence[Sequence[int]], **options: Any
) -> list[Scores]:
    """Return the scores of models that a process of its own serves, one after another."""
    task = {"directories": [str(path) for path in directories], "windows": windows}
    with TemporaryDirectory() as room:
        file = Path(room) / "task.json"
        file.write_text(json.dumps(task | {"options": options}))
        done = subprocess.run(
            [sys.executable, "-c", "import served, sys; served.answer(sys.argv[1])", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 0, done.stdout[-4000:]
        rows = json.loads(file.read_text())
    return [Scores(torch.tensor(log_probs), greedy) for log_probs, greedy in rows]


def answer(file: str) -> None:
    """Replace a task of `scores_elsewhere` by its scores."""
    task = json.loads(Path(file).read_text())
    rows = [
        scores(engine(directory, **task["options"]), task["windows"])
        for directory in task["directories"]
    ]
    Path(file).write_text(json.dumps([(row.log_probs.tolist(), row.greedy) for row in rows]))


@functools.cache
def text() -> list[list[int]]:
    """Windows of the standard library, of which the embedded model has not seen this file."""
    ids = AutoTokenizer.from_pretrained(STDLIB_LLAMA)(Path(os.__file__).read_text()).input_ids
    return [ids[start : start + WINDOW] for start in range(0, 4 * WINDOW, WINDOW)]


@functools.cache
def noise() -> list[list[int]]:
    """Windows of random tokens, for random models."""
    random = torch.Generator().manual_seed(0)
    return torch.randint(2, 256, (4, 48), generator=random).tolist()


def by_transformers(directory: Path, windows: Sequence[Sequence[int]], dtype: Any) -> Tensor:
    """Return the log-probabilities that transformers computes, as in `Scores`."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    with torch.inference_mode():
        ids = torch.tensor(windows)
        log_probs = model(ids).logits.float().log_softmax(2)
    return log_probs[:, :-1].gather(2, ids[:, 1:, None]).flatten()
