"""Models that are built in unusual ways: pruned as full forwards say, or refused with a reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow_pruning import report_of
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel

from mrp_lightning import prune_weight
from mrp_lightning.errors import TargetError
from mrp_lightning.pruning.job import Job
from mrp_lightning.pruning.sequential import prune_model
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.records.report import PruningReport
from mrp_lightning.targets.plan import make_plan

WIDTH = 16


class Part(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def update(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.update(hidden_states)


class KeywordOnly(Part):
    def forward(self, *, scale: Tensor, hidden_states: Tensor) -> Tensor:
        return self.update(hidden_states) * scale


class OddKeyword(Part):
    def forward(self, *, scale: Tensor, state: Tensor) -> Tensor:
        return self.update(state) * scale


class GivesDict(Part):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"state": self.update(x)}


class TakesAndGivesDict(Part):
    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"state": self.update(state["state"])}


class HiddenSecond(Part):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.mean(), self.update(x)


Forward = Callable[[Any, Tensor], Any]


class Model(nn.Module):
    """Blocks, run by a function."""

    def __init__(self, run: Forward, kind: type[Part] = Part, count: int = 3) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(kind() for _ in range(count))
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self.blocks, x)


def chain(blocks: Any, x: Any, **options: Any) -> Any:
    for block in blocks:
        x = block(x, **options)
    return x


def by_keyword(name: str) -> Forward:
    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(**{"scale": torch.tensor(0.9, dtype=x.dtype), name: x})
        return x

    return run


def unpack(key: Any) -> Forward:
    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)[key]
        return x

    return run


def skip_connection(blocks: Any, x: Tensor) -> Tensor:
    first = blocks[0](x)
    return blocks[2](first + blocks[1](first))


UNUSUAL: dict[str, tuple[Callable[[], nn.Module], list[int], str]] = {
    # the model, its blocks in the order in which they run, the walk
    "reversed": (lambda: Model(lambda blocks, x: chain(reversed(blocks), x)), [2, 1, 0], "inject"),
    "parallel": (lambda: Model(lambda blocks, x: sum(b(x) for b in blocks)), [0, 1, 2], "inject"),
    "skip connection": (lambda: Model(skip_connection), [0, 1, 2], "rerun"),
    "keyword only": (lambda: Model(by_keyword("hidden_states"), KeywordOnly), [0, 1, 2], "inject"),
    "odd keyword": (lambda: Model(by_keyword("state"), OddKeyword), [0, 1, 2], "inject"),
    "gives a dictionary": (lambda: Model(unpack("state"), GivesDict), [0, 1, 2], "rerun"),
    "takes a dictionary": (
        lambda: Model(lambda blocks, x: chain(blocks, {"state": x}), TakesAndGivesDict),
        [0, 1, 2],
        "rerun",
    ),
    "hidden state second": (lambda: Model(unpack(1), HiddenSecond), [0, 1, 2], "rerun"),
}


def make(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def inputs(*means: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn(4, 6, WIDTH, generator=generator).double() for _ in means]
    return [x + mean for x, mean in zip(noise, means, strict=True)]


def prune(model: nn.Module, batches: list[Tensor], **choices: Any) -> PruningReport:
    settings = Settings(pattern="2:4", method="SM", tolerance=1e-9)
    plan = make_plan(model, settings.recipe.pattern, **choices)
    job = Job(model=model, forward=model, batches=batches, plan=plan, settings=settings)
    prune_model(job)
    return report_of(job)


@torch.no_grad()
def slow_prune(model: nn.Module, blocks: list[nn.Module], batches: list[Tensor]) -> None:
    """Block by block, on what its layers are given in full forwards of the model so far."""
    for block in blocks:
        layers = [m for m in block.modules() if isinstance(m, nn.Linear)]
        seen: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers}
        handles = [
            layer.register_forward_pre_hook(
                lambda m, args, seen=seen: seen[m].append(args[0].flatten(0, -2))
            )
            for layer in layers
        ]
        for batch in batches:
            model(batch)
        for handle in handles:
            handle.remove()
        for layer in layers:
            x = torch.cat(seen[layer])
            hessian = (2 * x.T @ x / len(x)).float()
            solution = prune_weight(
                layer.weight, hessian, pattern="2:4", method="SM", tolerance=1e-9
            )
            layer.weight.copy_(solution.weight)


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a == 0, b == 0), name
        assert (a - b).norm() <= 1e-3 * b.norm(), name


@pytest.mark.parametrize("kind", UNUSUAL)
def test_is_pruned_as_full_forwards_say(kind):
    build, order, walk = UNUSUAL[kind]
    ours, theirs = make(build), make(build)
    batches = inputs(0, 0, 0)
    report = prune(ours, batches)
    slow_prune(theirs, [theirs.blocks[k] for k in order], batches)
    assert report.config["walk"] == walk
    assert_same(ours, theirs)


class Interleaved(nn.Module):
    """Two lists, whose blocks take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.ModuleList(Part() for _ in range(2))
        self.even = nn.ModuleList(Part() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for odd, even in zip(self.odd, self.even, strict=True):
            x = even(odd(x).tanh())
        return x


def test_blocks_of_two_lists_that_take_turns():
    ours, theirs = make(Interleaved), make(Interleaved)
    prune(ours, inputs(0, 0))
    order = [theirs.odd[0], theirs.even[0], theirs.odd[1], theirs.even[1]]
    slow_prune(theirs, order, inputs(0, 0))
    assert_same(ours, theirs)


class Held(nn.Module):
    """Blocks in something else than a ModuleList."""

    def __init__(self, holder: Callable[[list[nn.Module]], nn.Module]) -> None:
        super().__init__()
        self.trunk: Any = holder([Part(), Part()])

    def forward(self, x: Tensor) -> Tensor:
        return chain(
            self.trunk.values() if isinstance(self.trunk, nn.ModuleDict) else self.trunk, x
        )


@pytest.mark.parametrize(
    "holder",
    [
        lambda parts: nn.Sequential(*parts),
        lambda parts: nn.ModuleDict({"first": parts[0], "second": parts[1]}),
    ],
    ids=["Sequential", "ModuleDict"],
)
def test_blocks_in_other_containers_are_named(holder):
    ours, theirs = (make(lambda: Held(holder)) for _ in range(2))
    assert prune(make(lambda: Held(holder)), inputs(0)).config["walk"] == "whole model"
    assert prune(ours, inputs(0, 0), blocks="trunk").config["walk"] == "inject"
    slow_prune(theirs, list(theirs.trunk.children()), inputs(0, 0))
    assert_same(ours, theirs)


def test_a_block_that_some_batches_leave_out_is_calibrated_on_the_others():
    def run(blocks: Any, x: Tensor) -> Tensor:
        return chain(blocks if len(x) == 4 else [blocks[0], blocks[2]], x)

    ours, theirs = (make(lambda: Model(run)) for _ in range(2))
    batches = inputs(0, 0, 0)
    batches[1] = batches[1][:3]
    report = prune(ours, batches)
    slow_prune(theirs, list(theirs.blocks), batches)
    assert_same(ours, theirs)
    tokens = {row.name: row.tokens for row in report.layers}
    assert tokens["blocks.0.up"] == tokens["blocks.2.up"] == 6 * (4 + 3 + 4)
    assert tokens["blocks.1.up"] == 6 * (4 + 4)


def turn_around(blocks: Any, x: Tensor) -> Tensor:
    return chain(blocks if x.mean() > 0 else reversed(blocks), x)


def parts_without_blocks(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = x + block.down(block.up(x).relu())
    return x


@pytest.mark.parametrize(
    ("run", "message"),
    [
        # Every one names what it found, and `blocks`.
        (lambda b, x: chain([b[0], b[0], *b], x), r"blocks\.0 \(3 times\).*`blocks`"),
        (lambda b, x: b[0].up(x), r"called none of the 3 blocks, blocks\.0.*`blocks`"),
        (parts_without_blocks, r"called none of the 3 blocks, blocks\.0.*`blocks`"),
        (turn_around, r"blocks\.\d after blocks\.\d.*`blocks`"),
        (
            lambda b, x: chain([b[0], *b] if x.mean() < 0 else b, x),
            r"blocks\.0 after blocks\.0.*`blocks`",
        ),
        (lambda b, x: chain(b if x.mean() < 0 else b[1:], x), r"run blocks\.0, which.*`blocks`"),
    ],
    ids=["called again", "unused", "only parts", "turned around", "late again", "left out first"],
)
def test_is_refused_with_what_was_found(run, message):
    model = make(lambda: Model(run))
    with pytest.raises(TargetError, match=message):
        prune(model, inputs(3, -3))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all("forward" not in m.__dict__ for m in model.modules())


def test_blocks_that_share_their_weights_are_pruned_in_the_module_around_them():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = AlbertConfig(vocab_size=64, embedding_size=8, num_hidden_layers=3, **sizes)
    model = AlbertModel(config).eval()
    batches = [
        torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(k)) for k in (1, 2)
    ]
    with pytest.raises(TargetError, match=r"layer_groups\.0 \(3 times\).*once"):
        prune(model, batches)
    report = prune(model, batches, blocks="encoder")
    tokens = {row.name: row.tokens for row in report.layers}
    assert tokens.pop("encoder.embedding_hidden_mapping_in") == 2 * 12
    assert set(tokens.values()) == {3 * 2 * 12}  # each call of a layer counts
    assert len(tokens) == 6
