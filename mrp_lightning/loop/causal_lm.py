"""A Hugging Face causal language model as a LightningModule."""

import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_cosine_schedule_with_warmup,
)

from mrp_ground.arguments import checked
from mrp_lightning.calibration.offload import Offload, held_on_cpu
from mrp_lightning.devices import warn_of_slow_dtype
from mrp_lightning.errors import OptionError, TargetError, counted
from mrp_lightning.loop.perplexity import Perplexities, token_losses
from mrp_lightning.models.batch import check_vocabulary, split_batch, to_predict
from mrp_lightning.models.gguf import located
from mrp_lightning.models.integrity import explained_checkpoint
from mrp_lightning.models.loading import (
    as_dtype,
    find_tokenizer,
    load_model,
    load_tokenizer,
    make_config,
    tokenizer_files,
    tokenizer_from_files,
    warn_of_rounding,
    wider_dtypes,
)
from mrp_lightning.models.streaming import StreamedBlocks, load_streamed
from mrp_lightning.targets.blocks import find_blocks, pruned_layers, refuse_not_finite
from mrp_lightning.upstream.torch_names import recomputed_buffers, uncompiled


def _blocks_by_name(model: nn.Module) -> dict[str, nn.Module]:
    return {block.name: block.module for block in find_blocks(model)}


_CAUSAL_TOKENS = 16
"""The length of the sequence whose last token is changed to test whether a model is causal."""

_TOKENIZER = "tokenizer_files"
"""The key of a Lightning checkpoint for the tokenizer's files: bytes, by file name."""


