"""Tokens that leave between layers: against modules called on one text at a time, and by every executor."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch._dynamo.exc import Unsupported

import fastbert
from fastbert.compression import shrink
from fastbert.execution import cpu, eager, launchers
from fastbert.execution.call import Call
from fastbert.layers import encoder
from fastbert.layers.batch import PackedBatch
from fastbert.layers.elimination import count, kept_of, most_received
from fastbert.layers.encoder_layer import EncoderLayer
from fastbert.layers.taps import Taps
from fastbert.models.auto import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from fastbert.models.encoder import tapped
from fastbert.models.families import FAMILIES
from fastbert.runtime import dispatch
from tests.support.cpu_fixtures import threads  # noqa: F401
from tests.support.inputs import ends_of

SIZES = dict(hidden_size=48, num_attention_heads=3, num_hidden_layers=4, intermediate_size=80, vocab_size=60)
SCHEDULE = [0.8, 0.5, 0.5, 0.2]
LENGTHS = (23, 1, 7, 16)
HAVE = dispatch.unsupported_reason("cpu", "linear", "cpu", torch.float32) is None
needs_kernels = pytest.mark.skipif(not HAVE, reason="needs the compiled CPU kernels")


def of(name="bert", auto=AutoModel, dtype=torch.float32, schedule=SCHEDULE, **config):
    torch.manual_seed(0)
    layers = {**SIZES, "max_position_embeddings": 40, **config}
    model = auto.from_config(fastbert.EncoderConfig(model_type=name, **layers)).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * (0.5 if p.dim() == 1 else 0.15))
    return fastbert.eliminate(model, schedule)


def batch(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 60, (len(lengths), max(lengths)), generator=generator)
    return ids, (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def by_modules(model, ids):
    """All states of one text's tokens, by its layers' modules and their probabilities."""
    hidden = model.embeddings(ids, torch.arange(len(ids)), torch.zeros_like(ids))[None]
    rows, states = torch.arange(len(ids)), [hidden[0]]
    for layer, fraction in zip(model.encoder.layer, model.config.token_schedule, strict=True):
        attended, probs = layer.attend_by_modules(hidden)
        kept = math.ceil(round(fraction * len(ids), 6))
        received = probs.sum((0, 1, 2)).tolist()
        order = sorted(range(1, len(rows)), key=lambda j, received=received: -received[j])
        here = torch.tensor([0, *sorted(order[: kept - 1])])
        hidden, rows = layer.feed_by_modules(attended[:, here]), rows[here]
        states.append(states[-1].index_copy(0, rows, hidden[0]))
    return states


def test_counts():
    assert [
        count(f, n) for f, n in ((0.1, 30), (0.1, 31), (1.0, 7), (1e-12, 5), (0.5, 0), (153 / 256, 256))
    ] == [*(3, 4, 7, 1, 0, 153)]
    kept = kept_of([1, 0.5, 0.5, 0.3], [6, 0, 3], torch.device("cpu"))
    assert (kept[0], kept[2]) == (None, None)
    assert [(k.cu_seqlens.tolist(), k.max_seqlen, k.total) for k in (kept[1], kept[3])] == [
        ([0, 3, 3, 5], 3, 5),
        ([0, 2, 2, 3], 2, 3),
    ]


def test_the_first_and_the_most_received_stay():
    kept = kept_of([0.5], [6, 0, 4], torch.device("cpu"))[0]
    assert kept is not None
    received = torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0, 2.0, 9.0, 1.0, 5.0, 1.0])
    found = most_received(received, PackedBatch(ends_of([6, 0, 4]), 6), kept)
    assert found.tolist() == [0, 1, 3, 6, 8]
    bad = received.index_fill(0, torch.tensor([9]), torch.nan)
    assert most_received(bad, PackedBatch(ends_of([6, 0, 4]), 6), kept).tolist() == [0, 1, 3, 6, 9]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("grad", [False, True])
def test_all_states_are_those_of_each_text_alone(dtype, grad):
    model, (ids, mask) = of(dtype=dtype), batch()
    with torch.set_grad_enabled(grad):
        out = model(ids, attention_mask=mask, output_hidden_states=True)
        assert torch.equal(out.last_hidden_state, out.hidden_states[-1])
        close = dict(rtol=1e-9, atol=1e-11) if dtype == torch.float64 else dict(rtol=1e-4, atol=1e-4)
        for i, length in enumerate(LENGTHS):
            expected = by_modules(model, ids[i, :length])
            for state, each in zip(out.hidden_states, expected, strict=True):
                torch.testing.assert_close(state[i, :length], each, **close)
                assert not state[i, length:].any()


def test_gradients_are_those_of_each_text_alone():
    model, (ids, mask) = of(dtype=torch.float64), batch()
    dy = torch.randn(*ids.shape, 48, dtype=torch.float64) * mask[..., None]
    (model(ids, attention_mask=mask).last_hidden_state * dy).sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    sum((by_modules(model, ids[i, :n])[-1] * dy[i, :n]).sum() for i, n in enumerate(LENGTHS)).backward()
    assert len(found) > 60
    for name, grad in found.items():
        torch.testing.assert_close(grad, model.get_parameter(name).grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("every", [0, 1])
def test_training_with_dropout_and_recomputing(every):
    model, (ids, mask) = of(), batch()
    model.train()
    model.gradient_checkpointing_enable() if every else model.gradient_checkpointing_disable()
    grads = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(3)
        model(ids, attention_mask=mask).last_hidden_state.square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        every, _ = 1 - every, model.gradient_checkpointing_enable() if every == 0 else None
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("schedule", [[1.0] * 4, None])
def test_a_fraction_of_one_changes_no_bit(schedule):
    plain, (ids, mask) = of(schedule=None), batch()
    with torch.no_grad():
        expected = plain(ids, attention_mask=mask)
        found = fastbert.eliminate(fastbert.eliminate(copy.deepcopy(plain), SCHEDULE), schedule)(
            ids, attention_mask=mask
        )
    assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
    assert torch.equal(found.pooler_output, expected.pooler_output)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [LENGTHS, (40, 39, 40, 40, 39, 40)])
def test_order_packing_and_threads_change_no_bit(dtype, lengths, threads):  # noqa: F811
    model, (ids, mask) = of(dtype=dtype), batch(lengths)
    with torch.no_grad():
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            whole = model(ids, attention_mask=mask).last_hidden_state
            turned = model(ids.flip(0), attention_mask=mask.flip(0)).last_hidden_state.flip(0)
            assert torch.equal(whole, turned)
            for i, n in enumerate(lengths):
                alone = model(ids[i : i + 1, :n]).last_hidden_state
                assert torch.equal(whole[i, :n], alone[0])
            rows = torch.cat([ids[i, :n] for i, n in enumerate(lengths)])
            flat = model.forward_packed(rows, ends_of(lengths), max(lengths))
            assert torch.equal(flat, torch.cat([whole[i, :n] for i, n in enumerate(lengths)]))


# What the fused layer of a CPU knows: joined and gated products, norms before the blocks, angles
KINDS = {
    "bert": {},
    "roberta": {},
    "distilbert": {},
    "electra": {},
    "albert": {},
    "nomic_bert": {},
    "gte": {},
    "neobert": {},
    "eurobert": {"num_key_value_heads": 1, "pad_token_id": 0},
}


@needs_kernels
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_one_call_per_layer_has_the_bits_of_the_ops(name, int8, monkeypatch):
    model, (ids, mask) = of(name, **KINDS[name]), batch()
    model = model.quantize("int8") if int8 else model
    calls = []
    run = cpu.run
    monkeypatch.setattr(cpu, "run", lambda *args: calls.append(1) or run(*args))
    with torch.no_grad():
        fused = model(ids, attention_mask=mask, output_hidden_states=True)
        assert bool(calls) == (name != "eurobert")
        monkeypatch.setattr(cpu, "serves", lambda x, call: "it is not asked")
        by_ops = model(ids, attention_mask=mask, output_hidden_states=True)
    for a, b in zip(fused.hidden_states, by_ops.hidden_states, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", KINDS)
def test_after_the_last_attention_only_the_kept_are_fed(name):
    """The feed-forward block mixes no tokens, so their states are the plain model's."""
    model, (ids, mask) = of(name, dtype=torch.float64, schedule=[1, 1, 1, 0.4], **KINDS[name]), batch()
    plain = fastbert.eliminate(copy.deepcopy(model), None)
    with torch.no_grad():
        found = model(ids, attention_mask=mask).last_hidden_state
        states = plain(ids, attention_mask=mask, output_hidden_states=True).hidden_states
        norm = model.family.final_norm
        before = states[-2] if norm is None else model.get_submodule(norm)(states[-2])
    for i, n in enumerate(LENGTHS):
        fed = torch.isclose(found[i, :n], states[-1][i, :n], rtol=1e-9, atol=1e-11).all(-1)
        left = torch.isclose(found[i, :n], before[i, :n], rtol=1e-9, atol=1e-11).all(-1)
        assert fed.sum() == count(0.4, n)
        assert fed[0]
        assert torch.equal(left, ~fed)


