"""A short name for `mrp_lightning.callbacks`.

Use the long name if your project has a folder called `callbacks`.
"""

from mrp_lightning.callbacks import *  # noqa: F403
from mrp_lightning.callbacks import __all__ as __all__
