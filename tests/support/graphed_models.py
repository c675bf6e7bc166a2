"""Graphed models on a CPU: recorders that read and write the same memory as a CUDA graph would."""

from __future__ import annotations

import contextlib
import functools
import threading

import torch
from torch import nn

from fastbert.compression.shrink import without
from fastbert.graphs import model as graphs
from fastbert.graphs.recorder import EagerRecorder, Recording
from fastbert.models.auto import AutoModel
from fastbert.models.bert import BertModel
from fastbert.models.config import EncoderConfig
from fastbert.runtime import prepared
from tests.support.hf_models import hf_config, unit_scale

CPU = torch.device("cpu")
SIZES = {"max_tokens": 512, "max_batch": 64}
_SMALL = {"vocab_size": 120, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3}
_SMALL |= {"intermediate_size": 80, "max_position_embeddings": 72, "pad_token_id": 0}
# Families that transformers has no class of
OTHERS = {
    "neobert": {"model_type": "neobert", **_SMALL},
    "jina_bert": {"model_type": "bert", "position_embedding_type": "alibi", **_SMALL},
}


def fresh(name: str = "bert", dtype: torch.dtype = torch.float64, **config) -> BertModel:
    """A tiny model with weights at unit scale. In float64 a difference is a mistake, not rounding."""
    torch.manual_seed(0)
    if name in OTHERS:
        made = EncoderConfig(**{**OTHERS[name], **config})
    else:
        made = EncoderConfig.from_hf(hf_config(name, **config))
    model = AutoModel.from_config(made).eval()
    return unit_scale(model).to(dtype)


def pruned(model: BertModel) -> BertModel:
    """Without some heads and neurons: the second layer keeps no head, the third no neuron."""
    return without(model, heads={0: [1], 1: [0, 1, 2]}, neurons={0: [0, 3, 79], 2: range(80)})


shared = functools.cache(fresh)  # for tests that leave the model as it is


class GraphLike(EagerRecorder):
    """Replays read what a CUDA graph would read: the memory of parameters and derived weights at recording.

    A replay overwrites the outputs of all other recordings with NaN, because graphs may share a pool.
    """

    def __init__(self, model: nn.Module, device: torch.device = CPU):
        super().__init__(device)
        self.model, self.recorded, self.busy = model, [], False

    def record(self, function):
        parameters = [
            (m._parameters, name, p.detach())
            for m in self.model.modules()
            for name, p in m._parameters.items()
            if p is not None
        ]
        with prepared.collect_used() as entries:
            outputs = function()
        derived = {(id(owner), name): value for owner, name, value in entries}

        def replay():
            for made in self._made:
                for t in made.outputs:
                    if t is not None:
                        t.fill_(torch.nan)
            with frozen(self.model, parameters, derived):
                results = function()
            for old, new in zip(outputs, results, strict=True):
                if old is not None:
                    old.copy_(new)

        self.recorded.append(function)
        recording = Recording(outputs, replay)
        self._made.add(recording)
        return recording

    @contextlib.contextmanager
    def in_order(self):
        assert not self.busy, "two threads at a time"
        self.busy = True
        try:
            yield
        finally:
            self.busy = False


@contextlib.contextmanager
def frozen(model, parameters, derived):
    """Put the recorded memory in place of the modules' current tensors, without hooks, as in a graph."""
    kinds = "_forward_hooks", "_forward_pre_hooks"
    hooks = [(m, kind, getattr(m, kind)) for m in model.modules() for kind in kinds]
    now = [(table, name, table[name]) for table, name, _ in parameters if name in table]
    make, replaying = prepared.derived, threading.get_ident()

    def recorded(owner, name, sources, build, *, keep=True):
        if threading.get_ident() != replaying:  # another thread runs the model itself
            return make(owner, name, sources, build, keep=keep)
        return derived[id(owner), name]

    for table, name, value in parameters:
        table[name] = value
    for module, kind, _ in hooks:
        setattr(module, kind, {})
    prepared.derived = recorded
    try:
        yield
    finally:
        prepared.derived = make
        for table, name, value in now:
            table[name] = value
        for module, kind, seen in hooks:
            setattr(module, kind, seen)


class Graphed:
    """A graphed model, its model and its recorders."""

    def __init__(self, model: BertModel, **options):
        self.model, self.recorders = model, []
        self.graphed = graphs.graph(model, recorder=self.make, **{**SIZES, **options})

    def make(self, device):
        self.recorders.append(GraphLike(self.model, device))
        return self.recorders[-1]

    @property
    def recorded(self) -> int:
        """How many graphs have been recorded so far."""
        return sum(len(r.recorded) for r in self.recorders)

    @torch.no_grad()
    def check(self, *args, reason: str | None = None, **kwargs):
        """The call returns what the model returns: replayed, or with `reason` from the model itself."""
        same(self.graphed(*args, **kwargs), self.model(*args, **kwargs))
        assert self.graphed.last_fallback == reason


def same(actual, expected) -> None:
    if isinstance(expected, dict):
        assert type(actual) is type(expected)
        assert actual.keys() == expected.keys()
        actual, expected = list(actual.values()), list(expected.values())
    if isinstance(expected, torch.Tensor):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        assert actual.requires_grad == expected.requires_grad
        tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 0.1}[expected.dtype]
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
        return
    assert type(actual) is type(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        same(a, e)


def lengths_batch(lengths, seqlen=None, seed=0):
    """Right-padded ids and mask of sequences of these lengths."""
    g = torch.Generator().manual_seed(seed)
    seqlen = seqlen or max(1, *lengths)
    mask = (torch.arange(seqlen) < torch.tensor(lengths).unsqueeze(1)).long()
    return {"input_ids": torch.randint(5, 120, mask.shape, generator=g), "attention_mask": mask}
