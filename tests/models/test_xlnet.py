"""XLNet: both streams, memories, masks, heads and files against transformers, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import fastbert
from fastbert.checkpoint.files import CheckpointError
from fastbert.pretraining.formats import FullSentences
from fastbert.pretraining.objectives.permutation import Permutation
from fastbert.runtime.dispatch import use_backend
from tests.support.accelerated_models import same_gradients
from tests.support.hf_models import hf_model
from tests.support.model_pairs import NO_DROPOUT, close, kept_rows, native, no_larger_errors
from tests.support.objectives import batch_of, built, numbered, tensors

BATCH, LENGTH, PREDICTIONS = 4, 17, 5
EXACT, NEAR = 1e-9, {"rtol": 1e-4, "atol": 1e-4}
HEADS = (
    "XLNetLMHeadModel",
    "XLNetForSequenceClassification",
    "XLNetForTokenClassification",
    "XLNetForMultipleChoice",
    "XLNetForQuestionAnsweringSimple",
    "XLNetForQuestionAnswering",
)
NONE = {k: v for k, v in NO_DROPOUT.items() if k in ("hidden_dropout_prob",)} | {"summary_last_dropout": 0.0}
g = torch.Generator().manual_seed(0)
IDS = torch.randint(5, 120, (BATCH, LENGTH), generator=g)
TYPES = torch.randint(0, 4, (BATCH, LENGTH), generator=g)
# Padding on the left, as XLNet's tokenizer has it, and a hole
MASK = torch.ones(BATCH, LENGTH, dtype=torch.long)
MASK[0, :6] = MASK[1, :1] = MASK[2, 4:7] = 0
PERM = (torch.rand(BATCH, LENGTH, LENGTH, generator=g) > 0.6).double()
PERM[0, 3] = 0  # sees all
TARGETS = torch.nn.functional.one_hot(torch.tensor([[3, 1, 16, 8, 9]] * BATCH), LENGTH).double()


def models(name: str = "XLNetModel", **config) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(transformers' model, ours with its weights), both in float64 and eval."""
    hf = hf_model("xlnet", getattr(transformers, name), **config).double()
    return hf, native(hf).double()


def flat(value) -> list[torch.Tensor]:
    """The tensors of an output, or of a field of it."""
    return [value] if isinstance(value, torch.Tensor) else [t for each in value for t in flat(each)]


