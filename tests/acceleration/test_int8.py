"""`fastbert.accelerate(model, dtype="int8")`: the same bits as `quantize("int8")` of our own model.

The accelerated model keeps its parameters. Which layers stay in floating point, and what is refused.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import fastbert
from fastbert.acceleration.layer import AcceleratedLayer
from fastbert.acceleration.layer_gaps import int8_gap
from fastbert.backends.cpu import sizes
from fastbert.layers.asked import Asked
from fastbert.layers.batch import PackedBatch
from fastbert.runtime import prepared
from fastbert.sentences.encoder import SentenceEncoder
from tests.acceleration.test_interface import stock as other_stock
from tests.support import model_pairs
from tests.support.accelerated_models import (
    HEAD,
    LAST,
    LAYERS,
    MODEL,
    calls,
    close,
    first_kept,
    layer_calls,
    padded,
    same_gradients,
    stock,
    submodule,
)
from tests.support.hf_models import ACCELERATED, BERT_LAYERS, batch
from tests.support.quantized_models import alike

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = (ROOT / "examples" / "sentences.txt").read_text(encoding="utf-8").splitlines()
QUERY = "encoder.layer.1.attention.self.query"


def int8(name: str = "bert", auto: type = MODEL, **options) -> nn.Module:
    return fastbert.accelerate(stock(name, auto), dtype="int8", **options)


def native(slow: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Our own encoder with the weights of a transformers encoder, quantised."""
    return model_pairs.native(slow).to(dtype).quantize("int8")


