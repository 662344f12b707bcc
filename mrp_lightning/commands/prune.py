"""`mrp-lightning prune MODEL`: prune, compare with the dense model, save, convert."""

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from mrp_lightning.commands.command import (
    CommandParser,
    add_model_options,
    check_model,
    check_output,
    check_text,
    number_from,
)
from mrp_lightning.environment import extra, quiet_lightning, require_extra
from mrp_lightning.errors import OptionError
from mrp_lightning.models.locations import require_model
from mrp_lightning.pruning.arguments import PruningArguments

if TYPE_CHECKING:
    from mrp_lightning.callbacks import PruningCallback
    from mrp_lightning.commands.comparison import Conversion
    from mrp_lightning.commands.distillation import DistilledPruning
    from mrp_lightning.pruning.settings import Settings
    from mrp_lightning.terminal import Console

_RECIPES: dict[str, dict[str, Any]] = {
    "paper": {"method": "SM"},
    "joint": {"method": "JM"},
    "best": {"method": "JM", "target": "dense", "tuning": True},
    "best_4bit": {"method": "JM", "target": "dense", "tuning": True, "bits": 4},
}
"""The arguments of `PruningCallback` of each recipe, as in configs/recipes."""

_COLUMNS = 128
"""The default block size, reduced to a multiple of the pattern's group."""

_OF_MODEL = ("model", "dtype", "gguf_file", "revision", "trust_remote_code")
_OF_TEXT = (
    *("train_files", "num_samples", "sequence_length", "batch_size", "seed", "text_column"),
    *("tokenizer", "own"),
)
_SETTINGS = [field.name for field in fields(PruningArguments)]

_DESCRIPTION = (
    "Prune or quantise a language model, measure its perplexity before and after on text that it "
    "was not calibrated on, save it, and convert it. `predict` does the same by YAML files. An "
    "encoder or classifier of text is measured by the cosine of its outputs before and after."
)


def main(args: list[str]) -> None:
    """Prune a model, and print its quality, size and speed, or why it is of no use.

    Raises:
        OptionError: Options contradict each other or are missing; before anything is loaded.
    """
    parser = _parser(args)
    options = parser.parse_args(args)
    with parser.options_in_messages():
        _first_checks(options)
        settings = _settings(options)
    out = options.save_dir or _default_out(options, settings)
    # Imported late, since help and mistakes need not wait for Lightning and transformers.
    from mrp_lightning.signals import interruptible, unclaimed_signals
    from mrp_lightning.terminal import Console

    console = Console(width=None if sys.stdout.isatty() else 100)
    with interruptible(unclaimed_signals()), parser.options_in_messages():
        _run(parser, options, settings, out, console)


