"""The dropout bits are Philox4x32-10's and depend on their coordinates alone."""

from __future__ import annotations

import pytest
import torch

from fastbert.ops.attention import AttentionInputs
from fastbert.ops.attention_inputs import EVERYWHERE, AttentionNeeds
from fastbert.ops.dropout import keep_mask_2d, lanes_of, philox_blocks, philox_keep, philox_lanes, threshold
from fastbert.ops.embedding import EmbeddingInputs, EmbeddingSaved
from fastbert.ops.layer_norm import LayerNormInputs, LayerNormNeeds, LayerNormSaved
from fastbert.runtime import dispatch
from fastbert.runtime.namespaces import has_backward

# Known answers of the algorithm's authors (Random123, kat_vectors, philox4x32 10): counter, key, words.
KNOWN = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def as_seed(key):
    """The int64 whose low and high 32 bits are the two words of the key."""
    value = key[0] | key[1] << 32
    return torch.tensor([value - 2**64 if value >= 2**63 else value])


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    group, row, plane, offset = counter
    place = as_seed(key), offset, torch.tensor(plane), torch.tensor(row)
    got = philox_blocks(*place, torch.tensor(group))
    assert torch.stack(got).tolist() == list(words)
    halves = [half for word in words for half in (word % 2**16, word >> 16)]
    assert (lanes_of(got) >> 16).tolist() == halves
    assert philox_lanes(*place, (group << 3) + torch.arange(8)).tolist() == halves


def test_a_tile_of_the_mask_is_the_mask_of_the_tile():
    seed = torch.tensor([99])
    whole = keep_mask_2d(seed, 7, 20, 37, 0.4)
    tile = philox_keep(seed, 7, 0, torch.arange(5, 12).unsqueeze(1), torch.arange(3, 30).unsqueeze(0), 0.4)
    assert torch.equal(whole[5:12, 3:30], tile)


def test_thresholds():
    assert threshold(0.0) == 0
    assert threshold(0.5) == 2**31
    assert threshold(0.25) == 2**30
    assert threshold(0.1) == 6554 << 16  # to the nearest multiple of 2**-16
    assert threshold(2**-18) == 0
    assert threshold(1 - 2**-40) == (2**16 - 1) << 16  # never 2**32, which 32 bits cannot hold
    assert keep_mask_2d(torch.tensor([1]), 0, 4, 4, 0.0).all()


# -- every backend's kernels against a definition without tensors --------------------------------------------


