"""Replay of recorded forwards, everything but the capture itself: on a CPU, by recorders that read and write
the same memory as a CUDA graph would.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from fastbert import accelerate
from fastbert.graphs import model as graphs
from fastbert.graphs.buckets import sequence_rooms, token_buckets
from fastbert.graphs.calls import by_grid
from fastbert.graphs.recorder import CudaRecorder, EagerRecorder, Recording, recorder_for
from fastbert.layers.encoder import EncoderLayer
from fastbert.layers.modules import part
from fastbert.models.auto import AutoModel
from fastbert.models.bert import BertModel
from fastbert.models.config import EncoderConfig
from fastbert.runtime import dispatch, prepared
from fastbert.sentences.encoder import SentenceEncoder
from fastbert.sentences.tokenizer import load_tokenizer
from tests.support.hf_models import FAMILY_NAMES, batch, hf_config

CPU = torch.device("cpu")
SIZES = {"max_tokens": 512, "max_batch": 64}


def fresh(name: str = "bert", dtype: torch.dtype = torch.float64, **config) -> BertModel:
    """A tiny model with weights at unit scale. float64: what is left of a difference is a mistake."""
    torch.manual_seed(0)
    model = AutoModel.from_config(EncoderConfig.from_hf(hf_config(name, **config))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


shared = functools.cache(fresh)  # for tests that leave the model as it is


class GraphLike(EagerRecorder):
    """Replays with what a CUDA graph would read: the memory that parameters and derived weights had when it
    was recorded. A replay spoils all other recordings' outputs, as graphs may that share a pool.
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
    """The recorded memory instead of what the modules now hold; and no hooks, which a graph knows not."""
    hooks = [(m, m._forward_hooks) for m in model.modules()]
    now = [(table, name, table[name]) for table, name, _ in parameters if name in table]
    make = prepared.derived

    def recorded(owner, name, sources, build):
        return derived[id(owner), name]

    for table, name, value in parameters:
        table[name] = value
    for module, _ in hooks:
        module._forward_hooks = {}
    prepared.derived = recorded
    try:
        yield
    finally:
        prepared.derived = make
        for table, name, value in now:
            table[name] = value
        for module, seen in hooks:
            module._forward_hooks = seen


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
        """How many graphs have been recorded since the beginning."""
        return sum(len(r.recorded) for r in self.recorders)

    @torch.no_grad()
    def check(self, *args, reason: str | None = None, **kwargs):
        """The call gives what the model gives, replayed, or by the model itself for `reason`."""
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


# -- the same results ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_equals_the_model(name):
    """Right and left padding, holes, a full row; every form of asking and of answering."""
    g = Graphed(shared(name))
    inputs = batch(name)  # with holes: what MPNet's bias depends on
    reason = "the mask has holes, which this family's attention bias depends on" if name == "mpnet" else None
    for extra in ({}, {"first_token_only": True}, {"return_dict": False}):
        g.check(**inputs, **extra, reason=reason)
    del inputs["attention_mask"]
    for extra in ({}, {"first_token_only": True}, {"return_dict": False}):
        g.check(**inputs, **extra)
    g.check(**lengths_batch([7, 1, 40, 0, 23]))
    g.check(**lengths_batch([7, 1, 40, 0, 23]), position_ids=torch.arange(40).flip(0)[None] + 2)
    assert g.graphed.replays == (5 if name == "mpnet" else 8)


@pytest.mark.parametrize("seed", range(30))
def test_many_mixes_of_lengths(seed):
    """One graphed model for all: buckets are shared, and filled by what came before."""
    random = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 30, (), generator=random))
    lengths = torch.randint(0, 65, (count,), generator=random).tolist()
    if sum(lengths) > 512 or sum(lengths) == 0:
        lengths = [64] * 8  # the bucket filled to its last row
    mixes().check(**lengths_batch(lengths, 64, seed), first_token_only=seed % 3 == 0)


@functools.cache
def mixes() -> Graphed:
    return Graphed(shared())


def test_long_sequences_in_float32():
    """MiniLM's shapes: 384 wide, 12 heads, 512 tokens."""
    model = shared(
        "bert", torch.float32, hidden_size=384, num_attention_heads=12, intermediate_size=1536,
        num_hidden_layers=2, max_position_embeddings=512,
    )  # fmt: skip
    g = Graphed(model, max_tokens=2048)
    for lengths in ([512], [512, 511, 1], [128] * 3, [300, 7, 7, 7, 120], [512, 512, 512, 500]):
        g.check(**lengths_batch(lengths))
        g.check(**lengths_batch(lengths), first_token_only=True)


