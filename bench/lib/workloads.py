"""The workloads every benchmark uses: token lengths of the sequences of one batch, and model sizes.

| name | one batch |
|---|---|
| `full` | 32 x 512, every token real |
| `squad` | 96 lengths drawn from SQuAD v1.1 dev (about 17,000 real tokens, close to `full`'s 16,384) |
| `latency-128`, `latency-384` | one sequence; `latency` names both |
| `train` | 48 packs of 512 tokens |
| `short` | 256 sentences of 16 to 64 tokens, 40 on average |
| `1x128`, `1x512`, `8x128` | CPU: batch x length |
| `long16`, `1x1024`, … | CPU: 16 texts of 128 to 1,024 tokens; one of 1,024, 2,048 or 4,096 |
| `ragged16`, `ragged64` | CPU: 16 or 64 lengths drawn from SQuAD v1.1 dev |

Drawn lengths are a stratified sample: one window from each of n equally likely strata of the distribution,
in shuffled order. Small batches then keep the distribution's mean and its longest windows.
"""

from __future__ import annotations

import functools
import random
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

SQUAD_LENGTHS = Path(__file__).with_name("squad_v1.1_dev_lengths.txt")

FIXED = {
    "full": (512,) * 32,
    "latency-128": (128,),
    "latency-384": (384,),
    "train": (512,) * 48,
    "short": tuple(16 + 29 * i % 49 for i in range(256)),
    "1x128": (128,),
    "1x512": (512,),
    "8x128": (128,) * 8,
    "8x256": (256,) * 8,
    "1x1024": (1024,),
    "1x2048": (2048,),
    "1x4096": (4096,),
    "long16": tuple(128 + 896 * (7 * i % 16) // 15 for i in range(16)),
}
DRAWN = {"squad": 96, "ragged16": 16, "ragged64": 64}
GROUPS = {"latency": ("latency-128", "latency-384")}


@dataclass(frozen=True)
class Model:
    """The sizes that set an encoder's cost.

    Attributes:
        family: transformers' model_type.
        config: further keys of the config, and their values.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int = 30522
    family: str = "bert"
    config: tuple[tuple[str, object], ...] = ()

    def gemms(self) -> dict[str, tuple[int, int]]:
        """The layer's products as name -> (out features, in features)."""
        h, f = self.hidden, self.intermediate
        if self.family == "mobilebert":
            # in 128 columns, with three further feed-forward blocks
            narrow = {"input": (2 * 128, h), "qk": (2 * 128, 128), "value": (128, h), "proj": (128, 128)}
            return narrow | {"ffn1": (4 * f, 128), "ffn2": (128, 4 * f), "output": (h, 128)}
        up = 2 * f if self.family == "modernbert" else f
        return {"qkv": (3 * h, h), "proj": (h, h), "ffn1": (up, h), "ffn2": (h, f)}

    def pairs(self, lengths: tuple[int, ...]) -> int:
        """The pairs of a query and a key that it sees, in all layers together."""
        everything = sum(n * n for n in lengths)
        if self.family == "longformer":
            # 256 on each side
            return self.layers * (everything - sum((n - 257) * (n - 256) for n in lengths if n > 257))
        if self.family == "big_bird":
            # beyond 704 tokens five blocks of 64, but the first and the last block see all
            sparse = sum(n * n - 128 * n - 320 * (n - 128) for n in lengths if n > 704)
            return self.layers * (everything - sparse)
        if self.family != "modernbert":
            return self.layers * everything
        # every third layer sees all tokens, other layers 64 on each side
        full = -(-self.layers // 3)
        hidden = sum((n - 65) * (n - 64) for n in lengths if n > 65)
        return self.layers * everything - (self.layers - full) * hidden

    @property
    def attention_width(self) -> int:
        """Columns of queries, keys and values, counted once per score of a pair and once per sum."""
        width = 128 if self.family == "mobilebert" else self.hidden
        # DeBERTa scores two distances beside each pair, XLNet one
        return width * {"deberta-v2": 4, "xlnet": 3}.get(self.family, 2)


BASE = Model("base", 768, 12, 12, 3072)
LARGE = Model("large", 1024, 24, 16, 4096)
TINY = Model("tiny", 64, 2, 2, 128, vocab=211)
MODERNBERT = Model("modernbert", 768, 22, 12, 1152, vocab=50368, family="modernbert")
DEBERTA = Model(
    "deberta-v3",
    768,
    12,
    12,
    3072,
    vocab=128100,
    family="deberta-v2",
    config=(
        ("relative_attention", True),
        ("position_buckets", 256),
        ("norm_rel_ebd", "layer_norm"),
        ("share_att_key", True),
        ("pos_att_type", "p2c|c2p"),
        ("position_biased_input", False),
        ("max_position_embeddings", 512),
    ),
)
XLNET = Model("xlnet", 768, 12, 12, 3072, vocab=32000, family="xlnet", config=(("use_mems_eval", False),))
MOBILEBERT = Model("mobilebert", 512, 24, 4, 512, family="mobilebert")
LONGFORMER = Model(
    "longformer",
    768,
    12,
    12,
    3072,
    vocab=50265,
    family="longformer",
    config=(("max_position_embeddings", 4098),),
)
BIG_BIRD = Model("bigbird", 768, 12, 12, 3072, vocab=50358, family="big_bird")
MODELS = {
    model.name: model
    for model in (BASE, LARGE, TINY, MODERNBERT, DEBERTA, XLNET, MOBILEBERT, LONGFORMER, BIG_BIRD)
}


@functools.cache
def squad_histogram() -> tuple[tuple[int, int], ...]:
    """(tokens, windows) of every SQuAD v1.1 dev window, by rising length."""
    first, *windows = map(int, SQUAD_LENGTHS.read_text().split())
    return tuple((first + i, count) for i, count in enumerate(windows) if count)


def draw_squad(n: int, seed: int = 0) -> tuple[int, ...]:
    """n window lengths, one from each of n equally likely strata, in shuffled order."""
    if n < 1:
        raise ValueError(f"n: got {n}, expected at least 1")
    tokens, windows = zip(*squad_histogram(), strict=True)
    cumulative = list(accumulate(windows))
    rng = random.Random(seed)
    drawn = [tokens[bisect_right(cumulative, (i + rng.random()) / n * cumulative[-1])] for i in range(n)]
    rng.shuffle(drawn)
    return tuple(drawn)


def names() -> tuple[str, ...]:
    """Every workload that is one batch."""
    return (*FIXED, *DRAWN)


def expand(name: str) -> tuple[str, ...]:
    """The batches that a name means: two for `latency`, itself for any other."""
    if name not in FIXED and name not in DRAWN and name not in GROUPS:
        raise ValueError(f"name: got {name!r}, expected one of {', '.join((*names(), *GROUPS))}")
    return GROUPS.get(name, (name,))


def lengths(name: str, seed: int = 0) -> tuple[int, ...]:
    """Token length of each sequence of one batch; `seed` matters only to the drawn workloads."""
    if name in GROUPS:
        raise ValueError(
            f"name: {name!r} is short for the batches {', '.join(GROUPS[name])}: name one of them"
        )
    expand(name)
    return FIXED[name] if name in FIXED else draw_squad(DRAWN[name], seed)


def padded_inputs(
    lengths: tuple[int, ...], vocab: int, device: torch.device | str, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random right-padded model inputs: input_ids, attention_mask, token_type_ids, int64 (batch, longest).

    A batch without padding has no attention_mask: it is not needed there.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    mask = (torch.arange(shape[1])[None, :] < torch.tensor(lengths)[:, None]).long()
    first = min(1000, vocab // 2)  # BERT's special and unused ids lie below 1000
    inputs = {
        "input_ids": torch.randint(first, vocab, shape, generator=generator) * mask,
        "token_type_ids": torch.randint(0, 2, shape, generator=generator) * mask,
    }
    if not bool(mask.all()):
        inputs["attention_mask"] = mask
    return {key: value.to(device) for key, value in inputs.items()}


def rates(lengths: tuple[int, ...], flops: float, ms: float, floor: float | None = None) -> dict:
    """What a row says of its speed.

    Args:
        lengths: tokens of each sequence of the batch.
        flops: operations of the real tokens.
        ms: milliseconds that were taken.
        floor: the seconds that the machine's roofs allow.
    """
    found = {"tokens": sum(lengths), "padded_tokens": len(lengths) * max(lengths)}
    found |= {"tokens_per_s": sum(lengths) / ms * 1e3, "gflops": flops / ms / 1e6}
    return found if floor is None else found | {"floor_ms": floor * 1e3, "of_floor": floor * 1e3 / ms}


def encoder_flops(lengths: tuple[int, ...], model: Model) -> int:
    """Floating-point operations of one forward on the real tokens: matrix products and attention only."""
    per_token = 2 * model.layers * sum(n * k for n, k in model.gemms().values())
    return per_token * sum(lengths) + 2 * model.attention_width * model.pairs(lengths)


def training_flops(lengths: tuple[int, ...], model: Model, labelled: int) -> int:
    """Forward and backward (three forwards) of the encoder and of an MLM head on the labelled rows only."""
    head = 2 * labelled * model.hidden * (model.hidden + model.vocab)
    return 3 * (encoder_flops(lengths, model) + head)
