"""Settings of every test run."""

import atexit
import os
import pathlib
import shutil
import sys
import tempfile
import zlib

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # the working tree: `fastbert`, `tests`

from fastbert.testing import triton_interpreter
from tests.support import tiers

triton_interpreter.choose()  # before anything imports Triton
# so that their asserts say as much as those of the test modules
pytest.register_assert_rewrite("tests.support.accelerated_models", "tests.support.triton_fixtures")
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # the usual one may know an op by an older signature
    folder = tempfile.mkdtemp(prefix="fastbert-inductor-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # which workers of this run find, and leave alone
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
os.environ["FASTBERT_CACHE"] = ""  # tests neither read nor write the user's verdicts


@pytest.hookimpl(tryfirst=True)  # before the markers decide what runs
def pytest_collection_modifyitems(items):
    tiers.mark(items)


@pytest.fixture(autouse=True)
def own_seed(request):
    """Random inputs of a test are its own: the same alone, in any order, after any other test."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