@pytest.mark.parametrize("name", ["bert", "roberta", "albert", "mpnet"])
@pytest.mark.parametrize("first_only", [False, True])
@torch.no_grad()
def test_packed_sequences(name, first_only):
    g = Graphed(shared(name))
    ids = torch.arange(60) % 100 + 5
    for ends, longest in (([0, 60], 60), ([0, 20, 20, 60], 40), ([0, 1, 2, 60, 60], 300)):
        cu_seqlens = torch.tensor(ends, dtype=torch.int32)
        for extra in ({}, {"position_ids": torch.arange(60).flip(0)}):
            given = (ids, cu_seqlens, longest)
            actual = g.graphed.forward_packed(*given, **extra, first_token_only=first_only)
            assert g.graphed.last_fallback is None
            same(actual, g.model.forward_packed(*given, **extra, first_token_only=first_only))
    types = torch.arange(60) % 2
    if name == "bert":
        same(
            g.graphed.forward_packed(ids, cu_seqlens, 60, types),
            g.model.forward_packed(ids, cu_seqlens, 60, types),
        )


@torch.no_grad()
def test_for_the_heads():
    """`packed=True` gives the rows and the Inputs."""
    g = Graphed(shared())
    for extra in ({}, {"first_token_only": True}):
        hidden, states, probs, inputs = g.graphed(**batch("bert"), packed=True, **extra)
        expected, *_, wanted = g.model(**batch("bert"), packed=True, **extra)
        assert states is probs is None
        assert g.graphed.last_fallback is None
        same(hidden, expected)
        assert torch.equal(inputs.packing.cu_seqlens, wanted.packing.cu_seqlens)


def test_a_masked_first_token():
    """The pooler then reads zeros, as the model's does."""
    g = Graphed(shared())
    inputs = lengths_batch([5, 9, 3])
    inputs["attention_mask"][1, 0] = 0
    g.check(**inputs)
    g.check(**inputs, first_token_only=True)


def test_int32_ids():
    g = Graphed(shared())
    g.check(batch("bert")["input_ids"].int(), token_type_ids=batch("bert")["token_type_ids"].int())


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_in_a_sentence_encoder(pooling, tmp_path):
    g = Graphed(shared("bert", torch.float32))
    sentences = ["w7 w8 w9", "w20", " ".join(f"w{i}" for i in range(10, 30)), ""]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(5, 120))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = load_tokenizer(tmp_path)
    with_graphs, without = (SentenceEncoder(m, tokenizer, pooling=pooling) for m in (g.graphed, g.model))
    assert abs(with_graphs.encode(sentences) - without.encode(sentences)).max() < 1e-5
    assert g.graphed.replays == 1
    assert not g.graphed.fallbacks


# -- memory --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_result_is_the_callers_own():
    """The next replay leaves it alone, and writing into it does no harm."""
    g = Graphed(shared())
    inputs = [lengths_batch([30, 10], seed=seed) for seed in range(3)]
    dense = [{"input_ids": i["input_ids"]} for i in inputs]
    for given in (inputs, dense):
        expected = [copy.deepcopy(g.model(**i)) for i in given]
        first = g.graphed(**given[0])
        second = g.graphed(**given[1])
        same(first, expected[0])
        second.last_hidden_state.fill_(7)
        second.pooler_output.fill_(7)
        same(g.graphed(**given[1]), expected[1])
        same(g.graphed(**given[2]), expected[2])
        same(first, expected[0])


@torch.no_grad()
def test_what_a_graph_reads():
    """Behind the tokens 0, behind the sequences the number of tokens: whatever stood there before."""
    g = Graphed(shared())
    g.graphed(torch.full((2, 60), 77), token_type_ids=torch.ones(2, 60, dtype=torch.long))
    g.graphed(**lengths_batch([50, 20, 31]))
    [_, bucket] = g.graphed.graphs
    assert bucket.tokens == 112
    rows, ends = g.graphed._views(bucket)
    assert rows.shape == (3, 112)
    assert ends.shape == (15,)
    assert rows[:, 101:].eq(0).all()
    assert rows[0, :101].ge(5).all()
    assert rows[1, :101].tolist() == [*range(50), *range(20), *range(31)]
    assert ends.tolist() == [0, 50, 70, *[101] * 12]


