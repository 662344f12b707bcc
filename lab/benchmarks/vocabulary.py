r"""How much of a text needs other tokens than those that `prune --vocabulary` keeps.

    python lab/benchmarks/vocabulary.py TOKENIZER TEXT.txt MORE.txt

METHOD. The tokens are counted on the first nine tenths of TEXT, and again with MORE beside it; the
share of tokens that are not kept is that of the last tenth of TEXT.
"""

import argparse
from pathlib import Path

from transformers import AutoTokenizer

from mrp_lightning.narrowing.tokenizer import Vocabulary

SIZES = (8_000, 12_000, 16_000, 24_000, 32_000)


def main() -> None:
    """Print a row for each size of the vocabulary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer", help="a checkpoint's directory")
    parser.add_argument("text", type=Path)
    parser.add_argument("more", type=Path)
    options = parser.parse_args()
    vocabulary = Vocabulary.of(AutoTokenizer.from_pretrained(options.tokenizer))
    text = options.text.read_text("utf-8")
    cut = len(text) * 9 // 10
    counted, held_out = vocabulary.counts([text[:cut]]), vocabulary.counts([text[cut:]])
    with_more = counted + vocabulary.counts([options.more.read_text("utf-8")])
    print(f"{len(counted):,} tokens in {counted.total():,} tokens; with more, {len(with_more):,}")
    print("| tokens kept | others, counted on the text | with more |\n| --- | --- | --- |")
    for size in SIZES:
        shares = []
        for counts in (counted, with_more):
            kept = set(vocabulary.chosen(size, counts, ()))
            others = sum(n for token, n in held_out.items() if token not in kept)
            shares.append(f"{others / held_out.total():.2%}")
        print(f"| {size:,} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