def _run(
    parser: CommandParser,
    options: Namespace,
    settings: "Settings | None",
    out: Path,
    console: "Console",
) -> None:
    """Cut the vocabulary, prune, distil, evaluate and convert, as far as the options ask for it."""
    from mrp_lightning.callbacks import PruningCallback
    from mrp_lightning.commands.comparison import cut_and_compare, prune_and_compare
    from mrp_lightning.commands.subject import Subject
    from mrp_lightning.loop.causal_lm import CausalLM
    from mrp_lightning.loop.module_parts import plan_for
    from mrp_lightning.loop.pruned_module import check_save_dir
    from mrp_lightning.loop.trainer import require_accelerator
    from mrp_lightning.loop.vocabulary import save_cut
    from mrp_lightning.records import evaluation
    from mrp_lightning.storage.files import output_path

    require_accelerator(options.accelerator)
    overwrite, values = options.overwrite, vars(options)
    conversions, callback, problem = _conversions(options, out, settings), None, None
    if settings is not None:
        callback = PruningCallback(
            save_dir=out,
            overwrite=overwrite,
            resume=not options.restart,
            **{name: getattr(settings, name) for name in _SETTINGS},
        )
    source = {key: values[key] for key in _OF_MODEL}
    text = {key: values[key] for key in _OF_TEXT if values[key] is not None}
    with quiet_lightning(), _from_standard_input(options.train_files) as files:
        distilled = _distilled(parser, options, callback, output_path(out), files)
        console.print(f"Loading {options.model} …")
        subject = Subject(
            source, text | {"train_files": files}, options.eval_samples, options.accelerator
        )
        # Each step checks what the later ones need: a wrong option would show hours later.
        check_save_dir(out, subject.model, overwrite=overwrite, argument="--out")
        for conversion in conversions:
            conversion.check(subject.model)
        if options.vocabulary is not None:
            if callback is not None:
                plan_for(subject.model, callback.settings)  # refuses before the cut
            scores = cut_and_compare(subject, options.vocabulary, console)
        if callback is not None:
            with nullcontext() if distilled is None else distilled.unfinished.begun():
                problem = prune_and_compare(subject, callback, distilled, console)
        else:
            assert isinstance(subject.model, CausalLM)  # else its vocabulary cannot be cut
            save_cut(subject.model, out, overwrite=overwrite)
            evaluation.record(out, perplexity={subject.text: scores}, model=str(out))
    for conversion in conversions:
        conversion.convert(out, console)
    encoder, written = None, output_path(out)
    if not evaluation.read(written).perplexity:  # encoders have none
        config = json.loads((written / "config.json").read_text("utf-8"))
        encoder = str(config["architectures"][0])
    steps = _next_steps(out, conversions, settings, encoder)
    console.print(problem or steps, soft_wrap=True)


def _first_checks(options: Namespace) -> None:
    """Raise for an option that names what is not there, before torch is loaded."""
    check_model(options.model, options.gguf_file)
    check_text(options.train_files, options.text_column)
    if options.text_column is not None and not options.train_files:
        raise OptionError("it is about the files of `--text`. Give them, too.", "text_column")
    if options.own is not None and not (options.train_files and 0 <= options.own < 1):
        raise OptionError(
            "expected a share of the text, from 0 to less than 1, beside the files of `--text` "
            f"(without files all of the text is the model's own). Got {options.own:g}.",
            "own",
        )
    check_output(options.save_dir, overwrite=options.overwrite)
    if options.moment_bits is not None and options.tokens is None:
        raise OptionError("it is about the training of `--distill`. Give that, too.", "moment_bits")
    if options.moment_bits == 8:
        require_extra("torchao", "`--moment-bits 8`")
    if options.gguf is not None:
        require_extra("gguf", "Writing a GGUF file")