@torch.no_grad()
def test_bytes_held():
    g = Graphed(shared(), max_graphs=4, max_tokens=4096)
    assert g.graphed.bytes_held == 0
    held = set()
    for tokens in range(1, 200, 7):
        g.graphed(torch.full((1, min(tokens, 64)), 9).expand(-(-tokens // 64), -1))
        held.add(g.graphed.bytes_held)
        assert len(g.graphed.graphs) <= 4
    inputs = 3 * 4096 * 8 + 65 * 4
    assert inputs < min(held)
    assert max(held) <= inputs + 4 * (256 + 64) * 48 * 8
    g.graphed.clear()
    assert g.graphed.bytes_held == 0
    assert g.graphed.graphs == []
    g.check(**batch("bert"))


def test_nothing_keeps_a_dropped_model():
    g = Graphed(fresh())
    g.check(**batch("bert"))
    gone = weakref.ref(g.model), weakref.ref(next(g.model.parameters()))
    del g
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# -- buckets -------------------------------------------------------------------------------------------------


def test_token_buckets():
    assert token_buckets(1) == (1,)
    assert token_buckets(40) == (32, 40)
    assert token_buckets(128) == (32, 40, 48, 56, 64, 80, 96, 112, 128)
    for last in (33, 500, 512, 16384):
        sizes = token_buckets(last)
        assert sizes[-1] == last
        assert list(sizes) == sorted(set(sizes))
        assert all(b <= 1.25 * a for a, b in itertools.pairwise(sizes))
    assert len(sizes) == 37


def test_sequence_rooms():
    sizes = (10, 40, 64, 72, 800, 1000)
    assert sequence_rooms(sizes, 60) == (8, 8, 8, 9, 60, 60)
    assert sequence_rooms(sizes, 512) == (8, 8, 8, 9, 100, 512)  # the last one turns none away
    assert sequence_rooms(sizes, 3) == (3,) * 6
    assert sequence_rooms((7,), 60) == (60,)


@pytest.mark.parametrize(
    ("lengths", "tokens", "room"),
    [
        ([1], 32, 8),
        ([32], 32, 8),
        ([33], 40, 8),
        ([1] * 8, 32, 8),
        ([1] * 9, 80, 10),  # the smallest that holds 9 sequences
        ([16, *[0] * 9], 80, 10),
        ([1] * 60, 512, 60),  # max_batch
        ([65, 1, 1], 80, 10),
        ([70] * 3, 224, 28),
        ([64] * 8, 512, 60),
    ],
)
@torch.no_grad()
def test_the_bucket_of_a_batch(lengths, tokens, room):
    g = Graphed(shared(), max_batch=60)
    g.check(**lengths_batch(lengths))
    assert [b.tokens for b in g.graphed.graphs] == [tokens]
    assert dict(zip(g.graphed.buckets, g.graphed.rooms, strict=True))[tokens] == room


@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet"])
@torch.no_grad()
def test_what_is_recorded(name, monkeypatch):
    """Room for sequences as long as the tokens and the model's positions allow, and no longer."""
    model, seen = shared(name), []
    encode = type(model).encode_inputs

    def spy(self, inputs, *args):
        seen.append((inputs.packing.batch, inputs.packing.seqlen, inputs.packing.max_seqlen))
        return encode(self, inputs, *args)

    monkeypatch.setattr(type(model), "encode_inputs", spy)
    g, longest = Graphed(model), model.config.max_tokens
    assert 64 < longest < 80  # roberta and mpnet: fewer than the positions of the table
    for length, expected in ((5, (8, 32, 32)), (48, (8, 48, 48)), (longest, (10, longest, longest))):
        del seen[:]
        g.graphed(torch.full((1, length), 9))
        assert set(seen) == {expected}


@pytest.mark.parametrize("name", ["bert", "mpnet"])
@torch.no_grad()
def test_one_graph_for_any_mix_of_lengths(name):
    """All calls of one bucket of tokens, those of one sequence and of as many as it has room for."""
    g = Graphed(shared(name))
    for lengths in (
        [64], [1] * 8, [57], [29, 28], [40, 20], [50, 0, 12], [12, 9, 8, 8, 8, 8, 8], [62, 1], [8] * 8,
    ):  # fmt: skip
        for seqlen in (None, 64):
            g.check(**lengths_batch(lengths if sum(lengths) > 56 else [50, *lengths[1:]], seqlen))
    assert g.recorded == 1
    assert g.graphed.replays == 18
    assert [b.tokens for b in g.graphed.graphs] == [64]


@torch.no_grad()
def test_no_more_graphs_than_buckets():
    """However the lengths are mixed; and the default keeps all of the default buckets'."""
    g, random = Graphed(shared()), torch.Generator().manual_seed(0)
    for seed in range(60):
        count = int(torch.randint(1, 12, (), generator=random))
        lengths = torch.randint(1, 40, (count,), generator=random).tolist()
        g.graphed(**lengths_batch(lengths, 64, seed), first_token_only=True)
    held = [b.tokens for b in g.graphed.graphs]
    assert len(held) == len(set(held)) == g.recorded <= len(g.graphed.buckets)
    assert g.graphed.replays == 60
    default = graphs.graph(shared())
    assert len(default.buckets) <= default.max_graphs


@torch.no_grad()
def test_what_makes_another_graph():
    g = Graphed(shared())
    inputs = lengths_batch([40, 30])
    calls = [
        lambda: g.graphed(**inputs),
        lambda: g.graphed(**inputs, first_token_only=True),
        lambda: g.graphed(**inputs, packed=True),  # no pooler
        lambda: g.graphed(**lengths_batch([40, 60])),
        lambda: g.graphed(**lengths_batch([6] * 14)),  # 84 tokens, and more sequences than their bucket holds
        lambda: g.graphed(**lengths_batch([6] * 15)),
    ]
    expected = [(1, 80), (2, 80), (3, 80), (4, 112), (4, 112), (5, 128)]
    for (count, tokens), call in zip(expected, calls, strict=True):
        for _ in range(2):
            call()
            assert g.recorded == count
            assert g.graphed.graphs[-1].tokens == tokens
    with dispatch.use_backend("reference"):  # what was recorded by another backend must not serve
        g.check(**inputs)
    assert g.recorded == count + 1
    assert not g.graphed.fallbacks


@torch.no_grad()
def test_the_graph_used_longest_ago_gives_way():
    g = Graphed(shared(), max_graphs=2)
    a, b, c = ({"input_ids": torch.full((1, n), 9)} for n in (30, 40, 60))
    for inputs, recorded, kept in (
        (a, 1, [32]), (b, 2, [32, 40]), (a, 2, [40, 32]), (c, 3, [32, 64]), (a, 3, [64, 32]),
        (b, 4, [32, 40]),
    ):  # fmt: skip
        g.check(**inputs)
        assert g.recorded == recorded
        assert [x.tokens for x in g.graphed.graphs] == kept


def test_own_buckets():
    g = Graphed(shared(), buckets=[10, 100])
    g.check(**lengths_batch([7]))
    g.check(**lengths_batch([7, 4]))
    assert [b.tokens for b in g.graphed.graphs] == [10, 100]
    g.check(**lengths_batch([60, 41]), reason="there are more than 100 tokens")


# -- fall-backs ----------------------------------------------------------------------------------------------

FALLBACKS = {
    "output_attentions is asked for": {"output_attentions": True},
    "output_hidden_states is asked for": {"output_hidden_states": True},
    "head_mask is given": {"head_mask": torch.ones(3, dtype=torch.float64)},
    "attention_mask has four dimensions": {"attention_mask": torch.zeros(4, 1, 40, 40, dtype=torch.float64)},
    "inputs_embeds is given": {
        "input_ids": None, "inputs_embeds": torch.ones(4, 40, 48, dtype=torch.float64), "token_type_ids": None
    },
    "there are no tokens": {"attention_mask": torch.zeros(4, 40)},
}  # fmt: skip


@pytest.mark.parametrize("reason", FALLBACKS)
def test_what_the_model_does_itself(reason):
    g = Graphed(shared())
    g.check(**{**batch("bert"), **FALLBACKS[reason]}, reason=reason)
    assert dict(g.graphed.fallbacks) == {reason: 1}
    assert g.graphed.replays == 0
    assert g.recorded == 0
    g.check(**batch("bert"))
    assert dict(g.graphed.fallbacks) == {reason: 1}
    assert g.graphed.replays == 1


def test_sequences_longer_than_the_positions():
    """With position_ids they are legal; no graph reckons with them."""
    model = shared()
    longest = model.config.max_tokens
    ids = torch.arange(longest + 1)[None] % 100 + 5
    g = Graphed(model)
    g.check(ids, position_ids=ids % 50, reason=f"input_ids are more than {longest} a sequence")
    g.check(ids[:, 1:], position_ids=ids[:, 1:] % 50)
    with torch.no_grad():
        for call in (g.graphed, model):
            with pytest.raises(ValueError, match="input_ids: a sequence of 73 tokens is longer than the 72"):
                call(ids)


@pytest.mark.parametrize(
    ("serving", "head_dim", "grid"),
    [("triton", 64, None), ("triton", 128, None), ("triton", 136, "aten"), ("aten", 64, "aten"),
     ("reference", 64, "reference")],
)  # fmt: skip
def test_attention_by_a_grid(serving, head_dim, grid, monkeypatch):
    """On a GPU the time of all but the kernel grows with the room that a graph has."""
    model, asked = fresh(dtype=torch.float16), []
    monkeypatch.setattr(type(model.config), "head_dim", head_dim)
    assert by_grid(model) is None  # on a CPU

    def choose(*args):
        asked.append(args)
        return serving

    monkeypatch.setattr(dispatch, "serving_backend", choose)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(type(model), "device", device)
    reason = grid and f"attention is served by {grid}, on a grid of all sequences that a graph has room for"
    assert by_grid(model) == reason
    assert asked == [("attention_fwd", device, torch.float16)]


def test_what_a_grid_serves_is_not_recorded(monkeypatch):
    g, reasons = Graphed(shared()), ["by a grid", "by a grid", None]
    g.check(**lengths_batch([3]))
    monkeypatch.setattr(graphs, "by_grid", lambda model: reasons.pop(0) if model is g.model else None)
    g.check(**batch("bert"), reason="by a grid")
    g.check(**batch("bert"), reason="by a grid")
    assert g.recorded == 1
    g.check(**batch("bert"))  # asked anew: a self-check may have passed by now
    g.check(**batch("bert"))  # once recorded, not asked
    assert not reasons
    assert g.recorded == 2


def test_batches_outside_the_buckets():
    g = Graphed(shared(), max_tokens=100, max_batch=3)
    g.check(**lengths_batch([50, 51]), reason="there are more than 100 tokens")
    g.check(**lengths_batch([9, 9, 9, 9]), reason="there are more than 3 sequences")
    g.check(torch.ones(0, 4, dtype=torch.long), reason="there are no tokens")
    g.check(**lengths_batch([50, 48, 2]))
    with torch.no_grad():
        ids, cu_seqlens = torch.full((101,), 8), torch.tensor([0, 60, 101], dtype=torch.int32)
        same(g.graphed.forward_packed(ids, cu_seqlens, 60), g.model.forward_packed(ids, cu_seqlens, 60))
    assert g.graphed.last_fallback == "there are more than 100 tokens"
    assert g.recorded == 1
    assert g.graphed.replays == 1
    assert g.graphed.fallbacks.total() == 4


def test_what_the_config_asks_for():
    model = fresh()
    model.config.output_hidden_states = True
    Graphed(model).check(**batch("bert"), reason="output_hidden_states is asked for")
    Graphed(model).check(**batch("bert"), output_hidden_states=False)


def test_gradients():
    g = Graphed(fresh())
    reason = "gradients are on: call under torch.inference_mode() or torch.no_grad()"
    out = g.graphed(**batch("bert")).last_hidden_state
    assert out.requires_grad
    assert g.graphed.last_fallback == reason
    ids = torch.full((9,), 8)
    out = g.graphed.forward_packed(ids, torch.tensor([0, 9], dtype=torch.int32), 9)
    assert out.requires_grad
    assert g.graphed.last_fallback == reason
    assert g.graphed.fallbacks[reason] == 2
    g.model.requires_grad_(False)
    assert not g.graphed(**batch("bert")).last_hidden_state.requires_grad
    assert g.graphed.last_fallback is None


def test_training():
    g = Graphed(fresh(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    g.check(**batch("bert"))
    g.model.train()
    assert g.graphed.training
    g.check(**batch("bert"), reason="the model is in training mode")
    g.model.eval()
    g.check(**batch("bert"))
    g.model.encoder.layer[1].attention.train()
    g.check(**batch("bert"), reason="a part of the model is in training mode")


def test_autocast():
    g = Graphed(shared("bert", torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        g.check(**batch("bert"), reason="autocast is on")
    g.check(**batch("bert"))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", ["", "encoder.layer.1.output.dense"])
def test_hooks_see_every_call(when, where):
    g = Graphed(fresh())
    if when == "after":
        g.check(**batch("bert"))
    seen = []
    handle = g.model.get_submodule(where).register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        g.graphed(**batch("bert"))
    assert len(seen) == 1
    assert g.graphed.last_fallback == "a hook watches the model"
    handle.remove()
    g.check(**batch("bert"))


def test_a_replaced_forward_runs():
    g = Graphed(fresh())
    g.model.forward = lambda *args, **kwargs: "mine"
    with torch.no_grad():
        assert g.graphed(**batch("bert")) == "mine"
    assert g.graphed.last_fallback == "the model's forward was replaced"


def test_a_device_without_graphs():
    graphed = graphs.graph(shared())
    with torch.no_grad():
        same(graphed(**batch("bert")), shared()(**batch("bert")))
    assert graphed.last_fallback == "the model is on cpu, where there are no graphs"
    assert graphed.bytes_held == 0


def test_what_cannot_be_recorded():
    class Broken(GraphLike):
        def record(self, function):
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

    model = shared()
    graphed = graphs.graph(model, recorder=lambda device: Broken(model, device))
    reason = "recording failed: RuntimeError: operation not permitted"
    with torch.no_grad():
        with pytest.warns(RuntimeWarning, match="Bucket.tokens=.* has no graph: recording failed"):
            same(graphed(**batch("bert")), model(**batch("bert")))
        assert graphed.last_fallback == reason
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # not tried again
            same(graphed(**batch("bert")), model(**batch("bert")))
    assert graphed.fallbacks == {reason: 2}
    assert graphed.graphs == []


def test_a_model_made_in_inference_mode():
    with torch.inference_mode():
        g = Graphed(fresh())
        g.check(
            **batch("bert"),
            reason="the model was made in inference mode: changes of its weights would not be noticed",
        )


def test_under_torch_compile():
    g = Graphed(shared("bert", torch.float32))
    g.check(**batch("bert"))
    replays = g.graphed.replays
    compiled = torch.compile(lambda **inputs: g.graphed(**inputs).last_hidden_state, backend="eager")
    with torch.no_grad():
        same(compiled(**batch("bert")), g.model(**batch("bert")).last_hidden_state)
    assert g.graphed.replays == replays
    torch._dynamo.reset()


# -- inference mode ------------------------------------------------------------------------------------------


def test_inference_mode_and_no_grad_mix():
    g = Graphed(shared())
    with torch.inference_mode():
        inside = g.graphed(**batch("bert")).last_hidden_state
        assert inside.is_inference()
    with torch.no_grad():
        outside = g.graphed(**batch("bert")).last_hidden_state
        assert not outside.is_inference()
    with torch.inference_mode():
        again = g.graphed(**batch("bert")).last_hidden_state
        assert torch.equal(inside, again)
        assert torch.equal(inside, outside)
    outside.requires_grad_()
    assert g.recorded == 1
    assert g.graphed.replays == 3


# -- changes of the model ------------------------------------------------------------------------------------


@torch.no_grad()
def scale(model, factor=1.1):
    for parameter in model.parameters():
        parameter.mul_(factor)


def step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with torch.enable_grad():
        model(**batch("bert")).last_hidden_state.square().mean().backward()
    optimizer.step()


def load(model):
    state = {k: v * 0.9 for k, v in model.state_dict().items()}
    model.load_state_dict(state)


def by_data(model):
    """Past the version counter."""
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


def by_row(model):
    for parameter in model.parameters():
        parameter.data[0] *= 0.9


def by_numpy(model):
    for parameter in model.parameters():
        parameter.detach().numpy()[...] *= 0.9


def in_inference_mode(model):
    with torch.inference_mode():
        model.encoder.layer[0].attention.self.query.weight.mul_(1.5)


@pytest.mark.parametrize(
    "change",
    [scale, step, load, by_data, by_row, by_numpy, in_inference_mode, lambda m: m.train().eval()],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weights_changed_in_place_stay_valid(change, dtype, monkeypatch):
    """No graph is recorded anew, and what is derived from the weights is made anew."""
    # A CPU's fused layer keeps its weights in an object of its own; GPUs derive tensors
    monkeypatch.setattr(EncoderLayer, "_fused", lambda *_: None)
    g = Graphed(fresh("bert", dtype))
    calls = ({"return_dict": False}, {"return_dict": False, "first_token_only": True}, {"packed": True})

    def call():
        for extra in calls:
            for inputs in (batch("bert"), lengths_batch([3, 4])):
                with torch.no_grad():
                    # a copy derives its own weights: what the model remembers may be what graphs overwrote
                    fns = (g.graphed, copy.deepcopy(g.model))
                    actual, expected = (f(**inputs, **extra)[:2] for f in fns)
                for a, e in zip(actual, expected, strict=True):
                    assert (a is None) == (e is None)
                    if e is not None:
                        same(a, e)
                assert g.graphed.last_fallback is None

    call()
    recorded = g.recorded
    for _ in range(2):
        change(g.model)
        call()
    assert g.recorded == recorded == 5


def test_whether_weights_were_written_is_asked_of_the_host_alone(monkeypatch):
    """An operation on the device's tensors might wait for the device."""

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} was called")

    monkeypatch.setattr(EncoderLayer, "_fused", lambda *_: None)
    g = Graphed(fresh("bert", torch.float32))
    g.check(**batch("bert"))
    assert g.graphed._derived
    with Refuse():
        assert g.graphed._settle()
        assert all(prepared.is_current(*entry) for entry in g.graphed._derived.values())
    by_row(g.model)
    with Refuse():
        assert not all(prepared.is_current(*entry) for entry in g.graphed._derived.values())
    g.check(**batch("bert"))
    assert g.recorded == 1


def test_a_write_that_the_model_itself_found_first(monkeypatch):
    """It then has other derived weights than the graph, and set the marks again."""
    monkeypatch.setattr(EncoderLayer, "_fused", lambda *_: None)
    g = Graphed(fresh("bert", torch.float32))
    g.check(**batch("bert"))
    by_data(g.model)
    with torch.no_grad():
        g.model(**batch("bert"))
    g.check(**batch("bert"))
    assert g.recorded == 1


def test_overwritten_weights_are_the_ones_remembered():
    """No second copy stays."""
    module = nn.Linear(2, 2).requires_grad_(False)
    make = functools.partial(
        prepared.derived, module, "twice", (module.weight,), lambda: (module.weight * 2, None)
    )
    with prepared.collect_used() as entries:
        old = make()
    [(owner, _, value)] = entries
    assert owner is module
    assert value is old
    module.weight.add_(1)
    new = make()
    assert new is not old
    assert prepared.update_in_place(module, "twice", old)
    assert make() is old
    assert torch.equal(old[0], module.weight * 2)
    prepared.clear(module)
    assert not prepared.update_in_place(module, "twice", old)


def test_every_kind_of_recording_has_its_derived_weights(monkeypatch):
    """The one that needs fewest was recorded first, in the same bucket of tokens."""
    monkeypatch.setattr(EncoderLayer, "_fused", lambda *_: None)
    g = Graphed(fresh("bert", torch.float32))
    for order in ((True, False), (False, True)):
        for first_only in order:
            g.check(**lengths_batch([3, 4]), first_token_only=first_only)
        scale(g.model)
    assert g.recorded == 2


def test_derived_weights_of_a_backend_that_is_not_asked(monkeypatch):
    """They are not made anew, and so their recordings must go."""
    monkeypatch.setattr(EncoderLayer, "_fused", lambda *_: None)
    g = Graphed(fresh("bert", torch.float32))
    g.check(**batch("bert"))
    scale(g.model)
    with dispatch.use_backend("aten"):
        g.check(**batch("bert"))
    g.check(**batch("bert"))


def test_derived_weights_that_cannot_be_overwritten(monkeypatch):
    """Everything is recorded anew."""

    class Opaque:
        def __init__(self, weight):
            self.weight = weight

    def projected(self, x):
        form = self.form
        key = part(self, form.names.key)
        made = prepared.derived(self, "opaque", (key.weight,), lambda: Opaque(key.weight * 2))
        return tuple(F.linear(x, made.weight).reshape(-1, form.nheads, form.head_dim) for _ in range(3))

    monkeypatch.setattr(EncoderLayer, "_fused", lambda *_: None)
    monkeypatch.setattr(EncoderLayer, "_qkv", projected)
    g = Graphed(fresh())
    for recorded in (1, 2):
        g.check(**batch("bert"))
        assert g.recorded == recorded
        scale(g.model)


def replace_layer(model):
    model.encoder.layer[1] = copy.deepcopy(model.encoder.layer[0])


def assign(model):
    model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()}, assign=True)


def swap_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


def set_parameter(model):
    model.encoder.layer[2].output.dense.bias = nn.Parameter(torch.ones(48, dtype=model.dtype))


def drop_bias(model):
    model.encoder.layer[2].output.dense.bias = None


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Adapter(nn.Linear):
    def forward(self, x):
        return super().forward(x) + x.mean()


def adapt(model):
    model.encoder.layer[0].output.dense.__class__ = Adapter


def wrap(model):
    old = model.encoder.layer[0].output.dense
    new = Adapter(old.in_features, old.out_features, dtype=model.dtype)
    new.load_state_dict(old.state_dict())
    model.encoder.layer[0].output.dense = new.eval()


@pytest.mark.parametrize(
    "change",
    [
        replace_layer, assign, swap_data, set_parameter, drop_bias, wrap, adapt,
        lambda m: m.float(),
        lambda m: m.half().double(),
        lambda m: m.bfloat16(),
        lambda m: parametrize.register_parametrization(m.pooler.dense, "weight", Twice()).eval(),
        lambda m: m.resize_token_embeddings(130),
        lambda m: m.add_module("extra", nn.Linear(2, 2).eval()),
    ],
)  # fmt: skip
def test_replaced_parameters_are_noticed(change):
    g = Graphed(fresh())
    g.check(**batch("bert"))
    g.check(**lengths_batch([3, 4]))
    assert g.recorded == 2
    change(g.model)
    g.check(**batch("bert"))
    g.check(**lengths_batch([3, 4]))
    assert g.recorded == 4
    assert len(g.recorders) == 2
    assert len(g.graphed.graphs) == 2


def test_replaced_before_a_new_bucket():
    """What is recorded next belongs to the new weights, and nothing old is left."""
    g = Graphed(fresh())
    g.check(**batch("bert"))
    assign(g.model)
    g.check(**lengths_batch([3, 4]))
    assert len(g.graphed.graphs) == 1
    g.check(**batch("bert"))


def test_the_memory_that_a_graph_reads_stays():
    """A replay that is found outdated only afterwards must not read what has been freed."""
    g = Graphed(fresh())
    g.check(**batch("bert"))
    pointer = g.model.encoder.layer[0].output.dense.weight.data_ptr()
    swap_data(g.model)
    gc.collect()
    assert any(t.data_ptr() == pointer for t in g.graphed._weights.memory)
    g.check(**batch("bert"))
    assert all(t.data_ptr() != pointer for t in g.graphed._weights.memory)


def test_a_model_that_never_rests():
    """Weights that change during every replay: the model itself answers in the end."""
    model = fresh()

    class Restless(GraphLike):
        def record(self, function):
            made = super().record(function)

            def replay():
                made.replay()
                scale(model, 1.0)

            return Recording(made.outputs, replay)

    recorder = Restless(model)
    graphed = graphs.graph(model, recorder=lambda device: recorder)
    with torch.no_grad():
        same(graphed(**batch("bert")), model(**batch("bert")))
    assert graphed.last_fallback == "the model changed during the call"


# -- threads -------------------------------------------------------------------------------------------------


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
    assert all(reasons)  # each thread is told of its own call
    assert g.graphed.replays + g.graphed.fallbacks.total() == 60
    assert len(g.graphed.graphs) <= 3


# -- arguments -----------------------------------------------------------------------------------------------


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


# -- the CUDA recorder, on a torch.cuda that only writes down what it is asked for ---------------------------


class Log(list):
    """Stands for torch.cuda: streams, events and graphs that log what is called, in order."""

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
        }.items():  # fmt: skip
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
        ("on", "begins", "side"), "function", ("on", "ends", "side"),
        ("current", "wait_stream", "side"),
        ("capture", "begins", "graph", (0, 7), "side", "thread_local"), "function",
        ("capture", "ends", "graph", (0, 7), "side", "thread_local"),
        ("device", "ends", "cuda:0"),
    ]  # fmt: skip
    assert recording.outputs == (2, None)  # those of the capture
    del log[:]
    with recorder.in_order():
        recording.replay()
    recorder.wait()
    assert log == [
        ("device", "begins", "cuda:0"),
        ("current", "wait_event", "event"), ("graph", "replay"), ("event", "record", "current"),
        ("device", "ends", "cuda:0"),
        ("event", "synchronize"),
    ]  # fmt: skip
    del log[:]
    with contextlib.suppress(ZeroDivisionError), recorder.in_order():
        1 / 0  # what was enqueued before the error is waited for as well
    assert ("event", "record", "current") in log


def test_devices_without_a_recorder():
    assert recorder_for(CPU) is None
    assert recorder_for(torch.device("meta")) is None
