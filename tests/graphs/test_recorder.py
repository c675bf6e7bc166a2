"""Threads, attributes and bad arguments of a graphed model; what the CUDA recorder asks of torch.cuda."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn

from fastbert import accelerate
from fastbert.graphs import model as graphs
from fastbert.graphs.recorder import CudaRecorder, recorder_for
from tests.support.graphed_models import CPU, Graphed, lengths_batch, shared
from tests.support.hf_models import batch

# --- threads ------------------------------------------------------------------------------------------------


def test_many_threads():
    g = Graphed(shared(), max_graphs=3)
    inputs = [lengths_batch([(7 * i) % 60 + 1, (11 * i) % 50, 5], 64, seed=i) for i in range(12)]
    with torch.no_grad():
        expected = [g.model(**i) for i in inputs]
    wrong, reasons, start = [], [], threading.Barrier(4)

    def work(first):
        start.wait()
        for turn in range(15):
            which = (5 * turn + 3 * first) % len(inputs)
            asked = {"output_attentions": True} if (turn + first) % 7 == 0 else {}
            try:
                with torch.inference_mode():
                    out = g.graphed(**inputs[which], **asked)
                reasons.append((g.graphed.last_fallback is not None) == bool(asked))
                torch.testing.assert_close(
                    out.last_hidden_state, expected[which].last_hidden_state, rtol=0, atol=1e-11
                )
                torch.testing.assert_close(
                    out.pooler_output, expected[which].pooler_output, rtol=0, atol=1e-11
                )
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    assert all(reasons)  # each thread reads the reason of its own call
    assert g.graphed.replays + g.graphed.fallbacks.total() == 60
    assert len(g.graphed.graphs) <= 3


# --- arguments ----------------------------------------------------------------------------------------------


def test_calls_take_what_the_model_takes():
    g, ids = Graphed(shared()), batch("bert")["input_ids"]
    with torch.no_grad():
        for call in (g.graphed, g.model):
            with pytest.raises(ValueError, match=r"input_ids: token id 120 is outside"):
                call(ids * 0 + 120)
            with pytest.raises(ValueError, match=r"input_ids, inputs_embeds: expected exactly one"):
                call()
            with pytest.raises(ValueError, match=r"attention_mask: expected shape \(4, 40\)"):
                call(ids, ids[:, 1:])
            with pytest.raises(TypeError, match="unexpected keyword argument 'lengths'"):
                call(ids, lengths=[3])
            with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
                call(ids, input_ids=ids)
            with pytest.raises(TypeError, match="positional arguments"):
                call(ids, *[None] * 12)
            with pytest.raises(ValueError, match="use_cache: not supported"):
                call(ids, use_cache=True)
            with pytest.raises(ValueError, match="token_type_ids: expected shape"):
                call(ids, None, ids[:1])
        g.check(ids, None, ids % 2, ids % 50)
        distil = Graphed(shared("distilbert"))
        distil.check(ids, batch("bert")["attention_mask"])
        for call in (distil.graphed, distil.model):
            with pytest.raises(TypeError, match="at most 2 positional arguments, got 3"):
                call(ids, None, None)


def test_the_models_own_attributes():
    g = Graphed(shared())
    assert g.graphed.config is g.model.config
    assert (g.graphed.device, g.graphed.dtype, g.graphed.training) == (CPU, torch.float64, False)
    assert next(iter(g.graphed.parameters())) is next(g.model.parameters())


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens: expected an integer >= 1, got 0"),
        ({"max_batch": 2.0}, ValueError, "max_batch: expected an integer >= 1, got 2.0"),
        ({"max_graphs": True}, ValueError, "max_graphs: expected an integer >= 1, got True"),
        ({"buckets": []}, ValueError, "buckets: expected integers >= 1"),
        ({"buckets": 5}, ValueError, "buckets: expected integers >= 1, each above the one before, got 5"),
        ({"buckets": [4, 4]}, ValueError, r"buckets: .*each above the one before, got \[4, 4\]"),
        ({"buckets": [0, 4]}, ValueError, r"buckets: expected integers >= 1"),
    ],
)
def test_bad_options(options, error, match):
    with pytest.raises(error, match=match):
        graphs.graph(shared(), **options)


def test_bad_models():
    from fastbert.models.heads import BertForSequenceClassification

    head = BertForSequenceClassification(shared().config)
    with pytest.raises(
        TypeError, match=r"model: .*got BertForSequenceClassification; give model\.base_model"
    ):
        graphs.graph(head)
    with pytest.raises(TypeError, match="model: expected a fastbert encoder, got Linear"):
        graphs.graph(nn.Linear(2, 2))
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    stock = transformers.BertModel(transformers.BertConfig(vocab_size=30, **sizes))
    for model in (stock, accelerate(stock)):
        with pytest.raises(
            TypeError, match=r"got BertModel of transformers; .*fastbert\.AutoModel\.from_pretrained"
        ):
            graphs.graph(model)


# --- the CUDA recorder, on a torch.cuda that only writes down what it is asked for --------------------------


class Log(list):
    """A stand-in for torch.cuda: streams, events and graphs that log their calls in order."""

    def __init__(self, monkeypatch):
        log = self

        class Thing:
            def __init__(self, name):
                self.name = name

            def __getattr__(self, method):
                return lambda *args: log.append((self.name, method, *[getattr(a, "name", a) for a in args]))

        @contextlib.contextmanager
        def block(name, *details):
            log.append((name, "begins", *details))
            yield
            log.append((name, "ends", *details))

        def graph(captured, pool, stream, capture_error_mode):
            return block("capture", captured.name, pool, stream.name, capture_error_mode)

        for name, value in {
            "Stream": lambda: Thing("side"),
            "Event": lambda: Thing("event"),
            "CUDAGraph": lambda: Thing("graph"),
            "graph_pool_handle": lambda: (0, 7),
            "current_stream": lambda: Thing("current"),
            "device": lambda device: block("device", str(device)),
            "stream": lambda stream: block("on", stream.name),
            "graph": graph,
            "memory_snapshot": lambda: [
                {"segment_pool_id": (0, 7), "total_size": 100},
                {"segment_pool_id": (0, 0), "total_size": 5000},
                {"segment_pool_id": (0, 7), "total_size": 20},
            ],
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_the_cuda_recorder(monkeypatch):
    log = Log(monkeypatch)
    recorder = recorder_for(torch.device("cuda", 0))
    assert type(recorder) is CudaRecorder
    assert recorder.bytes_held() == 120

    def function():
        log.append("function")
        return (log.count("function"), None)

    del log[:]
    recording = recorder.record(function)
    assert log == [
        ("device", "begins", "cuda:0"),
        ("side", "wait_stream", "current"),
        ("on", "begins", "side"),
        "function",
        ("on", "ends", "side"),
        ("current", "wait_stream", "side"),
        ("capture", "begins", "graph", (0, 7), "side", "thread_local"),
        "function",
        ("capture", "ends", "graph", (0, 7), "side", "thread_local"),
        ("device", "ends", "cuda:0"),
    ]
    assert recording.outputs == (2, None)  # those of the capture
    del log[:]
    with recorder.in_order():
        recording.replay()
    recorder.wait()
    assert log == [
        ("device", "begins", "cuda:0"),
        ("current", "wait_event", "event"),
        ("graph", "replay"),
        ("event", "record", "current"),
        ("device", "ends", "cuda:0"),
        ("event", "synchronize"),
    ]
    del log[:]
    with contextlib.suppress(ZeroDivisionError), recorder.in_order():
        1 / 0  # work enqueued before the error is waited for as well
    assert ("event", "record", "current") in log


def test_devices_without_a_recorder():
    assert recorder_for(CPU) is None
    assert recorder_for(torch.device("meta")) is None
