import functools
import gc
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# The tests must not reach for a hub, nor may a progress bar of a library fill the log.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
import torch
from browser import find_chrome
from torch import Tensor, nn

from mrp_lightning.errors import counted

pytest_plugins = ["local_corpora"]

if not torch.cuda.is_available():
    # Triton decides when it is first imported, and transformers imports it by way of torchao.
    os.environ.setdefault("TRITON_INTERPRET", "1")

_MEMORY = "/dev/shm"
if Path(_MEMORY).is_dir() and os.access(_MEMORY, os.W_OK):
    # Directories of tests are in memory, where what is saved is flushed at once: on a disk the
    # suite waits for it minutes in all. Some tests run what they build, and none needs much room.
    _volume = os.statvfs(_MEMORY)
    if not _volume.f_flag & os.ST_NOEXEC and _volume.f_bavail * _volume.f_frsize > 2**32:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY)

if find_spec("hypothesis"):  # `make gpu` runs tests without it
    from hypothesis import HealthCheck, settings

    # Nothing is timed: other work on the same machine makes any example slow.
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("short", patient, max_examples=25)
    # Where nobody looks at a failure at once, the same examples are tried every time.
    settings.register_profile("repeatable", patient, max_examples=25, derandomize=True)
    settings.register_profile("thorough", patient, max_examples=1000)
    settings.load_profile("repeatable" if "CI" in os.environ else "short")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Search for no garbage in what is imported and collected: it stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_report_header() -> str:
    return f"browser: {find_chrome() or 'none'}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was left out by its reason: a suite that skips half of its tests is green, too."""
    left_out = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", ()):
        *_, reason = report.longrepr
        left_out[reason.removeprefix("Skipped: ")].append(report)
    if not left_out:
        return
    terminalreporter.section("left out")
    for reason, reports in sorted(left_out.items(), key=lambda item: -len(item[1])):
        # A module that is skipped as a whole is not collected: the number of its tests is unknown.
        tests = sum(isinstance(report, pytest.TestReport) for report in reports)
        files = sorted({report.nodeid.partition("::")[0] for report in reports})
        counts = [counted(tests, "test")] * bool(tests) + ["whole files"] * (tests < len(reports))
        terminalreporter.write_line(f"{' and '.join(counts)}, {reason}: {', '.join(files)}")


@pytest.fixture
def second() -> Iterator[torch.device]:
    """A device whose tensors cannot be mixed with those of the CPU: a GPU, or a stand-in."""
    if torch.cuda.is_available():
        yield torch.device("cuda", 0)
        return
    from second_device import second_device

    with second_device() as device:
        yield device


@pytest.fixture(scope="session")
def write_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes a random LLaMA of two blocks and the embedded model's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from mrp_lightning.embedded import STDLIB_LLAMA

    def write(name: str, hidden_size: int) -> Path:
        torch.manual_seed(0)
        sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        tokens = {"vocab_size": 2048, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
        shared = {"max_position_embeddings": 128, "tie_word_embeddings": True}
        config = AutoConfig.for_model("llama", **sizes, **heads, **tokens, **shared)
        directory = tmp_path_factory.mktemp("models") / name
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        AutoTokenizer.from_pretrained(STDLIB_LLAMA).save_pretrained(directory)
        return directory

    return write


@pytest.fixture(scope="session")
def tiny_llama(write_llama: Callable[..., Path]) -> Path:
    """The directory of a model whose layers have 32 and 64 columns."""
    return write_llama("tiny-llama", 32)


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in float32: many CPUs have no instructions for its bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mrp_lightning.embedded import STDLIB_LLAMA

    directory = tmp_path_factory.mktemp("models") / "embedded"
    model = AutoModelForCausalLM.from_pretrained(STDLIB_LLAMA, dtype=torch.float32)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(STDLIB_LLAMA).save_pretrained(directory)
    return directory


@functools.cache
def _first_files(read: Callable[[str], Iterator[str]], split: str) -> list[str]:
    files: list[str] = []
    for file in read(split):
        files.append(file)
        if sum(map(len, files)) > 100_000:
            break
    return files


@pytest.fixture(scope="session")
def shortened() -> Callable[[], AbstractContextManager[None]]:
    """Make the embedded text its first files, and exports compare logits on little of it."""
    from mrp_lightning.text import sources

    read: Any = sources.standard_library

    @contextmanager
    def short() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sources, "standard_library", lambda split: _first_files(read, split))
            patch.setattr("export.conversion.parity.MIN_TOKENS", 512)
            yield

    return short


@pytest.fixture
def short_library(shortened: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Read little text in a test."""
    with shortened():
        yield


@pytest.fixture(scope="session")
def tiny_gguf(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the tokenizer of `tiny_llama` as a GGUF file, alone in its directory."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason="needs the extra `gguf`")
    from gguf_files import write

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(path, tiny_llama)
    return path


class Harmful:
    """Leaves a directory behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def harmful(tmp_path: Path) -> Iterator[Harmful]:
    yield Harmful(tmp_path / "ran")
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def build() -> Callable[[str], nn.Module]:
    """A tiny random model of a family, the same one on every call."""
    import families

    return families.build


@pytest.fixture
def batches() -> list[dict[str, Tensor]]:
    """Batches of several lengths: padded on the left, on the right, and not at all."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for length in (12, 9, 16):
        ids = torch.randint(3, 64, (2, length), generator=generator)
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    made[0]["attention_mask"][0, :5] = 0
    made[1]["attention_mask"][1, 6:] = 0
    return made


def pytest_exception_interact(call: pytest.CallInfo[object]) -> None:
    """Stop where SIGTERM or Ctrl-C ended the command that a test ran, as without our handlers."""
    found = None if call.excinfo is None else call.excinfo.value
    if isinstance(found, SystemExit) and found.code in (130, 143):
        pytest.exit("interrupted", returncode=int(found.code))
