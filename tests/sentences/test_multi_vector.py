"""ColBERT directories, against sentence-transformers' MultiVectorEncoder, which reads PyLate's too."""

import numpy as np
import pytest
import torch

from fastbert import MultiVectorEncoder, SentenceEncoder
from fastbert.sentences.similarity import maxsim
from tests.support.sentence_folders import SENTENCES, rewrite
from tests.support.tiny_folders import colbert

TEXTS = [*SENTENCES[:7], "", "Commas, dots. And more!", "A long, long text. " * 9, "cat"]


@pytest.mark.parametrize(
    "settings",
    [{}, {"attend_to_expansion_tokens": True}, {"do_query_expansion": False, "skiplist_words": ...}],
    ids=["unseen", "attended", "not expanded"],
)
def test_vectors_are_sentence_transformers(minilm, tmp_path, settings):
    from sentence_transformers import MultiVectorEncoder as Stock

    folder = colbert(minilm, tmp_path / "pylate", **settings)
    stock = Stock(str(folder), device="cpu")
    stock.save_pretrained(str(tmp_path / "native"))
    theirs = [stock.encode_query(TEXTS), stock.encode_document(TEXTS)]
    for place in (folder, tmp_path / "native"):
        one = MultiVectorEncoder.from_pretrained(place, device="cpu")
        ours = [one.encode_query(TEXTS, batch_size=3), one.encode_document(TEXTS)]
        for mine, expected in zip(ours, theirs, strict=True):
            assert [rows.shape for rows in mine] == [rows.shape for rows in expected]
            assert max(np.abs(a - b.numpy()).max() for a, b in zip(mine, expected, strict=True)) < 1e-5
        if "do_query_expansion" not in settings:
            assert {rows.shape for rows in ours[0]} == {(12, 12)}
        torch.testing.assert_close(one.similarity(*ours), stock.similarity(*theirs), rtol=1e-4, atol=1e-4)
        assert np.abs(one.encode_query(TEXTS[0]) - ours[0][0]).max() < 1e-6
    assert np.allclose(np.linalg.norm(ours[1][0], axis=1), 1, atol=1e-5)


def test_a_long_query_is_kept_by_the_strategy_min(minilm, tmp_path):
    from sentence_transformers import MultiVectorEncoder as Stock

    stock = Stock(str(colbert(minilm, tmp_path / "pylate")), device="cpu")
    stock[0].query_expansion = {"strategy": "min", "length": 12}
    stock.save_pretrained(str(tmp_path / "native"))
    one = MultiVectorEncoder.from_pretrained(tmp_path / "native", device="cpu")
    ours, theirs = one.encode_query(TEXTS), stock.encode_query(TEXTS)
    assert [rows.shape for rows in ours] == [rows.shape for rows in theirs]
    assert max(len(rows) for rows in ours) > 12
    assert max(np.abs(a - b.numpy()).max() for a, b in zip(ours, theirs, strict=True)) < 1e-5


def test_maxsim_is_its_definition():
    generator = torch.Generator().manual_seed(0)
    queries, documents = (
        [torch.randn(n, 5, generator=generator) for n in lengths] for lengths in ((3, 1), (4, 2, 7))
    )
    expected = torch.tensor(
        [[sum(max(float(a @ b) for b in d) for a in q) for d in documents] for q in queries]
    )
    torch.testing.assert_close(maxsim(queries, documents), expected)
    torch.testing.assert_close(maxsim(queries, documents, mean=True), expected / torch.tensor([[3], [1]]))
    torch.testing.assert_close(maxsim(queries[0].numpy(), documents[1:2]), expected[:1, 1:2])
    assert maxsim(queries, [torch.zeros(0, 5)]).tolist() == [[0.0], [0.0]]
    assert maxsim([], documents).shape == (0, 3)
    with pytest.raises(ValueError, match=r"vectors of \[4, 5\] numbers; expected one width"):
        maxsim(queries, [torch.zeros(2, 4)])


def settings_file(**changes):
    return lambda folder: rewrite(folder / "config_sentence_transformers.json", **changes)


def dense_file(**changes):
    return lambda folder: rewrite(folder / "1_Dense" / "config.json", **changes)


BAD = {
    "prefix": (
        settings_file(query_prefix=3),
        r"config_sentence_transformers\.json: query_prefix 3; expected a text",
    ),
    "length": (settings_file(query_length=-1), r"query_length -1; expected a positive integer"),
    "attend": (
        settings_file(attend_to_expansion_tokens="no"),
        r"attend_to_expansion_tokens 'no'; expected true or false",
    ),
    "skiplist": (settings_file(skiplist_words="."), r"skiplist_words '\.'; expected a list of texts"),
    "activation": (
        dense_file(activation_function=None),
        r"1_Dense/config\.json: activation_function 'torch.*Tanh'; expected one of torch.*Identity",
    ),
    "residual": (
        dense_file(use_residual=True),
        r"1_Dense/config\.json: use_residual true is not implemented",
    ),
    "width": (
        dense_file(in_features=33),
        r"1_Dense/config\.json: in_features 33, out_features 12; expected 32",
    ),
    "weights": (
        dense_file(out_features=13),
        r"model\.safetensors: tensors .*\(12, 32\).*expected .*\(13, 32\)",
    ),
    "bias": (dense_file(bias=True), r"model\.safetensors: tensors .*expected .*linear\.bias"),
    "no markers": (
        lambda folder: (folder / "config_sentence_transformers.json").write_text("{}"),
        "no model_type 'ColBERT', and .*modules.json has no MultiVectorMask",
    ),
}


def test_bad_directories_are_refused(minilm, tmp_path):
    folder = colbert(minilm, tmp_path / "m")
    with pytest.raises(
        ValueError, match=r"modules Transformer, Dense; .*; fastbert\.MultiVectorEncoder reads this directory"
    ):
        SentenceEncoder.from_pretrained(folder)
    files = [path for path in folder.rglob("*.json") if path.stat().st_size < 10_000]
    before = {path: path.read_bytes() for path in files}
    for change, words in BAD.values():
        change(folder)
        with pytest.raises(ValueError, match=words):
            MultiVectorEncoder.from_pretrained(folder, device="cpu")
        for path, content in before.items():
            path.write_bytes(content)
    one = MultiVectorEncoder.from_pretrained(folder, device="cpu")
    with pytest.raises(TypeError, match=r"sentences\[1\]: tuple; expected str"):
        one.encode_document(["a", ("a", "pair")])
    with pytest.raises(ValueError, match=r"sentences\[0\]: .* tokens; at most 20 fit"):
        one.encode_document(["many words " * 20], on_long="error")
