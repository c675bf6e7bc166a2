"""A whole layer in one call: the same bits as its ops one by one, and only where that is allowed."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from fastbert.acceleration import accelerate
from fastbert.backends import cpu
from fastbert.backends.cpu import encoder_layer as cpu_encoder_layer
from fastbert.backends.cpu import sizes as cpu_sizes
from fastbert.execution import cpu as executor
from fastbert.execution import plan
from fastbert.execution.call import Call
from fastbert.execution.plan import survey
from fastbert.layers.batch import PackedBatch
from fastbert.layers.positions import rotary_tables
from fastbert.models.auto import AutoModel
from fastbert.models.batch import distances_of
from fastbert.models.bert import BertModel
from fastbert.models.config import EncoderConfig
from fastbert.ops.encoder_layer import encoder_layer, launchers
from fastbert.runtime import dispatch, loader, prepared
from tests.execution.test_gpu import AROUND, CHANGES, padded_right, stock_of
from tests.models.test_mobilebert import NARROW
from tests.support.cpu_fixtures import every_isa, threads  # noqa: F401
from tests.support.graphed_models import OTHERS
from tests.support.hf_models import BERT_LAYERS, batch, hf_config
from tests.support.inputs import ends_of
from tests.support.layer_calls import through

pytestmark = pytest.mark.skipif(
    dispatch.unsupported_reason("cpu", "linear", "cpu", torch.float32) is not None,
    reason="needs the compiled CPU kernels",
)
FLOAT, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (FLOAT, BF16, FP16)


def norms_of(layer: nn.Module) -> list[Any]:
    return [module for module in layer.modules() if isinstance(module, (nn.LayerNorm, nn.RMSNorm))]


@torch.no_grad()
def of(name: str, **overrides) -> BertModel:
    """A model whose biases and norms are far from 0 and 1."""
    if name in OTHERS:
        config = EncoderConfig(**{**OTHERS[name], **overrides})
    else:
        if name == "mobilebert":
            overrides = {**NARROW, **overrides}
        config = EncoderConfig.from_hf(hf_config(name, **overrides))
    model = AutoModel.from_config(config).eval()
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            module.weight.uniform_(0.5, 1.5)
        if isinstance(module, (nn.Linear, nn.LayerNorm)) and module.bias is not None:
            module.bias.normal_()
    return model


@contextlib.contextmanager
def fused_calls():
    """A list to which every fused layer appends its number of rows."""
    seen, found = [], executor.launchers

    def watched(*key):
        if (all_of_them := found(*key)) is None:
            return None
        make, launch, keeps_panels = all_of_them

        def call(x, layers, *args):
            seen.extend([x.shape[0]] * len(layers))
            return launch(x, layers, *args)

        return make, call, keeps_panels

    executor.launchers = watched
    try:
        yield seen
    finally:
        executor.launchers = found


@contextlib.contextmanager
def op_by_op():
    """Run without fused layers."""
    found, executor.launchers = executor.launchers, lambda *_: None
    try:
        yield
    finally:
        executor.launchers = found


def packed(model: BertModel, lengths: list[int], x: torch.Tensor, bias=None) -> PackedBatch:
    """The packed batch, with what the model's layers rotate and score distances by."""
    ends, longest, forms = ends_of(lengths), max(lengths), [layer.form for layer in model.layer_list()]
    rotaries = {form.rotary for form in forms} - {None}
    rest = torch.zeros(x.shape[0] - sum(lengths), dtype=torch.long)
    positions = torch.cat([*map(torch.arange, lengths), rest])
    tables = rotary_tables(rotaries, forms[0].head_dim, longest, x)
    with torch.no_grad():
        distances = distances_of(getattr(model, "encoder", nn.Module()))
    return PackedBatch(ends, longest, bias, positions=positions, tables=tables, distances=distances)


def assert_same_as_op_by_op(call, times: int) -> None:
    with torch.no_grad():
        with op_by_op():
            expected = call()
        with fused_calls() as seen:
            actual = call()
    assert len(seen) == times
    assert torch.equal(actual, expected)


# --- the same bits ------------------------------------------------------------------------------------------


EIGHT_BITS = [(name, True) for name in ("bert", "mpnet", "modernbert", "nomic_bert", "gte", "deberta-v2")]
EIGHT_BITS += [("eurobert", True), ("neobert", True)]


