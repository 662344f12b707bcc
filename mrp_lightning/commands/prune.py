"""`mrp-lightning prune MODEL`: prune, compare with the dense model, save, and say what is next."""

import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from mrp_lightning.cli.command import add_model_options, as_typed, make_parser, number_from
from mrp_lightning.errors import OptionError
from mrp_lightning.solver.patterns import SemiStructured, make_pattern

_RECIPES: dict[str, dict[str, Any]] = {
    "paper": {"method": "SM"},
    "joint": {"method": "JM"},
    "best": {"method": "JM", "target": "dense", "tuning": True},
    "best_4bit": {"method": "JM", "target": "dense", "tuning": True, "bits": 4},
}
"""The arguments of `PruningCallback` by the name of a recipe, as in configs/recipes."""

_COLUMNS = 128
"""The columns that are chosen together, or as many fewer as the groups of a pattern divide."""

_OF_MODEL = ("model", "dtype", "gguf_file", "revision", "trust_remote_code")
_OF_TEXT = ("num_samples", "sequence_length", "batch_size", "seed")

_TYPED = {
    **{key: f"--{key.replace('_', '-')}" for key in ("pattern", "sparsity", "method", "overwrite")},
    **{f"data.{key}": f"--{key.replace('_', '-')}" for key in _OF_TEXT},
    "sequence_length": "--sequence-length",
    **dict.fromkeys(("train_files", "data.train_files", "data.eval_files"), "--text"),
    **dict.fromkeys(("data.{train,eval}_files", "data.calibration"), "--text"),
    "trainer.accelerator": "--accelerator",
    "model": "MODEL",
    "model.model": "MODEL",
    "save_dir": "--out",
}
"""What is typed here, by what the classes behind it call it."""

_DESCRIPTION = (
    "Prune a language model, measure its perplexity before and after on text that it was not "
    "calibrated on, and save it. `predict` has more options, and YAML files."
)


def main(args: list[str]) -> None:
    """Prune a model, and print what it cost.

    Raises:
        OptionError: Options contradict each other or are missing; before anything is loaded.
    """
    options = _parser().parse_args(args)
    with as_typed(_TYPED):
        recipe = _recipe(options)
    out = options.out or _default_out(options)
    # Only now: they load Lightning and transformers, which help and a mistake need not wait for.
    from rich.console import Console

    from mrp_lightning.commands.comparison import prune_and_compare
    from mrp_lightning.signals import interruptible, unclaimed_signals

    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    given = vars(options)
    with interruptible(unclaimed_signals(), at_once=True), as_typed(_TYPED):
        prune_and_compare(
            {key: given[key] for key in _OF_MODEL},
            {"train_files": options.text, **{key: given[key] for key in _OF_TEXT}},
            {**recipe, "save_dir": out, "overwrite": options.overwrite},
            windows=options.eval_samples,
            accelerator=options.accelerator,
            console=console,
        )
    print(_next_steps(out))


def _recipe(options: Namespace) -> dict[str, Any]:
    """The arguments of the pruning callback that the options stand for."""
    if (options.pattern is None) == (options.sparsity is None):
        both = " Got both." if options.pattern else ""
        raise OptionError(
            "`prune` needs one of `--pattern` (such as 2:4: two of every four weights are kept) "
            f"and `--sparsity` (such as 0.5: half of all weights are removed).{both}"
        )
    if options.method is not None and options.recipe is not None:
        raise OptionError("`--recipe` names a method, too: give either `--recipe` or `--method`.")
    chosen = dict(_RECIPES[options.recipe or "paper"])
    chosen["method"] = options.method or chosen["method"]
    pattern = make_pattern(options.sparsity, options.pattern)
    if isinstance(pattern, SemiStructured) and _COLUMNS % pattern.group:
        chosen["block_size"] = max(1, _COLUMNS // pattern.group) * pattern.group
    return {**chosen, "pattern": options.pattern, "sparsity": options.sparsity}


def _default_out(options: Namespace) -> Path:
    """A directory beside which nobody has to think: `opt-125m-2of4`, in the working directory."""
    name = Path(options.model).expanduser().resolve().name.removesuffix(".gguf")
    setting = options.pattern or f"{100 * options.sparsity:g}"
    return Path("-".join([name, setting.replace(":", "of"), *filter(None, [options.recipe])]))


def _next_steps(out: Path) -> str:
    pruned = shlex.quote(str(out))
    return "\n".join(
        [
            f"The pruned model is in {out}; AutoModelForCausalLM.from_pretrained loads it. Next:",
            f"  mrp-lightning export {pruned}",
            "      packs it without its zeros: smaller, and faster where a kernel supports it;",
            "      `python -m export.generate` generates text with the packed model",
            f"  mrp-lightning zeroshot --model {pruned} --tasks hellaswag,piqa",
            f"  mrp-lightning report {pruned}",
        ]
    )


def _parser() -> Any:
    parser = make_parser("mrp-lightning prune", _DESCRIPTION)
    add_model_options(parser, first=True)
    option = parser.add_argument
    option("--pattern", help="N:M keeps N of every M consecutive weights of a row, such as 2:4")
    option("--sparsity", type=float, help="the fraction of the weights to remove, such as 0.5")
    option("--method", help="SM (default), JM, SS (SparseGPT), wanda, magnitude, …")
    what = "paper (SM), joint (JM), best (JM, dense target, tuned blocks), or best_4bit, which "
    what += "also puts the weights on a grid of 4 bits; in place of a method"
    option("--recipe", choices=list(_RECIPES), help=what)
    what = "text or .jsonl files to calibrate on, of which a tenth is held out to evaluate on "
    what += "(default: the model writes its own, and is evaluated on Python's standard library)"
    option("--text", nargs="+", metavar="FILE", help=what)
    what = "the directory of the pruned model (default: MODEL-PATTERN in this directory)"
    option("--out", type=Path, metavar="DIR", help=what)
    option("--overwrite", action="store_true", help="replace what this package wrote there before")
    what = "windows of text to calibrate on (default: 128)"
    option("--num-samples", type=number_from(1), default=128, metavar="N", help=what)
    what = "tokens a window (default: 2048, or as many as the model reads)"
    option("--sequence-length", type=number_from(2), metavar="N", help=what)
    option("--batch-size", type=number_from(1), default=1, metavar="N", help="windows a batch")
    what = "the most windows to evaluate on (default: 64)"
    option("--eval-samples", type=number_from(1), default=64, metavar="N", help=what)
    option(
        "--seed", type=number_from(0), default=0, metavar="N", help="seed of the windows' places"
    )
    option("--dtype", help="the type in which the model is loaded (default: as it is stored)")
    option("--accelerator", default="auto", help="cpu, gpu, mps or auto (default)")
    return parser