def golden_keep(seed: int, offset: int, plane: int, row: int, col: int, p: float) -> bool:
    """Whether the element is kept: Salmon et al. 2011, sec. 4.1, in Python's own integers."""
    words = [col // 8, row, plane, offset]
    key = [seed % 2**32, (seed >> 32) % 2**32]
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        highs = (second >> 32) ^ words[1] ^ key[0], (first >> 32) ^ words[3] ^ key[1]
        words = [highs[0], second % 2**32, highs[1], first % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    halves = [half for word in words for half in (word % 2**16, word // 2**16)]
    return halves[col % 8] >= min(round(p * 2**16), 2**16 - 1)


def golden(seed: int, offset: int, rows, cols: int, p: float, plane: int = 0) -> torch.Tensor:
    """The kept elements of the rows, bool (len(rows), cols)."""
    kept = [[golden_keep(seed, offset, plane, row, col, p) for col in range(cols)] for row in rows]
    return torch.tensor(kept)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_definition_gives_the_authors_answers(counter, key, words):
    group, row, plane, offset = counter
    seed = key[0] | key[1] << 32
    for i, word in enumerate(words):
        for column, half in ((2 * i, word & 0xFFFF), (2 * i + 1, word >> 16)):
            # kept at a probability of half / 2**16, and not at the next one
            place = (offset, plane, row, 8 * group + column)
            assert golden_keep(seed, *place, half / 2**16)
            assert not golden_keep(seed, *place, (half + 1) / 2**16)


SEEDS = [(0, 0), (1234, 7), (-5, 2**32 - 1), (2**62 + 17, 2**31)]


def kernels(op: str, function: str):
    """(backend, its `function`) for every backend that has the function here."""
    for name in dispatch.BACKENDS:
        if dispatch.unsupported_reason(name, op, "cpu", torch.float32, function) is None:
            yield name, getattr(dispatch.backend_module(name), function)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize(("seed", "offset"), SEEDS)
def test_every_layer_norm_draws_the_golden_bits(seed, offset, p):
    keep = golden(seed, offset, range(7), 18, p)
    where, weight, seen = torch.tensor([seed]), torch.ones(18), []
    for name, forward in kernels("layer_norm", "layer_norm_fwd"):
        dropped = {"dropout_p": p, "seed": where, "offset": offset}
        _, z, mean, rstd = forward(LayerNormInputs(torch.ones(7, 18), weight, eps=1e-5, **dropped), True)
        torch.testing.assert_close(z, keep / (1 - p), rtol=1e-6, atol=0, msg=name)
        dy = torch.randn(7, 18)
        backward = dispatch.backend_module(name).layer_norm_bwd
        needs = LayerNormNeeds(True, False, False, True)
        dx, dz, *_ = backward(dy, LayerNormSaved(z, weight, mean, rstd, **dropped), needs)
        assert dz.ne(0).all(), name
        torch.testing.assert_close(dx, dz * keep / (1 - p), rtol=1e-6, atol=0, msg=name)
        seen.append(name)
    assert {"reference", "aten"} <= set(seen)


@pytest.mark.parametrize(("seed", "offset"), SEEDS)
def test_every_embedding_draws_the_golden_bits(seed, offset):
    keep = golden(seed, offset, range(9), 12, 0.5)
    where, weight, shift = torch.tensor([seed]), torch.ones(12), torch.full((12,), 100.0)
    ids, word = torch.arange(9) % 5, torch.randn(5, 12)
    places = (2.0 ** torch.arange(9)).unsqueeze(1).expand(9, 12).contiguous()  # a column's sum tells its bits
    seen = []
    for name, forward in kernels("embedding", "embedding_fwd"):
        dropped = 0.5, where, offset
        inputs = EmbeddingInputs(ids, None, word, *(None,) * 4, weight, shift, -1, 1e-5, *dropped)
        y, z, mean, rstd = forward(inputs, True)
        assert torch.equal(y != 0, keep), name
        backward = dispatch.backend_module(name).embedding_bwd
        saved = EmbeddingSaved(z, weight, mean, rstd, ids, None, None, 5, 0, 0, -1, *dropped)
        sums = backward(places, saved, False, True)[-1]
        assert torch.equal(sums, 2 * (keep * places).sum(0)), name
        seen.append(name)
    assert {"reference", "aten"} <= set(seen)


@pytest.mark.sweep
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize(("seed", "offset"), SEEDS)
def test_every_attention_draws_the_golden_bits(seed, offset, p):
    where, ends, n = torch.tensor([seed]), torch.tensor([0, 5, 21], dtype=torch.int32), 16
    q = torch.zeros(21, 2, n)  # equal scores: the non-zero elements of a row of `out` are the kept ones
    unit = torch.cat([torch.eye(n)[:5], torch.eye(n)]).unsqueeze(1).repeat(1, 2, 1)
    seen = []
    for name, forward in kernels("attention", "attention_fwd"):
        inputs = AttentionInputs(q, q, unit, ends, n, 1.0, EVERYWHERE, None, None, p, where, offset)
        out, lse, _, bits = forward(inputs, False, True)
        assert bits.shape == (2, 21, 1), name
        dv = None
        if has_backward(name, "attention"):
            backward = dispatch.backend_module(name).attention_bwd
            needs = AttentionNeeds(True, True, True, False, False)
            dv = backward(unit, inputs, out, lse, bits, needs)[2]
            assert torch.equal(dv, backward(unit, inputs, out, lse, None, needs)[2]), name
        for head in range(2):
            for first, last in ((0, 5), (5, 21)):
                size = last - first
                keep = golden(seed, offset, range(first, last), size, p, head)
                saved = bits[head, first:last] >> torch.arange(size) & 1
                assert torch.equal(saved.bool(), keep), name
                kept = keep / (1 - p) / size
                torch.testing.assert_close(out[first:last, head, :size], kept, rtol=1e-6, atol=0, msg=name)
                if dv is not None:
                    torch.testing.assert_close(
                        dv[first:last, head, :size], kept.t(), rtol=1e-6, atol=0, msg=name
                    )
        seen.append(name)
    assert {"reference", "aten"} <= set(seen)