# The families whose layers rotate, of which some have norms before the blocks, gates and windows
ROTARY_LAYERS = ("modernbert", "nomic_bert", "gte", "jina_embeddings_v3", "eurobert", "neobert")
NAMES = (*BERT_LAYERS, *ROTARY_LAYERS, "deberta-v2")


@pytest.mark.parametrize(("name", "int8"), [*((name, False) for name in NAMES), *EIGHT_BITS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_family(name, int8, dtype, every_isa):  # noqa: F811
    model = of(name).to(dtype)
    inputs = batch(name) if name in BERT_LAYERS else padded_right(name)
    if not model.config.has_segments:
        inputs.pop("token_type_ids", None)
    model = model.quantize("int8") if int8 else model
    assert_same_as_op_by_op(lambda: model(**inputs)[0], len(model.layer_list()))


KINDS = [(name, number, int8) for name, number in (("bert", 0), ("modernbert", 1)) for int8 in (False, True)]
KINDS += [("modernbert", 0, False), ("nomic_bert", 0, False)]
KINDS += [("eurobert", 1, False), ("eurobert", 1, True), ("neobert", 1, False)]
OTHER_KINDS = [(name, 1, int8) for name in ("deberta-v2", "mobilebert") for int8 in (False, True)]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("name", "number", "int8"), KINDS + OTHER_KINDS)
# threads share rows, or each has its own sequences: for two threads, for three, with empty sequences
@pytest.mark.parametrize("lengths", [[60, 1, 140, 154], [60, 0, 59, 0, 61, 58, 0], [40, 20, 60, 61]], ids=str)
@pytest.mark.parametrize("capacity", [0, 2])
def test_any_number_of_threads(count, name, number, int8, lengths, capacity, threads):  # noqa: F811
    model = of(name, hidden_size=192, num_attention_heads=3, intermediate_size=260)
    layer = (model.quantize("int8") if int8 else model).layer_list()[number]
    x = torch.randn(sum(lengths) + capacity, 2 * 192)[:, :192]  # rows that are not next to each other
    bias = torch.randn(len(lengths), 3, max(lengths), max(lengths))
    for sequences in (packed(model, lengths, x), packed(model, lengths, x, bias)):
        torch.set_num_threads(1)
        with torch.no_grad(), fused_calls() as seen:
            expected = through(layer, x, sequences)
            torch.set_num_threads(count)
            assert torch.equal(through(layer, x, sequences), expected)
        assert len(seen) == 2


@pytest.mark.parametrize("lengths", [[7, 1, 40, 23], [0, 5, 5, 0, 0, 30, 0], [4], [1], [128, 129]], ids=str)
@pytest.mark.parametrize("capacity", [0, 9])
@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize(("name", "number", "int8"), KINDS + OTHER_KINDS)
def test_lengths_capacity_bias_and_gate(lengths, capacity, options, name, number, int8):
    model = of(name).quantize("int8") if int8 else of(name)
    layer, longest = model.layer_list()[number], max(lengths)
    x = torch.randn(sum(lengths) + capacity, 2 * 48)[:, :48]  # rows that are not next to each other
    bias = gate = None
    if options == "all":
        bias = torch.randn(len(lengths), 1, longest, longest)
        bias[torch.rand(bias.shape) < 0.3] = float("-inf")
        gate = torch.rand(6, dtype=torch.float64)[::2]
        for norm, eps in zip(norms_of(layer), (0.3, 0.01), strict=False):
            norm.eps = eps
        if layer.form.window is not None:
            layer.form = dataclasses.replace(layer.form, window=(3, 9))
    sequences = packed(model, lengths, x, bias)
    assert_same_as_op_by_op(lambda: through(layer, x, sequences, gate), 1)


@pytest.mark.parametrize("missing", ["query", "all three", "output", "norm"])
@pytest.mark.parametrize("int8", [False, True])
def test_missing_biases(missing, int8):
    model, inputs = of("bert"), batch("bert")
    with torch.no_grad():
        for layer in model.layer_list():
            attention = layer.attention
            where = {
                "query": [attention.self.query],
                "all three": [attention.self.query, attention.self.key, attention.self.value],
                "output": [attention.output.dense, layer.output.dense],
                "norm": [layer.output.LayerNorm],
            }[missing]
            for part in where:
                part.bias = None
    if int8:
        model.quantize("int8")
    joined = int8 and missing == "query"  # three products if one of the three has no bias
    assert_same_as_op_by_op(lambda: model(**inputs)[0], 0 if joined else len(model.layer_list()))


@pytest.mark.parametrize("missing", ["norm_bias", "attention_bias", "mlp_bias"])
def test_biases_that_the_config_leaves_out(missing):
    biases = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, missing: False}
    model, inputs = of("modernbert", **biases), padded_right("modernbert")
    assert_same_as_op_by_op(lambda: model(**inputs)[0], len(model.layer_list()))


