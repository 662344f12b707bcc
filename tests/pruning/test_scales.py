"""Weights on a grid are tuned by their scales: codes stay, and the file stays exact."""

import pytest
import torch
from quiet import QUIET
from transformers import AutoModelForCausalLM

from callbacks import MRPCallback
from mrp_lightning import BlockTuning, CausalLM, Trainer, prune_weight
from mrp_lightning.pruning.block_tuner import _Scales
from mrp_lightning.solver.grid import GRIDS, decompose, fit_groups, grid_of_bits
from mrp_lightning.targets.layers import Linear


def layer_on(grid, codes, scales):
    weight = codes * scales.repeat_interleave(grid.group_size, 1)[:, : codes.shape[1]]
    module = torch.nn.Linear(codes.shape[1], len(codes), bias=False)
    module.weight.data = weight
    return Linear("layer", module)


@pytest.mark.parametrize(
    "grid", [GRIDS["q4_0"], GRIDS["iq4_nl"], grid_of_bits(4, 24, zero_has_a_code=True)], ids=str
)
def test_gradients_and_weights_are_those_of_scales(grid):
    """By autograd through codes times scales, and a step that is written."""
    generator = torch.Generator().manual_seed(0)
    codebook = torch.tensor(grid.codebook).float()
    codes = codebook[torch.randint(0, len(codebook), (5, 64), generator=generator)]
    codes[:, ::8] = codebook[codebook.abs().argmax()]  # so that no larger scale would do
    scales = grid.round_scales(torch.rand(5, grid.groups(64), generator=generator) + 0.5)
    layer = layer_on(grid, codes, scales)
    tuned = _Scales([layer], grid, {})
    (master,) = tuned.masters
    x = torch.randn(7, 64, generator=generator)

    change = torch.zeros_like(scales, requires_grad=True)
    changed = (scales * (1 + change / 0.1)).repeat_interleave(grid.group_size, 1)[:, :64]
    (expected,) = torch.autograd.grad((x @ (codes * changed).T).square().sum(), change)
    loss = (x @ layer.parameter.T).square().sum()
    tuned.add(torch.autograd.grad(loss, tuned.parameters))
    torch.testing.assert_close(master.grad, expected, rtol=1e-4, atol=1e-4)

    with torch.no_grad():
        master += 0.004 * torch.randn(master.shape, generator=generator)
    tuned.write()
    now, _, fits = fit_groups(grid, layer.weight)
    assert fits.all()
    assert torch.equal(now.float(), codes)
    spread = (layer.weight / codes.where(codes != 0, 1)).detach()
    wanted = scales * (1 + master.detach() / 0.1)
    half_a_step = 2.0**-grid.scales.significant
    for column in range(64):
        off = spread[:, column] / wanted[:, column // grid.group_size] - 1
        assert off[codes[:, column] != 0].abs().max() <= half_a_step * 1.001


@pytest.mark.parametrize("name", ["q4_1", "q5_k"])
def test_minima_change_with_their_scales(name):
    """By autograd through whole groups times a factor, and a step that is written."""
    grid, generator = GRIDS[name], torch.Generator().manual_seed(0)
    dense = torch.randn(5, 256, generator=generator) + 0.3
    solution = prune_weight(dense, torch.eye(256), grid=name)
    layer = layer_on(grid, torch.zeros(5, 256), torch.ones(5, 8))
    layer.write_(solution.weight)
    tuned = _Scales([layer], grid, {"layer": solution.grid_parameters})
    (master,) = tuned.masters
    x = torch.randn(7, 256, generator=generator)

    change = torch.zeros(5, 8, requires_grad=True)
    changed = solution.weight * (1 + change / 0.1).repeat_interleave(32, 1)
    (expected,) = torch.autograd.grad((x @ changed.T).square().sum(), change)
    tuned.add(torch.autograd.grad((x @ layer.parameter.T).square().sum(), tuned.parameters))
    torch.testing.assert_close(master.grad, expected, rtol=1e-3, atol=1e-2)

    with torch.no_grad():
        master += 0.004 * torch.randn(master.shape, generator=generator)
    tuned.write()
    tuned.keep()
    assert not torch.equal(layer.weight, solution.weight)
    assert torch.equal(
        grid.codes_of(layer.weight, tuned.grid["layer"]),
        grid.codes_of(solution.weight, solution.grid_parameters),
    )
    factor, numbers = 1 + master.detach() / 0.1, solution.grid_parameters
    for ours, start in ((numbers.scales, 1), (numbers.minima, 0)):
        nearest = (ours * factor).half().float()
        if grid.steps is not None:  # the largest of a unit is 63 already, and cannot grow
            stored = grid.units(ours)[..., None] * torch.arange(start, 64)
            off = (stored - (ours * factor)[..., None]).abs()
            nearest = stored.gather(2, off.argmin(2, keepdim=True))[..., 0]
        written = tuned.grid["layer"].scales if start else tuned.grid["layer"].minima
        assert torch.equal(written, nearest)


def test_a_tuned_run_has_the_codes_of_one_that_is_not(tiny_llama, tmp_path):
    windows = torch.randint(3, 2000, (16, 32), generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(windows, batch_size=4)
    dense = AutoModelForCausalLM.from_pretrained(tiny_llama)
    models, tuning = [], BlockTuning(epochs=3, learning_rate=1e-3, batch_size=4)
    for k, options in enumerate(({}, {"tuning": tuning})):
        callback = MRPCallback(grid="q4_0", save_dir=tmp_path / str(k), **options)
        trainer = Trainer(**QUIET)
        trainer.predict(CausalLM(tiny_llama), loader, callbacks=[callback])
        models.append(AutoModelForCausalLM.from_pretrained(tmp_path / str(k)))
    weights = [model.model.layers[0].mlp.gate_proj.weight.detach() for model in models]
    codes, scales = zip(*(decompose(GRIDS["q4_0"], weight) for weight in weights), strict=True)
    assert torch.equal(*codes)
    assert not torch.equal(*scales)
    first = callback.report.blocks[0]
    assert first.epoch
    assert first.error_after < first.error_before
    # On the last tenth of the windows, relative to the size of each token.
    with torch.no_grad():
        hidden = [
            model(windows[-2:], output_hidden_states=True).hidden_states[1]
            for model in (dense, *models)
        ]
    size = hidden[0].square().sum(-1)
    before, after = ((x - hidden[0]).square().sum(-1).div(size).mean() for x in hidden[1:])
    assert first.error_before == pytest.approx(float(before), rel=1e-3)
    assert first.error_after == pytest.approx(float(after), rel=1e-3)
