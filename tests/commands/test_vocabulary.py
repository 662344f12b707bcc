"""`mrp-lightning prune --vocabulary`, alone and before a pruning, on the embedded tokenizer."""

import io
import json
import math
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("jsonargparse", reason="the command line needs the extra `cli`")

from export.to_gguf import main as to_gguf
from mrp_lightning import CausalLM, OptionError, TextDataModule, cut_vocabulary
from mrp_lightning.commands.main import main
from mrp_lightning.records.evaluation import read
from mrp_lightning.records.report import PruningReport

from .conftest import LINES

SMALL = ["--num-samples=4", "--sequence-length=32", "--eval-samples=6", "--accelerator=cpu"]
REPORT = "pruning_report.json"

pytestmark = pytest.mark.usefixtures("short_library")


@pytest.fixture(scope="module")
def made(tiny_llama, tmp_path_factory, shortened):
    """A model that was cut to 700 tokens, and its GGUF file; what the command said of both."""
    pytest.importorskip("gguf", reason="needs the extra `gguf`")
    root = tmp_path_factory.mktemp("vocabulary")
    (root / "text.txt").write_text(LINES)
    asked = [f"--text={root / 'text.txt'}", *SMALL, f"--out={root / 'words'}"]
    said = io.StringIO()
    with shortened(), redirect_stdout(said):
        main(["prune", str(tiny_llama), "--vocabulary=700", *asked, f"--gguf={root}/words.gguf"])
    return root, " ".join(said.getvalue().split())


@pytest.fixture
def shown(made, text):
    """What the command said; copies of its results are in the working directory."""
    root, said = made
    shutil.copytree(root / "words", "words")
    shutil.copy(root / "words.gguf", "words.gguf")
    return said


def held_out(directory, text, num_bytes):
    """Bits a byte of as many bytes of the last tenth, by transformers' own loss."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    (rest,) = TextDataModule(train_files=text, hold_out=True).documents("test")
    ids = tokenizer(rest, add_special_tokens=False).input_ids
    nats, tokens, read_bytes = 0.0, 0, 0
    while read_bytes < num_bytes:
        window, ids = torch.tensor([ids[:32]]), ids[32:]
        with torch.no_grad():
            nats += 31 * float(model(window, labels=window).loss)
        tokens += 31
        read_bytes += len(tokenizer.decode(window[0, 1:]).encode())
    return read_bytes, read_bytes / tokens, nats / math.log(2) / read_bytes


def test_alone_nothing_else_changes(tiny_llama, text, shown):
    dense, cut = (AutoModelForCausalLM.from_pretrained(d).eval() for d in (tiny_llama, "words"))
    whole, smaller = (AutoTokenizer.from_pretrained(d) for d in (tiny_llama, "words"))
    vocabulary = whole.get_vocab()
    kept = torch.tensor(
        [vocabulary[w] for w in sorted(smaller.get_vocab(), key=smaller.get_vocab().get)]
    )
    assert cut.config.vocab_size == len(kept) == 700
    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    for name, tensor in dense.state_dict().items():
        assert torch.equal(cut.state_dict()[name], tensor[kept] if name in tables else tensor)
    assert cut.get_input_embeddings().weight is cut.lm_head.weight

    report = PruningReport.load(Path("words", REPORT))
    record = report.vocabulary
    assert report.config == {"vocabulary": 700, "base_model": str(tiny_llama)}
    assert report.complete
    assert not report.layers
    assert (record["size"], record["kept"], record["rows"]) == (len(vocabulary), 700, 2048)
    assert record["model_weights"] == [sum(p.numel() for p in m.parameters()) for m in (dense, cut)]
    (start,) = TextDataModule(train_files=text, hold_out=True).documents("train")
    counted = [len(t(start, add_special_tokens=False).input_ids) for t in (whole, smaller)]
    assert record["tokens"]["the text"] == counted
    assert record["tokens"]["German (UDHR, article 1)"][1] > 60
    measured = record["held_out"]
    for i, directory in enumerate((tiny_llama, "words")):
        size, of_token, bits = held_out(directory, text, measured["bytes"][i])
        assert size == measured["bytes"][i]
        assert of_token == pytest.approx(measured["bytes_per_token"][i])
        assert bits == pytest.approx(measured["bits_per_byte"][i], rel=1e-4)
        assert f"{measured['bits_per_byte'][i]:.4f}" in shown
    assert abs(measured["bytes"][0] - measured["bytes"][1]) <= 32 * measured["bytes_per_token"][1]
    (scores,) = read("words").perplexity.values()
    assert scores["bits_per_byte"] == measured["bits_per_byte"][1]
    assert "logits of these are equal to the bit" in shown
    card = Path("words", "README.md").read_text()
    assert "cut to a vocabulary of 700" in card
    assert "- vocabulary: 700 of" in card
    assert not [*Path("words").glob("merges.txt"), *Path("words").glob("vocab.json")]

    # What takes a directory takes this one, too; and it can be cut again.
    main(["report", "words"])
    main(["generate", "words", "--prompt=value", "--max-new-tokens=2", "--device=cpu"])
    main(["prune", "words", "--vocabulary=500", f"--text={text}", *SMALL, "--out=fewer"])
    again = PruningReport.load(Path("fewer", REPORT))
    assert again.provenance["pruned_before"] == [{"vocabulary": 700}]
    assert len(AutoTokenizer.from_pretrained("fewer")) == 500


def test_a_model_on_a_grid_stays_on_it(tiny_llama, text, capsys, caplog):
    """Its file has the types of the whole model's, which need what the pruning kept of minima."""
    gguf = pytest.importorskip("gguf", reason="needs the extra `gguf`")
    small = [f"--text={text}", *SMALL]
    main(["prune", str(tiny_llama), "--grid=q4_1", *small, "--out=whole"])
    main(["prune", "whole", "--vocabulary=700", *small, "--out=cut"])
    kinds = {}
    for run in ("whole", "cut"):
        to_gguf([run])
        stored = gguf.GGUFReader(f"{run}.gguf").tensors
        kinds[run] = {tensor.name: tensor.tensor_type.name for tensor in stored}
    assert kinds["cut"] == kinds["whole"]
    assert kinds["cut"]["blk.1.ffn_down.weight"] == "Q4_1"
    assert capsys.readouterr().out.count("Each holds the weights of the checkpoint to the bit") == 2
    assert "- before this run: quantised to q4_1 by JM" in Path("cut", "README.md").read_text()

    narrower = ["--structure=neurons", "--sparsity=0.5", "--out=narrower"]
    main(["prune", "whole", *narrower, *small])
    assert "on a grid of few bits by an earlier run, and the compensation" in caplog.text
    assert "single weights" not in caplog.text


