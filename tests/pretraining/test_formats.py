"""Formats of sequences, on numbered sentences: a token's id says its place, so truth can be read."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from fastbert.pretraining import formats, rows
from fastbert.pretraining.corpus import Corpus
from fastbert.pretraining.formats import (
    NO_LABEL,
    DocSentences,
    Example,
    Format,
    FullSentences,
    Plan,
    SegmentPairs,
)
from fastbert.training.draws import Draws
from tests.support.draw_shares import few_or_many, inside, is_uniform

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CLS, SEP = 2, 3
RELATIONS = ("next", "order", "three")
# what a label says of the text
MEANING = {"next": ("next", "other"), "order": ("next", "previous"), "three": ("next", "previous", "other")}


def numbered(directory, sizes: list[list[int]]) -> Corpus:
    """A corpus of documents of sentences of so many tokens; token i has the id i + 5.

    Of three tokens the third continues the second's word, if it is in the same sentence.
    """
    vocabulary, documents, at = {name: i for i, name in enumerate(SPECIAL)}, [], 0
    for document in sizes:
        lines = []
        for size in document:
            line = ""
            for i in range(size):
                goes_on = i > 0 and at % 3 == 2
                vocabulary[f"##w{at}" if goes_on else f"w{at}"] = at + 5
                line += f"w{at}" if goes_on else f" w{at}"
                at += 1
            lines.append(line.strip())
        documents.append("\n".join(lines))
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    text = directory / "text.txt"
    text.write_text("\n\n".join(documents))
    corpus = Corpus.write([text], tokenizer, directory / "shards", shard_tokens=4096)
    assert np.array_equal(corpus.tokens(0, at), np.arange(at) + 5)
    return corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    """300 documents of 1 to 30 sentences of 1 to 12 tokens."""
    draws = Draws(0, 0, 0)  # whose numbers are the same in every version of NumPy
    sizes = [(1 + draws.below(12, int(n))).tolist() for n in 1 + draws.below(30, 300)]
    return numbered(tmp_path_factory.mktemp("numbered"), sizes)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> Corpus:
    """30 documents of 1 to 5 sentences, of which some have hundreds of tokens."""
    draws, lengths = Draws(1, 0, 0), np.array([1, 3, 18, 40, 58, 300])
    sizes = [lengths[draws.below(6, int(n))].tolist() for n in 1 + draws.below(5, 30)]
    return numbered(tmp_path_factory.mktemp("uneven"), sizes)


def formats_of(corpus: Corpus, max_length: int = 64, seed: int = 1) -> list[Format]:
    return [
        *(SegmentPairs(corpus, max_length, seed, relation) for relation in RELATIONS),
        FullSentences(corpus, max_length, seed),
        DocSentences(corpus, max_length, seed),
    ]


def kind(format: Format) -> str:
    return getattr(format, "relation", type(format).__name__)


KINDS = [*RELATIONS, "FullSentences", "DocSentences"]


@pytest.fixture(params=KINDS)
def format(request, corpus) -> Format:
    return formats_of(corpus)[KINDS.index(request.param)]


def every(format: Format, epoch: int = 0) -> list[Example]:
    plan = format.plan(epoch)
    return [format.build(plan, i) for i in range(len(plan))]


def segments(example: Example) -> list[range]:
    """The tokens between the special ones, as ranges of the corpus."""
    assert example.ids[0] == CLS
    assert example.ids[-1] == SEP
    ends = np.flatnonzero(example.ids == SEP)
    found = []
    for begin, end in pairwise([0, *ends]):
        tokens = example.ids[begin + 1 : end] - 5
        assert np.array_equal(tokens, np.arange(tokens[0], tokens[0] + len(tokens)))
        found.append(range(int(tokens[0]), int(tokens[0]) + len(tokens)))
    return found


def sentence_of(corpus: Corpus, token: int) -> int:
    return int(np.searchsorted(corpus.sentence_starts, token, "right")) - 1


def document_of(corpus: Corpus, token: int | np.ndarray) -> int | np.ndarray:
    return np.searchsorted(corpus.sentence_starts[corpus.document_starts], token, "right") - 1


# --- all formats --------------------------------------------------------------------------------------------


def test_what_every_format_promises(format):
    plan = format.plan(3)
    assert isinstance(plan, Plan)
    assert plan.lengths.dtype == np.int32
    assert len(plan) == len(plan.lengths) > 50
    for i in range(len(plan)):
        example = format.build(plan, i)
        length = plan.lengths[i]
        assert 3 <= length <= format.max_length
        for array, dtype in ((example.ids, int), (example.word_starts, bool), (example.token_types, int)):
            assert array.shape == (length,)
            assert array.dtype == dtype
        special = np.isin(example.ids, [CLS, SEP])
        tokens = example.ids[~special] - 5
        assert example.word_starts[special].all()
        assert np.array_equal(
            example.word_starts[~special], [format.corpus.word_starts(t, t + 1)[0] for t in tokens.tolist()]
        )
        assert not example.word_starts.all() or length < 12
        parts = segments(example)
        if format.num_labels:
            assert type(example.label) is int
            assert 0 <= example.label < format.num_labels
            assert example.token_types.tolist() == [0] * (len(parts[0]) + 2) + [1] * (len(parts[1]) + 1)
        else:
            assert example.label == NO_LABEL
            assert not example.token_types.any()


def test_an_example_depends_on_corpus_seed_epoch_and_number_alone(format):
    plan = format.plan(5)
    again = pickle.loads(pickle.dumps(format))
    assert again == format
    assert len(pickle.dumps(format)) < 1000  # no array goes along
    others = again.plan(5)
    for name in (field.name for field in dataclasses.fields(plan)):
        assert np.array_equal(getattr(plan, name), getattr(others, name))
    for i in reversed(range(len(plan))):
        here, there = format.build(plan, i), again.build(pickle.loads(pickle.dumps(others)), i)
        assert all(
            np.array_equal(getattr(here, f.name), getattr(there, f.name)) for f in dataclasses.fields(here)
        )
        if i < len(plan) - 40:
            break


def test_epochs_and_seeds_differ(format):
    shown = [
        [e.ids.tolist() for e in every(dataclasses.replace(format, seed=seed), epoch)]
        for seed, epoch in ((1, 0), (1, 1), (2, 0), (1, 2**64 - 1))
    ]
    if isinstance(format, DocSentences):  # whose definition leaves nothing to chance
        assert all(other == shown[0] for other in shown)
    else:
        sets = [set(map(tuple, each)) for each in shown]
        assert all(len(a & b) < len(a) / 2 for i, a in enumerate(sets) for b in sets[:i])


def test_another_corpus_is_drawn_otherwise(corpus):
    other = dataclasses.replace(corpus, hash="0")
    for one, two in zip(formats_of(corpus)[:4], formats_of(other)[:4], strict=True):
        assert one.plan(0).lengths.tolist() != two.plan(0).lengths.tolist()


def test_no_two_purposes_share_a_stream(uneven, monkeypatch):
    """Each block of sentences, the targets and each cut pair have draws of their own."""
    asked = []

    class Recorded(Draws):
        def __init__(self, key, epoch, index):
            asked.append((key, epoch, index))
            super().__init__(key, epoch, index)

    monkeypatch.setattr(formats, "Draws", Recorded)
    monkeypatch.setattr(formats, "BLOCK", 8)
    for epoch in range(3):
        plan = SegmentPairs(uneven, 20, 1).plan(epoch)
        for i in range(len(plan)):
            SegmentPairs(uneven, 20, 1).build(plan, i)
    assert len(set(asked)) == len(asked) > 100


def test_statistics(corpus):
    for format in formats_of(corpus):
        plan = format.plan(0)
        found = format.statistics(plan)
        assert all(type(value) is float for value in found.values())
        assert found["sequences"] == len(plan)
        assert found["mean_length"] == plan.lengths.mean()
        assert found["filled"] == pytest.approx(plan.lengths.mean() / 64)
        names = ("next", "random"), ("in_order", "swapped"), ("next", "previous", "other")
        if format.num_labels:
            labels = [format.build(plan, i).label for i in range(len(plan))]
            for label, name in enumerate(dict(zip(RELATIONS, names, strict=True))[format.relation]):
                assert found[name] == labels.count(label) / len(labels)
            total = plan.first_size + plan.second_size
            assert found["cut"] == (total > 61).mean() > 0


# --- pairs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("name", ["corpus", "uneven"])
def test_labels_are_true_of_the_text(name, relation, request):
    """From the ids alone. A cut segment may have lost tokens at both ends, so neighbours may be apart."""
    corpus = request.getfixturevalue(name)
    meanings = set()
    for max_length, epoch in ((64, 0), (20, 1)):
        for example in every(SegmentPairs(corpus, max_length, 7, relation), epoch):
            a, b = segments(example)
            documents = [set(document_of(corpus, np.array(part)).tolist()) for part in (a, b)]
            assert len(documents[0]) == len(documents[1]) == 1
            is_cut = len(example.ids) == max_length
            meaning = MEANING[relation][example.label]
            meanings.add(meaning)
            if meaning == "other":
                assert documents[0] != documents[1]
                continue
            assert documents[0] == documents[1]
            before, after = (a, b) if meaning == "next" else (b, a)
            assert before.stop <= after.start
            if not is_cut:
                assert before.stop == after.start
                assert before.stop in corpus.sentence_starts
    assert meanings == set(MEANING[relation])


def replay(format: SegmentPairs, plan: Plan, epoch: int) -> None:
    """Google's loop over the documents, sentence by sentence; what was drawn is read from the plan.

    Raises AssertionError where the plan is not what that loop would make of these draws.
    """
    corpus, targets = format.corpus, format._targets(epoch)
    sizes, starts = np.diff(corpus.sentence_starts).tolist(), corpus.sentence_starts
    pair = 0
    for document, (begin, end) in enumerate(pairwise(corpus.document_starts.tolist())):
        chunk, length, i = [], 0, begin
        while i < end:
            chunk.append(i)
            length += sizes[i]
            too_few = format.relation == "order" and len(chunk) == 1
            if i == end - 1 or (length >= targets[document] and not too_few):
                if too_few:
                    break
                meaning = MEANING[format.relation][int(plan.labels[pair])]
                found = [
                    (int(plan.first[pair]), int(plan.first_size[pair])),
                    (int(plan.second[pair]), int(plan.second_size[pair])),
                ]
                if meaning == "previous":
                    found.reverse()
                (a, a_size), (b, b_size) = found
                assert a == starts[chunk[0]]
                a_end = 0
                while a_size > 0:
                    a_size -= sizes[chunk[a_end]]
                    a_end += 1
                assert a_size == 0
                assert 1 <= a_end <= max(1, len(chunk) - 1)
                assert len(chunk) > 1 or meaning == "other"
                if meaning == "other":
                    other = int(document_of(corpus, b))
                    assert other != document
                    wanted = int(targets[document]) - found[0][1]
                    at = sentence_of(corpus, b)
                    assert starts[at] == b
                    filled = 0
                    while at < corpus.document_starts[other + 1]:
                        filled += sizes[at]
                        at += 1
                        if filled >= wanted:
                            break
                    assert b_size == filled
                    i -= len(chunk) - a_end
                else:
                    assert b == starts[chunk[a_end]]
                    assert b_size == sum(sizes[j] for j in chunk[a_end:])
                assert plan.shortened[pair] == (targets[document] < format.max_length - 3)
                pair += 1
                chunk, length = [], 0
            i += 1
    assert pair == len(plan) > 10


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("block", [3, 64, 1 << 16])
def test_a_plan_is_what_googles_loop_makes(corpus, uneven, relation, block, monkeypatch):
    monkeypatch.setattr(formats, "BLOCK", block)
    for text, max_length, short_share in ((corpus, 64, 0.1), (corpus, 11, 1.0), (uneven, 30, 0.5)):
        format = SegmentPairs(text, max_length, 3, relation, short_share)
        replay(format, format.plan(2), 2)


@few_or_many(12_500, 100_000)
@pytest.mark.parametrize("relation", RELATIONS)
def test_shares_of_the_draws(corpus, relation, size):
    """Exact 99.9% intervals; each place of A's end and each other document alike."""
    format = SegmentPairs(corpus, 40, 11, relation)
    sentences = np.diff(corpus.document_starts)
    labels, documents = np.zeros(format.num_labels, int), np.zeros(corpus.num_documents - 1, int)
    cuts = np.zeros(2, int)
    epoch = 0
    while labels.sum() < size:
        plan = format.plan(epoch)
        meanings = np.array(MEANING[relation])[plan.labels]
        a = np.where(meanings == "previous", plan.second, plan.first)
        a_size = np.where(meanings == "previous", plan.second_size, plan.first_size)
        b = np.where(meanings == "previous", plan.first, plan.second)
        document, sentence = document_of(corpus, a), np.searchsorted(corpus.sentence_starts, a)
        # two sentences and more can be gathered: A is not its document's last one, nor fills the target alone
        alone = (sentence == corpus.document_starts[document + 1] - 1) | (
            np.diff(corpus.sentence_starts)[sentence] >= format._targets(epoch)[document]
        )
        free = ~alone if relation != "order" else np.ones(len(plan), bool)
        labels += np.bincount(plan.labels[free], minlength=format.num_labels)
        if relation != "order":
            assert (meanings[alone] == "other").all()
            mixed = meanings == "other"
            other = document_of(corpus, b[mixed])
            documents += np.bincount(other - (other > document[mixed]), minlength=len(documents))
        # of three sentences that end the document, A has one or two
        three = (corpus.document_starts[document + 1] - sentence == 3) & free
        three &= corpus.sentence_starts[np.minimum(sentence + 2, corpus.num_sentences)] - a < np.minimum(
            format._targets(epoch)[document], 99
        )
        ends = np.searchsorted(corpus.sentence_starts, a + a_size)[three] - sentence[three]
        cuts += np.bincount(ends - 1, minlength=2)
        epoch += 1
    for label in range(format.num_labels):
        assert inside(labels[label], labels.sum(), 1 / format.num_labels), label
    assert cuts.sum() > size / 100
    assert inside(cuts[0], cuts.sum(), 0.5)
    if relation != "order":
        assert documents.sum() > 0.3 * size
        assert is_uniform(documents)
    assert sentences.max() > 20


