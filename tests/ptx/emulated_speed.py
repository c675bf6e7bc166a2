"""How long the emulator takes for attention: 512 queries by 512 keys of one head, d 64, per 128 queries.

python -m tests.ptx.emulated_speed
"""

from __future__ import annotations

import time

import torch

from fastbert.ops.attention import attention
from fastbert.runtime import dispatch
from tests.ptx.emulated_launches import Emulation, emulated
from tests.ptx.emulator import Program


def main() -> None:
    """Milliseconds of processor time, the fastest of five runs of each schedule."""
    emulation, spent = Emulation(), []
    original = Program.launch

    def timed(self: Program, name: str, *args, **options):
        begin = time.process_time()
        result = original(self, name, *args, **options)
        if name == "_attention_fwd_kernel":
            spent.append(time.process_time() - begin)
        return result

    Program.launch = timed
    ends = torch.tensor([0, 512], dtype=torch.int32)
    q, k, v = (torch.randn(512, 1, 64).bfloat16() for _ in range(3))
    with emulated(emulation), dispatch.use_backend(attention="triton"), torch.no_grad():
        for emulation.schedule in ("late", "early"):
            spent.clear()
            for _ in range(5):
                attention(q, k, v, ends, 512)
            print(f"{emulation.schedule}: {1000 * min(spent) / 4:.1f} ms per 128 x 512 block of attention")


if __name__ == "__main__":
    main()
