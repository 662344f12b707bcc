"""The walk against the only thing that is right by definition: the model's own full forward."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mrp_lightning.calibration.walk_choice import choose_walk
from mrp_lightning.calibration.walks import Inject, Rerun, Walk
from mrp_lightning.errors import TargetError
from mrp_lightning.targets.blocks import Block, find_blocks

Batches = list[dict[str, Tensor]]


def block_io(model: nn.Module, block: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """What a block is given and gives in a full forward."""
    seen = {}

    def pre(module, args, kwargs):
        seen["given"] = (args[0] if args else kwargs["hidden_states"]).clone()

    def post(module, args, output):
        seen["output"] = (output if isinstance(output, Tensor) else output[0]).clone()

    handles = [
        block.register_forward_pre_hook(pre, with_kwargs=True),
        block.register_forward_hook(post),
    ]
    model(**batch)
    for handle in handles:
        handle.remove()
    return seen["given"], seen["output"]


def remove_half(block: nn.Module) -> None:
    """Zero every other input feature of each matrix in place."""
    for parameter in block.parameters():
        if parameter.ndim == 2:
            parameter[:, ::2] = 0


def worst_error(walk: Walk, model: nn.Module, batches: Batches) -> float:
    """Prune along the walk, and compare what it runs with full forwards of the model so far.

    Relative to ‖output − input‖ of the block: what it adds to the residual stream.
    """
    worst = 0.0
    for k, block in enumerate(walk.blocks):
        for i in range(len(batches)):
            walk.output(k, i)
        remove_half(block.module)
        for i, batch in enumerate(batches):
            output = walk.output(k, i)
            output = output if isinstance(output, Tensor) else output[0]
            given, expected = block_io(model, block.module, batch)
            error = (output - expected).norm() / (expected - given).norm()
            worst = max(worst, float(error))
        for _ in walk.advance(k):
            pass
    return worst


def runner(model: nn.Module) -> Callable[[Any], Any]:
    return lambda batch: model(**batch)


@torch.no_grad()
def test_rerun_runs_each_block_as_in_the_model_pruned_so_far(build, batches):
    model = build("gemma3_text")
    assert worst_error(Rerun(runner(model), batches, find_blocks(model)), model, batches) < 1e-6


@torch.no_grad()
def test_encoder_and_decoder_are_walked_in_the_order_of_execution(build, batches):
    model = build("bart")
    for batch in batches:
        batch["decoder_input_ids"] = batch["input_ids"][:, :7]
    walk = choose_walk(runner(model), batches, find_blocks(model)[::-1])
    names = [block.name for block in walk.blocks]
    assert names == [f"model.{part}.layers.{k}" for part in ("encoder", "decoder") for k in (0, 1)]
    assert isinstance(walk, Inject)
    assert worst_error(walk, model, batches) < 1e-5


@torch.no_grad()
def test_a_model_that_stubs_break_is_run_in_full(build, batches, caplog):
    # Every block of T5 adds the position bias that its first block returns beside the hidden state.
    model = build("t5")
    for batch in batches:
        batch["decoder_input_ids"] = batch["input_ids"][:, :7]
    walk = choose_walk(runner(model), batches, find_blocks(model))
    assert isinstance(walk, Rerun)
    assert "Falling back to full re-runs" in caplog.text
    assert worst_error(walk, model, batches) < 1e-6
    assert all("forward" not in module.__dict__ for module in model.modules())


class InPlace(nn.Module):
    """Adds to its own input in place, as hand-written blocks do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x += self.down(self.up(x).relu())
        return x


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(64, 8), nn.ModuleList(blocks)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x


@torch.no_grad()
def test_blocks_that_change_their_input_in_place():
    torch.manual_seed(0)
    model = Stack([InPlace(8) for _ in range(3)])
    batches = [{"input_ids": torch.randint(0, 64, (2, 5))} for _ in range(2)]
    walk = choose_walk(runner(model), batches, find_blocks(model))
    assert isinstance(walk, Inject)
    assert worst_error(walk, model, batches) < 1e-5


