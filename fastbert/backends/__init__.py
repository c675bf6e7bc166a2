"""The implementations of the ops, one namespace per backend: `<op>_fwd` and `<op>_bwd` of each op it has.

May import `ops`, `runtime` and the Triton kernels of `kernels/`. `runtime.dispatch` chooses among them.
"""
