"""The former name of `mrp_ground.arguments`, for code that imports it."""

from mrp_ground.arguments import *  # noqa: F403
