"""Cases and the error rule, shared by tests, benchmarks, `fastbert verify` and self-checks.

May import `backends`, `ops`, `runtime` and `kernels`.
"""

from fastbert.testing.error_rule import Case as Case
from fastbert.testing.error_rule import Row as Row
from fastbert.testing.error_rule import bench_cases as bench_cases
from fastbert.testing.error_rule import cases as cases
from fastbert.testing.error_rule import chance_allowance as chance_allowance
from fastbert.testing.error_rule import compare as compare
from fastbert.testing.error_rule import evaluate as evaluate
from fastbert.testing.error_rule import gpu_cases as gpu_cases
from fastbert.testing.error_rule import rounding_step as rounding_step
from fastbert.testing.error_rule import run_case as run_case
from fastbert.testing.error_rule import self_check as self_check
from fastbert.testing.error_rule import small_cases as small_cases
from fastbert.testing.error_rule import training_cases as training_cases
from fastbert.testing.error_rule import verify as verify
