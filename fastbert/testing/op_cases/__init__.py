"""`testing.Case`s, one file per op: what tests, `fastbert verify`, self-checks and benchmarks run."""
