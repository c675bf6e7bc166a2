"""Files of trees, every way they can be wrong, and the examples that are made of them."""

from __future__ import annotations

import re

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from fastbert.analysis.treebank import as_examples, fitting, pieces_of, read_conllu
from fastbert.tasks.examples import KINDS
from tests.analysis.conftest import part
from tests.support.treebank import TREES, block, conllu

FILE = """\
# sent_id = 1
# text = I don't.
1\tI\tI\tPRON\tPRP\tCase=Nom|Number=Sing\t2\tnsubj\t2:nsubj\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\tSpaceAfter=No
2\tdo\tdo\tAUX\tVBP\t_\t0\troot\t0:root\t_
3\tn't\tnot\tPART\tRB\tPolarity=Neg\t2\tadvmod\t2:advmod\t_
3.1\tgo\tgo\tVERB\t_\t_\t_\t_\t2:conj\t_
4\t.\t.\tPUNCT\t.\t_\t2\tpunct\t2:punct\t_

\t \r

# a comment alone

1\tcent vingt\tcent vingt\tNUM\t_\t_\t0\troot\t_\t_\r
"""


def test_a_file(tmp_path):
    path = tmp_path / "a.conllu"
    path.write_bytes(b"\xef\xbb\xbf" + FILE.encode())
    one, other = read_conllu(path)
    assert one.words == ("I", "do", "n't", ".")
    assert one.upos == ("PRON", "AUX", "PART", "PUNCT")
    assert one.heads.tolist() == [2, 0, 2, 2]
    assert one.heads.dtype == np.int64
    assert one.relations == ("nsubj", "root", "advmod", "punct")
    assert one.lemmas == ("I", "do", "not", ".")
    assert one.features == ("Case=Nom|Number=Sing", "_", "Polarity=Neg", "_")
    assert len(one) == 4
    assert (other.words, other.heads.tolist()) == (("cent vingt",), [0])
    # the end of a file ends a sentence too
    path.write_text(FILE.rstrip("\n"))
    assert len(read_conllu(str(path))) == 2


def test_the_first_sentences(tmp_path):
    """What follows them is not read."""
    path = tmp_path / "a.conllu"
    path.write_text(FILE.replace("cent vingt\tNUM", "NUM"))
    assert [s.words[0] for s in read_conllu(path, max_sentences=1)] == ["I"]
    with pytest.raises(ValueError, match="line 14"):
        read_conllu(path, max_sentences=2)
    with pytest.raises(ValueError, match="max_sentences: expected an integer >= 1, got 0"):
        read_conllu(path, max_sentences=0)


CAT = TREES[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ": expected one sentence at least, found none"),
        (block(CAT).replace("NOUN\t_", "NOUN"), ", line 2: expected 10 columns with tabs between, found 9"),
        (block(CAT) + "8\tx\n", ", line 8: expected 10 columns with tabs between, found 2"),
        (block(CAT).replace("4\ton", "5\ton"), ", line 4: ID: expected 4, the next of the sentence, got '5'"),
        # an empty line is missing
        (block(CAT) + block(CAT), ", line 8: ID: expected 8, the next of the sentence, got '1'"),
        (block(CAT).replace("\tcat\t", "\t\t", 1), ", line 2: FORM: expected a text, got ''"),
        (block(CAT).replace("ADP", " "), ", line 4: UPOS: expected a text, got ' '"),
        (block(CAT).replace("nsubj", ""), ", line 2: DEPREL: expected a text, got ''"),
        (
            block(CAT).replace("6\tcase", "8\tcase"),
            ", line 4: HEAD: expected 0 to 7, a word of the sentence, got '8'",
        ),
        (block(CAT).replace("6\tcase", "-1\tcase"), ", line 4: HEAD: expected 0 to 7, .*, got '-1'"),
        (block(CAT).replace("6\tcase", "9" * 5000 + "\tcase"), ", line 4: HEAD: expected 0 to 7"),
        (block(CAT).replace("0\troot", "2\troot"), ", line 1: HEAD: expected one root .*, found 0"),
        (block(CAT).replace("6\tcase", "0\tcase"), ", line 4: HEAD: expected one root .*, found 2"),
        (block(CAT).replace("6\tcase", "4\tcase"), ", line 4: HEAD: the heads from here go in a circle"),
        (
            block(CAT) + "\n" + block(CAT).replace("3\tobl", "4\tobl"),
            ", line 12: HEAD: the heads from here go in a circle, not to the root",
        ),
        ("1-2\tab" + "\t_" * 8 + "\n", ", line 1: expected a sentence with a word at least"),
    ],
)
def test_bad_files(tmp_path, text, expected):
    path = tmp_path / "a.conllu"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path)) + expected):
        read_conllu(path)


def test_a_circle_of_any_length(tmp_path):
    """A ring of n - 1 words beside the root; and a chain of as many, which is a tree."""
    path = tmp_path / "a.conllu"
    for count in (3, 4, 5, 8, 9, 16, 17, 33):
        chain = [f"w{i} X {i} dep" for i in range(count)]
        path.write_text(block(" | ".join(chain)))
        assert len(read_conllu(path)[0]) == count
        ring = [f"w{i} X {i if i > 1 else count} dep" for i in range(1, count)]
        path.write_text(block(" | ".join(["w0 X 0 root", *ring])))
        with pytest.raises(ValueError, match="line 2: HEAD: the heads from here go in a circle"):
            read_conllu(path)


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "a.conllu"
    path.write_bytes(block(CAT).encode() + b"\n1\tcaf\xe9\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 9: not UTF-8")):
        read_conllu(path)
    with pytest.raises(FileNotFoundError, match="nothing"):
        read_conllu(tmp_path / "nothing")


