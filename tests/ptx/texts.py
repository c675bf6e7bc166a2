"""The text of a kernel around a test's statements."""

from __future__ import annotations


def kernel(
    body: str, parameters: str = ".param .u64 x, .param .u64 y", *, shared: int = 0, target: str = "sm_80"
) -> str:
    """Kernel `k`, with registers %p, %h, %r, %d and %rd, and `shared` bytes of shared memory, `memory`."""
    memory = f".shared .align 1024 .b8 memory[{shared}];" if shared else ""
    return f""".version 8.8
.target {target}
.address_size 64
.visible .entry k({parameters})
{{
.reg .pred %p<8>;
.reg .b16 %h<8>;
.reg .b32 %r<64>;
.reg .b32 %d<320>;
.reg .b64 %rd<32>;
{memory}
{body}
ret;
}}
"""
