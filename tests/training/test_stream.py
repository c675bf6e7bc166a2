"""The stream of examples: each once per epoch, the same for any reader and order."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fastbert.training.stream import Stream, loaded
from tests.support.tiny_training import Numbered, NumberedPlan

SIZES = ({"sequences": 5}, {"sequences": 100}, {"tokens": 31}, {"tokens": 1000})


def epochs_of(stream: Stream, count: int) -> list[list[int]]:
    """The indices of the first epochs, in the order of the stream."""
    found: list[list[int]] = [[] for _ in range(count)]
    number = 0
    while True:
        for epoch, index in stream.examples(number):
            if epoch == count:
                return found
            found[epoch].append(index)
        number += 1


def equal(a, b) -> bool:
    """Whether two batches hold the same."""
    return (
        a.inputs.keys() == b.inputs.keys()
        and all(np.array_equal(a.inputs[key], b.inputs[key]) for key in a.inputs)
        and a.counts == b.counts
        and np.array_equal(a.lengths, b.lengths)
    )


@pytest.mark.parametrize("size", SIZES)
def test_every_index_once_per_epoch(size):
    source = Numbered()
    found = epochs_of(Stream(source, 1, **size), 4)
    for epoch, indices in enumerate(found):
        assert sorted(indices) == list(range(37 + epoch % 3))
    orders = [tuple(i for i in indices if i < 37) for indices in found]
    assert len(set(orders)) == 4  # each epoch has an order of its own
    assert tuple(range(37)) not in orders
    other = epochs_of(Stream(source, 2, **size), 1)[0]
    assert other != found[0]  # and each seed
    assert epochs_of(Stream(dataclasses.replace(source, seed=6), 1, **size), 1)[0] != found[0]


def test_a_remainder_joins_the_next_epoch():
    """37, 38 and 39 examples in micro-batches of 5: the eighth has two of the first epoch."""
    stream = Stream(Numbered(), 1, sequences=5)
    assert [epoch for epoch, _ in stream.examples(7)] == [0, 0, 1, 1, 1]
    assert [epoch for epoch, _ in stream.examples(14)] == [1] * 5
    assert [epoch for epoch, _ in stream.examples(15)] == [2] * 5
    # one that is longer than three epochs
    assert [epoch for epoch, _ in Stream(Numbered(), 1, sequences=120).examples(0)] == (
        [0] * 37 + [1] * 38 + [2] * 39 + [3] * 6
    )


@pytest.mark.parametrize("tokens", [12, 31, 700])
def test_tokens_are_cut_where_examples_begin(tokens):
    source = Numbered()
    stream = Stream(source, 1, tokens=tokens)
    at = 0
    for number in range(3 + 1000 // tokens):
        examples = stream.examples(number)
        assert examples
        for epoch, index in examples:
            assert number * tokens <= at < (number + 1) * tokens
            at += int(source.plan(epoch).lengths[index])
    assert at >= number * tokens


@pytest.mark.parametrize("size", SIZES)
def test_any_number_can_be_asked_for_first(size):
    forwards = Stream(Numbered(), 3, **size)
    expected = [forwards.examples(number) for number in range(40)]
    for order in (range(39, -1, -1), [17, 3, 39, 3, 0, 38, 5], [39]):
        stream = Stream(Numbered(), 3, **size)
        assert all(stream.examples(number) == expected[number] for number in order)
    # with the sizes that a checkpoint kept, no plan of the epochs before is made

    class Last(Numbered):
        planned: tuple = ()

        def plan(self, epoch):
            self.planned += (epoch,)
            return super().plan(epoch)

    source = Last()
    stream = Stream(source, 3, **size, sizes=[list(pair) for pair in forwards.sizes])
    assert stream.examples(39) == expected[39]
    assert set(source.planned) == {epoch for epoch, _ in expected[39]}


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:This DataLoader will create 5")
@pytest.mark.parametrize("size", [{"sequences": 5}, {"tokens": 31}])
def test_workers_change_nothing(size):
    made = {}
    for workers in (0, 2, 5):
        stream = Stream(Numbered(), 3, **size)
        made[workers] = list(loaded(stream, range(4, 30, 2), workers)), stream.sizes
    alone, sizes = made[0]
    assert len(alone) == 13
    assert len(sizes) >= 2
    for workers in (2, 5):
        batches, known = made[workers]
        assert len(batches) == 13
        assert all(map(equal, batches, alone)), workers
        assert known == sizes  # what the parent has learned, for a checkpoint
    assert not equal(alone[0], alone[1])


class Broken(Numbered):
    """A source that fails in the third epoch."""

    def example(self, plan, epoch, index):
        if epoch == 2:
            kind, *words = self.error
            raise kind(*words)
        return super().example(plan, epoch, index)

    error = (ValueError, "corpus: tokens.bin: was changed")


class Untransferable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_source_is_the_same_with_workers(workers):
    source = Broken()
    with pytest.raises(ValueError, match=r"^corpus: tokens\.bin: was changed$"):
        list(loaded(Stream(source, 3, sequences=5), range(40), workers))
    source.error = (Untransferable, "one", "two")
    with pytest.raises((Untransferable, RuntimeError), match="one two"):
        list(loaded(Stream(source, 3, sequences=5), range(40), workers))


def test_sizes_are_compared():
    stream = Stream(Numbered(), 3, sequences=5, sizes=[(37, 256), (38, 1)])
    stream.examples(0)
    with pytest.raises(ValueError, match=r"sizes: epoch 1 has \(38, 259\), but the checkpoint has \(38, 1\)"):
        stream.examples(8)


def test_bad_arguments_are_named():
    for values, match in (
        ({}, "sequences, tokens: expected one of the two"),
        ({"sequences": 0}, "sequences: expected an integer >= 1, got 0"),
        ({"tokens": 1.5}, "tokens: expected an integer >= 1, got 1.5"),
    ):
        with pytest.raises(ValueError, match=match):
            Stream(**{"source": Numbered(), "seed": 0, **values})
    with pytest.raises(ValueError, match="tokens: expected at least the longest example, 12, got 11"):
        Stream(Numbered(), 0, tokens=11).examples(0)
    with pytest.raises(IndexError, match="number: expected an integer >= 0, got -1"):
        Stream(Numbered(), 0, tokens=12).examples(-1)

    class Empty(Numbered):
        def plan(self, epoch):
            return NumberedPlan(np.array([3, 0] if self.size else [], int))

    for size in (0, 1):
        with pytest.raises(ValueError, match="source: epoch 0: expected examples of at least one token"):
            Stream(Empty(size), 0, sequences=2).examples(0)
