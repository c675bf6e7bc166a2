"""Public names, signatures and command-line options are the same as before the modules moved into rooms.

public_api.json is the table of `tests.support.public_api` at commit 5d50b9a; classes with equal members are
one group there. GONE, NEW and CHANGED list the intended differences, with the reason.
"""

from __future__ import annotations

import json
from pathlib import Path

import fastbert
from fastbert.runtime import dispatch
from tests.support.public_api import public_api

BEFORE = json.loads((Path(__file__).parent / "public_api.json").read_text())

PACKING = "the op that removes and restores padding has one name in every room"
ACTIVATIONS = "one table of activations in ops/activation.py"
ATTENTION = "a helper of ops/attention.py, now in ops/attention_grid.py or ops/attention_checks.py"
PANELS = "weights laid out for a kernel are panels; packed says tokens without padding"
OPS = (None, sorted([*dispatch.OPS]), None)

# What is gone: name -> reason.
GONE = {
    "ops.attention.bits_shape": ATTENTION,
    "ops.attention.check_bias": ATTENTION,
    "ops.attention.check_lengths": ATTENTION,
    "ops.attention.from_grid": ATTENTION,
    "ops.attention.grid_mask": ATTENTION,
    "ops.attention.keep_mask": ATTENTION,
    "ops.attention.pack_bits": ATTENTION,
    "ops.attention.to_grid": ATTENTION,
    "ops.attention.unpack_bits": ATTENTION,
    "ops.checks.plain": "it is dispatch's, which uses it",
    "ops.dropout.philox_words": "dropout draws 16-bit lanes: philox_lanes",
    "ops.linear.activate_ref": ACTIVATIONS,
    "ops.linear.check_activation": ACTIVATIONS,
    "ops.linear.packer": PANELS,
    "ops.linear_int8.packer": PANELS,
    "ops.padding.pack": PACKING,
    "ops.padding.pack_ref": PACKING,
    "ops.padding.unpack": PACKING,
    "ops.padding.unpack_ref": PACKING,
    "testing.luck": "renamed chance_allowance, which tells",
}
# Members of classes that are renamed or new, whichever class has them.
# answer and words did not say what they do.
GONE_MEMBERS = {"answer", "words"}
# A family with other mathematics names its own layer_class and embeddings_class. CrossEncoder is new, and
# SentenceEncoder encodes queries and documents with their prompts.
NEW_MEMBERS = {
    "as_output",
    "check_batch_tokens",
    "device",
    "embeddings_class",
    "encode_document",
    "encode_inputs",
    "encode_query",
    "fixed_patterns",
    "layer_class",
    "logits_and_loss",
    "padded_output",
    "pair_head",
    "pair_logits",
    "from_pretrained",
    "predict",
    "rank",
    "taps",
    "tokenize",
    "too_long",
}
# What is new outside the ops (a new function of an op breaks no caller): name -> reason.
NEW = {
    "CrossEncoder": "scores of pairs, as sentence-transformers computes them",
    "testing.Case.in_parts": "what a kernel of several ops is timed beside",
    "fastbert warmup --jobs": "kernels are compiled side by side",
    "testing.Case.kind": "which calls a self-check times",
    "testing.Case.parts": "what a kernel of several ops is timed beside",
    "testing.Case.ranked_rows": "calls of few rows are judged apart",
    "testing.chance_allowance": "was luck",
    "testing.training_cases": "what a training step calls, which `make gpu` checks",
}
# Name -> (what it is now, reason).
CHANGED = {
    "SentenceEncoder": (
        "class (model, tokenizer=None, *, pooling='mean', normalize=False, max_length=None, "
        "lower_case=False, prompt='', prompts=None, segments=True, include_prompt=True, "
        "similarity_fn_name='cosine')",
        "prompts by name, segments of pairs; says what to call",
    ),
    "SentenceEncoder.encode": (
        "(self, sentences, *, prompt_name=None, prompt=None, batch_tokens=8192, batch_size=None, "
        "show_progress_bar=None, precision='float32', normalize_embeddings=False, "
        "truncate_dim=None, on_long='truncate', progress=None)",
        "as sentence-transformers' encode",
    ),
    "SentenceEncoder.tokenize": (
        "(self, sentences, prompt=None)",
        "a prompt per call",
    ),
    "encode": (
        "(model, sentences, *, pooling=None, normalize=None, max_length=None, dtype=None, "
        "device=None, prompt_name=None, prompt=None, batch_tokens=8192, batch_size=None, "
        "show_progress_bar=None, precision='float32', normalize_embeddings=False, "
        "truncate_dim=None, on_long='truncate')",
        "as sentence-transformers' encode",
    ),
    "fastbert verify --op": (repr(OPS), PACKING),
    "fastbert warmup --op": (repr(OPS), PACKING),
    "fastbert warmup --timeout": (
        "(None, None, None)",
        "None is the 300 s of before",
    ),
    "graph": (
        "(model, *, max_tokens=16384, max_batch=512, buckets=None, max_graphs=128, "
        "recorder=<function recorder_for>)",
        "a bucket has a graph for long sequences too",
    ),
    "ops.attention.attention": (
        "(q, k, v, cu_seqlens=None, max_seqlen=None, *, softmax_scale=None, causal=False, bias=None, "
        "gate=None, dropout_p=0.0, seed=None, offset=0, return_lse=False, return_probs=False, places=None)",
        "a table that a forward makes once for all its layers, on a GPU",
    ),
    "ops.linear.linear": (
        "(x, weight, bias=None, activation=None, residual=None, panels=None)",
        PANELS,
    ),
    "ops.linear_int8.linear_int8": (
        "(x, weight, scale, bias=None, activation=None, panels=None)",
        PANELS,
    ),
}

