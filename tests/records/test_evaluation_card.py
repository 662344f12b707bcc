from mrp_lightning.records import evaluation as records

CARD = "# opt, pruned to 2:4 sparsity\n\nPruned with mrp-lightning.\n\n## Left dense\n\n- `a`\n"


def scores(perplexity):
    return {"perplexity": perplexity, "loss": 1.0, "context": 2048, "windows": 2, "tokens": 4094}


def test_perplexities_are_recorded_in_the_card_too(tmp_path):
    card = tmp_path / "README.md"
    card.write_text(CARD)
    records.record(tmp_path, perplexity={"c4": scores(28.0)})
    records.record(tmp_path, perplexity={"wikitext2": scores(31.5), "broken": scores(None)})
    first, second = card.read_text().split("\n## Perplexity\n")
    assert first + "\n" == CARD or first == CARD
    assert second.splitlines()[1:] == [
        "| text | perplexity | context | tokens |",
        "| --- | --- | --- | --- |",
        "| c4 | 28.000 | 2048 | 4,094 |",
        "| wikitext2 | 31.500 | 2048 | 4,094 |",
    ]
    once = card.read_text()
    records.record(tmp_path, perplexity={"c4": scores(28.0)})
    assert card.read_text() == once


def test_other_peoples_cards_and_no_card_are_left_alone(tmp_path):
    records.record(tmp_path, perplexity={"c4": scores(28.0)})
    assert not (tmp_path / "README.md").exists()
    (tmp_path / "README.md").write_text("# LLaMA\n")
    records.record(tmp_path, perplexity={"c4": scores(28.0)})
    assert (tmp_path / "README.md").read_text() == "# LLaMA\n"
