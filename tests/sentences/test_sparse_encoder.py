"""SPLADE directories, against sentence-transformers' SparseEncoder."""

import numpy as np
import pytest
import torch

from fastbert import SentenceEncoder, SparseEncoder
from tests.support.sentence_folders import SENTENCES, rewrite
from tests.support.tiny_folders import splade, tiny

TEXTS = [*SENTENCES[:9], "", "A long, long text. " * 20, "cat", "Cat!"]


@pytest.mark.parametrize(
    ("pooling", "activation", "legacy"), [("max", "relu", True), ("sum", "log1p_relu", False)]
)
def test_embeddings_are_sentence_transformers(minilm, tmp_path, monkeypatch, pooling, activation, legacy):
    from sentence_transformers import SparseEncoder as Stock
    from sentence_transformers.util import select_max_active_dims

    folder = splade(
        minilm, tmp_path / "m", legacy, pooling_strategy=pooling, activation_function=activation, chunk_size=7
    )
    stock = Stock(str(folder), device="cpu")
    if not legacy:
        # As version 6 saves it
        stock.save_pretrained(str(tmp_path / "saved"))
        folder = tmp_path / "saved"
        rewrite(folder / "1_SpladePooling" / "config.json", chunk_size=7)
    one = SparseEncoder.from_pretrained(folder, device="cpu")
    assert (one.pooling_strategy, one.activation_function) == (pooling, activation)
    assert (one.width, one.max_length, one.similarity_fn_name) == (30522, 48, stock.similarity_fn_name)
    chunks, lm_logits = [], one.model.lm_logits
    monkeypatch.setattr(one.model, "lm_logits", lambda x: chunks.append(len(x)) or lm_logits(x))
    dense = one.encode(TEXTS)
    # Seven tokens at a time, whichever texts they belong to
    assert max(chunks) == 7
    assert sum(chunks) == len(one.tokenize(TEXTS).ids)
    theirs = stock.encode(TEXTS)
    assert (dense.dtype, dense.shape) == (np.float32, theirs.shape)
    assert np.abs(dense - theirs.to_dense().numpy()).max() < 1e-5 * max(1, dense.max())
    assert 0 < (dense == 0).mean() < 1
    sparse = one.encode(TEXTS, convert_to_sparse_tensor=True, batch_size=2)
    assert sparse.is_sparse
    assert sparse.is_coalesced()
    assert np.abs(sparse.to_dense().numpy() - dense).max() < 1e-5
    few = one.encode(TEXTS, max_active_dims=5)
    assert np.array_equal(few, select_max_active_dims(torch.from_numpy(dense), 5).numpy())
    single = one.encode(TEXTS[0], convert_to_sparse_tensor=True)
    assert single.shape == (30522,)
    assert np.abs(single.to_dense().numpy() - dense[0]).max() < 1e-5
    assert one.encode([], convert_to_sparse_tensor=True).shape == (0, 30522)
    torch.testing.assert_close(
        one.similarity(sparse, dense), stock.similarity(theirs, theirs), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_less_exact_than_sentence_transformers(minilm, tmp_path, dtype, pooling):
    from sentence_transformers import SparseEncoder as Stock

    folder = splade(minilm, tmp_path / "m", pooling_strategy=pooling)
    truth = SparseEncoder.from_pretrained(folder, dtype=torch.float64, device="cpu").encode(TEXTS)
    stock = Stock(str(folder), device="cpu", model_kwargs={"dtype": dtype})
    theirs = np.abs(stock.encode(TEXTS, convert_to_sparse_tensor=False).double().numpy() - truth)
    ours = np.abs(SparseEncoder.from_pretrained(folder, dtype=dtype, device="cpu").encode(TEXTS) - truth)
    assert truth.dtype == np.float64
    assert ours.mean() <= theirs.mean()
    assert ours.max() <= theirs.max() + torch.finfo(dtype).eps * truth.max()


def pooling_file(**changes):
    return lambda folder: rewrite(folder / "1_SpladePooling" / "config.json", **changes)


def settings_file(**changes):
    return lambda folder: rewrite(folder / "config_sentence_transformers.json", **changes)


BAD = {
    "strategy": (
        pooling_file(pooling_strategy="mean"),
        r"1_SpladePooling/config\.json: pooling_strategy 'mean'; expected one of max",
    ),
    "activation": (
        pooling_file(activation_function=["relu"]),
        r"config\.json: activation_function \['relu'\]",
    ),
    "width": (
        pooling_file(word_embedding_dimension=30000),
        r"config\.json: word_embedding_dimension 30000; expected 30522",
    ),
    "chunk": (pooling_file(chunk_size=0), r"config\.json: chunk_size 0; expected a positive integer"),
    "similarity": (
        settings_file(similarity_fn_name="maxsim"),
        r"similarity_fn_name 'maxsim'; expected one of cosine",
    ),
    "active": (settings_file(max_active_dims="few"), r"max_active_dims 'few'; expected a positive integer"),
    "task": (
        lambda folder: rewrite(folder / "sentence_bert_config.json", transformer_task="retrieval"),
        r"sentence_bert_config\.json: transformer_task 'retrieval'; expected one of fill-mask",
    ),
    "modules": (
        lambda folder: (folder / "modules.json").write_text('[{"type": "x.Router"}]'),
        r"module 'Router'.*not implemented; implemented: MLMTransformer, SpladePooling, Transformer",
    ),
}


@pytest.mark.filterwarnings("ignore:.*freshly initialised")
def test_bad_directories_are_refused(minilm, tmp_path):
    folder = splade(minilm, tmp_path / "m", pooling_strategy="max")
    with pytest.raises(
        ValueError, match=r"module 'MLMTransformer'.*; fastbert\.SparseEncoder reads this directory"
    ):
        SentenceEncoder.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"no weights for cls\.predictions.*; expected a masked-LM model"):
        SparseEncoder.from_pretrained(tiny("BertModel", minilm, tmp_path / "encoder"), device="cpu")
    files = [path for path in folder.rglob("*.json") if path.stat().st_size < 10_000]
    before = {path: path.read_bytes() for path in files}
    for change, words in BAD.values():
        change(folder)
        with pytest.raises(ValueError, match=words):
            SparseEncoder.from_pretrained(folder, device="cpu")
        for path, content in before.items():
            path.write_bytes(content)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("pooling_strategy", "mean"),
        ("activation_function", "gelu"),
        ("chunk_tokens", 0),
        ("max_active_dims", 0),
    ],
)
def test_bad_arguments_are_refused(minilm, tmp_path, argument, value):
    one = SparseEncoder.from_pretrained(splade(minilm, tmp_path / "m"), device="cpu")
    with pytest.raises(ValueError, match=f"{argument}: {value!r}; expected"):
        SparseEncoder(one.model, one._tokenizer, **{argument: value})
    with pytest.raises(TypeError, match="model: BertModel; expected a fastbert masked-LM model"):
        SparseEncoder(one.model.base_model, one._tokenizer)
