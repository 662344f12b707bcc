"""What a process imports first decides how Python reads its types."""

import subprocess
import sys

_ASK = """
import mrp_lightning.commands.sweep
from typing import get_args, get_type_hints
from lightning.pytorch import Trainer
print(get_args(get_type_hints(Trainer.__init__)["limit_test_batches"])[0].__name__)
"""


def test_one_batch_is_not_all_batches():
    # A process of its own: in this one Lightning has been imported long ago.
    asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True)
    assert asked.stdout.split()[-1] == "int"
