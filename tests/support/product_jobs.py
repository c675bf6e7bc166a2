"""Compile the kernels whose products have their left operand in registers on sm_90, and lint them.

Attention forward, and dq and dkdv of its backward, multiply what they have just computed:

    python tests/support/product_jobs.py DIR [SCOPE]     a JSON object per launch; the cubins go to DIR

SCOPE: `base` (the default) is what BERT-base runs in bfloat16: forward without dropout, and forward and
backward with saved bits of dropout. `configs` is every config that the heuristic or the tuner may choose, in
both half precisions, plain and with everything that takes registers. `all` adds single options.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from tests.support import triton_compile

ARCH = 90
HEIGHT = 64  # rows of a warp group's product: lower tiles take another instruction
SCOPES = ("base", "configs", "all")
# options by name, of the scope `configs`: plain, and with everything
CONFIGS = ("plain", "all", "all-drawn", "saved-all")


def _wanted(scope: str, dtype, headdim: int, name: str, base: bool) -> bool:
    """Whether a scope has a job; `base`: whether BERT-base has its config and options in bfloat16."""
    import torch

    if scope == "base":
        return base and dtype == torch.bfloat16 and headdim == 64
    return scope == "all" or name in CONFIGS


def forward_jobs(scope: str) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, architecture, call that launches) of `_attention_fwd_kernel`."""
    import torch

    from fastbert.kernels import attention as kernels

    dropout = {"dropout_p": 0.1, "save_bits": True}
    options = {
        "plain": {},
        "causal": {"causal": True, "gate": True},
        "saved": dropout,
        "all": dropout
        | {"bias": (32, 12, 512, 512), "probs": True, "causal": True, "gate": True, "batch": 32},
    }
    for dtype, headdim, name in itertools.product(
        (torch.bfloat16, torch.float16), (64, 128, 16, 32, 80), options
    ):
        extras = kernels.extras_of(*(option in options[name] for option in ("bias", "dropout_p", "probs")))
        configs = kernels.candidates(headdim, dtype, extras, divmod(ARCH, 10))
        for config in configs:
            base = config == configs[0] and name in ("plain", "saved")
            if config.block_m >= HEIGHT and _wanted(scope, dtype, headdim, name, base):
                tiles = "x".join(str(int(field)) for field in config)
                title = f"{str(dtype).removeprefix('torch.')}-{headdim}-{tiles}-{name}"
                args, given = (config, dtype, headdim), options[name]
                yield title, ARCH, lambda a=args, b=given: triton_compile.call_attention(*a, **b)


def backward_jobs(scope: str) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, architecture, call that launches) of dq, dkdv and, where there is a bias, dbias."""
    import torch

    from fastbert.kernels import attention_backward as kernels

    batch = 32
    bias, dropout = {"bias": (batch, 12, 512, 512)}, {"dropout_p": 0.1}
    more = {"causal": True, "gate": True}
    options = {
        "plain": {},
        "causal": more,
        "bias": bias,
        "drawn": dropout,
        "all-drawn": bias | dropout | more,
        "saved": dropout | {"saved": True},
        "saved-all": dropout | {"saved": True} | more,
        "saved-bias": bias | dropout | {"saved": True} | more,
    }
    for dtype, headdim, name in itertools.product(
        (torch.bfloat16, torch.float16), (64, 128, 16, 32, 80), options
    ):
        extras = name in ("bias", "drawn", "all-drawn", "saved-bias")
        saved = name in ("saved", "saved-all")
        facts = headdim, dtype, extras, saved, divmod(ARCH, 10)
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
                title = f"{str(dtype).removeprefix('torch.')}-{headdim}-{name}"
                args, given = (configs, dtype, headdim, batch), options[name]
                yield title, ARCH, lambda a=args, b=given: triton_compile.call_attention_bwd(*a, **b)


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