class ExactValues(LightningModule):
    """Casts its weights to another precision as transformers loads them in it.

    Buffers that are in no checkpoint, such as the frequencies of rotary positions, and the tensors
    that a class of transformers always keeps in float32, such as biases of routers, change only
    their device. Lightning's precisions `bf16-true` and `16-true` cast the whole module, and give
    the results of `dtype` this way.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        exact = _exact(self, fn(torch.empty(0)).dtype)

        def convert(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            if id(tensor) in exact and applied.dtype != tensor.dtype:
                return tensor.to(applied.device)
            return applied

        return super()._apply(convert, recurse)


def _exact(module: nn.Module, dtype: torch.dtype) -> set[int]:
    """Return the identities of the tensors that keep their values in a module of this dtype."""
    exact = set()
    for part in module.modules():
        exact |= {id(tensor) for tensor in recomputed_buffers(part)}
        if isinstance(part, PreTrainedModel):
            wider = wider_dtypes(part, dtype, as_published=False)
            state = part.state_dict(keep_vars=True) if wider else {}
            exact |= {id(state[name]) for name in wider}
    return exact


class CausalLM(ExactValues):
    """A causal language model to prune (`predict`), to evaluate (`test`) and to train (`fit`).

    The loss is the mean negative log-likelihood of every token but the first of each window, and
    perplexity is its exponential. With the non-overlapping windows of `TextDataModule` this is the
    protocol of SparseGPT and Wanda. Padding and tokens with the label −100 are never predicted or
    counted. Probabilities are computed in float32. The batch size affects only rounding.

    `test` and `validate` log `perplexity` and `loss` of one text. Of several texts, given as a
    dictionary of dataloaders, they log `perplexity/<name>` and `loss/<name>` each.

    Args:
        model: A local directory, a hub id, a GGUF file, a configuration, or a loaded Hugging Face
            model. A GGUF file is dequantized to bfloat16; if it is the only one in a directory
            without a `config.json`, the directory can be given. A configuration is an object or a
            dictionary with a `model_type`, for a new model with random weights.
        dtype: The precision to load the weights in, such as `float32` or `bfloat16`. `None` keeps
            the checkpoint's, and means float32 for random weights. A loaded model is cast in place.
        revision: The branch, tag or commit on the hub.
        trust_remote_code: Whether code that comes with the checkpoint may run here.
        gguf_file: The name of a GGUF file in the directory or hub repository `model`.
        tokenizer: A tokenizer, or the directory or hub id of one; by default the model's own.
        attn_implementation: The attention kernel of transformers, such as `sdpa` or `eager`; it is
            set in a loaded model, too. By default the model's own.
        offload: Whether the blocks stay in CPU memory in `validate` and `test`, with one at a time
            on the accelerator, for models that it cannot hold. Use large batches then.
        streaming: Whether the blocks stay in the safetensors files of the checkpoint, with one at a
            time in memory, for models that CPU memory cannot hold. Pruning then needs `save_dir`.
        learning_rate: The peak of the AdamW schedule: linear warm-up, then a cosine down to 0.
        weight_decay: The weight decay of the matrices; vectors (norms, biases) have none.
        warmup_steps: The number of optimizer steps until the peak.

    Attributes:
        model: The Hugging Face model.
        tokenizer: Its tokenizer, or `None` where there is none.
        streamed: The blocks that are read from files, `None` without `streaming`.
        vocabulary: The record of `cut_vocabulary`; empty for a model with its whole vocabulary.
        evaluation: The results of the last `test` or `validate`, by text: `perplexity`, `loss`, the
            `context` (the length of the longest window), the numbers of `windows` and of predicted
            `tokens`, and, for the windows of `TextDataModule`, `prefix` (the number of tokens such
            as BOS before the text in each) and `checksum` (the CRC-32 of the tokens). A single text
            without a name is called "text".

    Raises:
        FileNotFoundError: `model` is neither a model directory nor a model that the hub gives, or
            `gguf_file` or the named tokenizer does not exist.
        TargetError: The checkpoint is quantized, or its weights are not those of the model; the
            model is no causal one, or on the meta device; or `streaming` finds no blocks, or blocks
            with tied weights.
        FormatError: Files of the checkpoint are damaged, hold more than tensors, or do not fit the
            configuration; or transformers cannot read the architecture of a GGUF file.
        DataError: The tokenizer cannot be loaded.
        OptionError: An argument has a wrong type or value, or does not fit `model`, such as several
            GGUF files without `gguf_file`, `streaming` without safetensors files of dense weights,
            or `revision` with a loaded model.
        DependencyError: The model is a GGUF file, and the extra `gguf` is not installed.
        TypeError: `model` or `tokenizer` is of another type.
    """

    @checked
    def __init__(
        self,
        model: dict[str, Any] | str | os.PathLike[str] | PreTrainedConfig | nn.Module,
        *,
        dtype: str | torch.dtype | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        gguf_file: str | None = None,
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
        attn_implementation: str | None = None,
        offload: bool = False,
        streaming: bool = False,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
    ) -> None:
        super().__init__()
        hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        attention = {"attn_implementation": attn_implementation} if attn_implementation else {}
        location, kind = None, as_dtype(dtype)
        if isinstance(model, str | os.PathLike):
            location = located(os.fspath(model), gguf_file, revision)
        elif gguf_file is not None:
            raise OptionError("`gguf_file` needs `model` to be the directory or hub id of it.")
        elif streaming:
            raise OptionError(
                "`streaming` reads blocks from files: it needs `model` to be a directory or hub id."
            )
        self.streamed: StreamedBlocks | None = None
        if location is None:
            self.model: Any = _given(model, kind, revision, **attention)
        elif streaming:
            self.model, self.streamed = load_streamed(
                location, kind, _blocks_by_name, **attention, **hub
            )
        else:
            self.model = load_model(location, kind, **attention, **hub)
        if location is not None and kind is None:  # else the rounding was asked for
            warn_of_rounding(self.model)
        self.tokenizer: Any = None
        if tokenizer is not None:
            self.tokenizer = load_tokenizer(tokenizer, **hub)
        elif own := location or self.model.name_or_path:
            self.tokenizer = find_tokenizer(own, **hub)
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            tokenizer = tokenizer.name_or_path
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.warmup_steps, self.offload = warmup_steps, offload
        self._offloaded = ExitStack()
        self.evaluation: dict[str, dict[str, float | int]] = {}
        self.vocabulary: dict[str, Any] = {}
        self._texts = Perplexities()
        self._is_causal = False  # as far as known
        # The hyper-parameters of a Lightning checkpoint. `trust_remote_code` is none of them: a
        # checkpoint must not be able to ask for it.
        self.save_hyperparameters(
            {
                "model": location or self.model.config.to_dict(),
                "revision": revision,
                "attn_implementation": attn_implementation,
                "streaming": streaming,
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "tokenizer": os.fspath(tokenizer) if tokenizer else None,
                "offload": offload,
                "learning_rate": learning_rate,
                "weight_decay": weight_decay,
                "warmup_steps": warmup_steps,
            }
        )

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = True,
        **kwargs: Any,
    ) -> Self:
        """Load a Lightning checkpoint; see `lightning.pytorch.LightningModule`.

        Only tensors and plain containers are unpickled, unless `weights_only` is false, since other
        objects can run code. `None` means true. A FormatError is raised if that fails.
        """
        weights_only = weights_only is not False  # Lightning takes `None` for false with a URL
        with explained_checkpoint(checkpoint_path, weights_only=weights_only):
            return super().load_from_checkpoint(
                checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs
            )

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Compute the logits (batch, length, vocabulary); raise a TargetError if there are none."""
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        if not isinstance(getattr(output, "logits", None), Tensor):
            raise TargetError(
                f"A {type(self.model).__name__} gives no logits, so it has no loss and no "
                "perplexity. Load the class with a language-modelling head, such as by "
                "`AutoModelForCausalLM`; pruning takes the model as it is: `Trainer.predict(model, "
                "…)`."
            )
        return output.logits

    def loss(self, batch: Any) -> tuple[Tensor, int]:
        """Return the mean negative log-likelihood in nats, and the number of predicted tokens.

        The mean is NaN if no token is predicted. See `split_batch` for batches and their errors.
        """
        losses, predicted = self._token_losses(batch)
        count = predicted.sum()
        # By tokens, not by windows: a window with padding counts by the tokens that it has.
        return losses.sum() / count, int(count)

    def _token_losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        ids, mask = split_batch(batch)
        wanted = to_predict(batch, ids)
        check_vocabulary(self.model, ids, "training" if self.training else "evaluation")
        return token_losses(self(ids, mask), ids, mask, wanted)

    def _require_causal(self, batch: Any) -> None:
        """Raise a TargetError if a later token changes earlier logits; tested once for a model."""
        ids, mask = split_batch(batch)
        # Without padding, so that a causal model must ignore the last token of the pair.
        window = (ids[0] if mask is None else ids[0][mask[0] != 0])[:_CAUSAL_TOKENS]
        if self._is_causal or len(window) < 2:
            return
        check_vocabulary(self.model, window[None], "evaluation")
        other = window.clone()
        # A neighbour of the token is in the vocabulary, and differs from it for sure.
        other[-1] = 1 if window[-1] == 0 else window[-1] - 1
        with torch.no_grad():
            logits = self(torch.stack([window, other]), None)[:, :-1].float()
        # Both rows run in one batch, so that the logits of a causal model differ by rounding alone:
        # by at most max(1e-4, 8 ε) times the largest, 1e-4 as some kernels round more than float32.
        rounding = max(1e-4, 8 * torch.finfo(self.model.dtype).eps) * float(logits.abs().max())
        if float((logits[0] - logits[1]).abs().max()) > rounding:
            raise TargetError(
                f"The logits of a {type(self.model).__name__} depend on later tokens, so that it "
                "gives no likelihood of a token from those before it, and no perplexity. Evaluate "
                "it by the measure of its own task; `predict` prunes it as it is."
            )
        # One batch suffices: the architecture decides it. A failure is not kept, and raises again.
        self._is_causal = True

    def setup(self, stage: str) -> None:
        """Set the model to training mode for `fit`, or offload it for evaluation."""
        if stage == "fit":
            self._refuse_streamed("`fit` changes all weights at once")
            self.model.train()
        if stage in ("validate", "test"):
            # Before the data: a loss of NaN at the end would not name the weight.
            refuse_not_finite([], self.model.named_parameters())
        if not self.offload:
            warn_of_slow_dtype(self.model.dtype, self.trainer.strategy.root_device)
        self.teardown(stage)  # an exception may have skipped the last one
        if self.offload and stage in ("validate", "test"):
            blocks = [block.module for block in find_blocks(self)]
            offload = Offload(blocks, self.trainer.strategy.root_device)
            self._offloaded.enter_context(held_on_cpu(self, lambda: blocks))
            self._offloaded.enter_context(offload.active())

    def teardown(self, stage: str) -> None:
        """End the offloading that `setup` began; the blocks stay on the CPU."""
        self._offloaded.close()

    def on_train_start(self) -> None:
        """Warn if training would fill the zeros of a pruned model."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        is_kept = any(getattr(callback, "keeps_sparsity", False) for callback in callbacks)
        if not is_kept and (layers := pruned_layers(self)):
            rank_zero_warn(
                f"{len(layers)} layers of this model are pruned ({layers[0].name}, …), and "
                "training will fill their zeros. Add `callbacks.KeepSparsity` to keep them."
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean loss of a batch, a scalar in nats, and log it as `train_loss`."""
        loss, _ = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log loss and perplexity of the data; raise a TargetError if the model is not causal."""
        self._require_causal(batch)
        losses, predicted = self._token_losses(batch)
        for key, metric in self._texts.logged(dataloader_idx).items():
            metric.update(losses, predicted)
            # The name spares Lightning the search of all submodules for the metric.
            self.log(
                key,
                metric,
                on_epoch=True,
                prog_bar="/" not in key,
                batch_size=len(losses),
                add_dataloader_idx=False,
                metric_attribute=key,
            )

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Compute the logits (batch, length, vocabulary)."""
        return self(*split_batch(batch))

    def on_validation_epoch_start(self) -> None:
        """Begin the sums of loss and tokens of each text at zero."""
        trainer = self.trainer
        loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        self._texts = Perplexities(loaders, self.device)

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Set `evaluation` to the loss, the perplexity and the counts of each text, by name."""
        self.evaluation = self._texts.figures()

    def on_test_epoch_end(self) -> None:
        """Set `evaluation` as validation does, and log each perplexity with its context."""
        self.evaluation = self._texts.figures()
        lost = [n for n, x in self.evaluation.items() if x["tokens"] and math.isnan(x["loss"])]
        if lost:
            if self.streamed is not None:  # whose blocks `setup` does not read
                for name, block in self.streamed.blocks.items():
                    with self.streamed.pinned(block):
                        refuse_not_finite([], block.named_parameters(prefix=name))
            raise TargetError(
                f"The logits of the model hold NaN on {', '.join(lost)}, but its weights are "
                f"finite: its activations overflow in {self.model.dtype}. Evaluate it in another "
                "precision, such as `model.dtype: bfloat16`."
            )
        for name, figures in self.evaluation.items():
            bos = ", BOS before each" if figures.get("prefix") else ", no BOS before each"
            bos = bos if "prefix" in figures else ""
            windows = counted(figures["windows"], "window")
            rank_zero_info(
                f"{name}: perplexity {figures['perplexity']:.3f} (context {figures['context']}, "
                f"{windows}{bos}, {counted(figures['tokens'], 'predicted token')})"
            )

    def configure_optimizers(self) -> Any:
        """Return AdamW with linear warm-up and cosine decay over the trainer's steps.

        An unknown number of steps raises an OptionError.
        """
        steps = self.known_steps()
        trained = [p for p in self.parameters() if p.requires_grad]
        # Weight decay pulls towards 0, which is no neutral value for the scale of a norm.
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        schedule = get_cosine_schedule_with_warmup(optimizer, self.warmup_steps, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def known_steps(self) -> int:
        """Return the number of optimizer steps of the training; an OptionError if it is unknown."""
        steps = self.trainer.estimated_stepping_batches
        if not 1 <= steps < math.inf:
            raise OptionError(
                "The learning rate falls over the steps that the trainer will take, and their "
                "number is not known. Give `trainer.max_steps`."
            )
        return int(steps)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the configuration and the tokenizer, to rebuild the model without its source."""
        self._refuse_streamed("a Lightning checkpoint holds all weights at once")
        saved = dict(checkpoint.get("hyper_parameters", {}))
        saved["model"] = self.model.config.to_dict()
        if self.tokenizer is not None:
            checkpoint[_TOKENIZER] = tokenizer_files(self.tokenizer)
            # The files in the checkpoint replace the source, which another machine may lack.
            saved["tokenizer"] = None
        checkpoint["hyper_parameters"] = saved

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the checkpoint's tokenizer, if any; raise an OptionError for a streamed model."""
        self._refuse_streamed("`ckpt_path` gives all weights at once")
        if _TOKENIZER in checkpoint:
            self.tokenizer = tokenizer_from_files(checkpoint[_TOKENIZER])

    def _refuse_streamed(self, problem: str) -> None:
        """Raise an OptionError, with the problem, if the blocks are in files."""
        if self.streamed is not None:
            raise OptionError(
                f"`streaming`: {problem}, and only one block at a time is in memory. Load the "
                "model without `streaming`, on a machine that can hold it."
            )


