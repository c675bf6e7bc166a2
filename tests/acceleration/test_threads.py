"""Eight threads call models and tokenizers that they share, first use included: every result is right.

The right results are another copy's, in one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import fastbert
from tests.support.accelerated_models import HEAD, TEXTS, tiny
from tests.support.graphed_models import Graphed
from tests.support.hf_models import hf_model

st = pytest.importorskip("sentence_transformers", minversion="6")
WORDS = " ".join(TEXTS).split()
Calls = list[Callable[[], object]]


def texts(number: int) -> list[str]:
    """One to five texts of mixed lengths."""
    return [
        " ".join(WORDS[(7 * number + i) % 20 :][: 1 + (5 * number + 11 * i) % 40])
        for i in range(1 + number % 5)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer) -> dict[str, Path]:
    found = {}
    for name, auto, sizes in (("model", transformers.AutoModel, {}), ("scores", HEAD, {"num_labels": 1})):
        found[name] = tmp_path_factory.mktemp(name)
        tiny(auto, num_hidden_layers=2, **sizes).save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


def sentences(folders) -> Calls:
    model = fastbert.accelerate(st.SentenceTransformer(str(folders["model"]), device="cpu"))
    many = [lambda i=i: model.encode(texts(i)) for i in range(12)]
    return [*many, *(lambda i=i: model.encode(texts(i)[0]) for i in range(4))]


def shared_tokenizer(folders) -> Calls:
    """Two accelerated models, a cross-encoder and stock loops, all with one tokenizer."""
    one, two = (
        fastbert.accelerate(st.SentenceTransformer(str(folders["model"]), device="cpu")) for _ in "ab"
    )
    cross = fastbert.accelerate(st.CrossEncoder(str(folders["scores"]), device="cpu"))
    two[0].processor = cross[0].processor = one.tokenizer
    assert two.tokenizer is one.tokenizer is cross.tokenizer
    calls = [lambda m=m, i=i: m.encode(texts(i)) for i in range(8) for m in (one, two)]
    calls += [lambda i=i: one.encode(texts(i), output_value="token_embeddings") for i in range(4)]
    return calls + [lambda i=i: cross.predict([(a, WORDS[i]) for a in texts(i)]) for i in range(8)]


def bare_tokenizer(folders) -> Calls:
    """Another thread asks the tokenizer itself, without padding."""
    model = fastbert.accelerate(st.SentenceTransformer(str(folders["model"]), device="cpu"))
    calls = [lambda i=i: model.encode(texts(i)) for i in range(8)]
    bare = {"padding": False, "truncation": "longest_first"}
    return calls + [lambda i=i: model.tokenizer(texts(i)[0], **bare)["input_ids"] for i in range(8)]


def cross_encoder(folders) -> Calls:
    model = fastbert.accelerate(st.CrossEncoder(str(folders["scores"]), device="cpu"))
    return [lambda i=i: model.predict([(a, WORDS[i]) for a in texts(i)]) for i in range(16)]


def sentence_encoder(folders) -> Calls:
    model = fastbert.SentenceEncoder.from_pretrained(folders["model"], pooling="mean", max_length=64)
    return [lambda i=i: model.encode(texts(i)) for i in range(16)]


def pipeline(folders) -> Calls:
    model = transformers.pipeline("text-classification", str(folders["scores"]), function_to_apply="none")
    fastbert.accelerate(model)
    return [lambda i=i: [row["score"] for row in model(texts(i), batch_size=8)] for i in range(16)]


def bare(model: Callable) -> Calls:
    """Batches with padding, every third one on the left, and hidden states of every fourth."""

    def call(i: int) -> list[torch.Tensor]:
        lengths = torch.tensor([1 + (5 * i + 11 * row) % 30 for row in range(1 + i % 5)])
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        mask = mask.flip(1) if i % 3 == 2 else mask
        ids = torch.randint(5, 100, mask.shape, generator=torch.Generator().manual_seed(i))
        with torch.no_grad():
            out = model(ids, attention_mask=mask, output_hidden_states=i % 4 == 3)
        return [t * mask[..., None] for t in (out[0], *(out.get("hidden_states") or ()))]

    return [lambda i=i: call(i) for i in range(16)]


def evaluated(model):
    return lambda *args, **given: model.eval()(*args, **given)


KINDS = {
    "sentences": sentences,
    "shared tokenizer": shared_tokenizer,
    "bare tokenizer": bare_tokenizer,
    "cross-encoder": cross_encoder,
    "SentenceEncoder": sentence_encoder,
    "pipeline": pipeline,
    "native": lambda folders: bare(fastbert.AutoModel.from_pretrained(folders["model"])),
    "native, eval": lambda folders: bare(evaluated(fastbert.AutoModel.from_pretrained(folders["model"]))),
    "accelerated": lambda _: bare(fastbert.accelerate(hf_model("bert"))),
    "accelerated, eval": lambda _: bare(evaluated(fastbert.accelerate(hf_model("albert")))),
    "graphed": lambda folders: bare(Graphed(fastbert.AutoModel.from_pretrained(folders["model"])).graphed),
}


@pytest.mark.parametrize("count", [6, pytest.param(18, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("kind", KINDS)
def test_threads_get_their_own_results(folders, kind, count):
    """`count` calls per thread of a fresh copy return what another copy returns in one thread."""
    right = [call() for call in KINDS[kind](folders)]
    calls, start, failures = KINDS[kind](folders), threading.Barrier(8), []

    def work(thread: int) -> None:
        start.wait()
        for i in np.random.default_rng(thread).integers(len(calls), size=count):
            try:
                got, want = calls[i](), right[i]
                torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
            except Exception as error:
                failures.append((i, error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, f"{len(failures)} wrong; {failures[0]}"
