"""What a model writes is drawn from its own distribution."""

import copy

import numpy as np
import pytest
import torch
import transformers
from thread_processes import together
from tiny_configs import FAMILIES, VOCABULARY

from mrp_lightning.data import own_text as module
from mrp_lightning.data.own_text import write_together
from mrp_lightning.data.sampling import Sampling, require_writer, write
from mrp_lightning.errors import DataError, TargetError
from mrp_lightning.processes import ALONE

CAUSAL = ["llama", "opt", "bloom", "gpt2", "mistral", "gemma3_text", "gpt_oss", "qwen3_next"]
CAUSAL += ["mamba", "mamba2", "falcon_h1", "rwkv"]
"""Learned, rotary and no positions, tied weights, sliding windows, experts, states of all kinds."""


def made(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    family = FAMILIES[name]
    config = transformers.AutoConfig.for_model(family.model_type, **family.config)
    model = getattr(transformers, family.auto).from_config(config, dtype=torch.float32)
    with torch.no_grad():  # predictions that differ from token to token
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model.eval()


def sampling_of(length=12, seed=0, prefix=()) -> Sampling:
    return Sampling(
        length=length,
        seed=seed,
        prefix=torch.tensor(prefix).long(),
        first=torch.arange(3, VOCABULARY),
    )


def silent(_: int) -> None:
    pass


@pytest.fixture
def llama():
    return made("llama")


def drawn_plainly(model, what: Sampling, windows: range) -> list[list[int]]:
    """The same numbers, the whole text through the model for every token, and no cache."""
    found = []
    for numbers in what.uniforms(windows).double().numpy():
        ids = what.prefix.tolist() or [int(what.first[int(numbers[0] * len(what.first))])]
        while len(ids) < what.length:
            with torch.no_grad():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()
            edges = logits.softmax(-1).cumsum(-1).numpy()
            ids.append(int(np.searchsorted(edges, numbers[len(ids)] * edges[-1], side="right")))
        found.append(ids)
    return found


@pytest.mark.parametrize("family", CAUSAL)
def test_tokens_are_those_of_a_plain_loop_without_a_cache(family):
    model, what = made(family), sampling_of()
    windows = range(2, 4)
    assert write(model, what, windows, silent).tolist() == drawn_plainly(model, what, windows)


@pytest.mark.parametrize("is_another", [False, True])
def test_a_cache_is_given_up_for_another_state_and_not_for_rounding(is_another, caplog):
    """Of 2,000 tokens that are about as likely, rounding draws others, as another state does."""
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=2000, num_attention_heads=2, **size)
    model = transformers.LlamaForCausalLM(config).eval()
    tilt = torch.randn(2000).sort().values
    drawn = []

    def differs(_, __, logits):
        moved = logits + 0.05 * torch.randn(logits.shape)
        drawn.append(logits.shape[1])
        return moved + 8 * tilt if is_another and logits.shape[1] == 1 else moved

    model.lm_head.register_forward_hook(differs)
    what = Sampling(length=65, seed=0, prefix=torch.tensor([1]), first=torch.arange(2000))
    written = write(model, what, range(2), silent)
    assert ("with its cache" in caplog.text) == is_another
    assert drawn[:65] == [1] * 64 + [65]
    again = write(model, what, range(2), silent)
    assert is_another or (written != again).float().mean() > 0.3


def test_a_prefix_begins_every_window(llama):
    what = sampling_of(prefix=(1, 5))
    written = write(llama, what, range(4), silent)
    assert written[:, :2].tolist() == [[1, 5]] * 4
    assert written.tolist() == drawn_plainly(llama, what, range(4))
    assert len(set(map(tuple, written.tolist()))) == 4


def test_the_tokens_follow_the_models_probabilities(llama):
    count = 4000
    written = write(llama, sampling_of(length=2, prefix=(7,)), range(count), silent)
    with torch.no_grad():
        expected = llama(torch.tensor([[7]])).logits[0, -1].softmax(-1)
    share = torch.bincount(written[:, 1], minlength=VOCABULARY) / count
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((share - expected).abs() < 4.5 * deviation + 1 / count).all()
    assert expected.max() < 0.9  # or this would say little


def test_neither_generation_options_nor_dropout_have_a_say(llama):
    plain = write(llama, sampling_of(), range(3), silent)
    llama.generation_config = own = transformers.GenerationConfig(
        eos_token_id=plain[:, 3].tolist(), temperature=0.2, do_sample=True, repetition_penalty=3.0
    )
    llama.config.attention_dropout = 0.9
    llama.train()
    assert torch.equal(write(llama, sampling_of(), range(3), silent), plain)
    assert llama.generation_config is own
    assert all(part.training for part in llama.modules())
    assert torch.equal(write(llama, sampling_of(), range(1, 3), silent), plain[1:])
    assert not torch.equal(write(llama, sampling_of(seed=-1), range(3), silent), plain)


@pytest.mark.parametrize(
    ("value", "message"), [(1e4, "little but the token 2"), (torch.nan, "NaN")]
)
def test_what_is_no_text_is_refused(llama, value, message):
    def spoil(_, __, logits):
        logits[..., 2] = value
        return logits

    llama.lm_head.register_forward_hook(spoil)
    with pytest.raises(DataError, match=message):
        write(llama, sampling_of(), range(3), silent)


def test_what_cannot_write_is_refused():
    for model_type in ("bert", "t5"):
        with pytest.raises(TargetError, match="needs one causal language model"):
            require_writer(made(model_type))
    with pytest.raises(TargetError, match="no Hugging Face model, or several"):
        require_writer(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("size", [2, 8])
def test_processes_share_the_windows_and_all_get_all(llama, size, monkeypatch):
    monkeypatch.setattr(module, "windows_at_once", lambda *_: 3)
    whole = write(llama, sampling_of(), range(7), silent)
    models = [copy.deepcopy(llama) for _ in range(size)]

    def work(processes):
        tokens = []
        written = write_together(models[processes.rank], sampling_of(), 7, processes, tokens.append)
        assert sorted(tokens) == tokens
        assert all(0 < n <= 12 * len(range(7)[processes.share(7)]) for n in tokens)
        return written

    for written in together(size, work):
        assert torch.equal(written, whole)


def test_memory_for_half_a_batch_is_enough(llama, monkeypatch):
    whole, batches = write(llama, sampling_of(), range(7), silent), []

    def narrow(model, sampling, windows, report):
        batches.append(windows)
        if len(windows) > 2:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return write(model, sampling, windows, report)

    monkeypatch.setattr(module, "write", narrow)
    assert torch.equal(write_together(llama, sampling_of(), 7, ALONE, silent), whole)
    assert list(map(len, batches)) == [7, 3, 1, 1, 1, 1, 1, 1, 1]
    monkeypatch.setattr(module, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_together(llama, sampling_of(), 7, ALONE, silent)