def last(model: nn.Module, inputs: dict | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model(**(first_kept("bert") if inputs is None else inputs)).last_hidden_state


def runs(model: nn.Module) -> list[bool]:
    return [layer.int8 for layer in fastbert.explain(model).layers]


def snapshot(model: nn.Module) -> dict[str, tuple]:
    """What a user can see of a model: names, identities and values of tensors, classes, modes."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "tensors": {k: (id(v), v.data_ptr(), v.dtype, v.requires_grad, v._version) for k, v in tensors},
        "modules": {k: (id(m), type(m).__name__, m.training) for k, m in model.named_modules()},
        "keys": {k: set(vars(m)) - {"fastbert_state"} for k, m in model.named_modules()},
    }


# -- what is computed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACCELERATED)
def test_every_family_equals_our_own_model_quantised(name):
    slow, inputs = stock(name), padded(name)
    fast = fastbert.accelerate(copy.deepcopy(slow), dtype="int8", strict=True)
    kept = inputs["attention_mask"].bool()
    with calls(fast, packed=1, padded=0, fused=layer_calls(name), stock=0):
        out = last(fast, inputs)
    # MobileBERT's embeddings are the stock module's
    close(out, last(native(slow), inputs), 1e-6 if name == "mobilebert" else 0.0)
    full = last(slow, inputs)
    # A gated block multiplies two rounded halves
    alike(out, full, kept, 0.99 if name in BERT_LAYERS else 0.95)
    assert all(runs(fast))


def test_first_tokens_alone():
    layer, batch = submodule(int8(), LAST), PackedBatch(torch.tensor([0, 5, 12], dtype=torch.int32), 7)
    x = torch.randn(12, layer.output.dense.out_features)
    with torch.no_grad():
        whole, first = layer(x, batch)[0], layer(x, batch, Asked(first_only=True))[0]
    close(first, whole[[0, 5]], 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float32], ids=str)
def test_the_base_dtype_is_kept(dtype):
    slow, inputs = stock("bert").to(dtype), first_kept("bert")
    if dtype == torch.float32:  # from 1,536 rows weights are packed per call, from 2,048 rows run in blocks
        inputs = first_kept("bert", batch_size=80)
        inputs["attention_mask"][:] = 1
        assert sizes.MANY_ROWS <= 80 * 40
    fast = fastbert.accelerate(copy.deepcopy(slow), dtype="int8")
    assert {p.dtype for p in fast.parameters()} == {dtype}
    out = last(fast, inputs)
    assert out.dtype == dtype
    assert torch.equal(out, last(native(slow, dtype), inputs))


@pytest.mark.parametrize("name", ["bert", "albert", "mpnet", "distilbert"])
def test_op_by_op(name):
    """No whole layer runs in one call under autocast, and with gradients enabled that nothing requires."""
    slow, inputs = stock(name).requires_grad_(False), first_kept(name)
    fast, ours = fastbert.accelerate(copy.deepcopy(slow), dtype="int8"), native(slow)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(last(fast, inputs), last(ours, inputs))
    out = fast(**inputs).last_hidden_state
    assert torch.equal(out, ours(**inputs).last_hidden_state)
    assert not out.requires_grad
    whole = last(fast, inputs)
    # without a fused norm the bias is added before the residual, not together with it
    fastbert.accelerate(fast, dtype="int8", layer_norm=False)
    out = last(fast, inputs)
    kept = inputs["attention_mask"].bool()
    alike(out, whole, kept, 0.999)
    assert all(runs(fast))


@pytest.mark.parametrize("unpad", [False, True])
def test_padded_batches(unpad):
    """By option, or because first tokens are masked."""
    slow, inputs = stock("bert"), (batch if unpad else first_kept)("bert")
    kept = inputs["attention_mask"].bool()
    fast = fastbert.accelerate(copy.deepcopy(slow), dtype="int8", unpad=unpad)
    with calls(fast, packed=0, padded=1, fused=LAYERS, stock=0):
        out = last(fast, inputs)
    alike(out, last(slow, inputs), kept)
    alike(out, last(native(slow), inputs), kept, 0.999)


@pytest.mark.parametrize("name", ["bert", "albert", "electra", "mpnet"])
def test_poolers_projections_and_heads_stay_as_they_are(name):
    slow, inputs = stock(name, HEAD), first_kept(name)
    fast = fastbert.accelerate(copy.deepcopy(slow), dtype="int8")
    assert fast.base_model is not fast
    seen = {}
    for key, module in slow.named_modules():
        if type(module) is nn.Linear and ".layer" not in key and "albert_layer" not in key:
            seen[key] = submodule(fast, key)
    ran = []
    handles = [m.register_forward_hook(lambda m, a, out: ran.append((m, a[0], out))) for m in seen.values()]
    with torch.no_grad():
        logits = fast(**inputs).logits
        for module, given, out in ran:
            assert torch.equal(out, nn.functional.linear(given, module.weight, module.bias))
    for handle in handles:
        handle.remove()
    assert {id(m) for m, *_ in ran} >= {id(m) for k, m in seen.items() if "projection" not in k}
    assert logits.shape == (4, 2)
    with torch.no_grad():
        close(fast(**inputs).logits, native(slow)(**inputs).logits)


# -- the model stays what it is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "twin_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_copies_are_int8_by_themselves(twin_of):
    fast = int8()
    before = last(fast)
    twin = twin_of(fast)
    assert all(runs(twin))
    assert torch.equal(last(twin), before)
    submodule(twin, QUERY).weight.data.mul_(-1.5)
    assert not torch.equal(last(twin), before)
    assert torch.equal(last(fast), before)
    fastbert.restore(twin)
    assert torch.equal(last(fast), before)


def test_the_next_call_turns_it_off_and_on():
    slow = stock("bert")
    floats = last(fastbert.accelerate(copy.deepcopy(slow)))
    fast = copy.deepcopy(slow)
    seen = []
    for dtype in (None, "int8", None, "int8", torch.float32, "int8"):
        assert fastbert.accelerate(fast, dtype=dtype) is fast
        assert runs(fast) == [dtype == "int8"] * LAYERS
        seen.append(last(fast))
        kinds = {name[1] for name in prepared.remembered(fast) if name[0] == "layer"}
        assert kinds == {"linear_int8" if dtype == "int8" else "linear"}, "what no longer serves is kept"
    assert all(torch.equal(y, floats) for y in seen[::2])
    assert all(torch.equal(y, last(native(slow))) for y in seen[1::2])
    held = prepared.remembered(fast)  # the same options again keep what was derived
    fastbert.accelerate(fast, dtype="int8")
    assert prepared.remembered(fast) == held


def test_explain_says_int8():
    slow = stock("bert", HEAD)
    assert runs(slow) == runs(fastbert.accelerate(slow)) == [False] * LAYERS
    assert "int8" not in str(fastbert.explain(slow))
    fast = int8("bert", HEAD)
    report = fastbert.explain(fast)
    assert [(x.int8, x.float_reason, x.fused) for x in report.layers] == [(True, None, True)] * LAYERS
    assert str(report).count("fused, int8  (calls: 0 fused, 0 stock)") == LAYERS
    submodule(fast, "bert." + LAST).intermediate.intermediate_act_fn = nn.Tanh()
    report = fastbert.explain(fast)
    assert [x.int8 for x in report.layers] == [True, False, True]
    assert report.layers[1].fused
    assert report.layers[1].float_reason == "fastbert does not have the activation"
    assert "fused, not int8: fastbert does not have the activation" in str(report)
    submodule(fast, "bert." + LAST).output.dense.register_forward_hook(lambda *_: None)
    report = fastbert.explain(fast)
    assert [x.int8 for x in report.layers] == [True, False, True]
    assert report.layers[1].float_reason is None
    assert "output.dense" in report.layers[1].reason


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["int4", "INT8", "", "bfloat16", torch.int8, torch.float8_e4m3fn, 8, ["int8"]], ids=str
)
def test_other_dtypes_are_refused(dtype):
    model, error = stock("bert"), ValueError if isinstance(dtype, str) else TypeError
    words = r"^dtype: expected a floating-point torch\.dtype, 'int8' or None, got"
    with pytest.raises(error, match=words):
        fastbert.accelerate(model, dtype=dtype)
    assert type(model) is transformers.BertModel


@pytest.mark.parametrize("option", ["attention", "ffn"])
def test_half_a_layer_is_refused(option):
    model = stock("bert")
    with pytest.raises(ValueError, match=rf"^{option}: expected True with dtype='int8'"):
        fastbert.accelerate(model, dtype="int8", **{option: False})
    assert type(model) is transformers.BertModel


def test_weights_elsewhere_are_refused():
    model = stock("bert").to("meta")
    before = snapshot(model)
    words = r"^model: encoder\.layer\.0\.attention\.self\.query is on meta; int8 is for .* CPU: load its"
    with pytest.raises(ValueError, match=words):
        fastbert.accelerate(model, dtype="int8")
    assert snapshot(model) == before
    model = fastbert.accelerate(stock("bert"))
    model.encoder.layer[2].to("meta")
    with pytest.raises(ValueError, match=r"^model: encoder\.layer\.2\.attention\.self\.query is on meta"):
        fastbert.accelerate(model, dtype="int8")
    assert runs(model) == [False] * LAYERS


def test_a_layer_that_was_moved_runs_in_floating_point():
    """There is no GPU here, so the reason is checked without running the layer."""
    fast = int8()
    assert int8_gap(fast.encoder.layer[1]) is None
    fast.encoder.layer[1].to("meta")
    assert int8_gap(fast.encoder.layer[1]) == (
        "attention.self.query is on meta, and int8 is for inference on a CPU"
    )
    assert not fast.encoder.layer[1].int8
    assert fast.encoder.layer[2].int8


@pytest.mark.parametrize("what", ["weight", "bias"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(what, value):
    model = stock("bert")
    with torch.no_grad():
        getattr(submodule(model, LAST).output.dense, what).view(-1)[5] = value
    before = snapshot(model)
    words = rf"^encoder\.layer\.1\.output\.dense\.{what}: holds NaN or infinity"
    with pytest.raises(ValueError, match=words):
        fastbert.accelerate(model, dtype="int8")
    assert snapshot(model) == before
    assert type(model) is transformers.BertModel
    for layer_norm in (True, False):
        fast = int8(layer_norm=layer_norm)
        last(fast)
        with torch.no_grad():
            getattr(submodule(fast, LAST).output.dense, what).view(-1)[5] = value
        with pytest.raises(ValueError, match=words):
            last(fast)


# -- no training ---------------------------------------------------------------------------------------------

NO_GRADIENT = (
    r"^bert\.encoder\.layer\.0: runs on 8-bit weights, which have no gradient.*no_grad\(\).*without dtype"
)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("options", [{}, {"unpad": False}, {"strict": True}], ids=str)
def test_gradients_are_refused(train, options):
    fast, inputs = int8("bert", HEAD, **options).train(train), padded()
    with pytest.raises(RuntimeError, match=NO_GRADIENT):
        fast(**inputs, labels=torch.tensor([0, 1, 1, 0]))
    assert all(p.grad is None for p in fast.parameters())
    with torch.no_grad():
        assert not fast(**inputs).logits.requires_grad
    fast.requires_grad_(False)
    assert not fast(**inputs).logits.requires_grad
    for path in ("query.weight", "value.bias"):  # nothing below them requires a gradient
        parameter = submodule(fast.bert.encoder.layer[0].attention.self, path).requires_grad_(True)
        with pytest.raises(RuntimeError, match=NO_GRADIENT):
            fast(**inputs)
        parameter.requires_grad_(False)
    fast.bert.encoder.layer[0].output.LayerNorm.requires_grad_(True)
    with pytest.raises(RuntimeError, match=NO_GRADIENT.replace("0", "1")):
        fast(**inputs)


def test_a_head_trains_on_a_frozen_encoder():
    slow, inputs = stock("bert", HEAD), first_kept("bert")
    labels = torch.tensor([0, 1, 1, 0])
    fast = fastbert.accelerate(copy.deepcopy(slow), dtype="int8").train()
    fast.bert.requires_grad_(False)
    fast(**inputs, labels=labels).loss.backward()
    with torch.no_grad():
        pooled = fast.bert(**inputs).pooler_output
    twin = copy.deepcopy(slow.classifier)
    nn.functional.cross_entropy(twin(pooled), labels).backward()
    close(fast.classifier.weight.grad, twin.weight.grad)
    assert fast.classifier.weight.grad.abs().max() > 1e-3


def test_dropout_without_gradients():
    model = fastbert.accelerate(stock("bert", hidden_dropout_prob=0.2), dtype="int8").train()
    torch.manual_seed(0)
    a, b = last(model), last(model)
    torch.manual_seed(0)
    assert torch.equal(last(model), a)
    assert not torch.equal(a, b)
    assert torch.equal(last(model.eval()), last(native(stock("bert"))))


def test_training_goes_on_after_it_is_turned_off():
    slow, inputs = stock("bert", HEAD), first_kept("bert")
    fast = fastbert.accelerate(copy.deepcopy(slow), dtype="int8")
    with torch.no_grad():
        before = fast(**inputs).logits
    fastbert.accelerate(fast).train()
    slow.train()
    labels = torch.tensor([0, 1, 1, 0])
    for model in (fast, slow):
        model(**inputs, labels=labels).loss.backward()
    same_gradients(fast, slow, 1e-4)
    torch.optim.SGD(fast.parameters(), lr=0.5).step()
    fastbert.accelerate(fast.eval(), dtype="int8")
    with torch.no_grad():
        after = fast(**inputs).logits
        assert (after - before).abs().max() > 1e-2
        twin = fastbert.accelerate(fastbert.restore(copy.deepcopy(fast)), dtype="int8")
        assert torch.equal(twin(**inputs).logits, after)


# -- parts that cannot run on 8 bits -------------------------------------------------------------------------


def with_lora(model: nn.Module, layer: int | None = 1) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, target_modules=["query", "output.dense"], init_lora_weights=False, layers_to_transform=layer
    )
    return peft.get_peft_model(model, config)


@pytest.mark.sweep
@pytest.mark.parametrize("order", ["lora-first", "int8-first"])
def test_an_unmerged_adapter_keeps_its_layer_in_floating_point(order):
    inputs = first_kept("bert")
    slow = with_lora(stock("bert"))
    if order == "lora-first":
        fast = with_lora(stock("bert"))
        words = r"1 of 3 layers run in floating point.*layer\.1: .*query.*merge"
        with pytest.warns(RuntimeWarning, match=words):
            fastbert.accelerate(fast, dtype="int8")
        with pytest.raises(ValueError, match=r"layer\.1: attention\.self\.query is a Linear with an adapter"):
            fastbert.accelerate(with_lora(stock("bert")), dtype="int8", strict=True)
    else:
        fast = with_lora(int8())
    report = fastbert.explain(fast)
    assert [x.int8 for x in report.layers] == [True, False, True]
    assert [x.fused for x in report.layers] == [True, True, True]
    assert "attention.self.query" in report.layers[1].float_reason
    out = last(fast, inputs)
    # by hand: layers 0 and 2 in 8 bits, layer 1 accelerated in floating point
    mixed = fastbert.accelerate(slow)
    own = [m for m in mixed.modules() if isinstance(m, AcceleratedLayer)]
    options = copy.copy(fast.base_model.model.encoder.layer[0].fastbert_state.options)
    own[0].fastbert_state.options = own[2].fastbert_state.options = options
    assert torch.equal(out, last(mixed, inputs))
    merged = fast.merge_and_unload()
    assert all(runs(merged))
    again = with_lora(stock("bert")).merge_and_unload()
    assert torch.equal(last(merged, inputs), last(native(again), inputs))


def test_a_model_of_adapters_trains_in_floating_point():
    """If every layer has an adapter, no layer runs in 8 bits, and a warning says so."""
    inputs = padded()
    slow, fast = with_lora(stock("bert"), None), with_lora(stock("bert"), None)
    with pytest.warns(RuntimeWarning, match="3 of 3 layers run in floating point"):
        fastbert.accelerate(fast, dtype="int8")
    for model in (slow, fast):
        model(**inputs).last_hidden_state[inputs["attention_mask"].bool()].square().sum().backward()
    same_gradients(fast, slow, 1e-4)
    strict = with_lora(int8(strict=True))
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"layer\.1: .*it would run in floating point \(strict"),
    ):
        strict(**inputs)


def test_a_stock_layer_is_named():
    model = stock("bert")
    submodule(model, LAST).output.dense.register_forward_hook(lambda *_: None)
    with pytest.warns(RuntimeWarning, match=r"1 of 3 layers .*encoder\.layer\.1: output\.dense has hooks"):
        fastbert.accelerate(model, dtype="int8")
    assert runs(model) == [True, False, True]
    with torch.no_grad(), calls(model, fused=2, stock=1):
        model(**first_kept("bert"))


def test_another_activation():
    slow = stock("bert", hidden_act="mish")
    with pytest.raises(ValueError, match="activation"):
        fastbert.accelerate(slow, dtype="int8", strict=True)
    fast = copy.deepcopy(slow)
    with pytest.warns(RuntimeWarning, match=r"3 of 3 layers .*activation"):
        fastbert.accelerate(fast, dtype="int8")
    kept = first_kept("bert")["attention_mask"].bool()
    close(last(fast)[kept], last(slow)[kept])
    last(fast)
    assert not any(name[:2] == ("layer", "linear_int8") for name in prepared.remembered(fast))


def test_other_architectures_stay_in_floating_point():
    model = other_stock("xmod")
    with pytest.raises(ValueError, match="of no family that int8 knows"):
        fastbert.accelerate(model, dtype="int8", strict=True)
    with pytest.warns(RuntimeWarning, match="the model runs in floating point.*of a family that int8 knows"):
        fastbert.accelerate(model, dtype="int8")
    with pytest.warns(RuntimeWarning, match="nothing of Sequential"):
        fastbert.accelerate(nn.Sequential(nn.Linear(3, 3)), dtype="int8")


# -- compile and export --------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_compile_leaves_the_encoder_as_it_is(fresh_dynamo):
    fast, inputs = int8("bert", HEAD), first_kept("bert")
    compiled = torch.compile(fast, backend="aot_eager")
    with torch.no_grad():
        expected = fast(**inputs).logits
        with calls(fast, packed=1, padded=0, fused=LAYERS, stock=0):
            assert torch.equal(compiled(**inputs).logits, expected)
        fastbert.accelerate(fast)
        floats = fast(**inputs).logits
        assert not torch.equal(floats, expected)
        close(compiled(**inputs).logits, floats)
        fastbert.accelerate(fast, dtype="int8")
        assert torch.equal(compiled(**inputs).logits, expected)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="uncompiled"):
            torch.compile(fast, backend="aot_eager", fullgraph=True)(**inputs)


def test_an_exported_model_is_the_stock_one():
    slow, inputs = stock("bert"), first_kept("bert")
    program = torch.export.export(fastbert.accelerate(copy.deepcopy(slow), dtype="int8"), (), inputs)
    kept = inputs["attention_mask"].bool()
    close(last(program.module(), inputs)[kept], last(slow, inputs)[kept])


# -- what people have ----------------------------------------------------------------------------------------


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


@pytest.mark.sweep
def test_sentence_transformer(minilm):
    st = pytest.importorskip("sentence_transformers")
    model = st.SentenceTransformer(str(minilm), device="cpu", local_files_only=True)
    texts = SENTENCES[:40]
    full = model.encode(texts)
    assert fastbert.accelerate(model, dtype="int8", strict=True) is model
    vectors = model.encode(texts)
    assert runs(model) == [True] * 6
    assert 0.995 <= cosines(full, vectors).min() < 1 - 1e-5
    assert cosines(full, vectors).mean() >= 0.998
    ours = SentenceEncoder.from_pretrained(minilm, device="cpu").quantize("int8").encode(texts)
    assert cosines(vectors, ours).min() > 0.9999
    assert np.array_equal(fastbert.restore(model).encode(texts), full)
