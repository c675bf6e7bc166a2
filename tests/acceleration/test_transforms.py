"""`fastbert.accelerate` under torch.compile and export. Function transforms: tests/models/test_modules.py"""

from __future__ import annotations

import pytest
import torch
import transformers

import fastbert
from tests.support.accelerated_models import assert_close, assert_same_training, first_kept, tiny

# --- torch.compile ------------------------------------------------------------------------------------------


class Recorder:
    """A backend of torch.compile that runs graphs by AOT autograd and records their operations."""

    def __init__(self):
        self.graphs = 0
        self.ops: set[str] = set()

    def __call__(self, graph, inputs):
        self.graphs += 1
        self.ops |= {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def assert_accelerated_graph(recorder: Recorder) -> None:
    for op in ("attention_fwd", "linear_fwd", "layer_norm_fwd"):
        assert any(f"fastbert.{op}" in name for name in recorder.ops), (op, sorted(recorder.ops))
    assert not any("scaled_dot_product" in name for name in recorder.ops), sorted(recorder.ops)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("bert", "accelerated"),
        ("albert", "accelerated"),
        ("mpnet", "accelerated"),
        ("modernbert", "accelerated"),
        ("bert", "compiled"),
    ],
)
def test_compiled_in_one_graph(fresh_dynamo, name, first):
    recorder = Recorder()
    model, stock = (tiny(name=name, num_hidden_layers=1) for _ in range(2))
    inputs = first_kept(name, 4, 24)
    if first == "accelerated":
        fastbert.accelerate(model)
    compiled = torch.compile(model, fullgraph=True, backend=recorder)
    if first == "compiled":
        with torch.no_grad():
            compiled(**inputs)
        recorder.graphs = 0
        recorder.ops.clear()
        assert fastbert.accelerate(compiled) is compiled
    assert_same_training(compiled, stock, inputs)
    assert recorder.graphs == 1
    assert_accelerated_graph(recorder)
    with torch.no_grad():  # and outside the compiled graph it packs as before
        assert_close(model(**inputs).logits, stock(**inputs).logits)


@pytest.mark.sweep
def test_compiled_shapes_are_dynamic(fresh_dynamo):
    recorder, stock = Recorder(), tiny(num_hidden_layers=1)
    model = fastbert.accelerate(tiny(num_hidden_layers=1))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=recorder)
    graphs = []
    for batch_size, seqlen in ((3, 9), (4, 24), (7, 12)):
        inputs = first_kept("bert", batch_size, seqlen)
        with torch.no_grad():
            assert_close(compiled(**inputs).logits, stock(**inputs).logits)
        graphs.append(recorder.graphs)
    assert graphs[-1] == graphs[1] <= 2  # the stock model, too, may be compiled again after its first call
    assert_accelerated_graph(recorder)


@pytest.mark.sweep
def test_compiled_by_inductor(fresh_dynamo):
    model = fastbert.accelerate(tiny(transformers.AutoModel, num_hidden_layers=1))
    compiled, inputs = torch.compile(model, fullgraph=True), first_kept("bert", 4, 16)
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        actual = compiled(**inputs)
        expected = tiny(transformers.AutoModel, num_hidden_layers=1)(**inputs)
    assert_close(actual.last_hidden_state[kept], expected.last_hidden_state[kept])
    first = kept[:, 0]
    assert_close(actual.pooler_output[first], expected.pooler_output[first])


@pytest.mark.sweep
def test_layers_compiled_one_by_one(fresh_dynamo):
    recorder, stock = Recorder(), tiny(num_hidden_layers=4)
    model = fastbert.accelerate(tiny(num_hidden_layers=4))
    for layer in model.bert.encoder.layer:
        layer.compile(fullgraph=True, dynamic=True, backend=recorder)
    for batch_size, seqlen in ((3, 9), (4, 24)):
        inputs = first_kept("bert", batch_size, seqlen)
        with torch.no_grad():
            assert_close(model(**inputs).logits, stock(**inputs).logits)
    assert recorder.graphs <= 2  # not one per layer
    assert_accelerated_graph(recorder)
    assert "compiled by itself" in fastbert.explain(model).models[0].reason


# --- export and tracing -------------------------------------------------------------------------------------


def assert_runs_packed(model, inputs) -> None:
    """The model is still accelerated after an export."""
    with torch.no_grad():
        assert_close(model(**inputs).logits, tiny()(**inputs).logits)
    how = fastbert.explain(model)
    assert all(layer.fused_calls > 0 for layer in how.layers), str(how)
    assert all(part.packed_calls > 0 for part in how.models), str(how)


@pytest.mark.sweep
def test_torch_export_takes_the_stock_path():
    model, inputs = fastbert.accelerate(tiny()), first_kept("bert", 4, 24)
    dynamic = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("seqlen", max=72)}
    shapes = dict.fromkeys(inputs, dynamic)
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes)
    ops = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any("scaled_dot_product_attention" in op for op in ops)
    assert not any("fastbert" in op for op in ops), ops
    stock = torch.export.export(tiny(), (), inputs, dynamic_shapes=shapes)
    assert [n.target for n in program.graph.nodes] == [n.target for n in stock.graph.nodes]
    other = first_kept("bert", 5, 31, seed=2)
    with torch.no_grad():
        assert_close(program.module()(**other).logits, tiny()(**other).logits)
    assert_runs_packed(model, inputs)


@pytest.mark.sweep
def test_onnx_export_takes_the_stock_path():
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnx")
    model, inputs = fastbert.accelerate(tiny(num_hidden_layers=1)), first_kept("bert", 4, 24)
    program = torch.onnx.export(model, (), kwargs=inputs, dynamo=True, optimize=False, verbose=False)
    nodes = list(program.model.graph)
    assert any(node.op_type == "MatMul" for node in nodes)
    assert not any("fastbert" in node.domain or "fastbert" in node.op_type for node in nodes)
    with torch.no_grad():
        expected = tiny(num_hidden_layers=1)(**inputs).logits
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(
        program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (logits,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    assert_close(torch.from_numpy(logits), expected, 1e-4)


@pytest.mark.sweep
def test_fake_tensors_and_make_fx_take_the_stock_path():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    model, inputs = fastbert.accelerate(tiny()), first_kept("bert")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        logits = model(**{name: mode.from_tensor(tensor) for name, tensor in inputs.items()}).logits
    assert logits.shape == (4, 2)
    graph = make_fx(lambda ids: model(ids).logits)(inputs["input_ids"])
    with torch.no_grad():
        assert_close(graph(inputs["input_ids"]), tiny()(inputs["input_ids"]).logits)
    assert_runs_packed(model, inputs)