def test_where_the_draws_of_googles_loop_fall(corpus):
    """The other segment's first sentence is uniform."""
    format, starts = SegmentPairs(corpus, 30, 12), np.zeros(10, int)
    # ten sentences per document, so that each tenth is one sentence
    chosen = np.diff(corpus.document_starts) == 10
    assert chosen.any()
    for epoch in range(60):
        plan = format.plan(epoch)
        b = plan.second[plan.labels == 1]
        document = document_of(corpus, b)
        kept = chosen[document]
        place = np.searchsorted(corpus.sentence_starts, b[kept]) - corpus.document_starts[document[kept]]
        starts += np.bincount(place, minlength=10)
    assert starts.sum() > 500
    assert is_uniform(starts)


@few_or_many(50, 340)
def test_shares_of_shortened_targets(corpus, size):
    """Per document: a share of 0.1, and each target from 2 to max_length - 3 alike."""
    format = SegmentPairs(corpus, 20, 5)
    targets = np.concatenate([format._targets(epoch) for epoch in range(size)])
    assert len(targets) > 290 * size
    counts = np.bincount(targets, minlength=18)
    assert counts[:2].sum() == 0
    assert len(counts) == 18
    assert inside(counts[2:17].sum(), len(targets), 0.1 * 15 / 16)
    short = np.concatenate([SegmentPairs(corpus, 20, 5, "next", 1.0)._targets(e) for e in range(size // 3)])
    assert is_uniform(np.bincount(short)[2:])
    assert (SegmentPairs(corpus, 20, 5, "next", 0.0)._targets(0) == 17).all()


def cut_by_google(a: int, b: int, most: int) -> tuple[int, int]:
    """Lengths after dropping a token at a time from the longer one, from the second of equals."""
    while a + b > most:
        if a > b:
            a -= 1
        else:
            b -= 1
    return a, b


@pytest.mark.parametrize("max_length", [5, 6, 20, 63])
def test_long_pairs_are_cut_as_google_cuts(uneven, max_length):
    format = SegmentPairs(uneven, max_length, 1)
    both = 0
    for epoch in range(5):
        plan = format.plan(epoch)
        for i in range(len(plan)):
            sizes = int(plan.first_size[i]), int(plan.second_size[i])
            a, b = segments(format.build(plan, i))
            assert (len(a), len(b)) == cut_by_google(*sizes, max_length - 3)
            for part, begin, size in zip((a, b), (plan.first[i], plan.second[i]), sizes, strict=True):
                assert begin <= part.start <= part.stop <= begin + size
            both += len(a) < sizes[0] and len(b) < sizes[1]
    assert both > 5


@few_or_many(12_500, 100_000)
def test_cuts_fall_at_both_ends_alike(uneven, size):
    format = SegmentPairs(uneven, 20, 1)
    front = np.zeros(2, int)
    dropped = np.zeros(2, int)
    epoch = 0
    while dropped.min() < size:
        plan = format.plan(epoch)
        for i in range(len(plan)):
            for j, (part, begin, count) in enumerate(
                zip(
                    segments(format.build(plan, i)),
                    (plan.first[i], plan.second[i]),
                    (plan.first_size[i], plan.second_size[i]),
                    strict=True,
                )
            ):
                front[j] += part.start - begin
                dropped[j] += count - len(part)
        epoch += 1
    assert inside(front[0], dropped[0], 0.5)
    assert inside(front[1], dropped[1], 0.5)


# --- rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FullSentences, DocSentences])
@pytest.mark.parametrize("block", [7, 1 << 16])
@pytest.mark.parametrize(
    ("name", "max_length"),
    [("corpus", 5), ("corpus", 20), ("corpus", 400), ("uneven", 3), ("uneven", 5), ("uneven", 60)],
)
def test_rows_have_every_token_once_in_whole_sentences(name, max_length, block, kind, request, monkeypatch):
    corpus = request.getfixturevalue(name)
    monkeypatch.setattr(rows, "BLOCK", block)
    sizes, bounds = np.diff(corpus.sentence_starts), set(corpus.sentence_starts.tolist())
    document_ends = set(corpus.sentence_starts[corpus.document_starts].tolist())
    shown = [segments(example) for example in every(kind(corpus, max_length, 1), 4)]
    assert sorted(t for row in shown for part in row for t in part) == list(range(corpus.num_tokens))
    room = max_length - 2
    ends = np.array([(part[0], part[-1]) for row in shown for part in row])
    assert (np.diff(document_of(corpus, ends)) == 0).all()  # one document per segment
    for row, following in pairwise([*shown, None]):
        used = sum(map(len, row)) + len(row) - 1
        assert used <= room
        for before, after in pairwise(row):
            assert before.stop in document_ends
            assert after.start in document_ends
        assert kind is FullSentences or len(row) == 1
        ends_document = row[-1].stop in document_ends
        if row[-1].stop not in bounds:  # the sentence is longer than a row, and began this one
            size = sizes[sentence_of(corpus, row[-1].start)]
            assert size > room == used
            assert following[0].start == row[-1].stop
        if following is None or (ends_document and kind is DocSentences):
            continue
        # the next sentence, or as much of it as a row can hold, did not fit
        begin = following[0].start
        size = min(room, int(corpus.sentence_starts[sentence_of(corpus, begin) + 1]) - begin)
        assert used + size + ends_document > room
        assert begin == row[-1].stop or ends_document


def test_documents_of_full_rows_are_in_another_order_each_epoch(corpus):
    format = FullSentences(corpus, 64, 1)
    orders = []
    for epoch in range(2):
        parts = [part for example in every(format, epoch) for part in segments(example)]
        documents = document_of(corpus, np.array([part.start for part in parts]))
        order = documents[np.flatnonzero(np.diff(documents, prepend=-1))]
        assert sorted(order.tolist()) == list(range(corpus.num_documents))
        orders.append(order.tolist())
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


# --- the stream, bad input ----------------------------------------------------------------------------------


def test_plans_stay_as_they_are(corpus):
    """A run that is resumed by a later version must see the same sequences."""
    named = dataclasses.replace(corpus, hash="a corpus")
    digests = {}
    for format in formats_of(named):
        plan = format.plan(1)
        ids = np.concatenate([format.build(plan, i).ids for i in range(40)])
        content = plan.lengths.astype("<i4").tobytes() + ids.astype("<i8").tobytes()
        digests[kind(format)] = hashlib.sha256(content).hexdigest()[:16]
    assert digests == {
        "next": "ad0b1b6f0f0214b7",
        "order": "002cf56597845ce6",
        "three": "fc693ed98f66ff49",
        "FullSentences": "d55da26c8a95ec05",
        "DocSentences": "0ba36db81dee4bd9",
    }


def test_bad_arguments_are_named(corpus, tmp_path):
    for make, least in ((SegmentPairs, 5), (FullSentences, 3), (DocSentences, 3)):
        for bad in (least - 1, 64.0, True):
            with pytest.raises(ValueError, match=f"max_length: expected an integer >= {least}, got "):
                make(corpus, bad, 0)
        format = make(corpus, least, 0)
        with pytest.raises(ValueError, match="epoch: expected an integer"):
            format.plan(-1)
        plan = format.plan(np.int64(0))
        with pytest.raises(IndexError, match=rf"index: expected an integer in \[0, {len(plan)}\)"):
            format.build(plan, len(plan))
    rows, documents = formats_of(corpus)[3:]
    with pytest.raises(TypeError, match=r"plan: expected a .* of DocSentences\.plan, got "):
        documents.build(rows.plan(0), 0)
    with pytest.raises(ValueError, match=r"max_length: with .* tokens expected less than 2\*\*31"):
        FullSentences(dataclasses.replace(corpus, longest_sentence=2**31 - 64), 64, 0)
    with pytest.raises(ValueError, match="relation: expected one of next, order, three, got 'sop'"):
        SegmentPairs(corpus, 64, 0, "sop")
    with pytest.raises(ValueError, match=r"short_share: expected a number in \[0, 1\], got "):
        SegmentPairs(corpus, 64, 0, short_share=1.1)


def test_corpora_that_a_relation_cannot_use_are_named(tmp_path):
    for name, sizes in (("one", [[3, 4, 5]]), ("short", [[3], [4]])):
        (tmp_path / name).mkdir()
        made = numbered(tmp_path / name, sizes)
        for relation in RELATIONS:
            if (name == "one") == (relation != "order"):
                words = f"corpus: .*{name}/shards has one .*relation = {relation}"
                with pytest.raises(ValueError, match=words):
                    SegmentPairs(made, 64, 0, relation)
            else:
                assert len(SegmentPairs(made, 64, 0, relation).plan(0)) > 0
        for kind, count in ((FullSentences, 1), (DocSentences, made.num_documents)):
            assert len(kind(made, 64, 0).plan(0)) == count