# -- examples ------------------------------------------------------------------------------------------------


def check_words(examples, sentences):
    """Each word of each sentence once, in order, -1 around them; and `pieces_of` finds all their tokens."""
    starts, ends = pieces_of(examples)
    assert len(starts) == len(ends) == sum(map(len, sentences))
    assert starts.dtype == ends.dtype == np.int64
    word = 0
    for number, sentence in enumerate(sentences):
        words = part(examples, "words", number)
        assert words[0] == words[-1] == -1
        assert sorted(words[1:-1]) == words[1:-1]
        assert sorted(set(words[1:-1])) == [*range(len(sentence))]
        for i in range(len(sentence)):
            rows = examples.starts[number] + np.flatnonzero(np.array(words) == i)
            assert [*range(starts[word], ends[word])] == rows.tolist()
            word += 1


def test_examples(tokenizer, sentences):
    examples = as_examples(tokenizer, sentences)
    check_words(examples, sentences)
    assert part(examples, "words", 2) == [-1, 0, 1, 1, -1]
    assert [tokenizer.id_to_token(i) for i in part(examples, "ids", 2)] == (
        ["[CLS]", "it", "rain", "##ed", "[SEP]"]
    )
    assert [KINDS[k] for k in part(examples, "kinds", 0)] == (
        ["the first token", *["words"] * 6, "periods and commas", "separators"]
    )
    assert set(examples.segments) == set(examples.types) == {0}


def test_the_words_are_the_files(tokenizer, tmp_path):
    """Not those that the tokenizer would find: "sat." is one word here, and so is "the cat"."""
    path = tmp_path / "a.conllu"
    text = block("a NOUN 2 nsubj | sat. VERB 0 root | it PRON 2 obj").replace("\ta\t", "\tthe cat\t", 1)
    path.write_text(text)
    examples = as_examples(tokenizer, read_conllu(path))
    assert examples.words.tolist() == [-1, 0, 0, 1, 1, 2, -1]
    starts, ends = pieces_of(examples)
    assert (starts.tolist(), ends.tolist()) == ([1, 3, 5], [3, 5, 6])


def byte_level(prefix_space: bool) -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer as RoBERTa's, trained on the trees."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and it rained"] * 3, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=prefix_space
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


@pytest.mark.parametrize("prefix_space", [False, True])
def test_byte_level_tokenizers(sentences, prefix_space):
    """As transformers reads words with a space before each."""
    theirs = byte_level(True)
    examples = as_examples(byte_level(prefix_space).backend_tokenizer, sentences)
    check_words(examples, sentences)
    for number, sentence in enumerate(sentences):
        expected = theirs(list(sentence.words), is_split_into_words=True)
        assert part(examples, "ids", number) == expected["input_ids"]
        words = [-1 if word is None else word for word in expected.word_ids()]
        assert part(examples, "words", number) == words
    # in a sequence of steps too
    tokenizer = byte_level(False).backend_tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert as_examples(tokenizer, sentences).ids.tolist() == examples.ids.tolist()


def test_sentence_pieces(sentences):
    """As XLM-R's: a mark before each word."""
    pieces = [("<s>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    words = sorted({word for sentence in sentences for word in sentence.words} - {"rained"})
    pieces += [("▁" + word, -1.0) for word in words] + [("ed", -3.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    examples = as_examples(tokenizer, sentences)
    check_words(examples, sentences)
    assert [tokenizer.id_to_token(i) for i in part(examples, "ids", 2)] == (
        ["<s>", "▁it", "▁rain", "ed", "</s>"]
    )


def test_a_sentence_that_is_too_long(tokenizer, sentences):
    """Is named, or left out."""
    expected = r"sentences\[1\]: 15 tokens, expected 9 at most: 'a big dog ran to a …'"
    with pytest.raises(ValueError, match=expected):
        as_examples(tokenizer, sentences, max_length=9)
    kept = fitting(tokenizer, sentences, 9)
    assert [sentences.index(sentence) for sentence in kept] == [0, 2, 3, 4, 5, 7]
    check_words(as_examples(tokenizer, kept, max_length=9), kept)
    assert fitting(tokenizer, sentences) == sentences
    with pytest.raises(ValueError, match=r"max_length: expected an integer >= 1, got 2\.5"):
        fitting(tokenizer, sentences, 2.5)


def test_a_word_of_which_nothing_is_left(tokenizer, tmp_path):
    """BERT's normalizer takes away what has no width."""
    path = tmp_path / "a.conllu"
    path.write_text(conllu([TREES[2], "it PRON 2 nsubj | \u200b SYM 0 root"]))
    sentences = read_conllu(path)
    expected = r"sentences\[1\]: the tokenizer leaves nothing of word 1, '\\u200b': 'it \\u200b'"
    with pytest.raises(ValueError, match=expected):
        as_examples(tokenizer, sentences)
    assert fitting(tokenizer, sentences) == sentences[:1]
