"""vLLM in processes of its own: experts, tensor parallelism, and the server."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from served import (
    WINDOW,
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

pytest.importorskip("vllm", reason="needs vLLM: `make vllm`")


def test_experts_stay_dense(root, packed):
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 192}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    source = random_model(root / "mixtral", "mixtral", removed, sizes)
    # The groups of experts exist where the first model of a process has some.
    dense, sparse = scores_elsewhere([source, packed(source, "bitmask")], noise(), dtype="bfloat16")
    assert (sparse.log_probs - dense.log_probs).abs().mean() < 0.02


@pytest.mark.parametrize("form", ["bitmask", "bitmask4"])
def test_two_workers_share_the_packed_tensors(form, half, root, packed, monkeypatch):
    source = half if form == "bitmask" else embedded(root / "four-bits", four_bits)
    directory = packed(source, form)
    # The embedded model has 704 columns, of which half is a multiple of 8, but not of 64.
    if form == "bitmask4":
        directory = packed(source, form, "--skip", "*.down_proj")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    (shared,) = scores_elsewhere([directory], text(), **two)
    whole = scores(engine(directory), text())
    assert (shared.log_probs - whole.log_probs).abs().mean() < 0.03
    assert shared.perplexity == pytest.approx(whole.perplexity, rel=2e-3)


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def complete(port, prompt):
    """Let the server continue a prompt, and return the tokens' text."""
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]["text"]


def wait_until_up(port, server):
    for _ in range(240):
        assert server.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    pytest.fail("the server is not up after four minutes")


def test_the_server_answers_two_requests_at_once_and_stops(half, packed, port, tmp_path):
    from transformers import AutoTokenizer

    directory = packed(half, "bitmask")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += ["--model", str(directory), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", str(WINDOW), "--max-num-seqs", "4", "--dtype", "bfloat16"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until_up(port, server)
        prompts = [text()[0][:16], text()[1][:16]]
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda prompt: complete(port, prompt), prompts))
    finally:
        server.send_signal(signal.SIGINT)
        status = server.wait(60)
    assert status in (0, 130, -signal.SIGINT), (tmp_path / "log").read_text()[-2000:]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    (greedy, _) = [scores(engine(directory), [prompt, prompt]).greedy for prompt in prompts]
    assert answers[0] == tokenizer.decode(greedy)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
