"""Sweeps of a tiny model."""

from small_sweeps import finished, here, made  # noqa: F401
