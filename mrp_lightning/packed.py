"""The former name of `mrp_sparse`, for code that imports it."""

from mrp_sparse import *  # noqa: F403
