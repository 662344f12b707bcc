import pytest
import yaml
from huggingface_hub import ModelCard

from mrp_lightning.callbacks import PruningCallback
from mrp_lightning.pruning.arguments import BlockTuning
from mrp_lightning.records.model_card import model_card
from mrp_lightning.records.report import PruningReport
from mrp_lightning.records.rows import LayerReport

DATA = {"source": "c4", "samples": 128, "sequence_length": 2048, "seed": 3}


@pytest.fixture
def report():
    row = LayerReport(name="a.up", shape=(4, 8), method="SM", sparsity=0.5, relative_loss=0.25)
    config = {"method": "SM", "pattern": "2:4", "block_size": None, "damping": 0.01}
    dense = LayerReport.left_dense("a.down", (4, 9), "9 input features do not divide")
    report = PruningReport(config | {"targets": ["up"], "balance": False}, [row, dense])
    report.provenance = {"command": "python -m mrp_lightning predict --config a.yaml", "data": DATA}
    report.model_weights = 64
    return report


def front_matter(card):
    """What the hub reads, by the hub's own reader."""
    return ModelCard(card).data.to_dict()


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


@pytest.mark.parametrize(
    "arguments",
    [
        {"target": "dense", "tuning": BlockTuning(epochs=2), "sparsity": 0.7},
        {"allocation": "output", "sparsity": 0.7, "damping": 0.0},
        {"grid": "int4-g64", "balance": True},
        {"bits": 4, "pattern": "2:4", "group_size": 32},
    ],
)
def test_its_recipe_has_every_argument_that_is_no_default(report, arguments):
    prune = PruningCallback(method="JM", save_dir="somewhere", **arguments)
    report.config = prune.settings.config()
    recipe = yaml.safe_load(model_card(report, None).split("```yaml\n")[1].split("```")[0])
    if tuning := recipe["init_args"].get("tuning"):  # as the command line reads it
        recipe["init_args"]["tuning"] = BlockTuning(**tuning)
    again = PruningCallback(**recipe["init_args"], save_dir="somewhere")
    assert again.settings.config() == prune.settings.config()


@pytest.mark.parametrize("sparsity", [None, 0.5])
def test_a_model_on_a_grid_is_called_pruned_only_where_weights_were_removed(report, sparsity):
    report.config = {"method": "JM", "grid": "int4-g64", "sparsity": sparsity}
    card = model_card(report, "facebook/opt-125m")
    assert "quantised to int4-g64" in card
    assert "on the grid `int4-g64`" in card
    assert "its head" not in card
    assert (
        ("Pruned after training" in card) == ("weights removed in them" in card) == bool(sparsity)
    )
    assert ("Quantised after training" in card) == (not sparsity)


def test_a_directory_is_named_without_its_place(report, tmp_path):
    (tmp_path / "mine").mkdir()
    card = model_card(report, str(tmp_path / "mine"))
    assert "base_model" not in front_matter(card)
    assert "- base model: `mine`" in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (
            "mrp-lightning prune /data/me/opt --text ~/x/a.txt --out=../../b/c",
            "opt --text a.txt --out=c",
        ),
        (
            "mrp-lightning prune facebook/opt --config=runs/a.yaml",
            "facebook/opt --config=runs/a.yaml",
        ),
        ("mrp-lightning predict '--data.train_files=[/a/b.txt,/c d/e.txt]'", "[b.txt,/c d/e.txt]'"),
        ("mrp-lightning prune https://hub/x", "https://hub/x"),
    ],
)
def test_commands_name_files_without_their_directories(command, shown, report):
    report.provenance = {"command": command}
    (line,) = [x for x in model_card(report, None).splitlines() if x.startswith("mrp-lightning ")]
    assert line.endswith(shown)


def test_bytes_are_named_where_they_are_known(report):
    assert "- bytes of the weights: 1,234,567" in model_card(report, None, num_bytes=1234567)
    assert "bytes" not in model_card(report, None)


def test_what_is_not_known_is_left_out(report):
    report.provenance = {"command": None, "data": DATA | {"source": None, "seed": None}}
    card = model_card(report, None)
    assert "- calibrated on: 128 windows of 2048 tokens\n" in card
    report.provenance, report.model_weights = {}, None
    card = model_card(report, "Classifier", library=None)
    assert front_matter(card) == {"tags": ["pruned", "sparse"]}
    for unknown in ("calibrated", "Made by", "None", "of the model's weights"):
        assert unknown not in card


def test_of_a_model_without_zeros_no_zeros_are_listed(report):
    report.provenance["pruned_before"] = [{"vocabulary": 1000}]
    assert "- before this run: cut to a vocabulary of 1,000\n" in model_card(
        report, "facebook/opt-125m"
    )


def test_a_smaller_model_that_was_trained_kept_no_zeros(report):
    report.provenance["trained"] = {"steps": 16}
    report.provenance["pruned_before"] = [{"method": "SM", "sparsity": 0.2, "structure": "blocks"}]
    assert "with the removed weights kept at zero" in model_card(report, None)
    report.config.update(pattern=None, sparsity=0.2, structure="neurons")
    report.narrowed = {"structure": "neurons", "units": 40, "kept": 32, "config": {}}
    report.narrowed["model_weights"] = report.model_weights
    card = model_card(report, None)
    assert "then trained for 16 steps. What" in card
    assert "- before this run: without 20% of the blocks\n" in card


@pytest.mark.parametrize(
    ("changed", "tags"),
    [
        ({}, ["pruned", "sparse"]),
        ({"pattern": None, "sparsity": 0.2, "structure": "neurons"}, ["pruned"]),
        ({"pattern": None, "bits": 4, "group_size": 64}, ["quantized"]),
    ],
)
def test_its_tags_say_what_was_done(changed, tags, report):
    report.config.update(changed)
    assert front_matter(model_card(report, None))["tags"] == tags


def test_a_cut_of_the_vocabulary_has_no_recipe(report):
    report.config = {"vocabulary": 1000, "base_model": None}
    report.layers = []
    card = model_card(report, None)
    assert front_matter(card)["tags"] == ["pruned"]
    assert "## Recipe" not in card
    assert "## Made by\n\n```\npython -m mrp_lightning" in card
