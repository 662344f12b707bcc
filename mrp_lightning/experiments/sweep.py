"""`mrp-lightning sweep`: trials that compare models, settings, methods and options."""

import sys
from pathlib import Path

from mrp_lightning.commands.parser import Parser
from mrp_lightning.errors import FAILED, counted
from mrp_lightning.experiments.design import Sweep
from mrp_lightning.storage.outputs import require_writable


def main(args: list[str]) -> None:
    """Execute the runs that do not exist yet, then write the tables.

    Raises:
        OptionError: The sweep, or the configuration of a run, is wrong; before any run.
        SystemExit: With status 1 if a run failed; all others have been executed.
    """
    sweep = read_sweep(args)
    require_writable(sweep.out, "out")
    # Imported late, since help and mistakes need not wait for Lightning and pandas.
    # Lightning before rich: `typing` caches whichever of `int | float` and `float | int` comes
    # first in a process for both. With rich's first, Lightning's `limit_test_batches: 1` would
    # become 1.0, all batches.
    import lightning.pytorch  # noqa: F401
    from rich.markdown import Markdown

    from mrp_lightning.experiments.groups import find_models
    from mrp_lightning.experiments.running import comparable_runs, make_runs
    from mrp_lightning.experiments.scores import check_tables, write_tables
    from mrp_lightning.terminal import Console

    # Tables are checked before the runs, and written from whichever finished, also if others
    # failed.
    check_tables(Path(sweep.out))
    console = Console()
    failed = make_runs(sweep, console)
    if runs := comparable_runs(sweep, console):
        text = write_tables(find_models(runs), Path(sweep.out))
        console.print(Markdown(text))
        console.print(f"The tables are in {sweep.out}/results.md and results.csv.")
    if failed:
        names: dict[str, list[str]] = {}
        for trial, error in failed.items():
            names.setdefault(error, []).append(str(trial.directory))
        lines = "".join(f"\n  {', '.join(named)}: {error}" for error, named in names.items())
        sys.stderr.write(
            f"error: {counted(len(failed), 'run')} failed, all others were made:{lines}\n"
            "Remove the cause, and give the same sweep again: finished runs are not repeated.\n"
        )
        raise SystemExit(FAILED)


def read_sweep(args: list[str]) -> Sweep:
    """Read the sweep of a command line.

    Raises:
        OptionError: The command line or a file has a mistake, or the sweep is wrong.
        MethodError: A method does not exist, or not with a setting.
    """
    description = str(Sweep.__doc__).partition("Args:")[0].strip()
    parser = Parser(prog="mrp-lightning sweep", description=description)
    parser.add_argument("--config", action="config", help="YAML of a sweep; may be repeated.")
    parser.add_class_arguments(Sweep)
    options = parser.parse_args(args)
    arguments = vars(parser.instantiate(options))
    return Sweep(**{key: value for key, value in arguments.items() if key != "config"})
