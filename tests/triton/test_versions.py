"""The Triton kernels under the oldest supported Triton, beside this environment's."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest

from fastbert.backends.triton.device import OLDEST_TRITON
from tests.ptx import test_triton as emulated
from tests.triton import test_compile as gates

ROOT = pathlib.Path(__file__).resolve().parents[2]
OLDEST = ".".join(map(str, OLDEST_TRITON)) + ".0"
# every suite that interprets kernels; the id test_triton_linear is tests/triton/test_linear.py
FOLDER = pathlib.Path(__file__).parent
NOT_INTERPRETED = {"test_compile", "test_sass", "test_versions", "test_tuning", "test_host_waits"}
SUITES = sorted(path.stem for path in FOLDER.glob("test_*.py") if path.stem not in NOT_INTERPRETED)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def oldest(tmp_path_factory) -> pathlib.Path:
    """A folder with the oldest Triton alone; before site-packages on the path it hides the newer one."""
    if importlib.metadata.version("triton").startswith(OLDEST.removesuffix("0")):
        pytest.skip(f"this environment has Triton {OLDEST} already; the other tests are this one")
    folder = tmp_path_factory.mktemp("triton")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, f"triton=={OLDEST}"], check=True, timeout=900)
    return folder


@pytest.fixture
def environment(oldest, monkeypatch) -> dict[str, str]:
    """Variables under which Python imports that Triton, as an import proves."""
    monkeypatch.setenv("PYTHONPATH", f"{oldest}{os.pathsep}{ROOT}")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(oldest / "cache"))
    found = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__, triton.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    assert found.split() == [OLDEST, str(oldest / "triton/__init__.py")]
    return dict(os.environ)


# the gates of this environment; their processes inherit the path
@pytest.mark.parametrize("op", gates.GATES)
def test_launches_fit(op, environment):
    gates.test_launches_fit(op, full=True)


@pytest.mark.parametrize("op", gates.MAY_BE_TUNED)
def test_kernels_that_may_be_tuned(op, environment):
    gates.test_kernels_that_may_be_tuned(op, full=True)


def test_other_gates(environment):
    gates.test_the_last_to_arrive_sees_what_all_have_stored()
    gates.test_a_spill_is_seen()


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.replace("test_", "test_triton_"))
def test_interprets(suite, environment):
    path = f"tests/triton/{suite}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", path]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


# what that Triton compiles for sm_80 and sm_90, in the PTX emulator
@pytest.mark.parametrize("arch", ("80", "90"))
@pytest.mark.parametrize("op", emulated.OPS)
def test_runs_in_the_emulator(op, arch, environment):
    rows = emulated.rows_of("emulated_ops", op, "--arch", arch)
    emulated.assert_right(rows, emulated.OPS[op])