CHANGED |= {
    name: ("class (*args, **kwargs)", "an Auto class has no instances and says what to call")
    for name in fastbert.__all__
    if name.startswith("Auto")
}

# Commands that are new as a whole.
NEW_COMMANDS = ("fastbert train-tokenizer ", "fastbert prepare ", "fastbert pretrain ", "fastbert analyze ")
# Parameters that models' calls have got since -> reason.
ADDED = {
    ", cu_seqlens=None, max_seqlen=None, causal=None": "heads take packed tokens; causal models",
    ", choices=None": "how many sequences of a packed call are one example",
    ", cu_seqlens, max_seqlen, causal)": "of a head's `encode`",
    " causal=None,": "of forward_packed",
    ", rounded=False)": "a norm's result also for products under autocast",
    ", mean_resizing=True": "of resize_token_embeddings, as in transformers",
    ", strict=True": "unknown keys of a file, left out by request",
    ", calls=1)": "a self-check on a GPU makes every call twice",
}


def flat(table: dict) -> dict[str, str]:
    """Public name -> its description; each member of a class has its own entry."""
    found = dict(table["names"])
    for group in table["classes"]:
        for owner in group["owners"]:
            found.update({f"{owner}.{member}": text for member, text in group["members"].items()})
    return found


def split(names: set[str]) -> tuple[set[str], set[str]]:
    """(names that do not belong to a model, members of models without the names of their classes)."""
    members = {name for name in names if name.split(".")[0] in fastbert.__all__ and "." in name}
    return names - members, {name.split(".", 1)[1] for name in members}


def test_the_public_interface_is_as_before():
    before, now = flat(BEFORE), public_api()
    gone, gone_members = split(set(before) - set(now))
    assert (gone, gone_members) == (set(GONE), GONE_MEMBERS)
    new, new_members = split(set(now) - set(before))
    assert {name for name in new if not name.startswith(("ops.", *NEW_COMMANDS))} == set(NEW)
    assert new_members == NEW_MEMBERS
    for added in ADDED:
        now = {
            name: text.replace(added, ")" if added.endswith(")") else "")
            if name in before and before[name] != text
            else text
            for name, text in now.items()
        }
    different = {name: now[name] for name in before if name in now and before[name] != now[name]}
    assert different == {name: text for name, (text, _) in CHANGED.items()}
