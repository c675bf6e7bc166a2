"""Compile the kernels whose products have their left operand in registers on sm_90, and lint them.

Attention forward, and dq and dkdv of its backward, multiply what they have just computed:

    python tests/support/product_jobs.py DIR [SCOPE]     a JSON object per launch; the cubins go to DIR

SCOPE: `base` (the default) is what BERT-base runs in bfloat16: forward without dropout, and forward and
backward with saved bits of dropout. `configs` is every config that the heuristic or the tuner may choose, in
both half precisions, plain and with everything that takes registers. `all` adds single options.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from functools import partial
from itertools import product

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from fastbert.runtime import dispatch
from tests.support import triton_compile
from tests.support.triton_compile import DRAWN, HEADDIMS, MASK, MORE, Jobs, title

ARCH = 90
HEIGHT = 64  # rows of a warp group's product: lower tiles take another instruction
SCOPES = ("base", "configs", "all")
# options by name, of the scope `configs`: plain, and with everything
CONFIGS = ("plain", "all", "all-drawn", "saved-all")


def _wanted(scope: str, dtype: torch.dtype, headdim: int, name: str, base: bool) -> bool:
    """Whether a scope has a job; `base`: whether BERT-base has its config and options in bfloat16."""
    if scope == "base":
        return base and dtype == torch.bfloat16 and headdim == 64
    return scope == "all" or name in CONFIGS


def forward_jobs(scope: str) -> Jobs:
    """Jobs of `_attention_fwd_kernel`."""
    from fastbert.kernels import attention as kernels

    saved = DRAWN | {"save_bits": True}
    options = {"plain": {}, "causal": MORE, "saved": saved, "all": saved | MASK | MORE | {"probs": True}}
    for dtype, headdim, name in product(dispatch.HALF, HEADDIMS, options):
        extras = kernels.extras_of(*(option in options[name] for option in ("bias", "dropout_p", "probs")))
        configs = kernels.candidates(headdim, dtype, extras, divmod(ARCH, 10))
        for config in configs:
            base = config == configs[0] and name in ("plain", "saved")
            if config.block_m >= HEIGHT and _wanted(scope, dtype, headdim, name, base):
                tiles = "x".join(str(int(field)) for field in config)
                call = partial(triton_compile.call_attention, config, dtype, headdim, **options[name])
                yield title(dtype, headdim, tiles, name), ARCH, call


def backward_jobs(scope: str) -> Jobs:
    """Jobs of dq, dkdv and, where there is a bias, dbias."""
    from fastbert.kernels import attention_backward as kernels

    saved = DRAWN | {"saved": True}
    options = {
        "plain": {},
        "causal": MORE,
        "bias": MASK,
        "drawn": DRAWN,
        "all-drawn": MASK | DRAWN | MORE,
        "saved": saved,
        "saved-all": saved | MORE,
        "saved-bias": MASK | saved | MORE,
    }
    for dtype, headdim, name in product(dispatch.HALF, HEADDIMS, options):
        extras = name in ("bias", "drawn", "all-drawn", "saved-bias")
        facts = headdim, dtype, extras, name in ("saved", "saved-all"), divmod(ARCH, 10)
        ladder = kernels.ladder(*facts)
        # what the tuner may put in the place of one of them
        tuned = (
            ladder[0]._replace(**{part: config})
            for part in kernels.TUNED_PARTS
            for config in kernels.candidates(part, *facts)
        )
        for configs in dict.fromkeys((*ladder, *tuned)):
            high = max(configs.dq.block_m, configs.dkdv.block_n) >= HEIGHT
            base = configs == ladder[0] and name == "saved"
            if high and _wanted(scope, dtype, headdim, name, base):
                call = partial(triton_compile.call_attention_bwd, configs, dtype, headdim, **options[name])
                yield title(dtype, headdim, name), ARCH, call


def main() -> None:
    """Command line of this file."""
    from fastbert.kernels import attention, attention_backward

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="where the cubins go")
    parser.add_argument("scope", nargs="?", choices=SCOPES, default=SCOPES[0], help="what is compiled")
    options = parser.parse_args()
    for module, jobs in ((attention, forward_jobs), (attention_backward, backward_jobs)):
        rows = triton_compile.results(module, jobs(options.scope), code=False, keep=options.folder)
        for row in rows:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
