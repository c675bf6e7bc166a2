"""Threads, attributes and bad arguments of a graphed model; what the CUDA recorder asks of torch.cuda."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch import nn

from fastbert import accelerate
from fastbert.graphs import model as graphs
from fastbert.graphs.recorder import CudaRecorder, recorder_for
from tests.support.graphed_models import CPU, Graphed, lengths_batch, same, shared
from tests.support.hf_models import batch

# --- threads ------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_many_threads():
    g = Graphed(shared(), max_graphs=3)
    inputs = [lengths_batch([(7 * i) % 60 + 1, (11 * i) % 50, 5], 64, seed=i) for i in range(12)]
    with torch.no_grad():
        expected = [g.model(**i) for i in inputs]
    start = threading.Barrier(4)

    def work(first):
        start.wait()
        for turn in range(15):
            which = (5 * turn + 3 * first) % len(inputs)
            asked = {"output_attentions": True} if (turn + first) % 7 == 0 else {}
            with torch.inference_mode():
                out = g.graphed(**inputs[which], **asked)
            # each thread reads the reason of its own call
            assert (g.graphed.last_fallback is not None) == bool(asked)
            same([out.last_hidden_state, out.pooler_output], list(expected[which].values())[:2])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert g.graphed.replays + g.graphed.fallbacks.total() == 60
    assert len(g.graphed.graphs) <= 3


# --- arguments ----------------------------------------------------------------------------------------------


def test_calls_take_what_the_model_takes():
    g, ids = Graphed(shared()), batch("bert")["input_ids"]
    distil = Graphed(shared("distilbert"))
    for graphed, args, given, error, match in (
        (g, [ids * 0 + 120], {}, ValueError, "input_ids: token id 120 is outside"),
        (g, [], {}, ValueError, "input_ids, inputs_embeds: expected exactly one"),
        (g, [ids, ids[:, 1:]], {}, ValueError, r"attention_mask: expected shape \(4, 40\)"),
        (g, [ids], {"lengths": [3]}, TypeError, "unexpected keyword argument 'lengths'"),
        (g, [ids], {"input_ids": ids}, TypeError, "multiple values for argument 'input_ids'"),
        (g, [ids, *[None] * 12], {}, TypeError, "positional arguments"),
        (g, [ids], {"use_cache": True}, ValueError, "use_cache: not supported"),
        (g, [ids, None, ids[:1]], {}, ValueError, "token_type_ids: expected shape"),
        (distil, [ids, None, None], {}, TypeError, "at most 2 positional arguments, got 3"),
    ):
        for call in (graphed.graphed, graphed.model):
            with torch.no_grad(), pytest.raises(error, match=match):
                call(*args, **given)
    g.check(ids, None, ids % 2, ids % 50)
    distil.check(ids, batch("bert")["attention_mask"])


def test_bad_options():
    for name, value, match in (
        ("max_tokens", 0, "max_tokens: expected an integer >= 1, got 0"),
        ("max_batch", 2.0, "max_batch: expected an integer >= 1, got 2.0"),
        ("max_graphs", True, "max_graphs: expected an integer >= 1, got True"),
        ("buckets", [], "buckets: expected integers >= 1"),
        ("buckets", 5, "buckets: expected integers >= 1, in rising order, got 5"),
        ("buckets", [4, 4], r"buckets: .*in rising order, got \[4, 4\]"),
        ("buckets", [0, 4], "buckets: expected integers >= 1"),
    ):
        with pytest.raises(ValueError, match=match):
            graphs.graph(shared(), **{name: value})


def test_bad_models():
    with pytest.raises(TypeError, match=r"model: expected a model of fastbert, .*, got Linear$"):
        graphs.graph(nn.Linear(2, 2))
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    stock = transformers.BertModel(transformers.BertConfig(vocab_size=30, **sizes))
    other = accelerate(transformers.GPT2Model(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2)))
    for model in (stock, other):
        words = rf"that runs on packed tokens after fastbert\.accelerate .*, got {type(model).__name__}$"
        with pytest.raises(TypeError, match=words):
            graphs.graph(model)


# --- the CUDA recorder, on a torch.cuda that only writes down what it is asked for --------------------------


def test_the_cuda_recorder(monkeypatch):
    cuda = mock.MagicMock()
    names = "Stream Event CUDAGraph graph_pool_handle current_stream device stream graph memory_snapshot"
    for name in names.split():
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    cuda.graph_pool_handle.return_value = (0, 7)
    cuda.memory_snapshot.return_value = [
        {"segment_pool_id": pool, "total_size": size}
        for pool, size in (((0, 7), 100), ((0, 0), 5), ((0, 7), 20))
    ]
    recorder = recorder_for(torch.device("cuda", 0))
    assert type(recorder) is CudaRecorder
    assert recorder.bytes_held() == 120

    def order():
        found = [name for name, *_ in cuda.mock_calls]
        cuda.reset_mock()
        return found

    order()
    recording = recorder.record(cuda.function)
    cuda.graph.assert_called_once_with(
        cuda.CUDAGraph(), pool=(0, 7), stream=cuda.Stream(), capture_error_mode="thread_local"
    )
    assert recording.outputs is cuda.function()
    # once on the capture's stream, then in the capture
    assert order()[:-3] == [
        *("device", "device().__enter__", "current_stream", "Stream().wait_stream"),
        *("stream", "stream().__enter__", "function", "stream().__exit__", "current_stream().wait_stream"),
        *("CUDAGraph", "graph", "graph().__enter__", "function", "graph().__exit__", "device().__exit__"),
    ]
    # work enqueued before an error is waited for as well
    with contextlib.suppress(ZeroDivisionError), recorder.in_order():
        recording.replay()
        1 / 0
    recorder.wait()
    assert order() == [
        *("device", "device().__enter__", "current_stream", "current_stream().wait_event"),
        *("CUDAGraph().replay", "current_stream", "Event().record", "device().__exit__"),
        "Event().synchronize",
    ]
    first, second = recorder.record_pair(cuda.forward, cuda.backward)
    assert first.outputs == (cuda.forward().detach(),)
    assert second.outputs == ()
    assert cuda.backward.mock_calls == [mock.call(cuda.forward())] * 2
    # both once on the capture's stream, then each in a capture of its own
    captured = ["CUDAGraph", "graph", "graph().__enter__", "{}", "graph().__exit__"]
    assert order()[4:-1] == [
        *("stream", "stream().__enter__", "forward", "backward", "stream().__exit__"),
        "current_stream().wait_stream",
        *(name.format("forward") for name in captured),
        *(name.format("backward") for name in captured),
        *("forward().detach", "device().__exit__", "forward", "forward().detach"),
    ]
    assert recorder_for(CPU) is recorder_for(torch.device("meta")) is None
