"""What `fastbert.accelerate` promises: options, `restore`, `explain`, copies, files.

What accelerated models compute is in test_model.py, test_training.py and tests/models/test_modules.py.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import re
import sys
import warnings

import pytest
import torch
import transformers
from torch import nn

import fastbert
from fastbert.acceleration import model_gaps
from fastbert.models.config import EncoderConfig
from fastbert.runtime import prepared
from tests.support.accelerated_models import (
    HEAD,
    LAST,
    LAYERS,
    Twice,
    build,
    calls,
    close,
    first_kept,
    layer_calls,
    padded,
    same_gradients,
    same_outputs,
    stock,
    submodule,
)
from tests.support.hf_models import ACCELERATED, hf_config

# -- accelerate, restore, explain ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACCELERATED)
def test_model_stays_what_it_was(name):
    slow = stock(name, HEAD)
    fast = copy.deepcopy(slow)
    tensors = {k: id(v) for k, v in [*fast.named_parameters(), *fast.named_buffers()]}
    assert fastbert.accelerate(fast) is fast
    assert {k: id(v) for k, v in [*fast.named_parameters(), *fast.named_buffers()]} == tensors
    assert list(fast.state_dict()) == list(slow.state_dict())
    ours, theirs = dict(fast.named_modules()), dict(slow.named_modules())
    assert list(ours) == list(theirs)
    changed = 0
    for path, module in ours.items():
        kind, original = type(module), type(theirs[path])
        assert isinstance(module, original), path
        changed += kind is not original
        for attribute in ("__name__", "__qualname__", "__module__"):
            assert getattr(kind, attribute) == getattr(original, attribute), path
        assert inspect.signature(module.forward) == inspect.signature(theirs[path].forward), path
    assert changed > 0
    said = r"^ +fastbert: .*\n"
    assert re.sub(said, "", repr(fast), flags=re.MULTILINE) == repr(slow)
    count = sum(hasattr(m, "dropout_rates") for m in fast.modules())
    assert re.findall(said, repr(fast), flags=re.MULTILINE)[0].strip() == (
        f"fastbert: {count} of {count} layers run fused, padding taken out"
    )
    assert repr(fast).count("fastbert: fused\n") > 0
    assert fast.config.to_dict() == slow.config.to_dict()
    assert fast._no_split_modules == slow._no_split_modules


@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("name", ACCELERATED)
def test_restore_gives_the_stock_model_back(name, dtype):
    slow = stock(name, HEAD)
    fast = fastbert.accelerate(copy.deepcopy(slow), dtype=dtype)
    inputs = first_kept(name)
    with torch.no_grad():
        fast(**inputs)
        assert prepared.remembered(fast)
        for key, value in slow.state_dict().items():
            assert torch.equal(fast.state_dict()[key], value), key
        assert fastbert.restore(fast) is fast
        assert prepared.remembered(fast) == []
        for (path, a), (_, b) in zip(fast.named_modules(), slow.named_modules(), strict=True):
            assert type(a) is type(b), path
            assert vars(a).keys() == vars(b).keys(), path
        expected = slow(**inputs, output_hidden_states=True)
        actual = fast(**inputs, output_hidden_states=True)
    assert torch.equal(actual.logits, expected.logits)
    assert all(map(torch.equal, actual.hidden_states, expected.hidden_states))
    assert fastbert.restore(fast) is fast  # twice, and for a model that was never accelerated
    assert not any(layer.fused for layer in fastbert.explain(fast).layers)
    fastbert.accelerate(fast)
    with torch.no_grad(), calls(fast, packed=1, fused=layer_calls(name)):
        close(fast(**inputs).logits, expected.logits)


def test_second_call_changes_the_options_alone():
    slow, fast = build("bert")
    classes = [type(m) for m in fast.modules()]
    inputs = first_kept("bert")
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = slow(**inputs)
        for unpad in (True, False, True, False):
            assert fastbert.accelerate(fast, unpad=unpad) is fast
            assert [type(m) for m in fast.modules()] == classes
            assert len(fastbert.explain(fast).layers) == LAYERS
            with calls(fast, packed=int(unpad), padded=int(not unpad), fused=LAYERS, stock=0):
                same_outputs(fast(**inputs), expected, kept)


@pytest.mark.parametrize(
    "options",
    [
        {"unpad": False},
        *({off: False} for off in ("attention", "ffn", "layer_norm")),
        {"attention": False, "ffn": False, "layer_norm": False, "unpad": False},
        {"attention": False, "ffn": False},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize(
    "name", [*("bert", "distilbert", "albert", "mpnet", "modernbert", "gte"), "mobilebert", "longformer"]
)
def test_options_give_the_stock_outputs_and_gradients(name, options):
    slow = stock(name).double()
    fast = fastbert.accelerate(copy.deepcopy(slow), **options)
    inputs = first_kept(name)
    kept = inputs["attention_mask"].bool()
    expected, actual = slow(**inputs), fast(**inputs)
    same_outputs(actual, expected, kept, 1e-12)
    for out in (actual, expected):
        out.last_hidden_state[kept].square().sum().backward()
    same_gradients(fast, slow, 1e-9)


def test_options_leave_that_part_to_the_stock_modules(monkeypatch):
    from transformers.models.bert import modeling_bert as bert

    ran = []
    for key, kind in (
        ("attention", bert.BertSelfAttention),
        ("ffn", bert.BertIntermediate),
        ("layer_norm", nn.LayerNorm),
    ):
        original = kind.forward

        @functools.wraps(original)
        def forward(self, *args, _original=original, _key=key, **kwargs):
            ran.append(_key)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", forward)
    inputs = first_kept("bert")
    for off in (None, "attention", "ffn", "layer_norm"):
        fast = fastbert.accelerate(stock("bert"), **({} if off is None else {off: False}))
        ran.clear()
        with torch.no_grad():
            fast(**inputs)
        assert set(ran) - {"layer_norm"} == {off} - {"layer_norm", None}
        assert ("layer_norm" in ran) == (off is not None)  # the norm is part of either block's stock module
        assert len(ran) >= (LAYERS if off else 0)


def test_dtype_is_that_of_the_model():
    model = stock("bert")
    fast = fastbert.accelerate(copy.deepcopy(model), dtype=torch.bfloat16)
    assert {p.dtype for p in fast.parameters()} == {torch.bfloat16}
    inputs = first_kept("bert")
    with torch.no_grad(), calls(fast, packed=1, fused=LAYERS, stock=0):
        out = fast(**inputs).last_hidden_state
    assert out.dtype == torch.bfloat16
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        assert (out[kept] - model(**inputs).last_hidden_state[kept]).abs().mean() < 0.02
    assert {p.dtype for p in fastbert.accelerate(model).parameters()} == {torch.float32}


@pytest.mark.parametrize("model", [None, "bert-base-uncased", nn.Linear, {}])
def test_what_is_no_module_is_refused(model):
    for function in (fastbert.accelerate, fastbert.restore):
        with pytest.raises(TypeError, match="model"):
            function(model)


def test_module_without_a_transformers_model():
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.warns(RuntimeWarning, match="nothing of Sequential"):
        assert fastbert.accelerate(model) is model
    with pytest.raises(ValueError, match="no transformers model"):
        fastbert.accelerate(model, strict=True)
    assert fastbert.restore(model) is model


@pytest.mark.parametrize("option", ["strict", "attention", "ffn", "layer_norm", "unpad", "dtype"])
def test_options_of_the_wrong_type_are_named(option):
    model = stock("bert")
    for value in ("no", 1, torch.int64):
        unknown = ValueError if (option, value) == ("dtype", "no") else TypeError
        with pytest.raises(unknown, match=option):
            fastbert.accelerate(model, **{option: value})
    assert type(model) is transformers.BertModel


def test_explain_says_which_layers_are_fused_and_why_not():
    model = stock("bert", HEAD)
    submodule(model, "bert." + LAST).output.dense = Twice(80, 48)
    fast = fastbert.accelerate(model)
    report = fastbert.explain(fast)
    names = dict(fast.named_modules())
    assert [names[layer.name] for layer in report.layers] == list(fast.bert.encoder.layer)
    assert [layer.fused for layer in report.layers] == [True, False, True]
    for layer in report.layers:
        assert (layer.reason is None) == layer.fused
        assert layer.fused_calls == layer.stock_calls == 0
    assert "output.dense" in report.layers[1].reason
    (encoder,) = report.models
    assert names[encoder.name] is fast.bert
    assert encoder.packed_calls == encoder.padded_calls == 0
    assert encoder.unpads is False
    assert encoder.reason
    with torch.no_grad():
        fast(**first_kept("bert"))
    report = fastbert.explain(fast)
    assert [(x.fused_calls, x.stock_calls) for x in report.layers] == [(1, 0), (0, 1), (1, 0)]
    assert report.models[0].padded_calls == 1
    assert (report.fused_layers, report.total_layers) == (2, 3)
    table = str(report)
    assert table.splitlines()[0] == report.summary == "2 of 3 encoder layers run fused, padding left in"
    for layer in report.layers:
        assert layer.name in table
    assert report.layers[1].reason in table
    shown = repr(fast)
    assert f"fastbert: 2 of 3 layers run fused, padding left in, as {encoder.reason}\n" in shown
    assert f"fastbert: stock, as {report.layers[1].reason}\n" in shown
    assert shown.count("fastbert: fused\n") == 2
    # evaluated now
    submodule(fast, "bert." + LAST).output.dense = nn.Linear(80, 48)
    report = fastbert.explain(fast)
    assert all(layer.fused for layer in report.layers)
    assert report.models[0].unpads is True
    assert report.models[0].reason is None
    assert str(report).startswith("3 of 3 encoder layers run fused, padding taken out\n")


@pytest.mark.parametrize("kind", ["encoder", "head", "inside"])
def test_fastberts_own_models_need_no_accelerate(kind):
    config = EncoderConfig.from_hf(hf_config("bert"))
    if kind == "encoder":
        model = fastbert.BertModel(config)
    else:
        model = fastbert.BertForSequenceClassification(config)
    name = type(model).__name__
    if kind == "inside":
        model, name = nn.Sequential(model), "Sequential"
    keys, shown = set(vars(model)), repr(model)
    assert shown.count(f"fastbert: {LAYERS} of {LAYERS} layers run fused, padding taken out\n") == 1
    with pytest.warns(RuntimeWarning, match=f"{name} is fastbert's own model.*untouched"):
        assert fastbert.accelerate(model, dtype=torch.bfloat16) is model
    with pytest.raises(ValueError, match=f"model: {name} is fastbert's own model"):
        fastbert.accelerate(model, strict=True)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (set(vars(model)), repr(model)) == (keys, shown)
    report = fastbert.explain(model)
    assert [(m.kind, m.unpads) for m in report.models] == [("own", True)]
    assert (report.fused_layers, report.total_layers) == (LAYERS, LAYERS)
    first, second, third = str(report).splitlines()
    assert first.startswith(
        f"{LAYERS} of {LAYERS} encoder layers run fused, padding taken out; fastbert's own"
    )
    assert "calls" not in second
    assert f"layers 0 to {LAYERS - 1} by executor " in third
    with warnings.catch_warnings(action="error"):  # a stock model beside it is accelerated without a warning
        beside = nn.ModuleList([model, stock("bert")])
        assert fastbert.explain(fastbert.accelerate(beside)).fused_layers == 2 * LAYERS


def test_strict_changes_nothing_where_a_part_cannot_be_accelerated():
    model = stock("bert")
    submodule(model, LAST).output.dense = Twice(80, 48)
    classes, keys = [type(m) for m in model.modules()], [set(vars(m)) for m in model.modules()]
    with pytest.raises(ValueError, match=r"encoder\.layer\.1"):
        fastbert.accelerate(model, strict=True, dtype=torch.bfloat16)
    assert [type(m) for m in model.modules()] == classes
    assert [set(vars(m)) for m in model.modules()] == keys
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_strict_raises_where_a_layer_must_take_the_stock_path():
    inputs = padded()
    fast = fastbert.accelerate(stock("bert", attention="eager"), strict=True)
    with torch.no_grad(), calls(fast, packed=1, fused=LAYERS, stock=0):
        fast(**inputs)
    with pytest.raises(RuntimeError, match=r"encoder\.layer\.0: output_attentions is asked for"):
        fast(**inputs, output_attentions=True)
    handle = submodule(fast, LAST).attention.self.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"encoder\.layer\.1: attention\.self has hooks"):
        fast(**inputs)
    handle.remove()
    with torch.no_grad(), calls(fast, packed=1, fused=LAYERS, stock=0):
        fast(**inputs)
    handle = submodule(fast, LAST).intermediate.dense.register_forward_hook(lambda *_: None)
    fastbert.accelerate(fast)  # no longer strict
    with torch.no_grad(), calls(fast, fused=2, stock=1):
        fast(**inputs)


def test_other_versions_of_transformers_are_left_alone(monkeypatch):
    model = stock("bert")
    classes, keys = [type(m) for m in model.modules()], [set(vars(m)) for m in model.modules()]
    for version in ("4.57.3", "6.0.0", "6.1.0.dev0", "7.0"):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        with pytest.raises(RuntimeError, match=version):
            fastbert.accelerate(model, strict=True)
        with pytest.warns(RuntimeWarning, match=version):
            assert fastbert.accelerate(model) is model
    assert [type(m) for m in model.modules()] == classes
    assert [set(vars(m)) for m in model.modules()] == keys
    for version in ("5.0.0", "5.23.0", "5.99.1", "5.24.0.dev0"):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        with warnings.catch_warnings(action="error"):
            fast = fastbert.accelerate(stock("bert"))
        assert all(layer.fused for layer in fastbert.explain(fast).layers)


# -- copies, files, weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [*((name, None) for name in ACCELERATED), ("bert", "int8")])
def test_saved_model_is_vanilla(name, dtype, tmp_path):
    slow, fast = build(name, HEAD)
    fastbert.accelerate(fast, dtype=dtype)
    inputs = first_kept(name)
    with torch.no_grad():
        fast(**inputs)
    fast.save_pretrained(tmp_path / "fast")
    slow.save_pretrained(tmp_path / "slow")
    files = sorted(p.name for p in (tmp_path / "slow").iterdir())
    assert sorted(p.name for p in (tmp_path / "fast").iterdir()) == files
    for file in files:
        assert (tmp_path / "fast" / file).read_bytes() == (tmp_path / "slow" / file).read_bytes(), file
    loaded, info = type(slow).from_pretrained(tmp_path / "fast", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    # Not `slow` itself, whose attention BigBird may have switched
    vanilla = type(slow).from_pretrained(tmp_path / "slow")
    assert [type(m) for m in loaded.modules()] == [type(m) for m in vanilla.modules()]
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, slow(**inputs).logits)
        again = type(fast).from_pretrained(tmp_path / "fast")  # the class of the accelerated model itself
        close(again(**inputs).logits, slow(**inputs).logits)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "twin_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("name", ACCELERATED)
def test_a_twin_runs_its_own_weights(name, twin_of):
    slow, fast = build(name, HEAD)
    fastbert.accelerate(fast, unpad=False)
    inputs = first_kept(name)
    with torch.no_grad():
        before = fast(**inputs).logits
        twin, slow_twin = twin_of(fast), copy.deepcopy(slow)
        assert [type(a) is type(b) for a, b in zip(twin.modules(), fast.modules(), strict=True)]
        for model in (twin, slow_twin):
            for parameter in model.parameters():
                parameter.mul_(1.25)
        with (  # the options were copied
            calls(fast, packed=0, padded=0, fused=0, stock=0),
            calls(twin, packed=0, padded=1, fused=layer_calls(name), stock=0),
        ):
            close(twin(**inputs).logits, slow_twin(**inputs).logits)
        assert torch.equal(fast(**inputs).logits, before)
        assert not torch.allclose(twin(**inputs).logits, before, atol=1e-2)
        fastbert.restore(twin)
        assert [type(m) for m in twin.modules()] == [type(m) for m in slow.modules()]
        assert torch.equal(twin(**inputs).logits, slow_twin(**inputs).logits)
        with calls(fast, padded=1, fused=layer_calls(name), stock=0):
            assert torch.equal(fast(**inputs).logits, before)


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "albert", "electra", "distilbert", "mpnet", "modernbert"]
)
def test_resized_token_embeddings(name):
    slow, fast = build(name, transformers.AutoModelForMaskedLM)
    inputs = first_kept(name)
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        fast(**inputs)
    for size in (131, 90):
        for model in (slow, fast):
            torch.manual_seed(1)
            model.resize_token_embeddings(size, mean_resizing=False)
        inputs["input_ids"] = torch.where(kept, torch.randint(5, size, (4, 40)), 1)
        with calls(fast, packed=1, fused=LAYERS, stock=0):
            actual = fast(**inputs, labels=inputs["input_ids"].where(kept, -100))
        same_outputs(actual, slow(**inputs, labels=inputs["input_ids"].where(kept, -100)), kept)
        assert actual.logits.shape[-1] == size
        assert fast.get_output_embeddings().weight is fast.get_input_embeddings().weight
        actual.loss.backward()
        assert fast.get_input_embeddings().weight.grad.shape == (
            size,
            fast.get_input_embeddings().weight.shape[1],
        )
        fast.zero_grad()
        del actual  # its autograd graph knows the size


# -- around the model ----------------------------------------------------------------------------------------


class _Pair(nn.Module):
    """Two encoders with shared parts, as in retrieval models."""

    def __init__(self):
        super().__init__()
        self.left, self.right = stock("bert"), stock("distilbert")
        self.again = self.left

    def forward(self, inputs):
        types_ = {k: v for k, v in inputs.items() if k != "token_type_ids"}
        return (
            self.left(**inputs)[0][:, 0]
            + self.right(**types_)[0][:, 0]
            + self.again(inputs["input_ids"])[0][:, 0]
        )


def test_models_inside_any_module():
    slow = _Pair().eval()
    fast = fastbert.accelerate(copy.deepcopy(slow))
    assert type(fast) is _Pair
    inputs = first_kept("bert")
    with torch.no_grad(), calls(fast, packed=3, padded=0, fused=3 * LAYERS, stock=0):
        close(fast(inputs), slow(inputs))
    report = fastbert.explain(fast)
    assert [m.name for m in report.models] == ["left", "right"]
    assert [m.packed_calls for m in report.models] == [2, 1]
    assert len(report.layers) == 2 * LAYERS
    with torch.no_grad():
        assert torch.equal(fastbert.restore(fast)(inputs), slow(inputs))


DECODERS = {
    "bert": transformers.BertLMHeadModel,
    "roberta": transformers.RobertaForCausalLM,
    "xlm-roberta": transformers.XLMRobertaForCausalLM,
    "camembert": transformers.CamembertForCausalLM,
    "electra": transformers.ElectraForCausalLM,
    "ernie": transformers.ErnieForCausalLM,
}


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_run_as_they_are(name):
    torch.manual_seed(0)
    config = hf_config(name, is_decoder=True)
    slow = DECODERS[name](config).eval()
    fast = fastbert.accelerate(copy.deepcopy(slow))
    inputs = first_kept(name)
    with torch.no_grad():
        assert torch.equal(fast(**inputs).logits, slow(**inputs).logits)
    assert not any(layer.fused for layer in fastbert.explain(fast).layers)
    with pytest.raises(ValueError, match="decoder"):
        fastbert.accelerate(copy.deepcopy(slow), strict=True)
    ids = inputs["input_ids"][3:, :5]
    with warnings.catch_warnings(action="ignore"):
        settings_ = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert torch.equal(fast.generate(ids, **settings_), slow.generate(ids, **settings_))


def test_cross_attention_runs_as_it_is():
    torch.manual_seed(0)
    config = hf_config("bert", is_decoder=True, add_cross_attention=True)
    slow = transformers.BertModel(config).eval()
    fast = fastbert.accelerate(copy.deepcopy(slow))
    inputs = first_kept("bert")
    other = dict(encoder_hidden_states=torch.randn(4, 7, 48), encoder_attention_mask=torch.ones(4, 7))
    with torch.no_grad():
        assert torch.equal(fast(**inputs, **other)[0], slow(**inputs, **other)[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_of_autograd(mode):
    slow, fast = build("bert")
    inputs = first_kept("bert")
    kept = inputs["attention_mask"].bool()
    for _ in range(2):
        with mode():
            actual, expected = fast(**inputs), slow(**inputs)
            same_outputs(actual, expected, kept)
        assert actual[0].requires_grad == expected[0].requires_grad
        assert actual[0].is_inference() == expected[0].is_inference()
    fast(**inputs)[0].sum().backward()  # and what was derived there does not hinder this call
    assert all(p.grad is not None for k, p in fast.named_parameters() if "pooler" not in k)


@pytest.mark.filterwarnings("ignore")
def test_traced_model_is_the_stock_one():
    slow, fast = build("bert")
    inputs = first_kept("bert")
    arguments = (inputs["input_ids"], inputs["attention_mask"])
    other = first_kept("bert", seed=7)
    with torch.no_grad():
        traced = torch.jit.trace(fast, arguments, check_trace=False, strict=False)
        reference = torch.jit.trace(slow, arguments, check_trace=False, strict=False)
        assert "fastbert" not in str(traced.inlined_graph)
        actual, expected = (m(other["input_ids"], other["attention_mask"]) for m in (traced, reference))
        assert torch.equal(actual["last_hidden_state"], expected["last_hidden_state"])
        with calls(fast, packed=1, fused=LAYERS, stock=0):
            fast(**inputs)


def test_a_token_schedule_does_not_apply_without_a_word():
    slow, inputs = stock("bert", HEAD), first_kept("bert")
    model = copy.deepcopy(slow)
    model.config.token_schedule = [0.5] * LAYERS
    with pytest.warns(RuntimeWarning, match="compute all tokens, whatever config token_schedule says"):
        fastbert.accelerate(model)
    with torch.no_grad():
        close(model(**inputs).logits, slow(**inputs).logits)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["Model", "ForQuestionAnswering"])
def test_fastberts_own_models_say_how_they_are_traced(task):
    model = getattr(fastbert, f"Bert{task}")(EncoderConfig.from_hf(hf_config("bert"))).eval()
    inputs = first_kept("bert")
    arguments = (inputs["input_ids"], inputs["attention_mask"])
    with pytest.raises(RuntimeError, match=f"Bert{task}: .*transformers.*fastbert.accelerate"):
        torch.jit.trace(model, arguments, check_trace=False)
    with pytest.raises(RuntimeError, match=f"Bert{task}: .*dynamo=False.*fastbert.accelerate"):
        torch.onnx.export(model, arguments, io.BytesIO(), dynamo=False)
    with torch.no_grad():
        model(*arguments)


def test_tokens_in_cpu_memory_are_not_sent(monkeypatch):
    """PyTorch refuses them, in the stock model's call."""
    _, fast = build("bert")
    monkeypatch.setattr(model_gaps, "device_of", lambda model: torch.device("cuda"))
    fast(torch.ones(4, 40, dtype=torch.long))
    assert (fast.fastbert_state.packed_calls, fast.fastbert_state.padded_calls) == (0, 1)


def test_model_on_the_meta_device_gives_shapes():
    slow, fast = (m.to("meta") for m in build("bert"))
    ids = torch.zeros(4, 40, dtype=torch.long, device="meta")
    with torch.no_grad():
        assert fast(ids)[0].shape == slow(ids)[0].shape == (4, 40, 48)
