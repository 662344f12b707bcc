"""A pruned model that learns to predict as its dense model does, as a LightningModule."""

import logging
import math
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from mrp_lightning.distillation.divergence import (
    LOGITS_MEMORY,
    Predictor,
    divergence,
    token_figures,
)
from mrp_lightning.distillation.kept_values import (
    KeptValues,
    is_elementwise,
    moments_of_plain,
    plain_moments,
)
from mrp_lightning.environment import require_extra, without_noise
from mrp_lightning.errors import DataError, OptionError
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.perplexity import MeanLoss, Perplexity
from mrp_lightning.models.batch import check_vocabulary, split_batch, to_predict
from mrp_lightning.targets.blocks import find_blocks, pruned_layers, refuse_not_finite

log = logging.getLogger(__name__)

Source = str | os.PathLike[str] | nn.Module
_RATE, _RATE_OF_LARGE, _LARGE = 1.6e-3, 8e-4, 300_000_000
"""The default rate, and that of students with so many weights: at the first one the divergence of
Qwen2.5-Coder-0.5B does not fall (lab/results/distillation.md)."""
_LEAST_RATE = 0.05
"""The fraction of the peak rate at which the schedule ends."""
_LEAST_SCALE = 2.0**-10
"""The size of parameters that are smaller, such as biases of zeros, for their learning rate."""
_SCALES = "parameter_scales"
"""The key of a checkpoint for the sizes of the parameters before training."""
_TOKENS = 16
"""The tokens on which activations are measured: enough for tensors per window to be few."""