CONFIGS = [{"intermediate_size": size} for size in (1, 96, 97, 300)]
CONFIGS += [{"hidden_act": name} for name in ("gelu", "gelu_new", "relu", "silu", "tanh")]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", ["bert", "modernbert"])
@pytest.mark.parametrize("int8", [False, True])
def test_narrow_and_wide_inner_layers_and_activations(config, name, int8):
    model, inputs = of(name, **config), padded_right(name)
    model = model.quantize("int8") if int8 else model
    assert_same_as_op_by_op(lambda: model(**inputs)[0], len(model.layer_list()))


def test_no_tail_of_an_input_is_read_and_none_of_the_output_left_unwritten():
    layer = of("bert").layer_list()[0]
    cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
    sequences = PackedBatch(cu_seqlens, 7)
    memory = torch.full((16, 64), float("nan"))
    x = memory[2:14, 8:56]
    x.normal_()
    with torch.no_grad(), fused_calls() as seen:
        first = through(layer, x, sequences)
        assert first.isfinite().all()
        memory[14:], memory[:, 56:] = 3.0, 3.0
        assert torch.equal(through(layer, x, sequences), first)
    assert seen == [12, 12]


@pytest.mark.parametrize("name", ["bert", "modernbert", "deberta-v2", "mobilebert"])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("lengths", [[7, 1, 40, 23], [60, 60]], ids=str)
@torch.no_grad()
def test_layers_in_one_call(lengths, name, int8, threads):  # noqa: F811
    """The bits of a call per layer, also from rows that are not side by side, which stay as they are."""
    model = of(name, intermediate_size=97)
    model = model.quantize("int8") if int8 else model
    longest = max(lengths)
    x = torch.randn(sum(lengths), 2 * 48)[:, :48]
    before, bias = x.clone(), torch.randn(len(lengths), 3, longest, longest)
    for number, layer in enumerate(model.layer_list()):
        for norm, eps in zip(norms_of(layer), (0.3 / (1 + number), 0.01 * number), strict=False):
            norm.eps = eps
    assert_one_call_is_a_call_per_layer(model, x, packed(model, lengths, x, bias))
    assert torch.equal(x, before)


def assert_one_call_is_a_call_per_layer(model, x, batch):
    steps, call = survey(model.layer_list()), Call(batch, 2)
    stack = executor.kept([(step, executor.takes(step, x, call)) for step in steps])
    for count in (1, 2):
        torch.set_num_threads(count)
        expected = x
        for layer in model.layer_list():
            expected = through(layer, expected, call.batch)
        assert stack.serves(call)
        assert torch.equal(executor.run(stack, x, call), expected)


@torch.no_grad()
def test_what_is_asked_of_one_layer_takes_a_call_per_layer():
    model, inputs = of("mpnet", pruned_heads={0: [1]}), batch("mpnet")
    for asked in ({}, {"output_hidden_states": True}, {"head_mask": torch.tensor([0.5, 1.0, 0.0])}):
        arguments = {**inputs, **asked}
        with op_by_op():
            expected = model(**arguments)
        for _ in range(3):  # from the second call on by a kept plan
            found = model(**arguments)
            assert torch.equal(found[0], expected[0])
            if "output_hidden_states" in asked:
                assert all(map(torch.equal, found.hidden_states, expected.hidden_states))


# --- when the weights change --------------------------------------------------------------------------------


def test_weights_are_prepared_once_and_again_when_one_changes(noted):
    model, inputs, made = of("bert"), batch("bert"), noted(cpu, "encoder_layer_weights")
    dispatch._resolved.clear()
    with torch.no_grad():
        first = model(**inputs)[0]
        assert torch.equal(model(**inputs)[0], first)
        assert len(made) == 3
        for parameter in model.layer_list()[1].parameters():
            count = len(made)
            parameter.mul_(1.5)
            changed = model(**inputs)[0]
            assert len(made) == count + 1
            with op_by_op():
                assert torch.equal(model(**inputs)[0], changed)
        model.layer_list()[2].intermediate.dense = nn.Linear(48, 80)
        changed = model(**inputs)[0]
        with op_by_op():
            assert torch.equal(model(**inputs)[0], changed)
        model.layer_list()[2].output.LayerNorm.eps = 0.5
        assert not torch.equal(model(**inputs)[0], changed)
    dispatch._resolved.clear()


