"""The card of an exported model."""

import json

import huggingface_hub

from export.to_sparse import main
from mrp_lightning.records import evaluation as records

CARD = "---\nlicense: mit\ntags: [pruned]\n---\n\n# Tiny, pruned with mrp-lightning\n"
SCORES = {"perplexity": 28.0, "loss": 1.0, "context": 128, "windows": 2, "tokens": 254}


def test_it_is_the_pruned_models_with_how_to_load_it(llama, tmp_path, monkeypatch):
    (llama / "README.md").write_text(CARD)
    records.record(llama, perplexity={"c4": SCORES}, dense={"c4": SCORES})
    main([str(llama), "--out", str(tmp_path / "out")])
    text = (tmp_path / "out" / "README.md").read_text()
    data = huggingface_hub.ModelCard(text).data
    assert data.to_dict().keys() == {"license", "tags"}
    assert text.split("---\n")[2].startswith(CARD.split("---\n")[2])
    assert "| c4 | 28.000 | 28.000 | 1 | 128 | 254 |" in text
    assert "14 layers take 0.5625 of their bytes" in text
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert f"Its weight files have {size:,} bytes, those of the pruned" in text
    assert str(tmp_path) not in text
    assert "\n* logits: equal\n" in text
    assert "README.md" in json.loads((tmp_path / "out" / "export_report.json").read_text())["files"]
    code = text.split("```python\n")[1].split("```")[0]
    assert code.startswith("import export")
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    exec(code.replace("DIRECTORY", "out"), found)
    assert type(found["model"]).__name__ == "LlamaForCausalLM"


def test_a_model_without_a_card_gets_one(exports, tmp_path):
    text = (exports("packed", tmp_path).packed / "README.md").read_text()
    assert huggingface_hub.ModelCard(text).data.tags == ["pruned", "sparse"]
    assert "import export" in text


def test_the_dense_form_has_the_pruned_models(llama):
    (llama / "README.md").write_text(CARD)
    main([str(llama), "--format", "dense"])
    assert (llama.with_name("llama-dense") / "README.md").read_text() == CARD
