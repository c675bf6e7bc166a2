"""What runs below the ops: the compiled extension, the choice of a backend, derived weights.

May import no other room of `fastbert`. Backends and checks are loaded by name, at their first use.
"""