def _given(
    model: Any, dtype: torch.dtype | None, revision: str | None, **attention: str
) -> PreTrainedModel:
    """Return the model of a configuration, with random weights, or a loaded one, checked."""
    if isinstance(model, dict | PreTrainedConfig):
        config = make_config(model) if isinstance(model, dict) else model
        # Random weights have no precision of a checkpoint to keep.
        return AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32, **attention)
    _check_loaded(model, revision)
    if attention:
        # After all checks, since it changes the caller's model.
        model.set_attn_implementation(attention["attn_implementation"])
    return model if dtype is None else model.to(dtype)


def _check_loaded(model: Any, revision: str | None) -> None:
    """Raise for an object that is no causal language model of transformers with values."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            "`model` must be a path, a hub id, a transformers configuration or a transformers "
            f"model. Got {type(model).__name__}; {_next_step(model)}"
        )
    if model.config.is_encoder_decoder:
        raise TargetError(
            f"`model`: a {type(model).__name__} reads two texts, by its encoder and its decoder, "
            "and a CausalLM gives it one. Prune the model itself, with batches of `input_ids` and "
            "`decoder_input_ids`: `Trainer.predict(model, loader, callbacks=[…])`."
        )
    empty = [name for name, p in model.named_parameters() if p.is_meta]
    if empty and len(empty) == len(list(model.parameters())):  # `make_plan` lists some
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        raise TargetError(
            f"`model` is on the meta device, without values: {', '.join(empty[:3])}{more}. Load it "
            "with `from_pretrained`, or give its path, with `streaming=True` if it is larger than "
            "memory."
        )
    if revision is not None:
        raise OptionError("`revision` needs `model` to be a hub id; this model is loaded.")


def _next_step(module: Any) -> str:
    """Return the next step for a module that is no model of transformers, for the message."""
    if isinstance(uncompiled(module), PreTrainedModel):
        return "give the model before `torch.compile`, which is `model._orig_mod`."
    if callable(getattr(module, "merge_and_unload", None)):
        return "give `model.merge_and_unload()`, which has the adapters in its weights."
    return "another module needs its own LightningModule, with a `predict_step` that calls it."
