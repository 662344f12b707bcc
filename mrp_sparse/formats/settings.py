"""The `quantization_config` of a packed directory, checked before a tensor is read.

`mrp_sparse/FORMAT.md` describes its keys. Each engine has a class of its own for it.
"""

from collections.abc import Iterator, Mapping
from reprlib import repr as shortened
from typing import Any

from mrp_ground.errors import FormatError
from mrp_sparse.formats.eight_bit import VERSION as HEAD_VERSION
from mrp_sparse.formats.packed_format import PackedFormat


def check_settings(form: PackedFormat, settings: Mapping[str, Any]) -> None:
    """Raise if settings are not those of a format, as this version writes them.

    Args:
        form: The format.
        settings: The content of `quantization_config`. Missing keys are not checked: transformers
            makes a configuration without any.

    Raises:
        FormatError: There is an unknown key, another `quant_method` or version, or a value of
            another type. All unknown keys, or all such values, are listed.
    """
    method = settings.get("quant_method", form.quant_method)
    unknown = sorted(map(str, settings.keys() - _KEYS))
    # The version comes first: another one may have other keys, and its error names the remedy.
    if "format_version" in settings:
        _check_version("format_version", settings["format_version"], form.version)
    if unknown or method != form.quant_method:
        raise FormatError(
            f"`quantization_config`: expected `quant_method` {form.quant_method}, "
            f"`format_version`, `modules` and maybe `head` and `activations`. Got {method!r}, and "
            f"also {unknown or 'nothing'}. Export the pruned model again."
        )
    problems = list(_of_modules(settings.get("modules", ()), counted=form.counted))
    if "head" in settings:
        problems += _of_head(settings["head"])
    if (activations := settings.get("activations")) not in (None, *form.activations):
        expected = " or ".join(map(repr, form.activations)) or f"none with {form.quant_method}"
        problems.append(f"`activations` is {shortened(activations)}, expected {expected}")
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise FormatError(
            "`quantization_config` is not as mrp-lightning writes it. Export the pruned model "
            f"again.\n{listed}"
        )
    # Last, since only now is `head` known to be an object with a number.
    if "head" in settings:
        _check_version("head.format_version", settings["head"]["format_version"], HEAD_VERSION)


_KEYS = {"quant_method", "format_version", "modules", "head", "activations"}


def _check_version(key: str, version: Any, expected: int) -> None:
    if version != expected:
        raise FormatError(
            f"`quantization_config.{key}` is {version!r}, but this version of mrp-sparse reads "
            f"{expected}. Install the version that wrote it, or export the pruned model again."
        )


def _of_modules(modules: Any, *, counted: bool) -> Iterator[str]:
    """Yield the problems of `modules`: a list of names or, if counted, sizes by name."""
    # An empty one may be of either kind: transformers makes it without knowing the format.
    if not isinstance(modules, dict if counted else list | tuple) and modules not in ({}, [], ()):
        expected = "an object of sizes by name" if counted else "a list of names"
        yield f"`modules` is {shortened(modules)}, expected {expected}"
    elif isinstance(modules, dict):
        for name, size in modules.items():
            # `isinstance` would accept `true`, since bool is a kind of int.
            if type(size) is not int or size < 0:
                yield f"`modules.{name}` is {shortened(size)}, expected a whole number from 0"
    else:
        for i, name in enumerate(modules):
            if not isinstance(name, str):
                yield f"`modules[{i}]` is {shortened(name)}, expected a name"


def _of_head(head: Any) -> Iterator[str]:
    """Yield the problems of `head`: the name of a module, and the version of the format."""
    for key, kind in (("module", str), ("format_version", int)):
        value = head.get(key) if isinstance(head, Mapping) else None
        if type(value) is not kind:
            yield f"`head.{key}` is {shortened(value)}, expected {kind.__name__}"
