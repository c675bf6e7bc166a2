"""Settings of every test run; what imports torch is in tests/support/fixtures.py, for workers alone."""

import atexit
import gc
import os
import pathlib
import shutil
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # the working tree: `fastbert`, `tests`

from tests.support import tiers

# so that their asserts say as much as those of the test modules
for name in (
    "accelerated_models",
    "attention_calls",
    "attention_gradients",
    "attention_inputs",
    "benches",
    "checkpoints",
    "cpu_attention",
    "graphed_models",
    "model_pairs",
    "quantized_models",
    "triton_fixtures",
):
    pytest.register_assert_rewrite(f"tests.support.{name}")
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # the usual one may know an op by an older signature
    folder = tempfile.mkdtemp(prefix="fastbert-inductor-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # which workers of this run find, and leave alone
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
os.environ["FASTBERT_CACHE"] = ""  # tests neither read nor write the user's verdicts


def pytest_addoption(parser):
    parser.addoption("--part", metavar="K/N", help="run the tests of the K-th of N parts of the files")


def pytest_configure(config):
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.support.fixtures")
    if (text := config.getoption("--part")) is not None:
        try:
            config.part = tiers.part(text)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None


def pytest_ignore_collect(collection_path, config):
    """Do not even import the files of other parts, or those of which `make test` runs nothing."""
    if collection_path.name in tiers.BUILT_FOLDERS and config.getoption("markexpr") == tiers.USUAL:
        return True
    if hasattr(config, "part") and collection_path.match("test_*.py"):
        which, count = config.part
        if tiers.part_of(collection_path.relative_to(config.rootpath).as_posix(), count) != which:
            return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported meanwhile stays: no garbage collection looks at it, then or in a test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # or nanobind takes what Triton holds for leaks
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before the markers decide what runs
def pytest_collection_modifyitems(items):
    tiers.mark(items)
