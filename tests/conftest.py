"""Settings of every test run."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # the working tree: `fastbert`, `tests`

from tests import triton_interpreter

triton_interpreter.choose()  # before anything imports Triton
