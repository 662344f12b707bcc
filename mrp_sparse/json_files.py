"""The former name of `mrp_ground.json_files`, for code that imports it."""

from mrp_ground.json_files import *  # noqa: F403
