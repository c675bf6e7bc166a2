"""sentence-transformers' models, accelerated."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import transformers

import fastbert
from tests.support.accelerated_models import HEAD, TEXTS, assert_close, assert_fused, tiny, worst_gradient

SENTENCES = [
    "A man is playing the guitar on stage.",
    "",
    "Shares fell sharply after the company warned that its profits for the year would be lower than it had "
    "expected in spring, when a mild winter and cheap gas had helped it to the best quarter of its history.",
    "It rains.",
    "You must file your income tax by the thirty-first of July!",
    " ".join(["A long passage that never ends, well over what the model reads at once."] * 30),
    "Ein Satz auf Deutsch, 中文, and emoji 🎉.",
]


def sentence_model(folder: Path):
    st = pytest.importorskip("sentence_transformers")
    return st.SentenceTransformer(str(folder), device="cpu", local_files_only=True)


@pytest.fixture(scope="module")
def encoded(minilm) -> torch.Tensor:
    """The embeddings by the untouched model."""
    return sentence_model(minilm).encode(SENTENCES, batch_size=4, convert_to_tensor=True)


@pytest.mark.sweep
def test_a_sentence_model_is_copied_pickled_saved_and_restored(minilm, encoded, tmp_path):
    model = sentence_model(minilm)
    assert fastbert.accelerate(model) is model
    for batch_size in (1, 32):
        vectors = model.encode(SENTENCES, batch_size=batch_size, convert_to_tensor=True)
        assert vectors.shape == (7, 384)
        assert (vectors - encoded).abs().max() <= 1e-5
    assert_fused(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        vectors = copied.encode(SENTENCES, batch_size=4, convert_to_tensor=True)
        assert (vectors - encoded).abs().max() <= 1e-5
        assert_fused(copied)
    model.save(str(tmp_path))
    for vanilla in (sentence_model(tmp_path), fastbert.restore(model)):
        again = vanilla.encode(SENTENCES, batch_size=4, convert_to_tensor=True)
        assert torch.equal(again, encoded)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """Folders of tiny models with their tokenizer, by class."""

    def save(auto: type, **overrides) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        model, own = tiny(auto, **overrides), copy.deepcopy(tokenizer)
        model.save_pretrained(folder)
        if model.config.model_type == "modernbert":  # whose tokenizers return no segments
            own.model_input_names = ["input_ids", "attention_mask"]
        own.save_pretrained(folder)
        return folder

    return save


@pytest.mark.parametrize(
    ("name", "pooling"),
    [
        *(("bert", p) for p in ("cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")),
        ("modernbert", "mean"),
    ],
)
def test_every_pooling_sees_the_tokens_of_each_sentence(saved, name, pooling):
    st = pytest.importorskip("sentence_transformers")
    from sentence_transformers import models

    folder = saved(transformers.AutoModel, name=name)

    def make():
        words = models.Transformer(str(folder))
        return st.SentenceTransformer(
            modules=[words, models.Pooling(words.get_embedding_dimension(), pooling_mode=pooling)],
            device="cpu",
        )

    model, stock = fastbert.accelerate(make()), make()
    vectors = model.encode(TEXTS, batch_size=4, convert_to_tensor=True)
    assert_close(vectors, stock.encode(TEXTS, batch_size=4, convert_to_tensor=True))
    assert_fused(model)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_a_sentence_model_trains(saved, name):
    st = pytest.importorskip("sentence_transformers")
    folder = saved(transformers.AutoModel, name=name)
    gradients = []
    for change in (lambda m: m, fastbert.accelerate):
        model = change(st.SentenceTransformer(str(folder), device="cpu")).train()
        words = getattr(model, "preprocess", model.tokenize)(TEXTS)
        vectors = torch.nn.functional.normalize(model(words)["sentence_embedding"], dim=-1)
        loss = ((vectors @ vectors.T - torch.eye(4)) ** 2).sum()
        loss.backward()
        named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        gradients.append(named | {"loss": loss.detach()})
    assert_fused(model)
    assert len(gradients[0]) > (10 if name == "modernbert" else 30)
    error, name = worst_gradient(gradients[1], gradients[0])
    assert error <= 1e-5, name


@pytest.mark.parametrize("expansion", (None, True, False), ids=("none", "attended", "not-attended"))
def test_late_interaction_reads_what_it_expands_queries_by(saved, expansion):
    st = pytest.importorskip("sentence_transformers", minversion="6")
    folder = saved(transformers.AutoModel)

    def make():
        torch.manual_seed(0)  # of the projection
        model = st.MultiVectorEncoder(str(folder), device="cpu")
        if expansion is not None:
            model[0].query_expansion = {"strategy": "fixed", "attend": expansion, "length": 16}
        return model

    model, stock = fastbert.accelerate(make()), make()
    for encode in ("encode_query", "encode_document"):
        got, want = (getattr(m, encode)(TEXTS[1:3]) for m in (model, stock))
        for a, b in zip(got, want, strict=True):
            assert_close(torch.as_tensor(a), torch.as_tensor(b))
    how = fastbert.explain(model)
    if expansion is False:  # the masked words of a query are scored: they may not be zeros
        assert [part.packed_calls for part in how.models] == [0], str(how)
        with pytest.raises(ValueError, match="query_expansion"):
            fastbert.accelerate(make(), strict=True)
        model[0].query_expansion = None
        model.encode_query(TEXTS[1:3])
        fastbert.accelerate(model).encode_query(TEXTS[1:3])
        how = fastbert.explain(model)
    assert [part.packed_calls > 0 for part in how.models] == [True], str(how)


class LateInteraction(torch.nn.Module):
    """The shape of PyLate's ColBERT, and of Stanford's if `home` is its package; "a < b": a subclass in a."""

    def __init__(self, home: str, **attributes):
        super().__init__()
        self.bert = tiny(transformers.AutoModel)
        vars(self).update(attributes)
        for module in home.split(" < ")[::-1]:
            self.__class__ = type("ColBERT", (type(self),), {"__module__": module})


@pytest.mark.parametrize(
    ("home", "attributes", "scores_masked"),
    (
        ("mine", {"do_query_expansion": True, "attend_to_expansion_tokens": False}, True),
        ("mine", {"do_query_expansion": True, "attend_to_expansion_tokens": True}, False),
        ("mine", {"do_query_expansion": False}, False),
        ("pylate.models.colbert", {"do_query_expansion": False}, False),
        ("pylate.models.colbert", {}, True),
        ("colbert.modeling.colbert", {}, True),
        ("mine < colbert.modeling.colbert", {}, True),
        ("colbertish", {}, False),
    ),
)
def test_colbert_models_of_other_libraries_keep_the_tokens_that_expand_queries(
    home, attributes, scores_masked
):
    model, stock = fastbert.accelerate(LateInteraction(home, **attributes)).bert, tiny(transformers.AutoModel)
    ids = torch.tensor([[2, 7, 8, 3, 4, 4, 4], [2, 9, 3, 4, 4, 4, 4]])
    mask = (ids != 4).long()
    with torch.no_grad():
        got, want = (m(ids, attention_mask=mask).last_hidden_state for m in (model, stock))
    how = str(fastbert.explain(model))
    if scores_masked:
        assert_close(got, want)
        assert "query_expansion reads the outputs of masked tokens" in how
        with pytest.raises(ValueError, match="query_expansion"):
            fastbert.accelerate(LateInteraction(home, **attributes), strict=True)
    else:
        assert not got[mask == 0].any()
        assert "outputs of masked tokens are zeros" in how
        fastbert.accelerate(model, strict=True)(ids.where(ids != 4, 0), attention_mask=mask)
        some = ids.where((ids != 4) | torch.tensor([[True], [False]]), 0)  # and padding beside them
        for given in (ids, some):
            with pytest.raises(RuntimeError, match=r"masks tokens other than pad_token_id = 0.*unpad=False"):
                model(given, attention_mask=mask)
        again = fastbert.accelerate(model, strict=True, unpad=False)(ids, attention_mask=mask)
        assert_close(again.last_hidden_state, want)


def test_sparse_encoder(saved):
    st = pytest.importorskip("sentence_transformers")
    folder = saved(transformers.AutoModelForMaskedLM)
    model, stock = (st.SparseEncoder(str(folder), device="cpu") for _ in range(2))
    fastbert.accelerate(model)
    got, want = (m.encode(TEXTS, convert_to_sparse_tensor=False) for m in (model, stock))
    assert want.std() > 0.05
    assert_close(got, want)
    assert_fused(model)


@pytest.mark.parametrize("batch_size", (1, 32))
def test_cross_encoder(saved, batch_size):
    st = pytest.importorskip("sentence_transformers")
    folder = saved(HEAD, num_labels=1)
    pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[1], TEXTS[2]), (TEXTS[2], TEXTS[0]), (TEXTS[3], TEXTS[3])]
    stock = st.CrossEncoder(str(folder), device="cpu")
    model = st.CrossEncoder(str(folder), device="cpu")
    assert fastbert.accelerate(model) is model
    scores, stock_scores = (
        torch.from_numpy(m.predict(pairs, batch_size=batch_size, activation_fn=torch.nn.Identity()))
        for m in (model, stock)
    )
    assert scores.shape == (4,)
    assert scores.std() > 0.05  # the pairs matter
    assert_close(scores, stock_scores)
    ranked, stock_ranked = (m.rank(TEXTS[1], TEXTS) for m in (model, stock))
    assert [x["corpus_id"] for x in ranked] == [x["corpus_id"] for x in stock_ranked]
    assert_fused(model)
