"""The last layer computed only for first tokens: the same rows, and no others."""

from __future__ import annotations

import contextlib
import copy
from itertools import accumulate, pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastbert
from fastbert import testing
from fastbert.layers import encoder as layers
from fastbert.layers import fused
from fastbert.models.bert import BertModel
from fastbert.models.config import EncoderConfig
from fastbert.models.heads.task_model import TaskModel
from fastbert.ops.dropout import keep_mask_2d
from fastbert.ops.first_attention import CAST_FROM, first_attention
from fastbert.ops.pooling import pooling as pool
from fastbert.runtime import dispatch
from fastbert.sentences.encoder import SentenceEncoder
from fastbert.sentences.tokenizer import load_tokenizer
from tests.support.hf_models import FAMILY_NAMES, batch, hf_model
from tests.support.model_pairs import SEQUENCE_TASKS, half_errors, inputs_for, labels_for, model_of, pair

LAYERS, HIDDEN, INNER = 3, 48, 80  # the tiny models of tests/support/hf_models.py
FIRST_ONLY_TASKS = tuple(task for task in SEQUENCE_TASKS if task != "ForPreTraining")


@pytest.fixture(scope="module")
def bert() -> BertModel:
    return model_of("bert")


@contextlib.contextmanager
def products():
    """A list of (rows, outputs) of every product with a weight, in the order of the calls of a backend."""
    seen, launch, found = [], dispatch.call, fused.launchers

    def call(function, key, *args):
        result = launch(function, key, *args)
        if function.split()[0] in ("linear_fwd", "linear_int8_fwd"):
            seen.append(tuple((result[0] if isinstance(result, tuple) else result).shape))
        return result

    dispatch.call, fused.launchers = call, lambda *_: None
    try:
        yield seen
    finally:
        dispatch.call, fused.launchers = launch, found


def inner_rows(seen: list[tuple[int, int]]) -> list[int]:
    """The number of rows in the feed-forward of each layer."""
    return [rows for rows, out in seen if out == INNER]


def depth(model: BertModel) -> int:
    return len(model.base_model.layers())


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 5e-6) -> None:
    assert a.shape == b.shape
    error = (a - b).abs().max().item() if a.numel() else 0.0
    assert error <= tolerance, f"max error {error:.3g}"


# -- the attention of one query a sequence -------------------------------------------------------------------