def test_kept_tokens_keep_their_positions(monkeypatch):
    model, ids = of("nomic_bert", dtype=torch.float64, schedule=[0.5, 0.5, 0.5, 0.5]), batch((20,))[0]
    seen = []
    original = encoder.layer

    def layer(form, parts, x, batch, asked):
        seen.append(batch.positions)
        return original(form, parts, x, batch, asked)

    monkeypatch.setattr(encoder, "layer", layer)
    model(ids)
    assert seen[0].tolist() == list(range(20))
    assert len(seen[1]) == 10
    assert seen[1][0] == 0
    assert seen[1].tolist() != list(range(10))
    assert (seen[1].diff() > 0).all()


@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_heads(auto):
    model, (ids, mask) = of(auto=auto), batch()
    hidden = model.base_model(ids, attention_mask=mask)
    logits = model(ids, attention_mask=mask).logits
    if auto is AutoModelForTokenClassification:
        expected = model.classifier(hidden.last_hidden_state)
        torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(logits, model.classifier(hidden.pooler_output), rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(model(ids, attention_mask=mask).logits, logits, rtol=1e-4, atol=1e-4)
    assert logits.requires_grad


def test_a_layer_without_heads_keeps_the_first_tokens():
    model = of(schedule=None)
    model = fastbert.eliminate(fastbert.prune(model, heads={1: [0, 1, 2]}).model, [1, 0.5, 0.5, 0.5])
    ids = batch((10,))[0]
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(states[2][0, 5:], states[1][0, 5:])
    assert (states[2][0, :5] != states[1][0, :5]).any(-1).all()


def test_gates_count():
    model, (ids, mask) = of(dtype=torch.float64), batch()
    gates = torch.tensor([1.0, 0.0, 1.0])
    found = model(ids, attention_mask=mask, head_mask=gates).last_hidden_state
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.output.dense.weight[:, 16:32] = 0
    torch.testing.assert_close(found, model(ids, attention_mask=mask).last_hidden_state)


def test_a_sentence_encoder_pools_all_tokens(minilm):
    encoder = fastbert.SentenceEncoder.from_pretrained(minilm)
    layers = encoder.model.config.num_hidden_layers
    fastbert.eliminate(encoder.model, [1 - 0.1 * i for i in range(layers)])
    texts = ["a man walks his dog along the old river", "short", "apples, pears and bread for the evening"]
    found = encoder.encode(texts)
    for text, vector in zip(texts, found, strict=True):
        assert torch.equal(torch.as_tensor(encoder.encode([text])[0]), torch.as_tensor(vector))
    ids = torch.tensor([[101, 2460, 102]])
    hidden = encoder.model(ids).last_hidden_state[0]
    expected = torch.nn.functional.normalize(hidden.mean(0), dim=0)
    torch.testing.assert_close(torch.as_tensor(found[1]), expected, rtol=1e-5, atol=1e-6)


def test_saved_loaded_and_pruned(tmp_path):
    model, (ids, mask) = of(), batch()
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert again.config.token_schedule == SCHEDULE
    with torch.no_grad():
        assert torch.equal(
            again(ids, attention_mask=mask).last_hidden_state,
            model(ids, attention_mask=mask).last_hidden_state,
        )
    assert shrink.without(model, layers=[0, 2, 3]).config.token_schedule == [0.8, 0.5, 0.2]
    of(schedule=None).save_pretrained(tmp_path / "plain")
    loaded = AutoModel.from_pretrained(tmp_path / "plain", token_schedule=SCHEDULE)
    assert loaded.config.token_schedule == SCHEDULE


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (0.5, "one per layer, got 0.5"),
        ([0.5] * 3, "4 fractions"),
        ([0.5, 0.5, 0.4, 0.0], "4 fractions"),
        ([1.1, 1, 1, 1], "4 fractions"),
        ([True, 0.5, 0.5, 0.5], "4 fractions"),
        ([1, float("nan"), 0.5, 0.5], "4 fractions"),
        ([0.5, 0.6, 0.5, 0.5], "do not rise"),
    ],
)
def test_bad_schedules(schedule, words):
    model = of()
    with pytest.raises(ValueError, match=f"config token_schedule: expected .*{words}"):
        fastbert.eliminate(model, schedule)
    assert model.config.token_schedule == SCHEDULE


