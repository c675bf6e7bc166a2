"""The last layer computed only for first tokens: the same rows, and no others."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastbert.execution import cpu
from fastbert.layers import attention as layers
from fastbert.layers.batch import PackedBatch
from fastbert.models.bert import BertModel
from fastbert.ops.dropout import keep_mask_2d
from fastbert.ops.pooling import pooling as pool
from fastbert.runtime import dispatch
from fastbert.sentences.encoder import SentenceEncoder
from fastbert.sentences.tokenizer import load_tokenizer
from tests.support import model_pairs
from tests.support.hf_models import FAMILY_NAMES, batch
from tests.support.inputs import ends_of
from tests.support.model_pairs import CASES, SEQUENCE_TASKS, inputs_for, labels_for, model_of, pair

LAYERS, HIDDEN, INNER = 3, 48, 80  # the tiny models of tests/support/hf_models.py
FIRST_ONLY_TASKS = tuple(task for task in SEQUENCE_TASKS if task != "ForPreTraining")


@pytest.fixture(scope="module")
def bert() -> BertModel:
    return model_of("bert")


@contextlib.contextmanager
def products():
    """A list of (rows, outputs) of every product with a weight, in the order of the calls of a backend."""
    seen, call, launcher, found = [], dispatch.call, dispatch.launcher, cpu.launchers

    def watched(function, launch):
        def launched(*args):
            result = launch(*args)
            if function.split()[0] in ("linear_fwd", "linear_int8_fwd"):
                seen.append(tuple((result[0] if isinstance(result, tuple) else result).shape))
            return result

        return launched

    dispatch.call = lambda function, *args: watched(function, call)(function, *args)
    dispatch.launcher = lambda function, *where: watched(function, launcher(function, *where))
    cpu.launchers = lambda *_: None
    try:
        yield seen
    finally:
        dispatch.call, dispatch.launcher, cpu.launchers = call, launcher, found


def inner_rows(seen: list[tuple[int, int]], each: int = 1) -> list[int]:
    """The number of rows in the feed-forward of each layer, which has `each` such products."""
    return [rows for rows, out in seen if out == INNER][::each]


def inner_products(model: BertModel) -> int:
    form = model.base_model.layer_list()[0].form
    feeds = 0 if form.bottleneck is None else len(form.bottleneck.feeds)
    return 1 + feeds + (form.names.gate is not None)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 5e-6) -> None:
    model_pairs.close(a, b, tolerance)


def depth(model: BertModel) -> int:
    return len(model.base_model.layer_list())


# -- the same rows as the whole layer's ----------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_equals_the_first_rows_of_the_whole(name):
    model = model_of(name)
    inputs = batch(name)  # right and left padding, holes, a full row
    with torch.no_grad():
        whole = model(**inputs)
        with products() as seen:
            first = model(**inputs, first_token_only=True)
            as_tuple = model(**inputs, first_token_only=True, return_dict=False)
    total, n = int(inputs["attention_mask"].sum()), depth(model)
    assert inner_rows(seen, inner_products(model)) == [*[total] * (n - 1), 4] * 2
    assert first.last_hidden_state.shape == (4, 1, HIDDEN)
    close(first.last_hidden_state[:, 0], whole.last_hidden_state[:, 0])
    assert first.last_hidden_state[1].eq(0).all()  # padded on the left: position 0 is masked
    assert list(first) == list(whole)
    if whole.pooler_output is not None:
        close(first.pooler_output, whole.pooler_output)
    assert all(torch.equal(a, b) for a, b in zip(as_tuple, first.to_tuple(), strict=True))


@pytest.mark.parametrize(("name", "task"), [case for case in CASES if case[1] in FIRST_ONLY_TASKS])
def test_heads_that_read_position_0_equal_transformers(name, task):
    hf, model = pair(name, task)
    inputs = inputs_for(name, task)
    labels = labels_for(hf, inputs)
    with torch.no_grad(), products() as seen:
        expected, actual = hf(**inputs, **labels), model(**inputs, **labels)
    total, n = int(inputs["attention_mask"].sum()), depth(model)
    assert inner_rows(seen, inner_products(model)) == [*[total] * (n - 1), 4]
    close(actual.logits, expected.logits, 2e-5)
    close(actual.loss, expected.loss, 1e-5)
    model.reads_first_only = False
    whole = model(**inputs, **labels)
    model.reads_first_only = True
    close(actual.logits, whole.logits.detach())
    with torch.no_grad():
        assert torch.equal(model(**inputs, return_dict=False)[0], actual.logits)


@pytest.mark.parametrize("kind", ["bool", "additive", "per-head", "keys"])
def test_four_dimensional_masks(bert, kind):
    ids = batch("bert")["input_ids"]
    torch.manual_seed(1)
    allowed = torch.rand(4, 1, 40, 40) > 0.3
    allowed[0] |= torch.eye(40, dtype=torch.bool)
    allowed[2, 0, 0] = False  # a first token that sees nothing
    mask = {
        "bool": allowed,
        "additive": torch.zeros(4, 1, 40, 40).masked_fill(~allowed, float("-inf")),
        "per-head": torch.randn(1, 3, 40, 40),
        "keys": allowed[:, :, :1],
    }[kind]
    with torch.no_grad(), products() as seen:
        whole, first = (bert(ids, mask, first_token_only=only)[0] for only in (False, True))
    assert inner_rows(seen)[-1] == 4
    close(first[:, 0], whole[:, 0])


@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_head_mask(name):
    model, inputs = model_of(name), batch(name)
    gates = torch.tensor([[1.0, 0.0, 1.0], [0.5, 1.0, 1.0], [1.0, 1.0, -2.0]])
    with torch.no_grad():
        arguments = dict(**inputs, head_mask=gates)
        whole, first = (model(**arguments, first_token_only=only)[0][:, 0] for only in (False, True))
        close(first, whole)
        assert not torch.allclose(first, model(**inputs, first_token_only=True)[0][:, 0], atol=1e-2)


# -- nothing to compute --------------------------------------------------------------------------------------


def test_sequences_without_tokens(bert):
    inputs = batch("bert")
    inputs["attention_mask"][0] = inputs["attention_mask"][3] = 0  # the first and the last
    with torch.no_grad():
        whole, first = (bert(**inputs, first_token_only=only) for only in (False, True))
        close(first.pooler_output, whole.pooler_output)
        assert first.last_hidden_state[[0, 3]].eq(0).all()
        inputs["attention_mask"][:] = 0
        none = bert(**inputs, first_token_only=True)
        assert none.last_hidden_state.shape == (4, 1, HIDDEN)
        assert none.last_hidden_state.eq(0).all()
        empty = torch.zeros(0, 6, dtype=torch.long)
        assert bert(empty, first_token_only=True).last_hidden_state.shape == (0, 1, HIDDEN)
        assert bert(empty, empty, first_token_only=True).pooler_output.shape == (0, HIDDEN)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "albert", "mpnet"])
@pytest.mark.parametrize("lengths", [[7, 1, 40, 23], [0, 5, 5, 0, 0, 30, 0], [4], [1, 0], [0, 0]], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_forward_packed(name, lengths, grad):
    model = model_of(name).double()
    cu_seqlens = ends_of(lengths)
    ids = torch.randint(5, 120, (sum(lengths),), generator=torch.Generator().manual_seed(2))
    with torch.set_grad_enabled(grad), products() as seen:
        whole = model.forward_packed(ids, cu_seqlens, max(lengths))
        del seen[:]
        first = model.forward_packed(ids, cu_seqlens, max(lengths), first_token_only=True)
    last = len(lengths) if sum(lengths) else 0
    assert inner_rows(seen)[-1] == last
    close(first, pool(whole, cu_seqlens, "cls"), 1e-12)
    assert first.requires_grad == grad
    if grad and sum(lengths):
        expected = gradients(model, pool(whole, cu_seqlens, "cls"))
        assert_gradients(gradients(model, first), expected, 1e-12)


# -- gradients and training ----------------------------------------------------------------------------------


def gradients(model, out) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    out.square().sum().backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_gradients(actual, expected, tolerance) -> None:
    assert actual.keys() == expected.keys()
    largest = max(b.abs().max() for b in expected.values() if b is not None)
    for name, b in expected.items():
        a = actual[name]
        if b is not None and b.any():  # the gradient of a key's bias is only rounding
            scale = largest if name.endswith(("key.bias", "k.bias", "k_lin.bias")) else b.abs().max()
            assert (a - b).abs().max() <= tolerance * scale, name
        else:  # weights that only the omitted rows use
            assert a is None or a.eq(0).all(), name


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_the_whole_models(name, checkpointing):
    model, inputs = model_of(name).double(), batch(name)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    whole = model(**inputs)[0][:, 0]
    expected = gradients(model, whole)
    with products() as seen:
        first = model(**inputs, first_token_only=True)[0][:, 0]
    assert inner_rows(seen)[-1] == 4
    close(first, whole, 1e-13)
    assert_gradients(gradients(model, first), expected, 1e-12)


def test_dropout_of_attention_draws_as_in_the_whole_layer():
    model, inputs = model_of("bert").train(), batch("bert")
    for layer in model.layer_list():
        layer.attention.output.dropout.p = layer.output.dropout.p = 0.0
        layer.attention.self.dropout.p = 0.4
    found = []
    for only in (False, True):
        torch.manual_seed(5)
        out = model(**inputs, first_token_only=only)[0][:, 0]
        found.append((out, gradients(model, out)))
    close(found[1][0], found[0][0])
    assert_gradients(found[1][1], found[0][1], 2e-5)
    torch.manual_seed(6)
    assert not torch.allclose(model(**inputs, first_token_only=True)[0][:, 0], found[1][0], atol=1e-3)


def test_dropout_after_attention_and_feed_forward_draws_by_the_rows_that_are_computed():
    layer, lengths, site = model_of("bert").double().layer_list()[-1].train(), [7, 1, 20, 3], 4
    layer.attention.self.dropout.p, layer.attention.output.dropout.p, layer.output.dropout.p = 0.0, 0.3, 0.6
    cu_seqlens = ends_of(lengths)
    x = torch.randn(sum(lengths), HIDDEN, dtype=torch.float64)
    seed = torch.tensor([11])
    sequences = PackedBatch(cu_seqlens, max(lengths), seed=seed)
    starts = cu_seqlens[:-1].long()
    first, _ = layer(x, sequences, layers.Asked(site=site, first_only=True))
    qkv = layers.queries_keys_values(layer.form, layer.parts(), x)
    context = layers.attention(*qkv, cu_seqlens, max(lengths)).flatten(1)[starts]

    def drop(y, offset, p):
        return y * keep_mask_2d(seed, offset, *y.shape, p) / (1 - p)

    attended, norm = layer.attention.output.dense, layer.attention.output.LayerNorm
    y = norm(drop(F.linear(context, attended.weight, attended.bias), site + 1, 0.3) + x[starts])
    inner = F.gelu(F.linear(y, layer.intermediate.dense.weight, layer.intermediate.dense.bias))
    out = layer.output.dense
    expected = layer.output.LayerNorm(drop(F.linear(inner, out.weight, out.bias), site + 2, 0.6) + y)
    close(first, expected, 1e-12)


# -- where every row is computed all the same ----------------------------------------------------------------


def rows_of_the_last_layer(model, inputs, **arguments) -> int:
    with products() as seen:
        model(**inputs, **arguments)
    return inner_rows(seen)[-1]


@pytest.mark.parametrize(
    "asked",
    [{"output_hidden_states": True}, {"output_attentions": True}, {"first_token_only": False}],
    ids=str,
)
def test_other_outputs_need_every_row(bert, asked):
    inputs = batch("bert")
    total = int(inputs["attention_mask"].sum())
    asked = {"first_token_only": True, **asked}
    with torch.no_grad():
        assert rows_of_the_last_layer(bert, inputs, **asked) == total
        plain = bert(**inputs, **{**asked, "first_token_only": False})
        first = bert(**inputs, **asked)
    assert list(first) == list(plain)
    assert torch.equal(first.pooler_output, plain.pooler_output)
    for key in ("hidden_states", "attentions"):
        for a, b in zip(first.get(key, ()), plain.get(key, ()), strict=True):
            assert torch.equal(a, b)
    if asked["first_token_only"]:
        assert torch.equal(first.last_hidden_state, plain.last_hidden_state[:, :1])


# -- sentences -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> SentenceEncoder:
    folder = tmp_path_factory.mktemp("tokenizer")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    (folder / "vocab.txt").write_text("\n".join(words))
    return SentenceEncoder(model_of("bert"), load_tokenizer(folder), pooling="cls")


SENTENCES = ["a b c", "d", "", "e f g h i j", "k l m", "a b c"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_sentences_by_their_first_token(encoder, dtype, normalize):
    made = copy.copy(encoder)
    made.model, made.normalize = copy.deepcopy(encoder.model).to(dtype), normalize
    with products() as seen:
        rows = made.encode(SENTENCES)
    tokens = made.tokenize(SENTENCES)
    assert inner_rows(seen) == [len(tokens.ids), len(tokens.ids), len(SENTENCES)]
    cu_seqlens = torch.from_numpy(tokens.starts).int()
    with torch.no_grad():
        hidden = made.model.forward_packed(
            torch.from_numpy(tokens.ids), cu_seqlens, int(tokens.lengths.max())
        )
    expected = pool(hidden, cu_seqlens, "cls")
    expected = F.normalize(expected, dim=1) if normalize else expected
    assert rows.dtype == made.dtype
    close(torch.from_numpy(rows), expected, 0.05 if dtype == torch.bfloat16 else 5e-6)
