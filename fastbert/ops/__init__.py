"""The contract of each op, one file per op: math, checks, reference, custom op and autograd.

May import `runtime` only; `dispatch.call` brings a call to a backend.
"""
