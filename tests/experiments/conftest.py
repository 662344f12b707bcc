"""Sweeps of a tiny model."""

from small_sweeps import here  # noqa: F401