def test_models_that_compute_all_tokens_say_so():
    with pytest.raises(TypeError, match="model: expected a model of fastbert, got Linear"):
        fastbert.eliminate(torch.nn.Linear(1, 1), [0.5])
    refused = {n for n, f in FAMILIES.items() if f.counts_columns or f.block_sparse}
    assert {"mpnet", "modernbert", "deberta-v2", "big_bird", "longformer", "xlnet", "mobilebert"} <= refused
    assert not refused & {"bert", "roberta", "xlm-roberta", "electra", "distilbert", "albert", "nomic_bert"}
    for name, why in (("mpnet", "distances"), ("big_bird", "blocks")):
        with pytest.raises(ValueError, match=f"token_schedule: expected None, as {name} .*{why}"):
            of(name)
    with pytest.raises(ValueError, match="is_decoder"):
        of(is_decoder=True)
    with pytest.raises(ValueError, match="fixed_heads"):
        of(fixed_heads=["learned", "learned", "first"])


def test_calls_that_need_all_tokens_say_so():
    model, (ids, mask) = of(), batch()
    wide = torch.zeros(4, 1, 1, 23)
    for given, words in (
        ({"output_attentions": True}, "output_attentions: expected False"),
        ({"causal": True}, "causal: expected False"),
        ({"attention_mask": wide}, "attention_mask: expected 2-D"),
    ):
        with pytest.raises(ValueError, match=words):
            model(ids, **{"attention_mask": mask, **given})
    with tapped(model, Taps()), pytest.raises(ValueError, match="taps: expected None"):
        model(ids)
    model.encoder.layer[2].attention.self.query.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="layer 2 was changed or has hooks"):
        model(ids)


