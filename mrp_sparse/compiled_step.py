"""A step of decoding without Python: compiled ahead of time, and kept for the next start.

torch.export and AOTInductor compile the model's own forward for one token with a static cache of
keys and values. Packed layers call their operators, and the code between products becomes loops in
C++. The file holds no weights: every model of the same configuration, shapes and formats runs it,
however many weights of a layer are not zero.
"""

import hashlib
import json
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from mrp_ground.environment import cache_directory, locked, machine
from mrp_ground.errors import OptionError
from mrp_ground.upstream import attention_of
from mrp_sparse.packed_linear import Bitmask4Linear, PackedLinear
from mrp_sparse.upstream import grouped_attention

log = logging.getLogger(__name__)

LENGTHS = 256
"""A static cache is as long as a multiple of this, so that few lengths are compiled."""
VERSION = 3
"""The version of the traced code; steps that were compiled by another version are not run."""
_OPTIONS = {"aot_inductor.package_constants_in_so": False}


class Step(nn.Module):
    """The logits after one more token, with the cache as buffers that `torch.export` can see."""

    def __init__(self, model: nn.Module, cache: StaticCache) -> None:
        super().__init__()
        self.model, self.cache = model, cache
        layers: Any = cache.layers
        self.layers = layers
        for i, layer in enumerate(self.layers):
            self.register_buffer(f"keys_{i}", layer.keys)
            self.register_buffer(f"values_{i}", layer.values)

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """Map the token (1, 1) at a position, int64 (1,), to the logits (1, 1, vocabulary).

        The keys and values of the token are written to the cache, in place.
        """
        # While the step is traced, its buffers are tensors without data. The cache has to hold the
        # same ones: only then are its updates recorded as updates of buffers.
        self.give_back()
        for layer in self.layers:
            layer.cumulative_length = position[0].clone()  # the update adds to it in place
        output = self.model(input_ids=token, past_key_values=self.cache, use_cache=True)
        return output.logits

    def give_back(self) -> None:
        """Assign the buffers to the cache, with length 0; tracing leaves tensors without data."""
        for i, layer in enumerate(self.layers):
            layer.cumulative_length = torch.tensor(0)
            layer.keys = self.get_buffer(f"keys_{i}")
            layer.values = self.get_buffer(f"values_{i}")