def _settings(options: Namespace) -> "Settings | None":
    """Return the settings for the options, checked before anything is loaded.

    The result is `None` if nothing is pruned, but the vocabulary cut.
    """
    if options.vocabulary is not None:
        _check_vocabulary(options)
    if options.method is not None and options.recipe is not None:
        raise OptionError("a recipe has a method. Give either `--recipe` or `--method`.", "recipe")
    values = {name: getattr(options, name) for name in _SETTINGS}
    chosen = {name: value for name, value in values.items() if value is not None}
    if not chosen.keys() & {"pattern", "sparsity", "bits", "grid", "head_grid"}:
        if options.vocabulary is not None:
            if others := [*chosen, *(x for x in ("recipe", "own") if getattr(options, x))]:
                raise OptionError(
                    "alone it cuts the vocabulary and prunes nothing, so that "
                    f"{', '.join(f'`{name}`' for name in others)} would mean nothing. Leave this "
                    "out, or give `--sparsity` or `--pattern`.",
                    "vocabulary",
                )
            return None
        raise OptionError(
            "`prune` needs one of `--pattern` (such as 2:4: two of every four weights are kept) "
            "and `--sparsity` (such as 0.5: half of all weights are removed), or `--bits`, "
            "`--grid` or `--head-grid`, with either of them or alone, or `--vocabulary`."
        )
    # Options that the user gives override the recipe's, so `chosen` holds only options that are
    # set: a default would undo the recipe.
    # A joint mask has no column blocks, and is one of single weights, not of units.
    default = "paper" if chosen.keys() & {"structure", "block_size"} else "joint"
    arguments = {**_RECIPES[options.recipe or default], **chosen}
    if {"pattern", "sparsity"} <= chosen.keys():
        raise OptionError("give either `--pattern` or `--sparsity`. Got both.")
    # Imported late, since help and the mistakes above need not wait for torch.
    from mrp_lightning.pruning.settings import Settings
    from mrp_lightning.solver.patterns import SemiStructured, make_pattern

    if "pattern" in chosen and "block_size" not in chosen:
        pattern = make_pattern(None, options.pattern)
        # A block that ends within a group would choose the mask of half a group. The default
        # shrinks; a block size that the user names is an error of `Settings` instead.
        if isinstance(pattern, SemiStructured) and _COLUMNS % pattern.group:
            arguments["block_size"] = max(1, _COLUMNS // pattern.group) * pattern.group
    return Settings(**arguments)


def _check_vocabulary(options: Namespace) -> None:
    """Raise an OptionError if a vocabulary is to be cut without text, or before distillation."""
    if not options.train_files:
        raise OptionError(
            "it keeps the tokens that a text needs. Give the text by `--text FILE`.", "vocabulary"
        )
    if options.tokens is not None:
        raise OptionError(
            "the dense model, which it learns from, has a whole vocabulary. Cut that of the dense "
            "model first (`--vocabulary N --out DIR`), and then prune and distil DIR, whose dense "
            "model has the same vocabulary.",
            "tokens",
        )


def _distilled(
    parser: CommandParser,
    options: Namespace,
    prune: "PruningCallback | None",
    out: Path,
    files: Sequence[str] | None,
) -> "DistilledPruning | None":
    """Return the pruning with a distillation, if the options have one."""
    if options.tokens is None or prune is None:
        return None
    from mrp_lightning.commands.distillation import (
        DistilledPruning,
        Unfinished,
        state_of,
        state_of_model,
    )
    from mrp_lightning.solver.patterns import Dense
    from mrp_lightning.targets.blocks import LEAST_SPARSITY
    from mrp_lightning.text.documents import expanded

    if prune.settings.structure is None and isinstance(prune.settings.recipe.pattern, Dense):
        raise OptionError(
            "it trains what a pruning kept. Give `--sparsity`, `--pattern` or `--structure`, too.",
            "tokens",
        )
    if prune.settings.structure is None and prune.settings.recipe.pattern.sparsity < LEAST_SPARSITY:
        raise OptionError(
            f"training would fill the zeros of a layer with fewer than {LEAST_SPARSITY:.0%}. Give "
            "a higher `--sparsity`, or leave it out.",
            "tokens",
        )
    if prune.settings.structure is not None and prune.settings.recipe.grids:
        raise OptionError(
            f"what is left after a distillation of fewer {prune.settings.structure} is rounded by "
            "a run of its own. Leave it out, and give it to a second `prune`, of what this run "
            "saves.",
            "head_grid",
        )
    is_tuned = prune.settings.target == "dense" or prune.settings.block_tuning is not None
    if is_tuned and not prune.settings.recipe.grids:
        raise OptionError(
            "a dense target and tuning, as `--recipe best` has them, gain nothing before a "
            "distillation (lab/results/distillation.md). Leave them out, or give `--bits` or "
            "`--grid`, whose rounding after it gains by them.",
            "tokens",
        )
    if prune.settings.allocation != "uniform" and prune.settings.recipe.grids:
        raise OptionError(
            "its layers have other sparsities, which the rounding after a distillation would not "
            "keep. Leave out `--distill`, or the bits.",
            "allocation",
        )
    of_result = {"save_dir", "overwrite", "restart", "pack", "gguf", "eval_samples"}
    chosen = parser.by_option(options, vars(options).keys() - of_result - {"named_model"})
    teacher = _teacher(options)
    chosen["content of MODEL"] = state_of_model(options.model)
    if teacher["model"] != options.model:
        chosen["content of the dense model"] = state_of_model(teacher["model"])
    if files and "-" not in options.train_files:
        paths = expanded({"train_files": [Path(name) for name in files]})["train_files"]
        chosen["content of the text"] = state_of(paths)
    of_text = ("text_column", "tokenizer", "seed", "own")
    return DistilledPruning(
        prune,
        teacher,
        files,
        {key: value for key in of_text if (value := getattr(options, key)) is not None},
        options.tokens,
        options.moment_bits or 32,
        Unfinished.of(out, chosen, restart=options.restart),
        options.accelerator,
    )


def _teacher(options: Namespace) -> dict[str, Any]:
    """Return the arguments of `CausalLM` for the dense model, before all prunings of MODEL.

    Raises:
        OptionError: MODEL was pruned before, and its dense model is gone.
        FormatError: A report of an earlier pruning cannot be read.
    """
    from mrp_lightning.records.report import NAME, PruningReport, dense_model_of
    from mrp_lightning.storage.files import output_path

    given = {key: getattr(options, key) for key in _OF_MODEL}
    file = output_path(options.model) / NAME
    report = PruningReport.load(file) if file.is_file() else None
    # The model before a cut of the vocabulary has another one.
    dense = None if report is None or report.vocabulary else dense_model_of(report)
    if dense is None:
        return given
    try:
        require_model(dense)
    except FileNotFoundError as error:
        raise OptionError(
            f"it learns from the dense model of {options.model}, and {dense} is not there. Leave "
            "it out, and then distil the result: `mrp-lightning distill --teacher DIR`.",
            "tokens",
        ) from error
    return given | {"model": dense, "gguf_file": None, "revision": None}


def _conversions(options: Namespace, out: Path, settings: "Settings | None") -> list["Conversion"]:
    """Return the commands that convert the result.

    Raises:
        OptionError: A command would refuse the result, hours later.
    """
    from mrp_lightning.commands.comparison import Conversion

    again = ["--overwrite"] * options.overwrite
    conversions = []
    if options.pack:
        if settings is None or settings.structure is not None:
            raise OptionError(
                "neither `--structure` nor `--vocabulary` alone leaves zeros or few bits to pack. "
                "Leave it out: what is saved is smaller as it is.",
                "pack",
            )
        recipe = settings.recipe
        grid = recipe.head_grid if recipe.is_of_head_alone else recipe.grid
        engine = None if grid is None else grid.engine
        if engine == "llama.cpp":
            raise OptionError(
                f"{grid} is a type of llama.cpp. Write its file by `--gguf OUT.gguf`.", "pack"
            )
        form = ["--format", "compressed-tensors"] if engine else []
        packed = out.with_name(f"{out.name}-{form[-1] if form else 'packed'}")
        conversions.append(Conversion("export", packed, [*form, *again]))
    if options.gguf:
        if options.gguf.suffix != ".gguf":
            raise OptionError(f"expected a file that ends in .gguf. Got {options.gguf}.", "gguf")
        if out.resolve() in options.gguf.resolve().parents:
            # `--overwrite` would refuse to replace the directory, for a file that is not its own.
            raise OptionError(f"expected a file outside of {out}. Got {options.gguf}.", "gguf")
        # The file's tokenizer has the whole vocabulary.
        is_like = options.model.endswith(".gguf") and options.vocabulary is None
        like = ["--like", options.model] if is_like else []
        conversions.append(Conversion("gguf", options.gguf, [*like, *again]))
    return conversions


@contextmanager
def _from_standard_input(files: Sequence[str] | None) -> Iterator[list[str] | None]:
    """Yield the files, with a temporary file of standard input in place of `-`."""
    if not files or "-" not in files:
        yield list(files) if files else None
        return
    with TemporaryDirectory(prefix="mrp-lightning-") as directory:
        # Files may be read more than once, and a pipe cannot be.
        file = Path(directory, "stdin.txt")
        file.write_bytes(sys.stdin.buffer.read())
        yield [str(file) if name == "-" else name for name in files]


def _default_out(options: Namespace, settings: "Settings | None") -> Path:
    """Return a directory in the working directory such as `opt-125m-2of4`."""
    name = Path(options.model).expanduser().resolve().name.removesuffix(".gguf")
    amount = options.pattern or (f"{100 * options.sparsity:g}" if options.sparsity else None)
    bits = f"{settings.bits}bit" if settings is not None and options.bits else None
    tokens = f"{options.vocabulary}tokens" if options.vocabulary else None
    head = f"head-{options.head_grid}" if options.head_grid else None
    parts = [name, tokens, amount, options.structure, options.grid or bits, head, options.recipe]
    return Path("-".join(part.replace(":", "of").replace(" ", "") for part in parts if part))


def _next_steps(
    out: Path, conversions: "Sequence[Conversion]", settings: "Settings | None", encoder: str | None
) -> str:
    """Return the next steps as commands.

    `encoder` is the class of a model that predicts no next token, and `None` for one that does.
    """
    directory = shlex.quote(str(out))
    runnable = directory  # the directory for `generate`: a packed copy, if there is one
    kind = encoder or "AutoModelForCausalLM"
    lines = [f"The result is in {out}; {kind}.from_pretrained loads it. Next:"]
    for conversion in conversions:
        result = shlex.quote(str(conversion.out))
        if conversion.command == "gguf":
            lines.append(f"  llama-cli -m {result}")
        elif "compressed-tensors" in conversion.options:
            lines.append(f"  vllm serve {result}")
        else:
            runnable = result
    if not conversions:
        grid = None if settings is None else settings.recipe.grid
        is_of_llama_cpp = grid is not None and grid.engine == "llama.cpp"
        is_dense = settings is None or settings.structure is not None
        command = "gguf" if is_dense or is_of_llama_cpp else "export"
        # llama.cpp's files are made of models that predict tokens.
        if encoder is None or command != "gguf":
            lines.append(f"  mrp-lightning {command} {directory}")
    if encoder is None:
        lines += [
            f'  mrp-lightning generate {runnable} --prompt "Once upon a time"',
            f"  mrp-lightning zeroshot {directory} --tasks hellaswag,piqa",
        ]
    return "\n".join([*lines, f"  mrp-lightning report {directory}"])


def _first_sentences() -> dict[str, str]:
    """Return the first sentence on each of the arguments, with its default if it is a value."""
    with extra("cli", "Help on `prune`"):
        from docstring_parser import parse_from_object  # reads and parses source files

    sentences = {}
    # Base classes come first, so that a derived class's sentence on an argument replaces an earlier
    # one.
    for kind in reversed(PruningArguments.__mro__[:-1]):
        for parameter in parse_from_object(kind).params:
            text = " ".join((parameter.description or "").split()).partition(". ")[0].rstrip(".")
            default = getattr(PruningArguments, parameter.arg_name, None)
            shown = "" if default is None or isinstance(default, bool) else f" (default: {default})"
            sentences[parameter.arg_name] = f"{text}{shown}".replace("%", "%%")
    return sentences


def _add_settings(parser: CommandParser, *, with_help: bool) -> None:
    """Add an option without default for each of the `PruningArguments`."""
    hints, texts = get_type_hints(PruningArguments), _first_sentences() if with_help else {}
    shown = parser.add_argument_group("amount and method")
    for name in _SETTINGS:
        kinds = {*(get_args(hints[name]) or [hints[name]])}
        option, text = f"--{name.replace('_', '-')}", texts.get(name)
        if bool in kinds:
            shown.add_argument(option, action="store_true", default=None, help=text)
        elif any(get_origin(kind) is not None for kind in kinds):
            shown.add_argument(option, nargs="+", metavar="NAME", help=text)
        else:
            # Wider types come first: `int` would refuse 0.5 for an option that is `int | float`.
            kind = next(kind for kind in (str, float, int) if kind in kinds)
            shown.add_argument(option, type=kind, help=text)


def _parser(args: Sequence[str] = ()) -> CommandParser:
    parser = CommandParser("mrp-lightning prune", _DESCRIPTION)
    add_model_options(parser)
    option = parser.add_argument
    text = (
        "joint (JM, the default), paper (SM), best (JM, dense target, tuned blocks), or best_4bit, "
    )
    text += "which also puts the weights on a grid of 4 bits; in place of a method"
    option("--recipe", choices=list(_RECIPES), help=text)
    _add_settings(parser, with_help=not {"-h", "--help"}.isdisjoint(args))
    text = "first cut the vocabulary to the N tokens that the text needs most, bytes and special "
    text += "tokens included; alone, nothing is pruned"
    option("--vocabulary", type=number_from(1), metavar="N", help=text)
    text = "then train what is kept on N tokens, as `distill` does: before it is put on few bits"
    option("--distill", dest="tokens", type=number_from(1), metavar="N", help=text)
    text = "the bits of each of the optimizer's two moments of a weight in that training: 32 "
    text += "(default), or 8, for less memory (needs torchao)"
    option("--moment-bits", type=int, choices=[32, 8], help=text)
    group = parser.add_argument_group("text")
    text = "files, directories or wildcards to calibrate on, or - for standard input, of which a "
    text += "tenth is held out to evaluate on: text, .jsonl, tables (default: the model writes its "
    text += "own, and is evaluated on Python's standard library)"
    group.add_argument("--text", dest="train_files", nargs="+", metavar="FILE", help=text)
    text = "the share of text that the model writes itself, beside these files: it loses less on "
    text += "other text (default: 0, and 0.5 with --distill)"
    group.add_argument("--own", type=float, metavar="SHARE", help=text)
    text = "the key of the text in .jsonl files, and its column in tables (default: text)"
    group.add_argument("--text-column", metavar="NAME", help=text)
    text = "the directory or hub id of a tokenizer (default: the model's own)"
    group.add_argument("--tokenizer", metavar="NAME", help=text)
    text = "windows of text to calibrate on (default: 128, and fewer of its own where a model is "
    text += "small)"
    number = number_from(1)
    group.add_argument("--num-samples", type=number, metavar="N", help=text)
    text = "tokens a window (default: 2048, or as many as the model reads)"
    group.add_argument("--sequence-length", type=number_from(2), metavar="N", help=text)
    group.add_argument("--batch-size", type=number, default=1, metavar="N", help="windows a batch")
    text = "the most windows to evaluate on (default: 64)"
    group.add_argument("--eval-samples", type=number, default=64, metavar="N", help=text)
    text = "seed of the windows' positions"
    group.add_argument("--seed", type=number_from(0), default=0, metavar="N", help=text)
    group = parser.add_argument_group("result")
    text = "the directory of the pruned model (default: MODEL-PATTERN in this directory)"
    group.add_argument("--out", dest="save_dir", type=Path, metavar="DIR", help=text)
    text = "replace what this package wrote there before"
    group.add_argument("--overwrite", action="store_true", help=text)
    text = "start afresh, without the results of an interrupted run"
    group.add_argument("--restart", action="store_true", help=text)
    text = "also write a copy without zeros, as `export` does: smaller, and faster with a kernel"
    group.add_argument("--pack", action="store_true", help=text)
    text = "also write a file for llama.cpp, as `gguf` does"
    group.add_argument("--gguf", type=Path, metavar="OUT.gguf", help=text)
    option("--dtype", help="the type in which the model is loaded (default: as it is stored)")
    option("--accelerator", default="auto", help="cpu, gpu, mps or auto (default)")
    return parser
