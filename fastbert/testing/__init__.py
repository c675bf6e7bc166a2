"""Cases and the error rule, shared by tests, benchmarks, `fastbert verify` and self-checks.

May import `backends`, `ops`, `runtime` and `kernels`.
"""

from fastbert.testing.error_rule import (
    HALF,
    Case,
    Row,
    bench_cases,
    cases,
    chance_allowance,
    compare,
    evaluate,
    gpu_cases,
    rounding_step,
    run_case,
    self_check,
    small_cases,
    training_cases,
    verify,
)

__all__ = [
    "HALF",
    "Case",
    "Row",
    "bench_cases",
    "cases",
    "chance_allowance",
    "compare",
    "evaluate",
    "gpu_cases",
    "rounding_step",
    "run_case",
    "self_check",
    "small_cases",
    "training_cases",
    "verify",
]
