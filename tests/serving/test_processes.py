"""vLLM in processes of its own: experts, tensor parallelism, and the server."""

import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served import (
    embedded,
    engine,
    four_bits,
    noise,
    random_model,
    removed,
    scores,
    scores_elsewhere,
    text,
)
from trouble import servers

pytest.importorskip("vllm", reason="needs vLLM: `make vllm`")


def test_experts_stay_dense(root, packed):
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 192}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    source = random_model(root / "mixtral", "mixtral", removed, sizes)
    # The groups of experts exist where the first model of a process has some.
    dense, sparse = scores_elsewhere([source, packed(source, "bitmask")], noise(), dtype="bfloat16")
    assert (sparse.log_probs - dense.log_probs).abs().mean() < 0.02


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("bitmask", ()),
        ("bitmask4", ("--activations", "exact")),
        ("bitmask4", ("--activations", "int8")),
    ],
    ids=["bitmask", "bitmask4", "rounded"],
)
def test_two_workers_share_the_packed_tensors(form, options, half, root, packed, monkeypatch):
    source = half if form == "bitmask" else embedded(root / "four-bits", four_bits)
    directory = packed(source, form)
    # The embedded model has 704 columns, of which half is a multiple of 8, but not of 64.
    if form == "bitmask4":
        directory = packed(source, form, *options, "--skip", "*.down_proj")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    (shared,) = scores_elsewhere([directory], text(), **two)
    whole = scores(engine(directory), text())
    assert (shared.log_probs - whole.log_probs).abs().mean() < 0.03
    assert shared.perplexity == pytest.approx(whole.perplexity, rel=2e-3)


def test_a_server_that_is_killed_while_it_loads_changes_no_file(half, packed, tmp_path):
    model = packed(half, "bitmask")
    before = servers.state(model)
    server = servers.Server(Path(sys.executable), model, tmp_path)
    try:
        assert server.wait_for_engine(240), server.log.read_text()[-2000:]
        server.kill(engine=True)
    finally:
        server.stop()
    assert servers.state(model) == before


def test_the_server_answers_two_requests_at_once_and_stops(half, packed, tmp_path):
    from transformers import AutoTokenizer

    directory = packed(half, "bitmask")
    server = servers.Server(Path(sys.executable), directory, tmp_path)
    try:
        assert server.wait_until_up(240), "the server is not up after four minutes"
        prompts = [text()[0][:16], text()[1][:16]]
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(server.complete, prompts))
    finally:
        status = server.stop()
    assert status in (0, 130, -signal.SIGINT), server.log.read_text()[-2000:]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    (greedy, _) = [scores(engine(directory), [prompt, prompt]).greedy for prompt in prompts]
    assert answers[0] == tokenizer.decode(greedy)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0