def operands(lengths, dtype, bias="", gate=False, value_bias=True, nheads=3, head_dim=16, seed=0):
    """(keyword arguments of `first_attention`, the bias of the keys, which it does not need)."""
    g = torch.Generator().manual_seed(seed)
    hidden, size, total = nheads * head_dim, max(lengths), sum(lengths)

    def randn(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    made = {
        "x": randn(total, hidden),
        "q": randn(len(lengths), nheads, head_dim),
        "key_weight": randn(hidden, hidden) / hidden**0.5,
        "value_weight": randn(hidden, hidden) / hidden**0.5,
        "value_bias": randn(hidden) if value_bias else None,
        "bias": None,
        "gate": 1 + randn(nheads) if gate else None,
    }
    if bias:
        shape = {"shared": (1, nheads), "sequence": (len(lengths), 1), "full": (len(lengths), nheads)}[bias]
        made["bias"] = randn(*shape, size, size)
        made["bias"][torch.rand(made["bias"].shape, generator=g) < 0.3] = float("-inf")
        made["bias"][-1, 0] = float("-inf")  # a query that sees nothing
    return made, randn(hidden)


def attend(x, q, key_weight, value_weight, value_bias, bias, gate, key_bias, lengths, scale):
    """The same in plain PyTorch and the inputs' dtype: keys and values of all tokens, softmax, product."""
    nheads, head_dim = q.shape[1:]
    shape = (-1, nheads, head_dim)
    keys = F.linear(x, key_weight, key_bias).reshape(shape)
    values = F.linear(x, value_weight, value_bias).reshape(shape)
    rows = []
    for i, (start, end) in enumerate(pairwise(accumulate(lengths, initial=0))):
        scores = torch.einsum("hd,thd->ht", q[i], keys[start:end]) * scale
        if bias is not None:
            scores = scores + bias[i if bias.shape[0] > 1 else 0, :, 0, : end - start]
        # a query that sees nothing returns zeros
        probs = torch.softmax(scores, -1).masked_fill(scores.isneginf().all(-1, keepdim=True), 0)
        out = torch.einsum("ht,thd->hd", probs, values[start:end])
        rows.append((out if gate is None else out * gate[:, None]).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([40, 3, 0, 17, 17, 1, 128, 0], {}),
        ([33, 33, 33, 5], {"value_bias": False}),
        ([9, 64, 64, 0, 2], {"bias": "shared"}),
        ([9, 64, 64, 0, 2], {"bias": "sequence", "gate": True}),
        ([21, 21, 80], {"bias": "full", "gate": True}),
        ([1], {"gate": True}),
    ],
    ids=str,
)
def test_first_attention_by_the_error_rule(lengths, options, dtype):
    scale = 0.3
    for seed in range(3):
        made, key_bias = operands(lengths, dtype, seed=seed, **options)
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        actual = first_attention(**made, cu_seqlens=cu_seqlens, softmax_scale=scale)
        wide = {name: None if t is None else t.double() for name, t in made.items()}
        truth = attend(**wide, key_bias=key_bias.double(), lengths=lengths, scale=scale)
        eager = attend(**made, key_bias=key_bias, lengths=lengths, scale=scale)
        assert actual.dtype == dtype
        keys, values = (
            F.linear(wide["x"], wide[f"{name}_weight"], added).norm(dim=-1).max().item()
            for name, added in (("key", key_bias.double()), ("value", wide["value_bias"]))
        )
        q = wide["q"].norm(dim=-1).max().item()
        floor = 4 * torch.finfo(dtype).eps * (1 + q * keys * scale) * values
        *_, reason = testing.compare(actual, eager, truth, dtype, 0.0 if dtype in testing.HALF else floor)
        assert not reason, reason
        empty = torch.tensor([length == 0 for length in lengths])
        assert actual[empty].eq(0).all()


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
    assert inner_rows(seen) == [*[total] * (n - 1), 4] * 2
    assert first.last_hidden_state.shape == (4, 1, HIDDEN)
    close(first.last_hidden_state[:, 0], whole.last_hidden_state[:, 0])
    assert first.last_hidden_state[1].eq(0).all()  # padded on the left: position 0 is masked
    assert list(first) == list(whole)
    if whole.pooler_output is not None:
        close(first.pooler_output, whole.pooler_output)
    assert all(torch.equal(a, b) for a, b in zip(as_tuple, first.to_tuple(), strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_error_is_no_larger_than_transformers_own(name, dtype):
    def first_rows(model, inputs):
        kept = inputs["attention_mask"][:, 0].bool()
        only = {"first_token_only": True} if isinstance(model, BertModel) else {}
        return model(**inputs, **only).last_hidden_state[kept, 0]

    batches = (batch(name, batch_size=12, seed=seed) for seed in range(8))
    mine, theirs = half_errors((model_of(name), hf_model(name)), dtype, batches, first_rows)
    assert mine.mean() <= theirs.mean()
    assert mine.square().mean() <= theirs.square().mean()
    assert mine.max() <= 2 * theirs.max()  # the worst of 4,500 elements is a matter of chance


@pytest.mark.parametrize(
    ("name", "task"),
    [
        (n, t)
        for n in FAMILY_NAMES
        for t in FIRST_ONLY_TASKS
        if t != "ForNextSentencePrediction" or n in ("bert", "ernie")
    ],
)
def test_heads_that_read_position_0_equal_transformers(name, task):
    hf, model = pair(name, task)
    inputs = inputs_for(name, task)
    labels = labels_for(hf, inputs)
    with torch.no_grad(), products() as seen:
        expected, actual = hf(**inputs, **labels), model(**inputs, **labels)
    total, n = int(inputs["attention_mask"].sum()), depth(model)
    assert inner_rows(seen) == [*[total] * (n - 1), 4]
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


@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_every_backend(bert, backend):
    inputs = batch("bert")
    with torch.no_grad():
        whole = bert(**inputs)[0][:, 0]
        with dispatch.use_backend(backend):
            close(bert(**inputs, first_token_only=True)[0][:, 0], whole)


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


def test_a_model_without_layers():
    model = BertModel(EncoderConfig(vocab_size=120, hidden_size=24, num_hidden_layers=0)).eval()
    ids = batch("bert")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids, first_token_only=True)[0], model(ids)[0][:, :1])


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "albert", "mpnet"])
@pytest.mark.parametrize("lengths", [[7, 1, 40, 23], [0, 5, 5, 0, 0, 30, 0], [4], [0, 0]], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_forward_packed(name, lengths, grad):
    model = model_of(name)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    ids = torch.randint(5, 120, (sum(lengths),), generator=torch.Generator().manual_seed(2))
    with torch.set_grad_enabled(grad), products() as seen:
        whole = model.forward_packed(ids, cu_seqlens, max(lengths))
        del seen[:]
        first = model.forward_packed(ids, cu_seqlens, max(lengths), first_token_only=True)
    last = len(lengths) if sum(lengths) else 0
    assert inner_rows(seen)[-1] == last
    close(first, pool(whole, cu_seqlens, "cls"))
    assert first.requires_grad == grad


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


@pytest.mark.parametrize("lengths", [[7, 1, 40, 23], [0, 5, 5, 0, 0, 1, 0], [4], [1, 0]], ids=str)
def test_gradients_beside_empty_sequences(lengths):
    model = model_of("bert").double()
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    ids = torch.randint(5, 120, (sum(lengths),), generator=torch.Generator().manual_seed(2))
    whole = pool(model.forward_packed(ids, cu_seqlens, max(lengths)), cu_seqlens, "cls")
    expected = gradients(model, whole)
    first = model.forward_packed(ids, cu_seqlens, max(lengths), first_token_only=True)
    close(first, whole, 1e-13)
    assert_gradients(gradients(model, first), expected, 1e-12)


def test_dropout_of_attention_draws_as_in_the_whole_layer():
    model, inputs = model_of("bert").train(), batch("bert")
    for layer in model.layers():
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
    layer, lengths, site = model_of("bert").double().layers()[-1].train(), [7, 1, 20, 3], 4
    layer.attention.self.dropout.p, layer.attention.output.dropout.p, layer.output.dropout.p = 0.0, 0.3, 0.6
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    x = torch.randn(sum(lengths), HIDDEN, dtype=torch.float64)
    seed = torch.tensor([11])
    sequences = layers.Sequences(cu_seqlens, max(lengths), seed=seed)
    starts = cu_seqlens[:-1].long()
    first, _ = layer(x, sequences, None, site, first_only=True)
    context = layers.attention(*layer._qkv(x), cu_seqlens, max(lengths)).flatten(1)[starts]

    def drop(y, offset, p):
        return y * keep_mask_2d(seed, offset, *y.shape, p) / (1 - p)

    attended, norm = layer.attention.output.dense, layer.attention.output.LayerNorm
    y = norm(drop(F.linear(context, attended.weight, attended.bias), site + 1, 0.3) + x[starts])
    inner = F.gelu(F.linear(y, layer.intermediate.dense.weight, layer.intermediate.dense.bias))
    out = layer.output.dense
    expected = layer.output.LayerNorm(drop(F.linear(inner, out.weight, out.bias), site + 2, 0.6) + y)
    close(first, expected, 1e-12)


def test_training_in_half_precision_and_recomputed_draws_the_same():
    model, inputs = model_of("bert").train(), batch("bert")
    found = []
    for checkpointing in (False, True):
        (model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable)()
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(**inputs, first_token_only=True)[0][:, 0]
        found.append((out, gradients(model, out.float())))
    assert torch.equal(found[0][0], found[1][0])
    for key, value in found[0][1].items():
        assert (value is None) == (found[1][1][key] is None)
        assert value is None or torch.equal(value, found[1][1][key]), key


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


def test_config_may_ask_for_other_outputs():
    model = model_of("bert", output_hidden_states=True)
    inputs = batch("bert")
    with torch.no_grad():
        assert rows_of_the_last_layer(model, inputs, first_token_only=True) == inputs["attention_mask"].sum()
        assert len(model(**inputs, first_token_only=True).hidden_states) == LAYERS + 1


@pytest.mark.parametrize(
    "where", ["", "attention", "attention.self.key", "output.LayerNorm", "intermediate.dense"]
)
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_on_the_last_layer_sees_every_row(where, kind):
    model, inputs = model_of("bert"), batch("bert")
    seen = []

    def hook(_module, args, *result):
        results = result[0] if result and isinstance(result[0], tuple) else result
        seen.extend(t.shape[:2] for t in (args[0], *results[:1]))

    handle = getattr(model.layers()[-1].get_submodule(where), kind)(hook)
    with torch.no_grad():
        first = model(**inputs, first_token_only=True)[0]
        times = 2 if kind == "register_forward_hook" else 1
        assert seen == [inputs["attention_mask"].shape] * times
        handle.remove()
        assert rows_of_the_last_layer(model, inputs, first_token_only=True) == 4
        close(first[:, 0], model(**inputs)[0][:, 0])
        # a hook on another layer does not matter
        model.layers()[0].register_forward_hook(lambda *_: None)
        assert rows_of_the_last_layer(model, inputs, first_token_only=True) == 4


def test_a_replaced_last_layer_is_called_as_it_is(bert):
    model, inputs = copy.deepcopy(bert), batch("bert")
    calls = []

    class Own(layers.EncoderLayer):
        def forward(self, hidden, sequences, gate=None, site=1):
            calls.append(hidden.shape[0])
            return super().forward(hidden, sequences, gate, site)

    own = Own(model.config).eval()
    own.load_state_dict(model.layers()[-1].state_dict())
    model.encoder.layer[-1] = own
    with torch.no_grad():
        first = model(**inputs, first_token_only=True)[0]
        assert calls == [int(inputs["attention_mask"].sum())]
        assert torch.equal(first, bert(**inputs)[0][:, :1])


class Recorded(nn.Sequential):
    """Notes the shapes that it is called with."""

    def forward(self, x):
        self.calls = [*getattr(self, "calls", ()), x.shape[:2]]
        return super().forward(x)


@pytest.mark.parametrize("path", ["attention.self.query", "attention.self.key", "output.dense"])
def test_a_replaced_part_is_called_on_the_padded_batch(bert, path):
    model, inputs = copy.deepcopy(bert), batch("bert")
    owner, _, name = path.rpartition(".")
    last = model.layers()[-1]
    recorded = Recorded(last.get_submodule(path))
    setattr(last.get_submodule(owner), name, recorded)
    with torch.no_grad():
        first = model(**inputs, first_token_only=True, head_mask=torch.tensor([1.0, 0.5, 2.0]))[0]
        close(first[:, 0], bert(**inputs, head_mask=torch.tensor([1.0, 0.5, 2.0]))[0][:, 0])
    assert recorded.calls == [inputs["attention_mask"].shape]


def test_keys_and_values_are_made_only_where_they_must(bert):
    inputs = batch("bert")
    total = int(inputs["attention_mask"].sum())
    with torch.no_grad(), products() as seen:
        bert(**inputs, first_token_only=True)
    absorbed = list(seen)
    assert absorbed[-5:] == [
        (4, HIDDEN),
        (4, HIDDEN),
        (4, INNER),
        (4, HIDDEN),
        (4, HIDDEN),
    ]  # the pooler last
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), products() as seen:
        bert(**inputs, first_token_only=True)
    assert seen[-7:] == [(4, HIDDEN), (total, HIDDEN), (total, HIDDEN), *absorbed[-4:]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("total", [CAST_FROM - 1, CAST_FROM])
def test_few_tokens_do_not_pay_for_casting_weights(bert, dtype, total):
    model = copy.deepcopy(bert).to(dtype)
    ids = torch.randint(5, 120, (total,), generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.tensor([0, 20, 23, total], dtype=torch.int32)
    with torch.no_grad(), products() as seen:
        first = model.forward_packed(ids, cu_seqlens, total, first_token_only=True)
        own = seen[len(seen) - seen[::-1].index((total, INNER)) + 1 :]  # the last layer's
        close(
            first,
            model.forward_packed(ids, cu_seqlens, total)[cu_seqlens[:-1].long()],
            {torch.bfloat16: 0.1, torch.float16: 0.01}.get(dtype, 5e-6),
        )
    few = dtype in testing.HALF and total < CAST_FROM
    keys_and_values = [(total, HIDDEN)] * 2 if few else []
    assert own == [(3, HIDDEN), *keys_and_values, (3, HIDDEN), (3, INNER), (3, HIDDEN)]


# -- autocast, torch.compile, 8 bits -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    hf, model = hf_model("bert"), model_of("bert")
    mine, theirs = [], []
    for seed in range(8):
        inputs = batch("bert", batch_size=12, seed=seed)
        kept = inputs["attention_mask"][:, 0].bool()
        with torch.no_grad():
            truth = hf(**inputs)[0][kept, 0].double()
            with torch.autocast("cpu", dtype):
                whole = model(**inputs)[0]
                first, expected = model(**inputs, first_token_only=True)[0], hf(**inputs)[0]
                assert rows_of_the_last_layer(model, inputs, first_token_only=True) == 12
        assert first.dtype == whole.dtype
        mine.append((first[kept, 0].double() - truth).abs().flatten())
        theirs.append((expected[kept, 0].double() - truth).abs().flatten())
    mine, theirs = torch.cat(mine).mean(), torch.cat(theirs).mean()
    assert mine <= 1.05 * theirs, f"mean error {mine:.3g}, transformers' {theirs:.3g}"


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_compile_full_graph_dynamic(name):
    torch._dynamo.reset()
    model = model_of(name)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen in (40, 33, 12):
        inputs = batch(name, seqlen=seqlen)
        inputs["attention_mask"][1] = 0
        with torch.no_grad():
            with products() as seen:
                first = compiled(**inputs, first_token_only=True)
            assert inner_rows(seen) == [4 * seqlen] * (LAYERS - 1) + [4]
            whole = model(**inputs)
        close(first.last_hidden_state[:, 0], whole.last_hidden_state[:, 0], 5e-6)


def test_eight_bit_layers(bert):
    model, inputs = copy.deepcopy(bert).quantize("int8"), batch("bert")
    with torch.no_grad():
        whole = model(**inputs)
        with products() as seen:
            first = model(**inputs, first_token_only=True)
    assert inner_rows(seen)[-1] == 4
    # each row is rounded to 8 bits by itself: only the order of sums in attention differs
    close(first.last_hidden_state[:, 0], whole.last_hidden_state[:, 0], 1e-5)


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


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_other_poolings_read_every_token(encoder, pooling):
    made = copy.copy(encoder)
    made.pooling = pooling
    with products() as seen:
        made.encode(SENTENCES)
    assert set(inner_rows(seen)) == {len(made.tokenize(SENTENCES).ids)}


def test_hidden_states_of_a_head_that_reads_position_0():
    hf, model = pair("bert", "ForSequenceClassification")
    inputs = inputs_for("bert", "ForSequenceClassification")
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = hf(**inputs, output_hidden_states=True)
        actual = model(**inputs, output_hidden_states=True)
        assert rows_of_the_last_layer(model, inputs, output_attentions=True) == kept.sum()
    close(actual.logits, expected.logits, 2e-5)
    for a, e in zip(actual.hidden_states, expected.hidden_states, strict=True):
        close(a[kept], e[kept], 2e-5)


def test_every_head_says_what_it_reads():
    for name in fastbert.__all__:
        head = getattr(fastbert, name)
        if isinstance(head, type) and issubclass(head, TaskModel) and head.task != "Model":
            assert head.reads_first_only == (head.task in FIRST_ONLY_TASKS), name


@pytest.mark.sweep
def test_compiled_in_training():
    model, inputs = model_of("bert").double(), batch("bert")
    expected = gradients(model, model(**inputs, first_token_only=True)[0])
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_gradients(gradients(model, compiled(**inputs, first_token_only=True)[0]), expected, 1e-12)
    torch._dynamo.reset()