def test_compiled_code_runs_in_parts_or_refuses():
    model, (ids, mask) = of(), batch()
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(model, backend="eager")(ids, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(found, model(ids, attention_mask=mask).last_hidden_state)
    torch._dynamo.reset()
    with pytest.raises(Unsupported):
        torch.compile(model, backend="eager", fullgraph=True)(ids)
    torch._dynamo.reset()


def test_a_layer_with_a_forward_of_its_own_sees_the_kept_tokens():
    seen = []

    class Own(EncoderLayer):
        def forward(self, hidden, batch, asked):
            seen.append(hidden.shape)
            return super().forward(hidden, batch, asked)

    model, (ids, mask) = of(), batch()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).last_hidden_state
        model.encoder.layer[2].__class__ = Own
        torch.testing.assert_close(model(ids, attention_mask=mask).last_hidden_state, expected)
    assert seen == [(sum(count(0.5, n) for n in LENGTHS), 48)]


def test_executors_and_graphs_say_why():
    model, (ids, _) = of(), batch()
    graphed = fastbert.graph(model)
    with torch.no_grad():
        assert torch.equal(graphed(ids).last_hidden_state, model(ids).last_hidden_state)
    call = Call(PackedBatch(ends_of([4]), 4), 3, kept=kept_of(SCHEDULE, [4], torch.device("cpu")))
    assert eager.serves(torch.zeros(4, 48), call) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launchers, "on_gpu", lambda device: True)
        with torch.no_grad():
            call = Call(PackedBatch(ends_of([4]), 4), 3, kept=call.kept)
            assert launchers.serves(torch.zeros(4, 48), call) == "tokens leave between the layers"
