"""Hashes of the results of random calls, to show that a change of the code keeps every bit.

    python bench/bits.py --out FILE [--backend cpu] [--calls 200]    before and after, on one machine
    python bench/bits.py --compare BEFORE AFTER

`bench/bits.json` has the hashes of one machine, from before the executors. Those of backend `cpu` are valid
up to c548dc85, where its softmax and its exp changed.

The seed draws the calls: a family, its sizes, a dtype, and inference on packed or padded tokens, first tokens
alone, a bias, gates, states, probabilities, replaced parts, 8-bit weights, an accelerated model of
transformers, or a training step with dropout. Bits depend on the machine and on the number of threads, so the
hashes of two machines are not comparable.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import pathlib
import random
import sys

import torch
from torch import Tensor, nn

import fastbert
from fastbert.models.auto import AutoModel
from fastbert.runtime import dispatch
from fastbert.runtime.loader import extension

FAMILIES = ("bert", "roberta", "distilbert", "albert", "electra", "mpnet", "camembert")
OPTIONS = ({}, {"layer_norm": False}, {"ffn": False}, {"unpad": False})
CALLS = (
    *(
        "plain",
        "plain",
        "first",
        "bias",
        "gates",
        "everything",
        "replaced",
        "int8",
        "accelerated",
        "training",
    ),
    *("fixed", "packed", "causal", "autocast", "large"),
)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Beside(nn.Module):
    """A linear layer with a small one beside it, as adapters have it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        """base(x) + x."""
        return self.base(x) * 1.5


def drawn_model(draw: random.Random, what: str, dtype: torch.dtype) -> nn.Module:
    """A model with random weights, of a drawn family and sizes."""
    heads, width = draw.choice(((2, 32), (3, 16), (4, 16), (2, 64), (1, 48)))
    name = draw.choice(FAMILIES)
    sizes = dict(
        model_type=name,
        vocab_size=120,
        hidden_size=heads * width,
        num_attention_heads=heads,
        num_hidden_layers=draw.choice((1, 2, 3)),
        intermediate_size=draw.choice((64, 80, 192)),
        max_position_embeddings=120,
        hidden_act=draw.choice(("gelu", "gelu_new", "relu")),
    )
    if what == "fixed":
        sizes |= dict(
            model_type="bert", num_attention_heads=heads, fixed_heads=["learned"] + ["previous"] * (heads - 1)
        )
    config = fastbert.EncoderConfig(**sizes)
    if what == "accelerated":
        import transformers

        kind = "bert" if name in ("mpnet", "albert") else name
        stock = transformers.AutoConfig.for_model(
            kind, **{k: v for k, v in sizes.items() if k != "model_type"}
        )
        model = transformers.AutoModel.from_config(stock, attn_implementation="eager")
    else:
        model = AutoModel.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05) if parameter.dim() > 1 else parameter.data.add_(
            torch.randn_like(parameter) * 0.1
        )
    model = model.to(dtype).eval()
    if what == "accelerated":
        return fastbert.accelerate(
            model, **draw.choice(({}, {"layer_norm": False}, {"ffn": False}, {"unpad": False}))
        )
    if what == "int8":
        model.quantize("int8")
    if what == "replaced" and name not in ("distilbert", "albert", "mpnet"):
        layer = model.layer_list()[0]
        layer.output.dense = Beside(layer.output.dense)
    return model


def one_call(seed: int) -> str:
    """The hash of the results of the call that `seed` draws."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    what = draw.choice(CALLS)
    dtype = torch.float32 if what in ("int8", "autocast", "large") else draw.choice(DTYPES)
    model = drawn_model(draw, what, dtype)
    batch, longest = draw.randint(1, 6), draw.choice((1, 7, 33, 100))
    if what == "large":
        batch, longest = 40, 100
    lengths = torch.tensor([draw.randint(1, longest) for _ in range(batch)])
    ids = torch.randint(5, 120, (batch, longest))
    mask = (torch.arange(longest) < lengths[:, None]).long()
    heads, layers = model.config.num_attention_heads, model.config.num_hidden_layers
    options: dict = {}
    if what in ("everything", "causal") or draw.random() < 0.1:
        options["output_hidden_states"] = True
    if what == "everything":
        options["output_attentions"] = True
    if what == "bias":
        mask = torch.randn(batch, 1, longest, longest).to(dtype)
    if what == "gates":
        options["head_mask"] = torch.rand(layers, heads).to(dtype)
    if what == "causal":
        options["causal"] = True
    if what in ("first", "large") or (what == "int8" and draw.random() < 0.5):
        options["first_token_only"] = True
    if what == "packed":
        ends = torch.tensor([0, *lengths.cumsum(0).tolist()], dtype=torch.int32)
        ids, mask, options = ids.flatten()[: ends[-1]], None, options | {"cu_seqlens": ends}
    found: list[Tensor] = []
    trains = what == "training" or (
        what in ("accelerated", "plain", "replaced", "fixed") and draw.random() < 0.3
    )
    model.train(trains)
    scope = torch.autocast("cpu", torch.bfloat16) if what == "autocast" else contextlib.nullcontext()
    with torch.set_grad_enabled(trains), scope:
        out = model(ids, mask, **options)
        hidden = out.last_hidden_state
        found += [hidden, *(out.hidden_states or ()), *(out.attentions or ())]
        if trains:
            (hidden.float() ** 2).sum().backward()
            found += [p.grad for p in model.parameters() if p.grad is not None]
    digest = hashlib.sha256(what.encode())
    for t in found:
        digest.update(t.detach().contiguous().view(torch.uint8).numpy().tobytes() if t.numel() else b"")
    return f"{what} {digest.hexdigest()[:24]}"


def main() -> int:
    """Write the hashes of all calls, or compare two files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--backend", action="append", help="may be given more than once")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--compare", type=pathlib.Path, nargs=2)
    args = parser.parse_args()
    if args.compare:
        before, after = (json.loads(path.read_text())["hashes"] for path in args.compare)
        wrong = 0
        for backend in before.keys() & after.keys():
            pairs = list(zip(before[backend].split(", "), after[backend].split(", "), strict=True))
            for seed, (old, new) in enumerate(pairs):
                if old != new:
                    wrong += 1
                    print(backend, seed, old, new)
            print(f"{backend}: {len(pairs)} calls")
        return bool(wrong)
    torch.set_num_threads(1)
    found = {}
    for backend in args.backend or ["cpu", "aten", "reference"]:
        with dispatch.use_backend(backend) if backend != "cpu" else contextlib.nullcontext():
            found[backend] = ", ".join(map(one_call, range(args.calls)))
    isa = None if extension is None else extension.cpu_isa()
    facts = {"isa": isa, "torch": torch.__version__, "threads": torch.get_num_threads()}
    args.out.write_text(json.dumps(facts | {"hashes": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