def test_one_scratch_serves_layers_of_any_size_and_dtype(monkeypatch):
    monkeypatch.setattr(cpu_sizes, "MANY_ROWS", 1)
    monkeypatch.setattr(cpu_encoder_layer, "_RETURNED", 0)  # as if no memory were left
    ends, scratch, sizes = torch.tensor([0, 40], dtype=torch.int32), [], []
    with torch.no_grad():
        for inner, dtype in ((40, BF16), (40, FLOAT), (90, FLOAT), (40, FLOAT), (90, FP16), (300, FP16)):
            layer = of("bert", intermediate_size=inner).to(dtype).layer_list()[0]
            x, call = torch.randn(40, 48).to(dtype), Call(PackedBatch(ends, 40), 0, scratch=scratch)
            with fused_calls() as seen:
                out = through(layer, x, call.batch, call=call)
            assert seen == [40]
            assert not prepared.remembered(layer)
            assert len(scratch) == 2  # the packed weights, and the workspace of the layer
            sizes.append(scratch[0].data_ptr())
            with op_by_op():
                assert torch.equal(through(layer, x, call.batch), out)
    assert sizes[2] == sizes[3]


# --- where the ops run one by one ---------------------------------------------------------------------------


def fused_layers(model, inputs=None, **arguments) -> int:
    with fused_calls() as seen:
        model(**(inputs or batch("bert")), **arguments)
    return len(seen)


def test_not_in_training_nor_where_a_gradient_may_be_asked_for():
    model = of("bert")
    assert fused_layers(model) == 0
    with torch.no_grad():
        assert fused_layers(model) == 3
        assert fused_layers(model.train()) == 0
    with torch.inference_mode():
        assert fused_layers(model.eval()) == 3


def test_not_with_probabilities_autocast_or_other_dtypes():
    model = of("bert")
    with torch.no_grad():
        assert fused_layers(model, output_attentions=True) == 0
        assert fused_layers(model, output_hidden_states=True) == 3
        assert fused_layers(model, first_token_only=True) == 2
        with torch.autocast("cpu", torch.bfloat16):
            assert fused_layers(model) == 0
        assert fused_layers(of("bert").double()) == 0
        for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm)):
            norm.double()
        assert fused_layers(model) == 0


@pytest.mark.parametrize(
    "where", ["attention.self.key", "attention.output.LayerNorm", "intermediate.dense", "output.dense"]
)
def test_not_where_a_part_is_hooked_or_replaced(where):
    model, inputs, seen = of("bert"), batch("bert"), []
    with torch.no_grad():
        expected = model(**inputs)[0]
        owner, _, name = where.rpartition(".")
        layer = model.layer_list()[1]
        part = layer.get_submodule(where)
        handle = part.register_forward_hook(lambda *_: seen.append(1))
        assert fused_layers(model, inputs) == 2
        assert seen
        handle.remove()

        class Own(type(part)):
            pass

        part.__class__ = Own
        assert fused_layers(model, inputs) == 2
        assert (model(**inputs)[0] - expected).abs().max() < 1e-5
        setattr(layer.get_submodule(owner), name, part)


@pytest.mark.parametrize("op", ["attention", "layer_norm", "linear"])
def test_pins_hold(op):
    model = of("bert")
    with torch.no_grad():
        with dispatch.use_backend(**{op: "aten"}):
            assert fused_layers(model) == 0
        with dispatch.use_backend("aten"):
            assert fused_layers(model) == 0
        with dispatch.use_backend("cpu"):
            assert fused_layers(model) == 3
        with dispatch.use_backend(linear_int8="aten"):
            assert fused_layers(model) == 3
            assert fused_layers(of("bert").quantize("int8")) == 0
        assert fused_layers(model) == 3


