"""The encoder against transformers, for every family."""

from __future__ import annotations

import copy
import functools
import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastbert
from fastbert.models.auto import AutoModel
from fastbert.models.bert import BertModel
from fastbert.models.config import EncoderConfig
from fastbert.runtime import dispatch, prepared
from tests.support.hf_models import FAMILY_NAMES, batch, hf_model
from tests.support.model_pairs import close, half_errors


def ours(hf: torch.nn.Module, **kwargs) -> BertModel:
    """Our model with the weights of a transformers one."""
    model = AutoModel.from_config(EncoderConfig.from_hf(hf.config), **kwargs).eval()
    model.load_state_dict(hf.state_dict(), strict=True)
    return model


@pytest.fixture(scope="module")
def bert() -> tuple[torch.nn.Module, BertModel]:
    hf = hf_model("bert")
    return hf, ours(hf)


@pytest.mark.parametrize("name", (*FAMILY_NAMES, "xlnet"))
def test_family_saved_by_transformers_gives_its_outputs(name, tmp_path):
    hf = hf_model(name)
    hf.save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path)
    inputs = batch(name)
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = hf(**inputs, output_hidden_states=True, output_attentions=True)
        actual = model(**inputs, output_hidden_states=True, output_attentions=True)
    close(actual.last_hidden_state[kept], expected.last_hidden_state[kept])
    assert actual.last_hidden_state[~kept].eq(0).all()
    assert len(actual.hidden_states) == len(expected.hidden_states)
    for a, e in zip(actual.hidden_states, expected.hidden_states, strict=True):
        # the sums that pre-norm layers pass on are not normed
        close(a[kept], e[kept], 2e-5 * max(1.0, e[kept].std().item()))
    assert actual.hidden_states[-1] is actual.last_hidden_state
    pairs = (kept[:, None, :, None] & kept[:, None, None, :]).expand(
        -1, hf.config.num_attention_heads, -1, -1
    )
    assert len(actual.attentions) == len(expected.attentions)
    for a, e in zip(actual.attentions, expected.attentions, strict=True):
        # Longformer's are bands, and zeros at masked tokens
        close(*((a, e) if name == "longformer" else (a[pairs], e[pairs])))
        rows = a.sum(-1)[kept[:, None].expand(-1, a.shape[1], -1)]
        close(rows, torch.ones_like(rows))
    if "pooler_output" in expected:
        first = kept[:, 0]
        close(actual.pooler_output[first], expected.pooler_output[first])


ROTARY = ("modernbert", "nomic_bert", "gte", "jina_embeddings_v3", "eurobert")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "dtype"),
    # MobileBERT refuses float16
    [
        (n, d)
        for n in (*FAMILY_NAMES, "xlnet")
        for d in (torch.bfloat16, torch.float16)[: 2 - (n == "mobilebert")]
    ]
    + [(n, torch.float32) for n in ROTARY],
)
def test_error_is_no_larger_than_transformers_own(name, dtype):
    """In float32 the two differ by the order of sums alone."""
    hf, most = hf_model(name), 1.1 if dtype == torch.float32 else 1.0
    mine, theirs = half_errors((ours(hf), hf), dtype, (batch(name, seed=seed) for seed in range(12)))
    assert mine.mean() <= most * theirs.mean()
    assert mine.square().mean() <= most * theirs.square().mean()
    # the worst of 75,000 elements is a matter of chance; a wrong kernel is off by far more
    assert mine.max() <= 2 * theirs.max()


@pytest.mark.parametrize("name", ["roberta", "mpnet"])
def test_position_row_of_the_pad_id_is_not_trained(name):
    hf = hf_model(name)
    model = ours(hf)
    ids = batch(name)["input_ids"]  # with pads, and without a mask
    for m in (hf, model):
        m(ids).last_hidden_state.square().sum().backward()
    gradient = model.embeddings.position_embeddings.weight.grad
    assert gradient[1].eq(0).all()
    close(gradient, hf.embeddings.position_embeddings.weight.grad, 2e-4 * gradient.abs().max().item())


