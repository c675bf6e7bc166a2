"""The Cases of each op, one file per op: what tests, `fastbert verify`, self-checks and benchmarks run."""
