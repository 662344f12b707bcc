"""Decoding by llama.cpp: the time of a token."""

import os
import subprocess
from pathlib import Path

LONG, SHORT = 48, 16
"""Tokens of two runs: the difference leaves loading out."""


def seconds_a_token(file: Path, binaries: Path) -> float:
    """Seconds of CPU a token of llama.cpp. A first run reads the file, which may be on the disk."""
    spent = []
    for tokens in (1, SHORT, LONG):
        arguments = ["-m", file, "-p", 0, "-n", tokens, "-r", 1, "-t", 1, "-o", "json"]
        command = [str(part) for part in (binaries / "llama-bench", *arguments)]
        ended = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        _, status, used = os.wait4(ended.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(command)} failed: {ended.stderr.read().decode()[-300:]}")
        spent.append(used.ru_utime + used.ru_stime)
    return (spent[2] - spent[1]) / (LONG - SHORT)
