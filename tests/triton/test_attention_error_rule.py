"""The Triton attention by the error rule: on the GPU where there is one, else in the interpreter."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import strategies as st

from fastbert import testing
from fastbert.testing.op_cases.attention import CASES, AttentionCase
from tests.support.triton_attention_inputs import attention_cases
from tests.support.triton_fixtures import DEVICE, DTYPES, HALF, fuzz_tests
from tests.triton import test_attention, test_attention_backward

pytestmark = pytest.mark.usefixtures("checked_memory")
# name of forward's tiles, of backward's
CUTS = (("32x16", "high-wide"), ("16x32", "chunks"), ("16x16-one-loop", "high-wide"))
SLOW = (("32x16", "wide-high"), ("32x16", "two-words"))


def cut(monkeypatch: pytest.MonkeyPatch, forward: str, backward: str) -> None:
    monkeypatch.setattr(test_attention.kernels, "config_for", test_attention.CUTS[forward])
    cuts = test_attention_backward.CUTS
    monkeypatch.setattr(test_attention_backward.module, "configs_for", cuts[backward])


@pytest.fixture(params=[*CUTS, *(pytest.param(pair, marks=pytest.mark.slow) for pair in SLOW)], ids="-".join)
def tiles(request, monkeypatch):
    cut(monkeypatch, *request.param)


@pytest.fixture
def small_tiles(monkeypatch):
    cut(monkeypatch, *CUTS[0])


def check(
    case: AttentionCase, dtype: torch.dtype, seed: int = 0, luck: str = "", backward: bool = True
) -> None:
    """`luck`: which rows are held against `lucky_yardstick`: "gradients" or "all"."""
    rows = testing.run_case(case, "triton", dtype, DEVICE, backward=backward, seed=seed)
    names = set(case.output_names)
    if backward:
        given = {"qkv": case.packed_qkv, "bias": case.bias, "gate": case.gate}
        letters = {"query": "q", "key": "k", "distance": "b"}
        given |= {name: letter in case.relative for name, letter in letters.items()}
        names |= {f"d{name}" for name, is_given in given.items() if is_given}
        names |= set() if case.packed_qkv else {"dq", "dk", "dv"}
    assert {r.quantity for r in rows} == names
    held = {r.quantity for r in rows if luck == "all" or (luck and r.quantity not in case.output_names)}
    failed = [
        r for r in rows if not r.passed and not (r.quantity in held and lucky_yardstick(r, case, dtype))
    ]
    assert [f"{r.quantity}: {r.reason}" for r in failed] == []


def lucky_yardstick(row: testing.Row, case: AttentionCase, dtype: torch.dtype) -> bool:
    """With few elements eager's error may be small by luck: then allow twice that."""
    forward = row.quantity in case.output_names
    per_head = {"dgate": 1, "lse": sum(case.lengths)}.get(row.quantity, sum(case.lengths) * case.headdim)
    elements = case.nheads * per_head
    if elements >= (2000 if forward else 4000) or dtype == torch.float32 or not math.isfinite(row.max_error):
        return False
    step = torch.finfo(dtype).eps
    deep = 1 if forward else max(1, case.headdim / 16)
    return row.max_error <= 2 * row.eager_max_error + 4 * step * deep and row.mean_error <= (
        row.eager_mean_error * (1 + 8 / elements**0.5) + step / (4 if forward else 2)
    )


def cases_and_dtypes():
    """All, and backward where it is quick in the interpreter; what takes seconds are slow tests."""
    for (i, case), (j, dtype) in itertools.product(enumerate(CASES), enumerate(DTYPES)):
        trained = not case.probs
        quick = trained and sum(n * n for n in case.lengths) * case.nheads <= 4000 and j == i % 3
        long = sum(case.lengths) * case.nheads > 1000 and dtype != torch.bfloat16
        marks = pytest.mark.slow if long else ()
        yield pytest.param(case, dtype, quick, marks=marks, id=f"{case.id}-{dtype}")
        if trained and not quick:
            yield pytest.param(case, dtype, True, marks=pytest.mark.slow, id=f"{case.id}-{dtype}-backward")


@pytest.mark.parametrize(("case", "dtype", "backward"), list(cases_and_dtypes()))
def test_cases(case, dtype, backward):
    check(case, dtype, backward=backward)


# The last block of keys and the last tile of queries have every size; each sequence has others beside it.
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("first", "dtype", "causal"), [(1, torch.float32, False), (18, HALF[0], True)], ids=str
)
def test_every_length_of_small_tiles(small_tiles, first, dtype, causal):
    check(AttentionCase(tuple(range(first, first + 17)), 1, 16, causal=causal, lse=True), dtype)


@pytest.mark.sweep
@pytest.mark.parametrize("headdim", [1, 7, 8, 16, 24, 32, 40, 48, 72, 80, 96, 112, 120, 128])
def test_every_head_dimension(headdim):
    backward = headdim in (7, 24, 80, 128)
    lengths = (17, 20) if backward else (19, 40)
    check(AttentionCase(lengths, 1, headdim, lse=True), HALF[headdim // 8 % 2], 0, "gradients", backward)
    case = AttentionCase((19,), 1, headdim, bias="sequence", dropout_p=0.25)
    check(case, torch.float32, backward=backward)


@pytest.mark.sweep
@pytest.mark.parametrize(("causal", "bias"), [(False, "sequence"), (True, "")])
def test_all_cuts(tiles, causal, bias):
    options = {"causal": causal, "bias": bias, "masked": bool(bias), "lse": True}
    check(AttentionCase((20, 0, 16, 1), 1, 24, capacity=3, slack=5, **options), torch.float32)
    check(AttentionCase((33,), 2, 32, gate=True, dropout_p=0.3, packed_qkv=True, **options), torch.bfloat16)
    probs = AttentionCase((50,), 2, 32, gate=True, probs=True, **options)
    check(probs, torch.bfloat16, backward=False)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "options", [{"dropout_p": 0.5}, {"bias": "sequence"}, {"gate": True, "causal": True}]
)
def test_a_sharp_softmax(small_tiles, dtype, options):
    """dS is a small difference of large numbers: its error is that of delta."""
    for sharpness in (4.0, 32.0):
        check(AttentionCase((33, 20), 2, 32, sharpness=sharpness, **options), dtype)


@st.composite
def fuzzed_cases(draw):
    return (*draw(attention_cases()), draw(st.sampled_from([None, *CUTS, *SLOW])))


def check_drawn(case, dtype, seed, tiles):
    with pytest.MonkeyPatch.context() as patch:
        if tiles is not None:
            cut(patch, *tiles)
        check(case, dtype, seed, "all", backward=not case.probs and seed % 8 == 0)


test_fuzz, test_fuzz_long = fuzz_tests(check_drawn, fuzzed_cases(), 50, 2500)
