"""Students of sentence encoders: vectors, texts of two tokenizers, folders, and mistakes."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

import fastbert
from fastbert.compression.distillation.cache import FILE
from fastbert.compression.distillation.data import sentences_of
from fastbert.compression.distillation.objective import Distilled
from fastbert.compression.distillation.sentences import SentenceVectors, projection_to, teacher_vectors
from fastbert.sentences.settings import sentence_settings
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.training.loop import TrainingError
from fastbert.training.stream import Batch
from tests.support.rule_tasks import NOUNS, SIZES, SPECIAL, VERBS, logged, resumes, tiny_model

GIVEN = {"lr": 1e-3, "epochs": 6, "batch_size": 8, "progress": False}
TEXTS = [" ".join(random.Random(i).choices([*NOUNS, *VERBS], k=3 + i % 5)) for i in range(60)]


def saved(folder, pooling="mean", normalize=True, **options):
    """A sentence encoder with random weights."""
    tiny_model(folder / "plain")
    model = fastbert.AutoModel.from_pretrained(folder / "plain")
    given = {"pooling": pooling, "normalize": normalize, **options}
    fastbert.SentenceEncoder(model, load_tokenizer(folder / "plain"), **given).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentences")
    saved(folder / "teacher", max_length=9)
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    other = tiny_model(folder / "other", seed=3, vocab_size=len(SPECIAL) + 2 * len(NOUNS) + len(VERBS))
    words = [*SPECIAL, *(f"{noun}s" for noun in NOUNS), *VERBS, *NOUNS]
    (other / "vocab.txt").write_text("\n".join(words) + "\n")
    return folder


def distil(places, student, output, data="texts.txt", **options):
    given = {**GIVEN, **options}
    return fastbert.distill(places / "teacher", student, places / data, output, "sentences", **given)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "lasttoken", "weightedmean"])
@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_are_those_of_the_encoder(tmp_path, pooling, normalize):
    vectors = teacher_vectors(saved(tmp_path, pooling, normalize), torch.device("cpu")).eval()
    encoder = vectors.encoder()
    tokens = encoder.tokenize(TEXTS[:7])
    given = torch.from_numpy(tokens.ids), torch.from_numpy(tokens.starts.astype(np.int32))
    found = vectors(*given, int(tokens.lengths.max()))
    torch.testing.assert_close(found.detach(), torch.from_numpy(encoder.encode(TEXTS[:7])))
    found.square().sum().backward()
    assert all(p.grad is not None for p in vectors.parameters())


@pytest.mark.parametrize("loss", ["vectors", "angles"])
def test_a_student_learns_the_vectors(places, tmp_path, loss):
    weights = {"vectors": 0, "angles": 1} if loss == "angles" else None
    found = distil(places, [0], tmp_path / "out", weights=weights)
    assert {key for key in found.last if key.endswith("_loss")} == {f"{loss}_loss"}
    curve = [line["loss"] for line in logged(tmp_path / "out")]
    assert np.mean(curve[-3:]) < 0.5 * np.mean(curve[:3])
    taught, learned = found.teacher.encode(TEXTS), found.student.encode(TEXTS)
    assert (taught * learned).sum(1).mean() > 0.95
    expected = ((taught - learned) ** 2).mean() if loss == "vectors" else 1 - (taught * learned).sum(1).mean()
    assert found.last["loss"] == pytest.approx(expected, rel=0.7)
    loaded = fastbert.SentenceEncoder.from_pretrained(tmp_path / "out")
    assert (loaded.encode(TEXTS) == learned).all()
    stock = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    np.testing.assert_allclose(stock.encode(TEXTS), learned, rtol=1e-4, atol=1e-5)
    assert (loaded.normalize, loaded.pooling, loaded.max_length) == (True, "mean", 9)


@pytest.mark.parametrize("width", [16, 96])
def test_a_student_of_another_width(places, tmp_path, width):
    config = fastbert.EncoderConfig(**{**SIZES, "hidden_size": width})
    given = {"epochs": 25, "lr": 5e-3}
    found = distil(places, config, tmp_path / "live", **given)
    taught = torch.from_numpy(found.teacher.encode(TEXTS))
    brought = projection_to(taught, width)
    if width > 64:
        assert torch.equal(brought, torch.eye(64, width))
    else:
        # PCA as sentence-transformers' example has it
        components = torch.linalg.svd(taught - taught.mean(0))[2][:width]
        torch.testing.assert_close((components @ brought).abs(), torch.eye(width), rtol=0, atol=1e-3)
    expected = torch.nn.functional.normalize(taught @ brought)
    learned = torch.from_numpy(found.student.encode(TEXTS))
    assert (expected * learned).sum(1).mean() > 0.95
    assert found.last["loss"] == pytest.approx(float((expected - learned).square().mean()), rel=0.7)
    stock = SentenceTransformer(str(tmp_path / "live"), device="cpu")
    np.testing.assert_allclose(stock.encode(TEXTS), learned, rtol=1e-4, atol=1e-5)
    # A cache has the teacher's whole vectors, for students of all widths
    distil(places, [0], tmp_path / "same", cache=tmp_path / "cache", epochs=0.2)
    distil(places, config, tmp_path / "stored", cache=tmp_path / "cache", **{**given, "epochs": 2})
    live, stored = (logged(tmp_path / name)[0]["loss"] for name in ("live", "stored"))
    assert live == pytest.approx(stored, rel=1e-4)


def test_a_distilbert_student(places, tmp_path):
    found = distil(places, [1], tmp_path / "out", student_family="distilbert", max_length=7)
    assert found.student.model.config.model_type == "distilbert"
    assert found.student.max_length == 7
    stock = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    np.testing.assert_allclose(stock.encode(TEXTS), found.student.encode(TEXTS), rtol=1e-4, atol=1e-5)


def test_both_texts_of_a_pair_learn_the_vector_of_the_first(places, tmp_path):
    lines = [(text, text.replace("cat", "cats").replace("dog", "dogs")) for text in TEXTS]
    (places / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in lines))
    rows = (json.dumps({"text": a, "pair": b}) + "\n" for a, b in lines)
    (places / "pairs.jsonl").write_text("".join(rows))
    student = SentenceVectors(
        fastbert.AutoModel.from_pretrained(places / "other"), sentence_settings(places / "other")
    ).encoder()
    teacher = fastbert.SentenceEncoder.from_pretrained(places / "teacher")
    for name in ("pairs.tsv", "pairs.jsonl"):
        own, other = sentences_of(places / name, student, teacher)
        assert len(own) == len(other) == 2 * len(TEXTS)
        for i, (first, second) in enumerate(lines):
            for number, text in ((i, first), (i + len(TEXTS), second)):
                at, to = own.starts[number : number + 2]
                assert own.ids[at:to].tolist() == student.tokenize([text]).ids.tolist()
                at, to = other.starts[number : number + 2]
                assert other.ids[at:to].tolist() == teacher.tokenize([first]).ids.tolist()
    found = distil(places, places / "other", tmp_path / "out", "pairs.tsv", epochs=12, lr=2e-3)
    taught = found.teacher.encode([a for a, _ in lines])
    for side in (0, 1):
        assert (taught * found.student.encode([line[side] for line in lines])).sum(1).mean() > 0.9
    assert load_tokenizer(tmp_path / "out").token_to_id("cats") is not None


def test_a_folder_of_sentence_transformers_keeps_its_pooling(places, tmp_path):
    saved(tmp_path / "cls", "cls", False, max_length=12, prompts={"query": "the "})
    own = distil(places, tmp_path / "cls", tmp_path / "own", epochs=0.2).student
    assert (own.pooling, own.normalize, own.max_length, own.prompts) == ("cls", False, 12, {"query": "the "})
    for student in (fastbert.EncoderConfig(**SIZES), tmp_path / "cls" / "plain"):
        taken = distil(places, student, tmp_path / type(student).__name__, epochs=0.2).student
        assert (taken.pooling, taken.normalize, taken.prompts) == ("mean", True, {})


def test_a_prompt_is_read_by_both(places, tmp_path):
    saved(tmp_path / "teacher", prompt="the red ", prompts={"default": "the red "})
    given = tmp_path / "teacher", [0], places / "texts.txt", tmp_path / "out", "sentences"
    found = fastbert.distill(*given, **GIVEN)
    assert found.student.prompt == "the red "
    assert (found.teacher.encode(TEXTS) * found.student.encode(TEXTS)).sum(1).mean() > 0.95
    # A cut copy of the teacher has no loss if both read the prompt
    again = fastbert.distill(
        given[0], [0, 1], given[2], tmp_path / "same", "sentences", **{**GIVEN, "lr": 1e-9}
    )
    assert again.last["loss"] < 1e-6


def test_cached_vectors_and_their_key(places, tmp_path):
    for name in ("live", "first", "second"):
        cache = None if name == "live" else tmp_path / "cache"
        distil(places, places / "other", tmp_path / name, cache=cache, epochs=2)
    live, first, second = (logged(tmp_path / name) for name in ("live", "first", "second"))
    assert first == second
    for line, other in zip(live, first, strict=True):
        assert line == pytest.approx(other, rel=1e-4)
    # The teacher reads its own tokens, so students with other tokenizers share a cache
    stamp = (tmp_path / "cache" / FILE).stat().st_mtime_ns
    distil(places, [0], tmp_path / "third", cache=tmp_path / "cache", max_length=64, epochs=0.2)
    assert (tmp_path / "cache" / FILE).stat().st_mtime_ns == stamp
    path = places / "teacher" / "1_Pooling" / "config.json"
    text = path.read_text()
    try:
        swapped = {"cls_token": "mean_tokens", "mean_tokens": "cls_token"}
        values = json.loads(text)
        keys = {f"pooling_mode_{a}": values[f"pooling_mode_{b}"] for a, b in swapped.items()}
        path.write_text(json.dumps({**values, **keys}))
        with pytest.raises(ValueError, match=r"cache: .* was made with another teacher_pooling"):
            distil(places, places / "other", tmp_path / "x", cache=tmp_path / "cache", epochs=2)
        with pytest.raises(TrainingError, match=r"pooling: the run in"):
            distil(places, places / "other", tmp_path / "live", epochs=2)
    finally:
        path.write_text(text)


def test_a_run_knows_what_its_teacher_reads(places, tmp_path):
    for name, first in (("one", "the red cat"), ("two", "the blue cat")):
        (tmp_path / f"{name}.tsv").write_text(f"{first}\tthe white owl\n" * 2)
    # The student reads the same tokens of words that it does not know
    given = places / "teacher", places / "other"
    fastbert.distill(*given, tmp_path / "one.tsv", tmp_path / "out", "sentences", **GIVEN)
    with pytest.raises(TrainingError, match=r"^data: the run in"):
        fastbert.distill(*given, tmp_path / "two.tsv", tmp_path / "out", "sentences", **GIVEN)


def test_all_that_learns_has_a_gradient(places):
    teacher = teacher_vectors(places / "teacher", torch.device("cpu")).eval()
    student = SentenceVectors(fastbert.AutoModel.from_pretrained(places / "other"), teacher.settings)
    module = Distilled(student.train(), teacher, {"vectors": 1.0}, [])
    tokens = student.encoder().tokenize(TEXTS[:4])
    inputs = {"input_ids": torch.from_numpy(tokens.ids), "max_seqlen": int(tokens.lengths.max())}
    inputs["cu_seqlens"] = torch.from_numpy(tokens.starts.astype(np.int32))
    module(inputs)[0]["vectors"].backward()
    learning = {name for name, p in module.named_parameters() if p.requires_grad}
    assert learning == {name for name, p in module.named_parameters() if p.grad is not None}
    assert not any("pooler" in name for name in learning)
    assert module.work(Batch({}, {}, tokens.lengths)) > 0


@pytest.mark.parametrize("student", [[0], fastbert.EncoderConfig(**{**SIZES, "hidden_size": 32})])
def test_a_stopped_run_resumes_to_the_same_bytes(places, tmp_path, monkeypatch, student):
    found = resumes(monkeypatch, 3, tmp_path, lambda out: distil(places, student, out, epochs=1))
    assert "modules.json" in found


@pytest.mark.parametrize(
    ("student", "changes", "message"),
    [
        (
            {"hidden_size": 32},
            {"data": "few.tsv"},
            "data: expected at least 32 texts, the student's width, got 2",
        ),
        ("bilstm", {}, "student: a BiLSTM learns from labelled examples, which this recipe does not read"),
        ([0], {"data": "."}, r"data: .*: expected a file that ends in .jsonl, .txt, .tsv"),
        ([0], {"data": "labels.jsonl"}, "line 1: label: expected none, got 1"),
        ([0], {"layer_map": [1]}, "layer_map: expected None with a recipe that compares no layers"),
        ([0], {"weights": {"kd": 1}}, "weights: 'kd' is no loss of this recipe; expected some of .*angles"),
        ([0], {"max_length": 65}, "max_length: expected at most 64 for these models, got 65"),
    ],
)
def test_a_mistake_is_one_line(places, tmp_path, student, changes, message):
    (places / "few.tsv").write_text("the cat\tthe dog\n")
    (places / "labels.jsonl").write_text('{"text": "the cat", "label": 1}\n')
    given = fastbert.EncoderConfig(**{**SIZES, **student}) if isinstance(student, dict) else student
    with pytest.raises((TypeError, ValueError), match=message):
        distil(places, given, tmp_path / "out", **changes)
    assert not (tmp_path / "out" / "run").exists()