@pytest.mark.parametrize(("name", "number", "int8"), KINDS + OTHER_KINDS[2:])
def test_for_many_rows_nothing_is_kept_and_blocks_share_what_is_packed(
    monkeypatch, noted, name, number, int8
):
    model = of(name).quantize("int8") if int8 else of(name)
    layer, made = model.layer_list()[number], noted(cpu, "encoder_layer_weights")
    monkeypatch.setattr(cpu_sizes, "FUSED_ROWS", 700)
    dispatch._resolved.clear()
    for rows, calls in (
        (0, []),
        (1399, [1399]),
        (1400, [700, 700]),
        (1536, [800, 736]),
        (2500, [900, 900, 700]),
    ):
        made.clear()
        prepared.clear(layer)
        lengths, x = [100] * (rows // 100) + [rows % 100], torch.randn(rows, 48)
        sequences = packed(model, lengths, x)
        with torch.no_grad():
            with fused_calls() as seen:
                out = through(layer, x, sequences)
            if rows and not int8:
                assert bool(prepared.remembered(layer)) == (rows < cpu_sizes.MANY_ROWS)
            with op_by_op():
                assert torch.equal(through(layer, x, sequences), out)
        assert seen == calls
        assert len(made) == bool(calls)
    dispatch._resolved.clear()


# --- bad input ----------------------------------------------------------------------------------------------


def test_bad_input_is_named():
    layer = of("bert").layer_list()[0]
    _make, launch, _keeps = launchers(torch.device("cpu"), FLOAT, "linear")
    with torch.no_grad():
        x, ends = torch.randn(6, 48), torch.tensor([0, 2, 6], dtype=torch.int32)
        layer = executor.takes(*survey([layer]), x, Call(PackedBatch(ends, 4), 0)).layer

        def call(x=x, cu_seqlens=ends, max_seqlen=4, bias=None, gate=None, **changed):
            layers = [layer, layer._replace(**changed)]
            return encoder_layer(launch, x, layers, cu_seqlens, max_seqlen, bias=bias, gate=gate)

        assert call().shape == (6, 48)
        for match, changed in (
            ("weights: expected those of a layer from 47", {"x": torch.randn(6, 47)}),
            ("x: expected", {"x": torch.randn(2, 3, 48)}),
            ("cu_seqlens: expected to end", {"cu_seqlens": torch.tensor([0, 7], dtype=torch.int32)}),
            ("cu_seqlens: expected to start", {"cu_seqlens": torch.tensor([1, 6], dtype=torch.int32)}),
            ("max_seqlen: expected at least", {"max_seqlen": 3}),
            ("bias: expected", {"bias": torch.zeros(2, 3, 5, 4)}),
            ("headdim: expected at least 1", {"headdim": 0}),
            ("weights: expected those of a layer", {"headdim": 8}),
            ("gate: expected", {"gate": torch.zeros(2)}),
            ("activation: expected", {"activation": "gelu_fast"}),
            ("eps: expected", {"eps": (1e-12, -1.0)}),
        ):
            with pytest.raises(ValueError, match=match):
                call(**changed)
        with pytest.raises(TypeError, match="cu_seqlens: expected int32"):
            call(cu_seqlens=ends.long())
        with pytest.raises(ValueError, match="layers: expected at least one"):
            encoder_layer(launch, x, [], ends, 4, bias=None)


@torch.no_grad()
def test_bad_input_of_layers_that_rotate_is_named():
    model, x = of("modernbert"), torch.randn(6, 48)
    batch = packed(model, [2, 4], x)
    taken = executor.takes(survey(model.layer_list())[1], x, Call(batch, 2))
    rotary = taken.layer.rotary
    cos, sin = batch.tables[rotary]
    rows = len(cos)  # as many as the longest text of the process has needed

    def call(positions=batch.positions, tables=batch.tables, **changed):
        layers, more = [taken.layer, taken.layer._replace(**changed)], {"bias": None, "positions": positions}
        return encoder_layer(taken.launch, x, layers, batch.cu_seqlens, 4, tables=tables, **more)

    assert torch.equal(call(), call(batch.positions.int()))
    for match, changed in (
        ("tables: expected positions", {"positions": None}),
        ("tables: expected positions", {"tables": {}}),
        ("positions: expected", {"positions": torch.arange(5)}),
        (f"position {rows} is out of range for tables of {rows}", {"positions": torch.full((6,), rows)}),
        ("positions: position -1 is out of range", {"positions": torch.full((6,), -1)}),
        ("cos: expected shape", {"tables": {rotary: (cos.repeat(1, 2), sin.repeat(1, 2))}}),
        ("sin: expected", {"tables": {rotary: (cos, sin[:, :3])}}),
        ("window: expected", {"window": (-2, 4)}),
        ("weights: expected those of a layer", {"gated": None}),
        ("gated: expected", {"gated": "third"}),
        ("kv_heads: expected a divisor of 3 heads, got 2", {"kv_heads": 2}),
        ("weights: expected those of a layer", {"kv_heads": 1}),
        ("eps: expected", {"pre_norm": False, "eps": (None, 0.1)}),
        ("eps: expected", {"eps": (0.1, None)}),
    ):
        with pytest.raises(ValueError, match=match):
            call(**changed)


@pytest.mark.parametrize("name", ["attention.self.query", "attention.output.dense", "intermediate.dense"])
def test_weights_of_other_shapes_are_refused(name):
    model = of("bert")
    owner, _, leaf = name.rpartition(".")
    setattr(model.layer_list()[1].get_submodule(owner), leaf, nn.Linear(48, 32))
    with torch.no_grad(), pytest.raises(ValueError, match=r"weights: expected those of a layer from 48"):
        model(**batch("bert"))


def test_weights_for_another_instruction_set_are_refused():
    module = loader.extension
    layer, before = of("bert").layer_list()[0], module.cpu_isa()
    other = "avx2" if before != "avx2" else "none"
    x, sequences = torch.randn(6, 48), PackedBatch(torch.tensor([0, 6], dtype=torch.int32), 6)
    with torch.no_grad():
        through(layer, x, sequences)
        module.set_cpu_isa(other)
        try:
            with pytest.raises(RuntimeError, match=f"panels made for {before}, and {other} is in use"):
                through(layer, x, sequences)
        finally:
            module.set_cpu_isa(before)


@pytest.fixture
def surveys(noted):
    """How often layers were looked at, as the length of a list."""
    return noted(plan, "survey")


@torch.no_grad()
def test_a_plan_is_kept_for_calls_of_each_kind(surveys, monkeypatch):
    model, inputs = of("bert"), batch("bert")
    kinds = {}, {"first_token_only": True}, {"output_hidden_states": True}, {"output_attentions": True}
    wanted = [model(**inputs, **kind).last_hidden_state for kind in kinds]
    for _ in range(2):
        for kind, result in zip(kinds, wanted, strict=True):
            surveys.clear()
            assert torch.equal(model(**inputs, **kind).last_hidden_state, result)
    assert surveys == []
    # for many rows weights are not kept, and so neither is what runs
    monkeypatch.setattr(cpu_sizes, "MANY_ROWS", 8)
    before = list(prepared.beside(model.encoder).kept)
    with fused_calls() as seen:
        torch.testing.assert_close(model(**inputs).last_hidden_state, wanted[0], rtol=1e-5, atol=1e-5)
    assert len(seen) >= len(model.encoder.layer)
    assert list(prepared.beside(model.encoder).kept) == before
    with dispatch.use_backend("reference"), fused_calls() as seen:
        torch.testing.assert_close(model(**inputs).last_hidden_state, wanted[0], rtol=1e-5, atol=1e-5)
    assert seen == []


@pytest.mark.parametrize("accelerated", [False, True])
@torch.no_grad()
def test_a_plan_made_under_autocast_knows_the_tables_later(accelerated):
    model = accelerate(stock_of("bert").float()) if accelerated else of("bert")
    inputs = padded_right("bert")
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            model(**inputs)
    plan = prepared.beside(model.encoder)
    model(**inputs)
    assert len(plan.kept) == 2
    assert plan.known["words and segments"] is not None


@pytest.mark.parametrize("change", [*CHANGES, *AROUND])
@pytest.mark.parametrize("accelerated", [False, True])
@torch.no_grad()
def test_a_kept_plan_sees_a_change(change, accelerated):
    model = accelerate(stock_of("bert").float()) if accelerated else of("bert")
    inputs = padded_right("bert")
    for _ in range(3):
        model(**inputs)
    assert prepared.beside(model.encoder).state is not None
    (CHANGES | AROUND)[change](model)
    model.float()
    for _ in range(3):
        found = model(**inputs)
        prepared.clear(model)
        with dispatch.use_backend("reference"):
            wanted = model(**inputs)
        for a, b in zip(found[:2], wanted[:2], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
