"""Fixtures of the tests of compiled kernels."""

from tests.support.cpu_fixtures import every_isa, guarded, isa, threads  # noqa: F401
