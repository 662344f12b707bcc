"""GGUF files of a pruned model, run by llama.cpp."""

import pytest
import torch
from served import text
from transformers import AutoModelForCausalLM

xllamacpp = pytest.importorskip("xllamacpp", reason="needs xllamacpp: `make vllm`")


@pytest.fixture(scope="module")
def server(half, root):
    """llama.cpp with the GGUF file of the model that the other tests pack, in float32."""
    from export.to_gguf import main

    file = root / "half.gguf"
    main([str(half), "--type", "f32", "--out", str(file)])
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel = str(file), 512, 1
    options.cpuparams.n_threads, options.warmup = 1, False
    return xllamacpp.Server(options)


@pytest.mark.parametrize("length", [1, 16, 100])
def test_the_likeliest_tokens_are_as_likely_as_in_transformers(length, half, server):
    ids = text()[1][:length]
    request = {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "logprobs": 20}
    (choice,) = server.handle_completions(request)["choices"]
    top = choice["logprobs"]["content"][0]["top_logprobs"]
    model = AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32).eval()
    with torch.inference_mode():
        log_probs = model(torch.tensor([ids])).logits[0, -1].log_softmax(0)
    theirs = torch.tensor([row["logprob"] for row in top])
    assert len(top) == 20
    assert torch.allclose(theirs, log_probs[[row["id"] for row in top]], atol=0.01)
    assert top[0]["id"] == int(log_probs.argmax())
