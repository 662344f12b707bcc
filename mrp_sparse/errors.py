"""The former name of `mrp_ground.errors`, for code that imports it."""

from mrp_ground.errors import *  # noqa: F403
