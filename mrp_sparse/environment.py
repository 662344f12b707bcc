"""The former name of `mrp_ground.environment`, for code that imports it."""

from mrp_ground.environment import *  # noqa: F403
