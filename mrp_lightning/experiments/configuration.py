"""The configuration of a run: files and options as one, flat, and beside that of another run."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jsonargparse import ArgumentError, Namespace
from jsonargparse.typing import Path_fr
from lightning.pytorch.cli import LightningArgumentParser

from mrp_lightning.cli.arguments_given import Argument
from mrp_lightning.cli.lightning_cli import PruningCLI
from mrp_lightning.cli.parser import Parser
from mrp_lightning.environment import quiet_lightning
from mrp_lightning.journal.manifest import differences


class Configured(PruningCLI):
    """The command line of some files, with options set; models and data are made by `build`.

    Options are values by dotted key. Where a key passes a list, its last item is meant.
    """

    def __init__(self, files: Sequence[Path_fr], options: Mapping[str, Any]) -> None:
        self._options = options
        with quiet_lightning():
            super().__init__([f"--config={file.absolute}" for file in files], run=False)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the files, whatever they leave to the options, then all of it."""
        assert isinstance(parser, Parser)
        parser.defaults_given = [
            Argument(key.replace(".init_args", ""), str(value))
            for option in self._options.items()
            for key, value in _flat(option[1], option[0])
        ]
        given = Namespace()  # a file may lack what is required
        for key, value in self._options.items():
            if not key.startswith("trainer.callbacks"):
                given[key] = value
        found = _nested(parser, parser.parse_args(args, namespace=given))
        for key, value in self._options.items():
            _set(found, key.split("."), value)
        self.config = parser.parse_object(found)

    def instantiate_classes(self) -> None:
        """Make nothing yet: a configuration can be looked at before a model is loaded."""

    def build(self) -> None:
        """Make the trainer, the model and the data."""
        super().instantiate_classes()

    def described(self) -> dict[str, Any]:
        """The configuration by dotted key, with its defaults."""
        return dict(_flat(_nested(self.parser, self.config)))

    def difference(self, before: Mapping[str, Any]) -> str:
        """How it differs from what `described` gave of another run, or an older version of it."""
        return "; ".join(differences(before, self.described(), self._defaults))

    def _defaults(self, keys: Iterable[str]) -> dict[str, Any]:
        """The defaults of some options, where all others stay as they are.

        They may depend on the others: the defaults of a callback on its class.
        """
        wanted, parser = set(keys), self.parser
        given = _without(_nested(parser, self.config), wanted)
        exits, parser.exit_on_error = parser.exit_on_error, False
        try:
            found = _nested(parser, parser.parse_object(given))
        except ArgumentError:
            return {}  # one of them has no default
        finally:
            parser.exit_on_error = exits
        return {key: value for key, value in _flat(found) if key in wanted}


def _nested(parser: LightningArgumentParser, config: Any) -> dict[str, Any]:
    nested: dict[str, Any] = json.loads(parser.dump(config, format="json", skip_unset=False))
    return nested


def _set(values: Any, path: Sequence[str], value: Any) -> None:
    """Set a value in nested ones; what has no place for it makes room."""
    first, *rest = path
    if not rest:
        values[first] = value
        return
    if not (isinstance(values.get(first), dict | list) and values[first]):
        values[first] = {}
    inner = values[first]
    _set(inner[-1] if isinstance(inner, list) else inner, rest, value)


def _flat(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values in mappings, and in lists of mappings, by dotted key."""
    if isinstance(values, list) and any(isinstance(value, dict) for value in values):
        values = dict(enumerate(values))
    if not isinstance(values, dict) or not values:
        yield key, values
        return
    for name, value in values.items():
        yield from _flat(value, f"{key}.{name}" if key else name)


def _without(values: Any, keys: set[str], key: str = "") -> Any:
    """Nested values without some, and without mappings that held nothing else."""
    if isinstance(values, list):
        return [_without(value, keys, f"{key}.{i}") for i, value in enumerate(values)]
    if not isinstance(values, dict):
        return values
    names = {name: f"{key}.{name}" if key else name for name in values}
    kept = {n: _without(values[n], keys, full) for n, full in names.items() if full not in keys}
    return {name: value for name, value in kept.items() if value or value == values[name]}
