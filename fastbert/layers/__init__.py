"""The mathematics of the papers, as modules that call ops. Imports from `ops` and `runtime` only."""