CALLS = {
    "ids alone": {},
    "types": {"token_type_ids": TYPES},
    "permuted": {"perm_mask": PERM, "token_type_ids": TYPES},
    "two streams": {"perm_mask": PERM, "target_mapping": TARGETS, "token_type_ids": TYPES},
    "two streams of padding": {"perm_mask": PERM, "target_mapping": TARGETS, "input_mask": 1.0 - MASK},
    "query stream that sees itself": {"target_mapping": TARGETS},
}
KINDS = [
    {},
    {"attn_type": "uni"},
    {"attn_type": "uni", "same_length": True, "mem_len": 4},
    {"clamp_len": 4, "mem_len": None},
    {"bi_data": True},
    {"mem_len": 6, "reuse_len": 4},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_outputs_of_every_kind_of_call(kind):
    hf, model = models(**kind)
    more = {"output_hidden_states": True, "output_attentions": True}
    for call in CALLS.values():
        if kind.get("attn_type") == "uni" and {"perm_mask", "input_mask"} & {*call}:
            continue  # transformers adds a mask of a batch to one of a sequence in place, and fails
        with torch.no_grad():
            expected, actual = hf(IDS, **call, **more), model(IDS, **call, **more)
            assert list(actual) == list(expected)
            for a, e in zip(flat(actual.to_tuple()), flat(expected.to_tuple()), strict=True):
                close(a, e, EXACT)
            later = dict(input_ids=IDS[:, :9], token_type_ids=TYPES[:, :9], use_mems=True)
            expected = hf(**later, mems=expected.mems)
            actual = model(**later, mems=actual.mems)
            for a, e in zip(flat(actual.to_tuple()), flat(expected.to_tuple()), strict=True):
                close(a, e, EXACT)


def test_padding_and_the_polarity_of_its_masks():
    """huggingface/transformers#1022 and #1013."""
    hf, model = models()
    kept = MASK.bool()
    with torch.no_grad():
        expected = hf(IDS, attention_mask=MASK, token_type_ids=TYPES).last_hidden_state
        for mask in (
            {"attention_mask": MASK},
            {"attention_mask": kept},
            {"input_mask": 1 - MASK},
            {"input_mask": 1.0 - MASK},
        ):
            found = model(IDS, **mask, token_type_ids=TYPES).last_hidden_state
            close(found[kept], expected[kept], EXACT)
            assert found[~kept].eq(0).all()
        # Without a mask padding is text, whatever its type
        whole = model(IDS, token_type_ids=TYPES).last_hidden_state
        close(whole, hf(IDS, token_type_ids=TYPES).last_hidden_state, EXACT)
        assert (whole[0, 6:] - expected[0, 6:]).abs().max() > 0.1
        # A sequence alone, without its padding, and packed with others
        alone = model(IDS[:1, 6:], token_type_ids=TYPES[:1, 6:]).last_hidden_state
        close(alone[0], expected[0, 6:], EXACT)
        rows, ends = [IDS[0, 6:], IDS[3]], torch.tensor([0, 11, 28], dtype=torch.int32)
        types = torch.cat([TYPES[0, 6:], TYPES[3]])
        packed = model(torch.cat(rows), cu_seqlens=ends, token_type_ids=types)
        close(packed.last_hidden_state[:11], alone[0], EXACT)
        assert packed.mems is None
    with pytest.raises(ValueError, match="input_mask: expected None beside attention_mask"):
        model(IDS, MASK, input_mask=1 - MASK)


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 129])
def test_lengths_around_the_kept_tables(length):
    hf, model = models(num_hidden_layers=2)
    ids = torch.randint(5, 120, (2, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        for _ in range(2):  # computes, and reads what is kept
            close(model(ids).last_hidden_state, hf(ids).last_hidden_state, EXACT)
        model.layer[0].rel_attn.r.mul_(1.5)
        hf.layer[0].rel_attn.r.mul_(1.5)
        close(model(ids).last_hidden_state, hf(ids).last_hidden_state, EXACT)


def ragged(*lengths: int) -> dict[str, torch.Tensor]:
    """Padding on the right, so that tokens are adjacent; three types of tokens."""
    g = torch.Generator().manual_seed(0)
    ids, types = (
        torch.randint(a, b, (len(lengths), max(lengths)), generator=g) for a, b in ((5, 120), (0, 3))
    )
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def biased(hf: torch.nn.Module) -> torch.nn.Module:
    """The model with biases of queries that matter."""
    with torch.no_grad():
        for layer in hf.layer:
            for bias in (layer.rel_attn.r_w_bias, layer.rel_attn.r_r_bias, layer.rel_attn.r_s_bias):
                bias.normal_()
    return hf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_no_larger_than_transformers_own(dtype):
    hf = biased(hf_model("xlnet", num_hidden_layers=2))
    no_larger_errors((native(hf), hf), dtype, [ragged(1, 70, 128), ragged(129, 40)])


@pytest.mark.parametrize("lengths", [(1, 40), (128, 3), (129, 70, 128)], ids=str)
@pytest.mark.parametrize("typed", [False, True])
@torch.no_grad()
def test_what_inference_keeps(lengths, typed):
    """One query for all terms, and the table in the backend's layout, until a weight changes."""
    model, inputs = native(biased(hf_model("xlnet", num_hidden_layers=2))), ragged(*lengths)
    if not typed:
        del inputs["token_type_ids"]
    attention = model.layer[0].rel_attn
    for name in (None, "r", "r_w_bias", "r_r_bias", "r_s_bias", "seg_embed", "q"):
        if name is not None:
            getattr(attention, name).mul_(-1.5)
        found = kept_rows(model, inputs)
        torch.testing.assert_close(found, kept_rows(copy.deepcopy(model).double(), inputs).float(), **NEAR)
        with use_backend("aten"):
            torch.testing.assert_close(kept_rows(model, inputs), found, **NEAR)
    one = {key: t[:1, : lengths[0]] for key, t in inputs.items()}
    assert torch.equal(kept_rows(model, one), kept_rows(model, inputs)[: lengths[0]])


def labels_of(name: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    if name == "XLNetForQuestionAnswering":
        return dict(
            start_positions=torch.tensor([8, 2, 9, 16]),
            end_positions=torch.tensor([9, 2, 12, 16]),
            cls_index=torch.full((BATCH,), LENGTH - 1),
            is_impossible=torch.tensor([0.0, 1.0, 0.0, 1.0]).double(),
        )
    if name == "XLNetForQuestionAnsweringSimple":
        return dict(start_positions=torch.tensor([8, 2, 9, 16]), end_positions=torch.tensor([9, 2, 12, 99]))
    if name == "XLNetForMultipleChoice":
        return {"labels": torch.tensor([1, 0])}
    if name == "XLNetForSequenceClassification":
        return {"labels": torch.randint(0, 5, (BATCH,), generator=draw)}
    classes = 120 if name == "XLNetLMHeadModel" else 5
    return {"labels": torch.randint(0, classes, (BATCH, LENGTH), generator=draw).where(MASK.bool(), -100)}


@pytest.mark.parametrize("name", HEADS)
def test_heads_losses_gradients_and_files(name, tmp_path):
    labels = {} if "Question" in name or "Choice" in name else {"num_labels": 5}
    hf, model = models(name, **labels, **NONE, start_n_top=3, end_n_top=2)
    inputs = {"input_ids": IDS, "input_mask": 1 - MASK, "token_type_ids": TYPES}
    if "Question" in name:  # whose losses are over the kept tokens alone
        inputs.pop("input_mask")
    if "Choice" in name:
        inputs = {k: v.unflatten(0, (2, 2)) for k, v in inputs.items()}
    for given in ({}, labels_of(name)):
        expected, actual = hf(**inputs, **given), model(**inputs, **given)
        assert list(actual) == list(expected)
        for key in expected.keys() - {"mems"}:
            a, e = actual[key], expected[key]
            kept = MASK.bool() if a.shape[:2] == MASK.shape and "input_mask" in inputs else ...
            close(a[kept], e[kept], EXACT)
    for m in (hf, model):
        m.train()(**inputs, **labels_of(name)).loss.backward()
    same_gradients(model, hf, EXACT)

    hf.eval().float().save_pretrained(tmp_path / "theirs")
    getattr(fastbert, name).from_pretrained(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    stock = getattr(transformers, name)
    back, info = stock.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), hf.parameters(), strict=True))
    theirs, kept = hf.config.to_dict(), back.config.to_dict()
    assert {key for key in theirs if kept[key] != theirs[key]} <= {"_name_or_path", "dtype"}


def test_answers_are_no_masked_tokens():
    hf, model = models("XLNetForQuestionAnswering", start_n_top=3, end_n_top=2)
    outside = torch.zeros(BATCH, LENGTH)
    outside[:, -1] = 1
    with torch.no_grad():
        found = model(IDS, MASK, p_mask=outside)
        expected = hf(IDS, attention_mask=MASK, p_mask=((1 - MASK) + outside).clamp_max(1).double())
    for key in ("start_top_log_probs", "start_top_index", "end_top_log_probs", "end_top_index"):
        close(found[key].double(), expected[key].double(), EXACT)
    with pytest.raises(ValueError, match="input_ids: expected at least 3 tokens per sequence, got 2"):
        model(IDS[:, :2])


@pytest.mark.parametrize("kind", ["last", "first", "mean", "cls_index"])
def test_a_sequence_is_summarised_from_its_kept_tokens(kind):
    hf, model = models("XLNetForSequenceClassification", summary_type=kind)
    with torch.no_grad():
        ids, expected = torch.cat([IDS[0, 6:], IDS[3]]), [hf(IDS[:1, 6:]).logits, hf(IDS[3:]).logits]
        packed = model(ids, cu_seqlens=torch.tensor([0, 11, 28], dtype=torch.int32)).logits
        close(packed, torch.cat(expected), EXACT)
        if kind != "first":  # which is masked
            close(model(IDS, MASK).logits[[0, 3]], packed, EXACT)


def test_dropout_is_drawn_and_repeats():
    _, model = models()
    model.train()
    for call in ({"attention_mask": MASK}, {"perm_mask": PERM, "target_mapping": TARGETS}):
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(model(IDS, **call).last_hidden_state)
        assert torch.equal(found[0], found[1])
        assert not torch.allclose(found[0], found[2], atol=1e-2)
        found[0].square().sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_target_without_context_sees_nothing():
    """transformers lets it see every token, its own too."""
    _, model = models()
    perm = torch.ones(1, LENGTH, LENGTH)
    mapping = TARGETS[:1]
    changed = IDS[:1].clone()
    changed[0, 3] = 7
    found = [model(ids, perm_mask=perm, target_mapping=mapping)[0] for ids in (IDS[:1], changed)]
    assert torch.equal(*found)


def test_the_permutation_objective_is_that_of_both_streams():
    ours = Permutation(FullSentences(numbered(), 50, 0))
    losses = built(ours, family="xlnet")
    batch = tensors(batch_of(ours, 3))
    loss = losses(batch)[0]["permutation"]
    loss.backward()
    given, total, count = [], 0.0, batch["labelled"]
    model = copy.deepcopy(losses.model)
    model.zero_grad()
    for i, (a, b) in enumerate(zip(batch["cu_seqlens"], batch["cu_seqlens"][1:], strict=False)):
        labels, rows = batch["labels"][a:b], b - a
        content = (labels == -100).nonzero()[:, 0]
        n, targets = len(content), batch["position_ids"][a:b][len(content) :]
        ranks = batch["ranks"][i, :n]
        perm = ((ranks > 0)[None] & (ranks[None] >= ranks[:, None]))[None].double()
        mapping = torch.nn.functional.one_hot(targets, n)[None].double()
        types = batch["token_type_ids"][a:b][:n][None]
        out = model(
            batch["input_ids"][a:b][:n][None], perm_mask=perm, target_mapping=mapping, token_type_ids=types
        )
        given.append(rows)
        total = total + torch.nn.functional.cross_entropy(out.logits[0], labels[n:], reduction="sum") / count
    close(loss, total, EXACT)
    total.backward()
    same_gradients(losses.model, model, EXACT)
    optimizer, first = torch.optim.Adam(losses.parameters(), 3e-3), loss.item()
    for _ in range(30):
        optimizer.zero_grad()
        loss = losses(batch)[0]["permutation"]
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5 * first


def test_what_is_refused(tmp_path):
    hf, model = models()
    ends = torch.tensor([0, 17], dtype=torch.int32)
    for call, match in (
        (
            {"input_ids": IDS[0], "cu_seqlens": ends, "mems": [torch.zeros(1, 1, 48)] * 3},
            "cu_seqlens: expected None",
        ),
        ({"input_ids": IDS, "perm_mask": PERM[:, 1:]}, "perm_mask: expected"),
        ({"input_ids": IDS, "target_mapping": TARGETS[..., 1:]}, "target_mapping: expected shape"),
        ({"input_ids": IDS, "mems": [torch.zeros(1, BATCH, 48)]}, "mems: expected 3 tensors, got 1"),
        ({"input_ids": IDS, "token_type_ids": TYPES + 2}, "token_type_ids: token type 5"),
    ):
        with pytest.raises(ValueError, match=match):
            model(**call)
    with pytest.raises(TypeError, match=r"layer\.0: a StreamLayer has no int8 form"):
        model.quantize()
    state = hf.state_dict()
    state["layer.0.rel_attn.x"] = state.pop("layer.0.rel_attn.q")
    hf.config.save_pretrained(tmp_path)
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"rel_attn\.[qx]"):
        fastbert.XLNetModel.from_pretrained(tmp_path)