class Mixed(nn.Module):
    """Adds an image between its blocks, as DeepStack of Qwen3-VL does, where a batch has one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([InPlace(8) for _ in range(4)])

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        x = x.clone()
        for k, block in enumerate(self.blocks):
            x = block(x)
            if image is not None and k < 2:
                x += image
        return x


@pytest.mark.parametrize("text_first", [True, False])
@torch.no_grad()
def test_what_is_added_between_blocks_to_some_batches_only(text_first):
    torch.manual_seed(0)
    model = Mixed()
    text, images = ([{"x": torch.randn(2, 5, 8)} for _ in range(2)] for _ in range(2))
    for batch in images:
        batch["image"] = 10 * torch.randn(2, 5, 8)
    batches = text + images if text_first else images + text
    walk = choose_walk(runner(model), batches, find_blocks(model))
    assert isinstance(walk, Inject)
    assert worst_error(walk, model, batches) < 1e-5


class Skipping(Mixed):
    """With an image, the last block is given what the first one made, too."""

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        first = None
        for k, block in enumerate(self.blocks):
            x = block(x.clone() if first is None or k < 3 else x + first)
            first = x if k == 0 and image is not None else first
        return x


@torch.no_grad()
def test_a_kind_of_batch_that_stubs_break_is_found_wherever_it_comes(caplog):
    torch.manual_seed(0)
    model = Skipping()
    batches = [{"x": torch.randn(2, 5, 8)} for _ in range(3)]
    assert isinstance(choose_walk(runner(model), batches, find_blocks(model)), Inject)
    batches[1]["image"] = torch.randn(2, 5, 8)
    walk = choose_walk(runner(model), batches, find_blocks(model))
    assert isinstance(walk, Rerun)
    assert "blocks.3: relative error" in caplog.text
    assert worst_error(walk, model, batches) < 1e-6


@torch.no_grad()
def test_a_kind_of_batch_that_runs_other_blocks_is_refused_before_the_walk():
    model = Mixed()
    tower = nn.ModuleList([InPlace(8), InPlace(8)])
    model.tower = tower

    def forward(batch: Any) -> Tensor:
        if "image" in batch:
            batch["image"] = tower[1](tower[0](batch["image"].clone()))
        return model(**batch)

    batches = [{"x": torch.randn(2, 5, 8)} for _ in range(2)]
    batches[1]["image"] = torch.randn(2, 5, 8)
    with pytest.raises(TargetError, match=r"Some batches run tower\.0, which the first"):
        choose_walk(forward, batches, find_blocks(model))


@torch.no_grad()
def test_a_block_that_is_called_twice_is_named():
    shared = InPlace(8)
    model = Stack([InPlace(8), shared])
    model.blocks.append(shared)
    batches = [{"input_ids": torch.randint(0, 64, (2, 5))}]
    blocks = [Block(f"blocks.{k}", model.blocks[k], "blocks") for k in (0, 1)]
    with pytest.raises(TargetError, match=r"blocks\.1 \(2 times\).*Name in `blocks`"):
        choose_walk(runner(model), batches, blocks)


class Headed(Stack):
    """Counts what runs, and how many hidden states are alive at a time."""

    def __init__(self, depth: int) -> None:
        super().__init__([InPlace(8) for _ in range(depth)])
        self.head = nn.Linear(8, 64)
        self.runs = {"model": 0, "block": 0, "head": 0}
        self.most_alive = 0
        for block in self.blocks:
            block.register_forward_hook(lambda *_: self.count("block"))
        self.head.register_forward_hook(lambda *_: self.count("head"))

    def count(self, what: str) -> None:
        self.runs[what] += 1
        alive = {
            x.data_ptr()
            for x in gc.get_objects()
            if issubclass(type(x), Tensor) and x.shape == (2, 37, 8)
        }
        self.most_alive = max(self.most_alive, len(alive))

    def forward(self, input_ids: Tensor) -> Tensor:
        self.runs["model"] += 1
        return self.head(super().forward(input_ids))


@torch.no_grad()
def test_finding_the_walk_costs_little_whatever_the_depth():
    alive = []
    for depth in (3, 9):
        model = Headed(depth)
        batches = [{"input_ids": torch.randint(0, 64, (2, 37 - n))} for n in (0, 1, 1)]
        gc.freeze()  # the modules of all packages, which need not be looked through
        assert isinstance(choose_walk(runner(model), batches, find_blocks(model)), Inject)
        # One forward to the end, then one for each block alone, with stubs before it.
        stubs = depth * (depth - 1) // 2
        assert model.runs == {"model": 1 + depth, "block": 2 * depth + stubs, "head": 1}
        alive.append(model.most_alive)
        gc.unfreeze()
    assert alive[0] == alive[1] <= 4


@torch.no_grad()
def test_an_error_in_the_model_leaves_no_stub(build, batches):
    model = build("llama")
    walk = choose_walk(runner(model), batches, find_blocks(model))
    for k in (0, 1):
        for _ in walk.advance(k):
            pass
    handle = model.model.layers[2].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        walk.output(2, 0)
    handle.remove()
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
