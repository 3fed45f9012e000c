"""What every test runs under: no network, one thread, shapes checked at the channels' public functions."""

import gc
import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from jaxtyping import install_import_hook  # noqa: E402

install_import_hook("sidestream.channels", "beartype.beartype")


@pytest.fixture(autouse=True)
def _cheap_collections() -> None:
    """Trainer collects garbage at every start and end; whole state graphs of Blocksworld make that most of a test."""
    gc.freeze()
