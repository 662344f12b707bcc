"""The packed formats in vLLM: a plug-in that vLLM finds by its entry point.

Only the modules of this package import vLLM, and only after vLLM itself calls `register`.
"""

import logging
import re

OLDEST, NEWEST = "0.29", "0.32"
"""The first and the last minor version of vLLM with which the serving tests were run."""


def register() -> None:
    """Register the quantization methods of the packed formats; safe to call again.

    vLLM calls this in each of its processes, before it reads a model.
    """
    from vllm import __version__ as version

    # Numbers are compared, since "0.9" is above "0.29" as text; patch releases do not count.
    oldest, this, newest = (
        [*map(int, re.findall(r"\d+", text)[:2])] for text in (OLDEST, version, NEWEST)
    )
    if not oldest <= this <= newest:
        # A child of vLLM's logger, whose handlers write to the terminal.
        logging.getLogger(f"vllm.{__name__}").warning(
            "mrp-sparse was tested with vLLM %s to %s; this is %s. If packed models fail to load, "
            "install one of these, or a newer mrp-sparse.",
            *(OLDEST, NEWEST, version),
        )
    # Both import vLLM: at the top of the file they would load it together with the package.
    from mrp_sparse.vllm import configuration, reading

    configuration.register()
    reading.register()
