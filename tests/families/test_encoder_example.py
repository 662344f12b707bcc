"""docs/module.md runs, with a tiny BERT in place of the named one."""

import re
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from mrp_lightning.embedded import STDLIB_LLAMA

PAGE = (Path(__file__).parents[2] / "docs" / "module.md").read_text()
SIZE = {"vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64}


def test_a_sentence_encoder_is_pruned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = BertConfig(**SIZE, num_hidden_layers=2, num_attention_heads=4)
    dense = BertModel(config).eval()
    dense.save_pretrained("tiny-bert")
    AutoTokenizer.from_pretrained(STDLIB_LLAMA).save_pretrained("tiny-bert")
    lines = [" ".join(["import", "os", *["path"] * (n % 9)]) for n in range(64)]
    Path("sentences.txt").write_text("\n".join(lines))

    every = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S)
    (code,) = (block for block in every if "SentenceEncoder" in block)
    names: dict = {}
    exec(code.replace("sentence-transformers/all-MiniLM-L6-v2", "tiny-bert"), names)

    saved = AutoModel.from_pretrained("runs/encoder-2of4")
    assert AutoTokenizer.from_pretrained("runs/encoder-2of4").pad_token is not None
    pruned = {row.name for row in names["prune"].report.layers if row.skipped is None}
    assert len(pruned) == 2 * 6
    for name, parameter in saved.named_parameters():
        if name.removesuffix(".weight") in pruned:
            assert ((parameter.unflatten(1, (-1, 4)) == 0).sum(2) == 2).all(), name
        else:
            assert torch.equal(parameter, dense.get_parameter(name)), name

    # Only tokens counted: as many as the sentences have.
    tokens = sum(int(names["model"].collate([line])["attention_mask"].sum()) for line in lines)
    assert {row.tokens for row in names["prune"].report.layers} == {tokens}

    batch = names["model"].collate(lines[:8])
    with torch.no_grad():
        ours = names["model"].predict_step(batch, 0)
    assert torch.allclose(ours.norm(dim=-1), torch.ones(8), atol=1e-5)


def test_the_first_module_of_the_page_is_pruned_block_by_block(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    every = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S)
    (code,) = (block for block in every if "class Regression" in block)
    names: dict = {}
    exec(code, names)
    pruned = [row.name for row in names["prune"].report.layers]
    assert pruned == [f"blocks.{k}.linear" for k in range(4)]  # and not the head
