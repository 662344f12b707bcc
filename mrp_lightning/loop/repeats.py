"""Finding calibration windows that more than one process was given."""

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence

from mrp_lightning.loop.capture import Step
from mrp_lightning.models.batch import token_ids
from mrp_lightning.processes import Processes

log = logging.getLogger(__name__)


def warn_of_repeats(steps: Sequence[Step], processes: Processes) -> None:
    """Warn of windows that count more than once.

    Lightning gives each window to one process. A sampler of the user's may repeat some, so that all
    processes get as many, and data that it cannot index are read whole by each.

    Args:
        steps: The calibration batches of this process.
        processes: The processes that share the calibration batches; all call this.
    """
    if processes.size == 1:
        return
    batches = [ids for step in steps if (ids := token_ids(step.batch)) is not None]
    mine = {hashlib.sha1(row.numpy().tobytes()).hexdigest() for ids in batches for row in ids}
    processes_of = Counter(window for theirs in processes.all(mine) for window in theirs)
    repeated = sum(count > 1 for count in processes_of.values())
    if repeated:
        log.warning(
            "%d of %d calibration windows were given to more than one process, and count each "
            "time. Let Lightning share the data (a map-style dataset, without a distributed "
            "sampler), or share them so that none is repeated.",
            repeated,
            len(processes_of),
        )
