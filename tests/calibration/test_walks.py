"""The walk against the only thing that is right by definition: the model's own full forward."""

from collections import namedtuple
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mrp_lightning.calibration.walk_choice import (
    DIRECTIONS,
    choose_walk,
    kind,
    one_of_each_kind,
    relative_error,
    sketch,
)
from mrp_lightning.calibration.walks import Inject, Rerun, Walk, replaced
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
    """Counts what runs."""

    def __init__(self, depth: int) -> None:
        super().__init__([InPlace(8) for _ in range(depth)])
        self.head = nn.Linear(8, 64)
        self.runs = {"model": 0, "block": 0, "head": 0}
        for block in self.blocks:
            block.register_forward_hook(lambda *_: self.count("block"))
        self.head.register_forward_hook(lambda *_: self.count("head"))

    def count(self, what: str) -> None:
        self.runs[what] += 1

    def forward(self, input_ids: Tensor) -> Tensor:
        self.runs["model"] += 1
        return self.head(super().forward(input_ids))


@torch.no_grad()
def test_finding_the_walk_costs_little_whatever_the_depth():
    for depth in (3, 9):
        model = Headed(depth)
        batches = [{"input_ids": torch.randint(0, 64, (2, 37 - n))} for n in (0, 1, 1)]
        assert isinstance(choose_walk(runner(model), batches, find_blocks(model)), Inject)
        # One forward to the end, then one for each block alone, with stubs before it.
        stubs = depth * (depth - 1) // 2
        assert model.runs == {"model": 1 + depth, "block": 2 * depth + stubs, "head": 1}


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


def test_replacements_nest_and_what_stood_there_comes_back():
    module = nn.Linear(2, 2)
    with replaced(module, "forward", lambda _: "outer"):
        with replaced(module, "forward", lambda _: "inner"):
            assert module(0) == "inner"
        assert module(0) == "outer"
    assert "forward" not in vars(module)
    module.note = None  # of its own, and as false as nothing
    with replaced(module, "note", 1):
        assert module.note == 1
    assert vars(module)["note"] is None


IDS, FLOATS = torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5)


@dataclass
class Step:
    args: tuple[Any, ...]
    width: InitVar[int] = 0


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "same",
    [
        (IDS, IDS[:1, :3]),
        ({"ids": IDS, "n": 1}, {"n": 2, "ids": IDS[:, :1]}),
        ([FLOATS, FLOATS], [FLOATS[:1]]),
        (Step(({"ids": IDS}, 0)), Step(({"ids": IDS[:1]}, 7))),
        ({"attention_mask": IDS}, {"attention_mask": IDS[:1]}),
        (Pair(IDS, "a"), Pair(IDS[:1], "b")),
    ],
)
def test_batches_of_one_kind(same):
    assert kind(same[0]) == kind(same[1])


@pytest.mark.parametrize(
    "other",
    [
        (IDS, FLOATS),
        (FLOATS, FLOATS[0]),
        ({"ids": IDS}, {"ids": IDS, "image": FLOATS}),
        ({"ids": IDS, "image": None}, {"ids": IDS, "image": FLOATS}),
        ([FLOATS], []),
        (Step(({"ids": IDS}, 0)), Step(({"ids": None}, 0))),
        (Pair(IDS, None), Pair(IDS, FLOATS)),
        ({"attention_mask": IDS}, {"attention_mask": IDS.tril()}),
    ],
)
def test_batches_of_two_kinds(other):
    assert kind(other[0]) != kind(other[1])
    assert one_of_each_kind([other[0], other[0], other[1], other[0]]) == list(other)


def distance(a, b):
    return float((sketch(a).projection - sketch(b).projection).norm())


def perturbations():
    generator = torch.Generator().manual_seed(0)
    shape = (3, 1500, 24)  # more rows than are projected at a time
    everywhere = torch.randn(shape, generator=generator)
    one_row = torch.zeros(shape)
    one_row[1, 700] = everywhere[0, 0]
    one_column = torch.zeros(shape)
    one_column[..., 5] = everywhere[..., 5]
    alike = everywhere[..., :1].expand(shape)
    return {"everywhere": everywhere, "row": one_row, "column": one_column, "alike": alike}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("where", ["everywhere", "row", "column", "alike"])
def test_distances_are_those_of_the_tensors(where, dtype):
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(3, 1500, 24, generator=generator).to(dtype)
    b = a + perturbations()[where].to(dtype)
    true = float((b.double() - a.double()).norm())
    # A row is told exactly; where all columns differ alike, to three times 1/√(2·DIRECTIONS).
    bound = 1e-4 if where == "row" else 3 / (2 * DIRECTIONS) ** 0.5
    assert distance(a, b) == pytest.approx(true, rel=bound)


def test_equal_tensors_have_equal_sketches():
    a = torch.randn(40, 6)
    a[0], a[1, 0], a[2, 1], a[3, 2] = torch.nan, torch.inf, -torch.inf, 1e20
    assert distance(a, a.clone()) == 0.0
    assert distance(a, a.nan_to_num(0.0, torch.inf, -torch.inf)) == 0.0
    other = a.clone()
    other[1, 0] = 1.0
    assert distance(a, other) == pytest.approx(1e30)


@pytest.mark.parametrize("shape", [(), (5,), (0, 5), (2, 3, 4, 5)])
def test_tensors_of_any_shape(shape):
    made = sketch(torch.ones(shape))
    assert made.shape == shape
    assert made.projection.isfinite().all()


@contextmanager
def half_by_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("context", [torch.autocast("cpu", torch.bfloat16), half_by_default()])
def test_the_precision_of_the_forward_does_not_round_it(context):
    a = torch.randn(50, 8)
    expected = sketch(a).projection
    with context:
        assert torch.equal(sketch(a).projection, expected)


def test_errors_are_relative_to_what_the_block_adds():
    given = torch.randn(200, 16)
    update, mistake = 1e-2 * torch.randn(200, 16), 1e-3 * torch.randn(200, 16)
    expected = given + update
    error = relative_error(sketch(expected + mistake), sketch(expected), sketch(given))
    assert error == pytest.approx(0.1, rel=0.3)
    other_shape = sketch(given[:, :4])
    assert relative_error(sketch(expected), sketch(expected), other_shape) == 0.0
    assert relative_error(other_shape, sketch(expected), sketch(given)) == float("inf")
