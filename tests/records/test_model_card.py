import pytest
import yaml

from mrp_lightning.records.model_card import model_card
from mrp_lightning.records.report import PruningReport
from mrp_lightning.records.rows import LayerReport

DATA = {"source": "c4", "samples": 128, "sequence_length": 2048, "seed": 3}


@pytest.fixture
def report():
    row = LayerReport(name="a.up", shape=(4, 8), method="SM", sparsity=0.5, relative_loss=0.25)
    config = {"method": "SM", "pattern": "2:4", "block_size": None, "damping": 0.01}
    report = PruningReport(config | {"targets": ["up"], "true_sequential": False}, [row])
    report.skip("a.down", (4, 9), "9 input features do not divide")
    report.provenance = {"command": "python -m mrp_lightning predict --config a.yaml", "data": DATA}
    report.model_weights = 64
    return report


def front_matter(card):
    """What the hub reads, by the hub's own reader."""
    hub = pytest.importorskip("huggingface_hub")
    return hub.ModelCard(card).data.to_dict()


def test_it_names_base_model_data_recipe_and_command(report):
    card = model_card(report, "facebook/opt-125m")
    data = front_matter(card)
    assert data["base_model"] == "facebook/opt-125m"
    assert data["library_name"] == "transformers"
    assert "license" not in data
    assert "# opt-125m, pruned to 2:4 sparsity" in card
    assert "- base model: `facebook/opt-125m`" in card
    assert "- layers pruned: 1, 50% of the model's weights; left dense: 1" in card
    assert "- calibrated on: 128 windows of 2048 tokens of c4, seed 3" in card
    assert "```\npython -m mrp_lightning predict --config a.yaml\n```" in card
    assert "- `a.down`: 9 input features do not divide" in card
    recipe = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert recipe == {
        "class_path": "callbacks.PruningCallback",
        "init_args": {
            "method": "SM",
            "pattern": "2:4",
            "block_size": None,
            "damping": 0.01,
            "targets": ["up"],
        },
    }


def test_a_directory_is_named_without_its_place(report, tmp_path):
    (tmp_path / "mine").mkdir()
    card = model_card(report, str(tmp_path / "mine"))
    assert "base_model" not in front_matter(card)
    assert "- base model: `mine`" in card
    assert str(tmp_path) not in card


def test_what_is_not_known_is_left_out(report):
    report.provenance = {"command": None, "data": DATA | {"source": None, "seed": None}}
    card = model_card(report, None)
    assert "- calibrated on: 128 windows of 2048 tokens\n" in card
    report.provenance, report.model_weights = {}, None
    card = model_card(report, "Classifier", library=None)
    assert front_matter(card) == {"tags": ["pruned", "sparse"]}
    for unknown in ("calibrated", "Made by", "None", "of the model's weights"):
        assert unknown not in card
