"""The former name of `mrp_ground.grid`, for code that imports it."""

from mrp_ground.grid import *  # noqa: F403
