"""Fixtures of the tests of compiled kernels, all of which need the extension."""

import pytest

from fastbert.runtime import loader
from tests.support.cpu_fixtures import every_isa, guarded, isa, threads  # noqa: F401


def pytest_runtest_setup():
    if loader.extension is None:
        pytest.skip(str(loader.missing))