@pytest.mark.parametrize("shape", [(4, 1), (1, 1), (4, 3)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_of_keys_alone(bert, kind, shape):
    """(batch, 1, 1, seqlen), as old code extends a mask, in forward and backward."""
    hf, model = bert
    ids = batch("bert")["input_ids"]
    torch.manual_seed(1)
    allowed = torch.rand(*shape, 1, 40) > 0.3
    theirs = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    mask = allowed if kind == "bool" else theirs
    with torch.no_grad():
        actual = model(ids, mask).last_hidden_state
        close(actual, hf(ids, theirs.expand(4, 3, 40, 40)).last_hidden_state)
        assert torch.equal(actual, model(ids, mask.expand(-1, -1, 40, -1)).last_hidden_state)
    gradients = []
    for one in (mask, mask.expand(-1, -1, 40, -1)):
        model.zero_grad()
        model(ids, one).last_hidden_state.square().sum().backward()
        gradients.append(model.embeddings.word_embeddings.weight.grad.clone())
    model.zero_grad()
    assert torch.equal(*gradients)


def test_fully_masked_row_is_finite_in_half_precision_and_backward(bert):
    _, model = bert
    model = copy.deepcopy(model).to(torch.bfloat16).train()
    inputs = batch("bert")
    inputs["attention_mask"][3] = 0
    out = model(**inputs)
    assert out.last_hidden_state[3].eq(0).all()
    assert out.pooler_output.isfinite().all()
    (out.last_hidden_state.sum() + out.pooler_output.sum()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@functools.cache
def _small() -> BertModel:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    rest = dict(vocab_size=120, max_position_embeddings=32, initializer_range=0.2)
    return BertModel(EncoderConfig(**sizes, **rest)).eval()


def test_head_mask_silences_and_scales_heads(bert):
    _, model = bert
    inputs = batch("bert")
    kept = inputs["attention_mask"].bool()
    gates = torch.tensor([[1.0, 0.0, 1.0], [0.5, 1.0, 1.0], [1.0, 1.0, 0.0]])
    # switching a head off equals zero columns in the output projection
    cut = copy.deepcopy(model)
    with torch.no_grad():
        for layer, gate in zip(cut.layer_list(), gates, strict=True):
            layer.attention.output.dense.weight.mul_(gate.repeat_interleave(16)[None])
        expected = cut(**inputs).last_hidden_state
        close(model(**inputs, head_mask=gates).last_hidden_state[kept], expected[kept])
        ones = model(**inputs, head_mask=torch.ones(3)).last_hidden_state
        close(ones[kept], model(**inputs).last_hidden_state[kept], 1e-6)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_layer_drops_where_transformers_does(name, monkeypatch):
    hf = hf_model(name, num_hidden_layers=2, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2)
    model = ours(hf)
    seen = []
    monkeypatch.setattr(
        torch.nn.functional,
        "dropout",
        lambda x, p=0.5, training=True, inplace=False: seen.append(p * training) or x,
    )
    with torch.no_grad():
        hf.train()(**batch(name))
    layers = model.layer_list()
    before = model._modules[model.family.embeddings].train().dropout_rate()
    every = sorted((before, *layers[0].train().dropout_rates() * len(layers)))
    assert [p for p in sorted(seen) if p > 0] == [p for p in every if p > 0]
    assert before == (0.0 if name == "eurobert" else 0.1)
    assert not any(layers[0].eval().dropout_rates())


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["bert", "mpnet", "modernbert", "deberta-v2", "mobilebert", "xlnet"])
def test_compile_full_graph_dynamic(name):
    torch._dynamo.reset()
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = ours(hf_model(name, num_hidden_layers=1 if name != "modernbert" else 2, **off))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen in (40, 33, 12):
        inputs = batch(name, seqlen=seqlen)
        with torch.no_grad():
            close(compiled(**inputs).last_hidden_state, model(**inputs).last_hidden_state, 5e-6)
    inputs = batch(name, seqlen=25)
    gradients = []
    for m in (model, compiled):
        model.zero_grad()
        m(**inputs).last_hidden_state.square().sum().backward()
        # a compiled graph may give zeros where eager gives None
        gradients.append(
            [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        )
    for a, b in zip(*gradients, strict=True):
        close(a, b, 1e-4 * max(1.0, b.abs().max().item()))


@pytest.mark.sweep
def test_compile_with_inductor():
    torch._dynamo.reset()
    model = _small()
    compiled = torch.compile(model, fullgraph=True)
    inputs = batch("bert", seqlen=20)
    with torch.no_grad():
        close(compiled(**inputs).last_hidden_state, model(**inputs).last_hidden_state, 5e-6)


@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_every_backend_gives_the_same_model(bert, backend):
    hf, model = bert
    inputs = batch("bert")
    kept = inputs["attention_mask"].bool()
    with torch.no_grad(), dispatch.use_backend(backend):
        close(model(**inputs).last_hidden_state[kept], hf(**inputs).last_hidden_state[kept])


@pytest.mark.sweep
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    name=st.sampled_from((*FAMILY_NAMES, "xlnet")),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([8, 16, 20, 32]),
    layers=st.integers(2, 4),
    act=st.sampled_from(["gelu", "gelu_new", "relu", "silu", "tanh"]),
    seed=st.integers(0, 1000),
)
def test_random_configs_equal_transformers(name, heads, head_dim, layers, act, seed):
    hf = hf_model(
        name,
        seed=seed,
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        intermediate_size=3 * head_dim + seed % 7 + 1,
        hidden_act=act,
    )
    model = ours(hf)
    inputs = batch(name, seed=seed)
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        # four layers of norms over 8 columns magnify rounding
        close(model(**inputs).last_hidden_state[kept], hf(**inputs).last_hidden_state[kept], 1e-4)


@pytest.mark.sweep
def test_many_lengths_leave_nothing_behind():
    model = _small()
    ids = torch.randint(5, 120, (2, 32))

    def run(lengths):
        with torch.no_grad():
            for n in lengths:
                model(ids[:, :n], torch.arange(n)[None] < torch.tensor([[n], [max(1, n - 3)]]))

    run(range(1, 33))
    kept = len(dispatch._resolved), len(prepared.remembered(model))
    gc.collect()
    tensors = sum(type(o) is torch.Tensor for o in gc.get_objects())
    run(range(1, 33))
    run(range(32, 0, -1))
    gc.collect()
    assert (len(dispatch._resolved), len(prepared.remembered(model))) == kept
    assert sum(type(o) is torch.Tensor for o in gc.get_objects()) <= tensors


def test_transformers_config_objects_are_understood():
    hf = hf_model("roberta")
    model = AutoModel.from_config(hf.config, add_pooling_layer=False)
    assert type(model) is fastbert.RobertaModel
    assert model.config == EncoderConfig.from_hf(hf.config)
    assert not model.has_pooler
    with pytest.raises(TypeError, match="config: expected an EncoderConfig, got dict"):
        AutoModel.from_config({})
