"""What all tests of models use."""

from tests.support.one_thread import one_thread  # noqa: F401