class CompiledStep:
    """A compiled decoding step of a model at batch 1 on the CPU.

    The first start on a machine compiles the step, which takes minutes. Later starts load it from
    the cache directory, which `XDG_CACHE_HOME` moves.

    Args:
        model: The model, on the CPU. Its weights are shared and must stay where they are.
        length: Most tokens, prompt included; it is rounded up to a multiple of `LENGTHS`.
        later: Whether the caller compiles and loads the step by `prepare`; if not, it is done here.

    Attributes:
        file: The file of the compiled step.

    Raises:
        OptionError: The model is not on the CPU, its cache has layers other than `StaticLayer`, or
            the step uses tensors of no module.
        Exception: The errors of the model, of torch.export and of the compilers, of many kinds.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, model: Any, length: int, *, later: bool = False) -> None:
        self._model, self._position = model, 0
        self._length = -(-length // LENGTHS) * LENGTHS
        self._cache = StaticCache(config=model.config, max_cache_len=self._length)
        layers = self._cache.layers
        kinds = {type(layer).__name__ for layer in layers if type(layer) is not StaticLayer}
        if model.device.type != "cpu" or kinds:
            reason = (
                f"its cache is a {', '.join(sorted(kinds))}" if kinds else "it is not on the CPU"
            )
            raise OptionError(f"the step of {type(model).__name__} cannot be compiled: {reason}")
        # The cache has no keys and values before a first forward, and `Step` registers them.
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), past_key_values=self._cache)
        self._step = Step(model, self._cache).eval()
        self.file = _file(self._step)
        if not later:
            self.prepare()

    @torch.inference_mode(False)
    @torch.no_grad()
    def prepare(self) -> None:
        """Load the step, compiled before if its file is missing.

        Raises:
            OptionError: The step uses tensors of no module.
            Exception: The errors of torch.export and of the compilers, of many kinds.
        """
        # Of several processes one compiles; the others wait, and load its file.
        with locked(self.file.with_suffix(".lock")):
            if not self.file.is_file():
                log.warning("Compiling the step of decoding, once: some minutes.")
                _compile(self._step, self.file)
        self._run = torch._inductor.aoti_load_package(str(self.file), run_single_threaded=True)
        # `user_managed` uses the model's tensors without a copy, and `check_full_update` makes a
        # missing one an error.
        self._run.load_constants(
            _constants(self._step, self._run), check_full_update=True, user_managed=True
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def read(self, prompt: Tensor) -> Tensor:
        """Start anew with a prompt, int64 (1, tokens); return the logits (vocabulary,) after it."""
        self._step.give_back()
        self._position = prompt.shape[1]
        output = self._model(input_ids=prompt, past_key_values=self._cache, logits_to_keep=1)
        return output.logits[0, -1]

    @torch.inference_mode()  # else each operator of ours goes through Python's autograd
    def __call__(self, token: Tensor) -> Tensor:
        """Append a token, int64 (1, 1), and return the logits (vocabulary,) after it.

        Raises:
            OptionError: The cache is full: prompt and tokens reach the (rounded) length.
        """
        if self._position >= self._length:
            raise OptionError(f"there is room for {self._length} tokens, and all are there")
        # An input of the step and no constant: one compiled step serves all positions.
        position = torch.tensor([self._position])
        self._position += 1
        output = self._run(token, position)
        return (output if isinstance(output, Tensor) else output[0])[0, -1]


def _file(step: Step) -> Path:
    """Return the file of a compiled step, named by a digest of all that it depends on."""
    root = cache_directory()
    root.mkdir(parents=True, exist_ok=True)
    # The step also reads buffers that are in no state dict, such as offsets.
    tensors = step.state_dict(keep_vars=True) | dict(step.named_buffers(remove_duplicate=False))
    model: Any = step.model
    config = model.config.to_dict()
    for key in ("_name_or_path", "quantization_config", "transformers_version"):
        config.pop(key, None)  # these depend on the files alone
    modules = dict(step.named_modules())
    packed = {name: m for name, m in modules.items() if isinstance(m, PackedLinear)}
    # Only the operator reads the values, so that their number is no part of the compiled code.
    counted = {f"{name}.weight" for name, layer in packed.items() if layer.FORMAT.count}
    shapes = {name: [] if name in counted else [*map(int, t.shape)] for name, t in tensors.items()}
    # All that tracing fixes is in the digest: another model's step could run without any error and
    # compute other numbers. `eight_bit_activations` is such a constant.
    dependencies = {
        "version": VERSION,
        "options": _OPTIONS,
        "config": config,
        "attention": attention_of(model.config),
        "tensors": {name: [shapes[name], str(t.dtype)] for name, t in tensors.items()},
        "kinds": {name: type(layer).__name__ for name, layer in packed.items()},
        "rounded": [n for n, m in packed.items() if getattr(m, "eight_bit_activations", False)],
        "machine": machine(torch.device("cpu")),
        "transformers": transformers.__version__,
    }
    text = json.dumps(dependencies, sort_keys=True, default=str)
    return root / f"step-{hashlib.sha256(text.encode()).hexdigest()[:16]}.pt2"


def _compile(step: Step, file: Path) -> None:
    """Compile a step into a file, which is moved into place when it is whole."""
    inputs = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    try:
        with grouped_attention():
            exported = torch.export.export(step, inputs, strict=False)
    finally:
        step.give_back()
    with tempfile.TemporaryDirectory(dir=file.parent) as directory, warnings.catch_warnings():
        # The compiler of torch 2.13 copies objects of a class that torch itself deprecates.
        warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
        package = str(Path(directory) / "step.pt2")
        torch._inductor.aoti_compile_and_package(
            exported, package_path=package, inductor_configs=dict(_OPTIONS)
        )
        Path(package).replace(file)


def _constants(step: Step, run: Any) -> dict[str, Tensor]:
    """Return the tensors of the model and its cache by their names in the compiled step.

    Raises:
        OptionError: The step uses a tensor of no module.
    """
    # With duplicates, since a tied weight may be traced under any of its names.
    known: dict[str, Tensor] = dict(step.named_parameters(remove_duplicate=False))
    known |= dict(step.named_buffers(remove_duplicate=False))
    names = run.loader.get_constant_fqns()
    # A tensor of no module is a value of the traced model, and would be wrong for another one.
    if unknown := sorted(set(names) - known.keys()):
        raise OptionError(f"it computes with tensors of no module: {', '.join(unknown[:3])}")
    return {name: known[name].detach() for name in names}


def round_activations(model: nn.Module) -> None:
    """Set `eight_bit_activations` of all layers of four bits, in place."""
    for module in model.modules():
        if isinstance(module, Bitmask4Linear):
            module.eight_bit_activations = True