@pytest.mark.usefixtures("shown")
def test_beside_a_pruning_it_comes_first(tiny_llama, text, capsys):
    """Against two commands, the second of which prunes the result of the first."""
    asked = [f"--text={text}", *SMALL]
    main(["prune", "words", "--sparsity=0.5", *asked, "--out=two"])
    main(["prune", str(tiny_llama), "--vocabulary=700", "--sparsity=0.5", *asked, "--out=one"])
    one, two = (AutoModelForCausalLM.from_pretrained(d).state_dict() for d in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert len(AutoTokenizer.from_pretrained("one")) == 700
    first, second = (PruningReport.load(Path(d, REPORT)) for d in ("one", "two"))
    assert first.vocabulary["kept"] == first.config["vocabulary"] == 700
    assert not second.vocabulary
    assert first.totals["removed"] == second.totals["removed"] > 0
    assert "cut to a vocabulary of 700 and pruned to 50%" in Path("one", "README.md").read_text()
    assert read("one").dense == read("two").dense
    with pytest.raises(SystemExit):
        main(["distill", "one", "--tokens=1000"])
    assert "its dense model has another one" in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("shown")
def test_a_gguf_file_has_the_words_and_their_merges():
    import gguf

    reader = gguf.GGUFReader("words.gguf")
    content = json.loads(Path("words", "tokenizer.json").read_text())
    tokens = sorted(AutoTokenizer.from_pretrained("words").get_vocab().items(), key=lambda w: w[1])
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["tokenizer.ggml.tokens"] == [token for token, _ in tokens]
    merges = [" ".join(m) if isinstance(m, list) else m for m in content["model"]["merges"]]
    assert fields["tokenizer.ggml.merges"] == merges
    (tensor,) = (t for t in reader.tensors if t.name == "token_embd.weight")
    assert [*tensor.shape] == [32, 700]
    to_gguf(["words", "--type=q8_0", "--out=words-q8_0.gguf"])


def test_from_python(tiny_llama, text):
    module = CausalLM(tiny_llama)
    module.model = torch.compile(module.model, backend="eager")
    record = cut_vocabulary(module, 700, [text.read_text()], save_dir="words")
    assert module.vocabulary is record
    assert len(module.tokenizer) == module.model.config.vocab_size == 700
    assert len(AutoTokenizer.from_pretrained("words")) == 700
    assert PruningReport.load(Path("words", REPORT)).vocabulary == record
    with pytest.raises(FileExistsError):
        cut_vocabulary(module, 500, [text.read_text()], save_dir="words")
    assert len(module.tokenizer) == 700
    with pytest.raises(OptionError, match="without `streaming`"):
        cut_vocabulary(CausalLM(tiny_llama, streaming=True), 700, [text.read_text()])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "Give the text by `--text FILE`"),
        (["--text=text.txt", "--distill=1000"], "Cut that of the dense model first"),
        (["--text=text.txt", "--method=SM"], "alone it cuts the vocabulary and prunes nothing"),
        (["--text=text.txt", "--own=0.5"], "so that `own` would mean nothing"),
        (["--text=text.txt", "--pack"], "`--vocabulary` alone leaves zeros"),
    ],
)
def test_mistakes_are_told_before_the_model_is_loaded(options, said, tiny_llama, text, capsys):
    with pytest.raises(SystemExit):
        main(["prune", str(tiny_llama), "--vocabulary=700", *options])
    shown = capsys.readouterr()
    assert said in " ".join(shown.err.split())
    assert "Loading" not in shown.out