class Distillation(CausalLM):
    """Train a pruned model (`fit`) to predict as its dense model: knowledge distillation.

    The loss is the mean over all tokens, padding left out, of KL(p_teacher(·|x) ‖ p_student(·|x))
    in nats over the whole vocabulary: no labels are needed, and any text serves, also the teacher's
    own. Head and loss run in chunks of tokens, so that no logits of a whole batch exist. The
    teacher's weights stay as they are. The student's are trained but for embeddings and output
    head; `callbacks.KeepSparsity` keeps its zeros, and halves the memory for the optimizer's
    moments. With `accumulate_grad_batches`, and of several processes, a step has the mean of the
    batches' means: a batch of few tokens counts as much as one of many.

    Training logs `kl` of each batch, and validation the means `val_kl` and `perplexity` (of the
    student), of several texts `val_kl/<name>` and so on. `predict` and `test` are those of
    `CausalLM` for the student.

    Of weights in 16 bits the optimizer has a float32 copy, since their rounding would undo small
    steps.

    Args:
        student: The pruned model: a directory, a hub id, a GGUF file, a `CausalLM` or a loaded
            Hugging Face model.
        teacher: The dense model, in one of these forms, with the student's vocabulary.
        dtype: The precision of the student's weights, such as `float32`; `None` keeps the
            checkpoint's.
        teacher_dtype: That of the teacher's weights; `None` keeps the checkpoint's.
        learning_rate: The peak of the AdamW schedule, relative to each parameter: a step moves
            the entries by about this fraction of their root mean square, which is rounded to a
            power of two. Linear warm-up, then a cosine down to a twentieth. `None` is 1.6e-3, and
            8e-4 for a student of 300 million weights or more.
        warmup_steps: The number of optimizer steps until the peak.
        weight_decay: The weight decay of the matrices.
        train_embeddings: Whether embeddings and output head are trained, too.
        gradient_checkpointing: Whether the activations of each block are computed again in the
            backward pass, for a third more time and far less memory.
        moment_bits: The bits of each of the optimizer's two moments of a weight: 32, or 8, which
            torchao stores with a scale for 256.
        **options: `revision`, `trust_remote_code`, `tokenizer`, `attn_implementation` and
            `gguf_file`, as of `CausalLM`, for the student.

    Attributes:
        student: The pruned model without its output head, and that head, which run in turn.
        teacher: The dense model, likewise; no submodule, so that checkpoints do not hold it.

    Raises:
        OptionError: The student is packed, or the teacher itself; the two models have other
            vocabularies or tokenizers; or `moment_bits` is neither. `CausalLM` raises more.
        DependencyError: Moments are to have 8 bits, and torchao is not installed.
        TargetError: As of `CausalLM`.
    """

    def __init__(
        self,
        student: Source,
        teacher: Source,
        *,
        dtype: str | torch.dtype | None = None,
        teacher_dtype: str | torch.dtype | None = None,
        learning_rate: float | None = None,
        warmup_steps: int = 10,
        weight_decay: float = 0.0,
        train_embeddings: bool = False,
        gradient_checkpointing: bool = False,
        moment_bits: int = 32,
        **options: Any,
    ) -> None:
        if moment_bits not in (32, 8):
            raise OptionError(f"expected 32 or 8; got {moment_bits!r}.", "moment_bits")
        if moment_bits == 8:
            require_extra("torchao", "`moment_bits: 8`")
        if isinstance(student, CausalLM):
            options.setdefault("tokenizer", student.tokenizer)
            student = student.model
        super().__init__(
            student,
            dtype=dtype,
            learning_rate=_RATE if learning_rate is None else learning_rate,
            warmup_steps=warmup_steps,
            weight_decay=weight_decay,
            **options,
        )
        if getattr(self.model.config, "quantization_config", None) is not None:
            raise OptionError(
                f"{self.model.name_or_path} is packed, and packed weights cannot be trained. Give "
                "the pruned model from which it was made.",
                "student",
            )
        if learning_rate is None and _size(self.model) >= _LARGE:
            self.learning_rate = self.hparams["learning_rate"] = _RATE_OF_LARGE
        trust = options.get("trust_remote_code", False)
        if not isinstance(teacher, CausalLM):
            teacher = CausalLM(teacher, dtype=teacher_dtype, trust_remote_code=trust)
        _require_one_vocabulary(self, teacher)
        dense = teacher.model
        if dense is self.model:
            raise OptionError(
                "it is the student itself, which cannot learn from its own predictions. Give the "
                "dense model, or a copy of it.",
                "teacher",
            )
        self.student = Predictor(self.model)
        self.teacher = Predictor(dense.eval().requires_grad_(False))
        self.train_embeddings = train_embeddings
        self.gradient_checkpointing = gradient_checkpointing
        self.moment_bits = moment_bits
        self._values: list[KeptValues] = []
        self._figures: dict[str, dict[str, MeanLoss]] = {}
        self._texts_held = [""]
        self._has_tokens: bool | None = None  # whether a batch had any; `None` before the first
        self._scales: dict[str, float] = {}
        self.hparams["student"] = self.hparams.pop("model")
        self.save_hyperparameters(
            {
                "teacher": dense.name_or_path or None,
                "teacher_dtype": str(dense.dtype).removeprefix("torch."),
                "train_embeddings": train_embeddings,
                "gradient_checkpointing": gradient_checkpointing,
                "moment_bits": moment_bits,
            }
        )

    def configure_model(self) -> None:
        """Shard both models by block where the strategy is `ModelParallelStrategy` (FSDP2)."""
        mesh = self.device_mesh
        if mesh is None or self._is_sharded:
            return
        if self.train_embeddings:
            raise OptionError(
                "it needs the whole output head in each process, which a sharded model has not. "
                "Leave it out, or train with `strategy: ddp`.",
                "train_embeddings",
            )
        if self.moment_bits == 8:
            raise OptionError(
                "a sharded model divides moments of 32 bits among its processes. Leave it out, or "
                "train with `strategy: ddp`.",
                "moment_bits",
            )
        from torch.distributed.fsdp import fully_shard

        for model in (self.model, self.teacher.model):
            for block in find_blocks(model):
                fully_shard(block.module, mesh=mesh["data_parallel"])
            fully_shard(model, mesh=mesh["data_parallel"])

    @property
    def text_writer(self) -> PreTrainedModel:
        """The model that writes own text: the teacher."""
        return self.teacher.model

    @property
    def _is_sharded(self) -> bool:
        return any(isinstance(parameter, DTensor) for parameter in self.model.parameters())

    def setup(self, stage: str) -> None:
        """Bring the teacher to the student's device, and choose the parameters to train."""
        super().setup(stage)
        if stage not in ("fit", "validate"):
            return
        refuse_not_finite([], self.teacher.model.named_parameters())
        teacher: nn.Module = self.teacher.model
        teacher.to(self.trainer.strategy.root_device)
        if stage == "validate":
            return
        self._scales, self._has_tokens = {}, None
        if not pruned_layers(self.model) and _size(self.model) == _size(self.teacher.model):
            log.warning(
                "The student has no pruned layer and as many weights as the teacher: there is "
                "nothing to win back. Give a pruned or narrower `student`."
            )
        self.model.requires_grad_(True)
        if not self.train_embeddings:
            for module in self.embeddings():
                module.requires_grad_(False)
        if self.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )

    def embeddings(self) -> list[nn.Module]:
        """Return the embeddings of tokens and positions, and the output head."""
        head = self.model.get_output_embeddings()
        tables: list[nn.Module] = [
            module for module in self.model.modules() if isinstance(module, nn.Embedding)
        ]
        return tables if head is None else [*tables, head]

    def on_fit_start(self) -> None:
        """Give the optimizer float32 values of the weights that have 16 bits."""
        self.on_fit_end()  # a `fit` that raised an error has not come to its end
        for optimizer in self.trainer.optimizers:
            narrow = {
                parameter: None
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.dtype in (torch.bfloat16, torch.float16)
                and not isinstance(parameter, DTensor)
            }
            if narrow and is_elementwise(optimizer):
                self._values.append(KeptValues(optimizer, narrow))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Move the gradients to the float32 values, before they are clipped."""
        for values in self._values:
            values.take_gradients()

    def on_fit_end(self) -> None:
        """Drop the float32 values of trained parameters, and their hooks on the optimizer."""
        for values in self._values:
            values.release()
        self._values = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean KL(teacher ‖ student) of a batch, a scalar in nats, and log it as `kl`.

        If it is not finite in one of the processes, training ends before this step is taken.
        """
        ids, mask = split_batch(batch)
        check_vocabulary(self.model, ids, "training")
        result = divergence(self.student, self.teacher, ids, mask)
        self._has_tokens = bool(self._has_tokens or result.tokens)
        loss = result.kl / max(1, result.tokens)  # a batch of padding alone has none
        finite = bool(loss.detach().isfinite())
        if not self.trainer.strategy.reduce_boolean_decision(finite, all=True):
            log.error(
                "The divergence of step %d is not finite: training ends, and what was best so far "
                "is kept. Give a lower `learning_rate`, or `gradient_clip_val: 1.0`.",
                self.global_step,
            )
            self.trainer.should_stop = True
            return loss.new_zeros((), requires_grad=True)  # without an effect on any weight
        self.log("kl", loss, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """Raise a DataError if nothing was read but padding, which trains nothing."""
        has_tokens = self._has_tokens is not False
        if not self.trainer.strategy.reduce_boolean_decision(has_tokens, all=False):
            raise DataError(
                "all tokens to train on are padding, by an `attention_mask` of zeros. Give 1 for "
                "tokens, or leave the mask out."
            )

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log KL(teacher ‖ student) of held-out data as `val_kl`, in nats, and `perplexity`."""
        ids, mask = split_batch(batch)
        check_vocabulary(self.model, ids, "validation")
        figures = token_figures(self.student, self.teacher, ids, mask)
        tokens = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
        predicted = tokens[:, 1:] & tokens[:, :-1]
        if (wanted := to_predict(batch, ids)) is not None:
            predicted = predicted & wanted[:, 1:]
        for held_out in {"", self._texts_held[dataloader_idx]}:
            sums = self._figures[held_out]
            sums["val_kl"].update(figures.kl, tokens)
            for name, losses in (("perplexity", figures.student), ("teacher", figures.teacher)):
                sums[name].update(losses.masked_fill(~predicted, 0), predicted)

    def on_validation_epoch_start(self) -> None:
        """Reset the sums of all held-out data and, of several texts, of each."""
        loaders = self.trainer.val_dataloaders
        if isinstance(loaders, list | tuple):
            loaders = dict(enumerate(loaders))
        names = [f"/{name}" for name in loaders] if isinstance(loaders, Mapping) else [""]
        self._texts_held = names if len(names) > 1 else [""]
        self._figures = {
            name: {
                "val_kl": MeanLoss().to(self.device),
                "perplexity": Perplexity().to(self.device),
                "teacher": Perplexity().to(self.device),
            }
            for name in {"", *self._texts_held}
        }

    def on_validation_epoch_end(self) -> None:
        """Log the means over all tokens of all processes; `val_kl/own` etc. of several texts."""
        for text, sums in sorted(self._figures.items()):
            for name, metric in sums.items():
                self.log(
                    f"{name}{text}", metric.compute().float(), prog_bar=f"{name}{text}" == "val_kl"
                )

    def configure_optimizers(self) -> Any:
        """Return AdamW at rates relative to the parameters, with warm-up and a cosine after it.

        An unknown number of steps raises an OptionError.
        """
        steps = self.known_steps()
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        self._scales = self._scales or {name: _scale(p) for name, p in trained.items()}
        groups: dict[tuple[float, bool], list[nn.Parameter]] = defaultdict(list)
        for name, parameter in trained.items():
            groups[self._scales[name], parameter.ndim >= 2].append(parameter)
        options = [
            {
                "params": parameters,
                "lr": self.learning_rate * scale,
                # Towards 0, which is no neutral value for the scale of a norm. A step subtracts
                # lr × weight_decay × weight, which the scale of the weights must not change.
                "weight_decay": self.weight_decay / scale if is_matrix else 0.0,
            }
            for (scale, is_matrix), parameters in groups.items()
        ]
        optimizer: Optimizer
        if self.moment_bits == 8:
            with without_noise():
                from torchao.optim import AdamW8bit
            optimizer = AdamW8bit(options, betas=(0.9, 0.95))
        else:
            optimizer = torch.optim.AdamW(options, betas=(0.9, 0.95))

        def rate(step: int) -> float:
            """Return the fraction of the peak rate at a step."""
            if step < self.warmup_steps:
                return (step + 1) / (self.warmup_steps + 1)
            part = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
            return _LEAST_RATE + (1 - _LEAST_RATE) * (1 + math.cos(math.pi * min(part, 1))) / 2

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the student's configuration and tokenizer; the teacher stays where it is."""
        super().on_save_checkpoint(checkpoint)
        saved = checkpoint["hyper_parameters"]
        saved["student"] = saved.pop("model")
        # Trained weights may have other scales, and the optimizer's groups must stay the same.
        checkpoint[_SCALES] = self._scales
        if self.moment_bits == 8:
            for optimizer in checkpoint.get("optimizer_states", ()):
                optimizer["state"] = plain_moments(optimizer["state"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the sizes of the parameters at the start, to which their rates are relative."""
        super().on_load_checkpoint(checkpoint)
        self._scales = checkpoint.get(_SCALES, {})
        if self.moment_bits == 8:
            for optimizer in checkpoint.get("optimizer_states", ()):
                optimizer["state"] = moments_of_plain(optimizer["state"])


def _scale(parameter: nn.Parameter) -> float:
    """Return the root mean square of the entries that are not zero, rounded to a power of two."""
    entries = parameter.detach()
    square, count = (
        float(total.full_tensor() if isinstance(total, DTensor) else total)
        for total in (entries.double().square().sum(), (entries != 0).sum())
    )
    if square == 0:
        return _LEAST_SCALE
    return max(_LEAST_SCALE, 2.0 ** round(math.log2(square / count) / 2))


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _require_one_vocabulary(student: CausalLM, teacher: CausalLM) -> None:
    """Raise an OptionError if two models have vocabularies of other sizes or tokens."""
    sizes = [x.model.config.get_text_config().vocab_size for x in (student, teacher)]
    tokens = [None if x.tokenizer is None else x.tokenizer.get_vocab() for x in (student, teacher)]
    advice = "their predictions cannot be compared. Give the student's dense model."
    if sizes[0] != sizes[1]:
        raise OptionError(
            f"its vocabulary has {sizes[1]} tokens, and the student's {sizes[0]}: {advice}",
            "teacher",
        )
    if None not in tokens and tokens[0] != tokens[1]:
        raise OptionError(
            f"its tokenizer gives other tokens than the student's: {advice}", "teacher"
        )


def needed_memory(module: Distillation, tokens: int, precision: str = "32-true") -> int:
    """Return about how many bytes a training step needs, beside both models.

    A kept weight has a float32 value and two moments of `moment_bits`, and a weight of a pruned
    layer a byte in a mask. The rest is the larger of two sums: at the end of the forward pass all
    activations and the last step's float32 gradients of kept weights, at the end of the backward
    pass the gradients of all trained weights. Activations are what
    autograd saves for a few tokens, in proportion to the `tokens` of a batch: attention must not
    save its matrix of weights (`sdpa` does not). With gradient checkpointing they are those of one
    block, and the inputs of all. With `bf16-mixed` float32 matrices have a copy in bfloat16 until
    the backward pass; that activations are smaller then does not count.
    """
    model, trained, pruned = module.model, _trained(module), pruned_layers(module.model)
    masks = sum(layer.view.numel() for layer in pruned)  # bool
    kept = _num_kept(module)
    forward = 4 * kept + tokens * _activations(module)
    if precision == "bf16-mixed":
        matrices = (p for p in model.parameters() if p.ndim == 2 and p.dtype == torch.float32)
        forward += sum(p.numel() * torch.bfloat16.itemsize for p in matrices)
    backward = sum(parameter.nbytes for parameter in trained)
    return (4 + _of_moments(module)) * kept + masks + max(forward, backward) + LOGITS_MEMORY


def needed_disk(module: Distillation) -> int:
    """Return about how many bytes an unfinished training takes on the disk, beside its result.

    A checkpoint holds the model, a float32 value and two moments of each kept weight, and the best
    weights; while it is written the one before it is there, too. The best weights have a file of
    their own.
    """
    model = sum(parameter.nbytes for parameter in module.model.parameters())
    best = sum(parameter.nbytes for parameter in _trained(module))
    return 2 * (model + (4 + _of_moments(module)) * _num_kept(module) + best) + best


def _of_moments(module: Distillation) -> int:
    """Return the bytes of both moments of a weight; scales are left out."""
    return module.moment_bits // 4


def _trained(module: Distillation) -> list[nn.Parameter]:
    """Return the parameters that are trained."""
    tables = {id(p) for table in module.embeddings() for p in table.parameters()}
    parameters = module.model.parameters()
    return [p for p in parameters if module.train_embeddings or id(p) not in tables]


def _num_kept(module: Distillation) -> int:
    """Return the number of trained weights that are not removed."""
    removed = sum(int((layer.view == 0).sum()) for layer in pruned_layers(module.model))
    return sum(parameter.numel() for parameter in _trained(module)) - removed


def _activations(module: Distillation) -> int:
    """Return the bytes per token that autograd saves in a forward pass, weights left out."""
    model = module.model
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device=model.device)
    wanted = {p: p.requires_grad for p in model.parameters()}
    is_training = model.training
    model.train().requires_grad_(True)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            hidden = module.student.hidden(ids, None)
        whole = sum(saved.values()) // _TOKENS
    finally:
        model.train(is_training)
        for parameter, requires in wanted.items():
            parameter.requires_grad_(requires)
    if not module.gradient_checkpointing:
        return whole
    blocks = max(1, len(find_blocks(model)))
    return whole // blocks + blocks * hidden[0, 0].nbytes
