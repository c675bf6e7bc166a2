"""CrossEncoder beside sentence-transformers' own: scores, ranks, settings, arguments."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import sentence_transformers
import torch
import transformers

import fastbert
from fastbert.sentences.cross_encoder import CrossEncoder
from tests.support.hf_models import hf_config
from tests.support.sentence_folders import SENTENCES, rewrite

PAIRS = [*itertools.pairwise(SENTENCES[:20]), ("", "a"), ("short", "a very long text " * 99)]


@pytest.fixture(scope="module", params=["bert-1", "bert-3", "roberta-1", "modernbert-1"])
def folders(request, directory, tmp_path_factory):
    """A folder that sentence-transformers has saved, and its model."""
    kind, labels = request.param.split("-")
    folder = tmp_path_factory.mktemp("cross")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.model_max_length = 98
    if kind != "bert":
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(folder / "plain")
    rewrite(folder / "plain" / "tokenizer_config.json", model_input_names=tokenizer.model_input_names)
    values = {"vocab_size": len(tokenizer), "num_labels": int(labels), "max_position_embeddings": 100}
    values |= {"type_vocab_size": 1 if kind == "roberta" else 2, "pad_token_id": 0, "initializer_range": 0.3}
    config = hf_config(kind, **values)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "plain")
    model = sentence_transformers.CrossEncoder(str(folder / "plain"), device="cpu")
    model.save_pretrained(str(folder / "saved"))
    return folder / "saved", model


def test_scores_are_sentence_transformers(folders):
    folder, theirs = folders
    ours = CrossEncoder.from_pretrained(folder, device="cpu")
    assert ours.max_length == theirs.max_seq_length
    expected = theirs.predict(PAIRS)
    scores = ours.predict(PAIRS)
    assert (scores.shape, scores.dtype) == (expected.shape, expected.dtype)
    assert np.ptp(expected) > 0.01
    assert np.abs(scores - expected).max() < 1e-4
    assert np.abs(ours.predict(PAIRS, batch_size=3, batch_tokens=512) - expected).max() < 1e-4
    for one in (PAIRS[0], list(PAIRS[0]), {"text": PAIRS[0]}, np.array(PAIRS[0]), np.array(PAIRS, object)):
        assert np.abs(ours.predict(one) - theirs.predict(one)).max() < 1e-4
        assert ours.predict(one).shape == theirs.predict(one).shape
    for options in (
        {"activation_fn": torch.nn.Identity()},
        {"apply_softmax": True},
        {"prompt": "find: ", "activation_fn": torch.nn.Tanh()},
    ):
        assert np.abs(ours.predict(PAIRS, **options) - theirs.predict(PAIRS, **options)).max() < 1e-4
    assert len(ours.predict([])) == 0
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(ours.predict, [PAIRS, PAIRS[:3], PAIRS[:1]] * 8):
            assert np.abs(found - scores[: len(found)]).max() < 1e-4


def test_ranks_are_sentence_transformers(folders):
    folder, theirs = folders
    ours = CrossEncoder.from_pretrained(folder, device="cpu")
    arguments = {"query": "a cat", "documents": SENTENCES[:30], "top_k": 7, "return_documents": True}
    if theirs.num_labels > 1:
        with pytest.raises(ValueError, match="rank: the model has 3 labels; expected one"):
            ours.rank(**arguments)
        return
    for entry, expected in zip(ours.rank(**arguments), theirs.rank(**arguments), strict=True):
        assert entry == {**expected, "score": pytest.approx(expected["score"], abs=1e-4)}
    assert [len(e) for e in ours.rank("a", ["b", "c"], batch_size=1)] == [2, 2]
    equal = [m.rank("a", ["b", "c", "d"], activation_fn=torch.zeros_like) for m in (ours, theirs)]
    assert [[e["corpus_id"] for e in found] for found in equal] == [[0, 1, 2]] * 2


@pytest.mark.parametrize("place", ["file", "config", "old-config"])
def test_the_directorys_settings_are_read(folders, tmp_path, place):
    folder, _ = folders
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    name = "torch.nn.modules.activation.Tanh"
    path = tmp_path / "config_sentence_transformers.json"
    content = json.loads(path.read_text())
    content |= {"prompts": {"q": "find: "}, "default_prompt_name": "q", "activation_fn": None}
    path.write_text(json.dumps(content | ({"activation_fn": name} if place == "file" else {})))
    if place != "file":
        key, value = (
            ("sentence_transformers", {"activation_fn": name})
            if place == "config"
            else ("sbert_ce_default_activation_function", name)
        )
        rewrite(tmp_path / "config.json", **{key: value})
    ours = CrossEncoder.from_pretrained(tmp_path, device="cpu", max_length=20)
    assert (type(ours.activation_fn), ours.max_length, ours.prompt) == (torch.nn.Tanh, 20, "find: ")
    plain = CrossEncoder(
        ours.model, ours._tokenizer, max_length=20, activation_fn=torch.nn.Tanh(), segments=ours.segments
    )
    first, second = PAIRS[0]
    assert np.array_equal(ours.predict(PAIRS[0]), plain.predict((f"find: {first}", second)))
    for other in ("os.system", "mine.Tanh"):
        path.write_text(json.dumps(content | {"activation_fn": other}))
        with pytest.raises(ValueError, match=rf"activation_fn '{other}'; expected one of torch\.nn's"):
            CrossEncoder.from_pretrained(tmp_path)
    for other in ("activation.Threshold", "activation.Softmax2d", "loss.MSELoss", "module.Module"):
        path.write_text(json.dumps(content | {"activation_fn": f"torch.nn.modules.{other}"}))
        with pytest.raises(ValueError, match=rf"activation_fn 'torch\S+{other}': is no activation \("):
            CrossEncoder.from_pretrained(tmp_path)
    path.write_text("{}")
    rewrite(tmp_path / "config.json", sentence_transformers=[1])
    with pytest.raises(ValueError, match=r"config\.json: sentence_transformers: expected an object, got \[1"):
        CrossEncoder.from_pretrained(tmp_path)
    (tmp_path / "modules.json").write_text('[{"type": "a.Transformer"}, {"type": "a.Dense"}]')
    with pytest.raises(ValueError, match=r"modules\.json: modules Transformer, Dense; expected one"):
        CrossEncoder.from_pretrained(tmp_path)


@pytest.fixture(scope="module")
def small(directory):
    return CrossEncoder(
        fastbert.BertForSequenceClassification(
            fastbert.EncoderConfig(num_hidden_layers=1, hidden_size=24, intermediate_size=24, num_labels=1)
        ).eval(),
        fastbert.SentenceEncoder.from_pretrained(directory, device="cpu")._tokenizer,
    )


def test_a_model_of_one_segment_is_named(directory):
    config = fastbert.EncoderConfig(
        num_hidden_layers=1, hidden_size=24, intermediate_size=24, num_labels=1, type_vocab_size=1
    )
    tokenizer = fastbert.SentenceEncoder.from_pretrained(directory, device="cpu")._tokenizer
    model = CrossEncoder(fastbert.BertForSequenceClassification(config).eval(), tokenizer)
    words = "config type_vocab_size: the model knows 1 token types, but the tokenizer"
    with pytest.raises(ValueError, match=words):
        model.predict([("a", "b")])


@pytest.mark.parametrize(
    ("query", "documents", "top_k", "error", "words"),
    [
        (5, ["a"], None, TypeError, "query: int; expected str"),
        ("a", 5, None, TypeError, "documents: int; expected a sequence of texts"),
        ("a", ["b", None], None, TypeError, r"documents\[1\]: NoneType; expected str"),
        ("a", ["b"], -1, ValueError, "top_k: -1; expected an integer >= 0"),
    ],
)
def test_bad_arguments_of_rank(small, query, documents, top_k, error, words):
    with pytest.raises(error, match=words):
        small.rank(query, documents, top_k=top_k)


@pytest.mark.parametrize(
    ("pairs", "options", "error", "words"),
    [
        ("a text", {}, TypeError, "pairs: str; expected a sequence of texts"),
        ([("a", "b"), "c"], {}, TypeError, r"pairs\[1\]: a str; expected a pair of texts"),
        ([("a", "b", "c")], {}, TypeError, r"sentences\[0\]: a tuple of 3"),
        ([("a", "long " * 600)], {"on_long": "error"}, fastbert.EncodingError, "tokens; at most 512 fit"),
        ([("a", "b")], {"activation_fn": torch.nn.Tanh}, TypeError, "activation_fn: .*; expected a function"),
        ([("a", "b")], {"activation_fn": torch.sum}, ValueError, r"activation_fn: expected scores \(1, 1\)"),
        (
            [("a", "b")],
            {"activation_fn": torch.nn.Linear(5, 5)},
            ValueError,
            "activation_fn: .* failed: Runt",
        ),
    ],
)
def test_bad_arguments(small, pairs, options, error, words):
    with pytest.raises(error, match=words):
        small.predict(pairs, **options)
    with pytest.raises(TypeError, match=r"model: str; .*CrossEncoder\.from_pretrained\(directory\)"):
        CrossEncoder("a/folder")
