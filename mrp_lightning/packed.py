"""The packed layers under the name that they had before `mrp_sparse` was a package of its own."""

from mrp_sparse import *  # noqa: F403
