"""`fastbert analyze report`: one page that anyone can open, with no number that is not in the JSON file."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import transformers

import fastbert
from fastbert.analysis import pictures
from fastbert.analysis.attention import attention_statistics
from fastbert.analysis.fixed import fitting, fixed_heads
from fastbert.analysis.heads import ablate
from fastbert.analysis.syntax import parse
from fastbert.analysis.treebank import as_examples, read_conllu
from fastbert.cli.analyses.report import name_of
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.tasks.examples import masked, paired, tokenized
from fastbert.tasks.inputs import read
from tests.cli.conftest import LINES, WORDS, save, write_rows
from tests.cli.conftest import call as analyze
from tests.support import blank_figures
from tests.support.hf_models import hf_model
from tests.support.pages import Page, is_rounding, value_at
from tests.support.treebank import TREES, conllu

pytestmark = pytest.mark.sweep
LINES = [
    *LINES,
    'the <b>cat</b> & "the $mat$ {dog}" sat .',
    "the cat ran to the dog , the dog ran to the cat .",
]
# a name of a directory that is none of HTML, of a template or of mathematics
STRANGE = "a <b> & {n} $x$"
ALWAYS = ["brief", "model", "attention", "patterns", "maps", "heads", "importance", "fixed"]
ALWAYS += ["effective", "geometry"]
OF_TREES = ["syntax", "probe"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models with a tokenizer, as transformers saves them, and files of examples."""
    place = tmp_path_factory.mktemp("report")
    for name, auto in (("words", "MaskedLM"), ("classes", "SequenceClassification"), ("both", "PreTraining")):
        save(place / name, hf_model("bert", getattr(transformers, f"AutoModelFor{auto}")))
    save(place / STRANGE, hf_model("bert", seed=1))
    (place / "lines.txt").write_text("".join(line + "\n" for line in LINES))
    (place / "trees.conllu").write_text(conllu(TREES * 8))
    rows = ({"text": line, "pair": "the cat", "class": i % 2} for i, line in enumerate(LINES))
    write_rows(place / "rows.jsonl", rows)
    return place


def call(folder, model, file, output, *more):
    return analyze(folder, "report", model, file, output, *more)


# name -> (model, file, further arguments, sections)
RUNS = {
    "words": (
        "words",
        "lines.txt",
        ["--seed", "3", "--against", STRANGE, "--conllu", "trees.conllu"],
        [*ALWAYS[:8], "change", *ALWAYS[8:], *OF_TREES],
    ),
    "strange": (STRANGE, "lines.txt", [], ALWAYS),
    "classes": ("classes", "rows.jsonl", ["--pairs", "--labels", "class", "--mode", "uniform"], ALWAYS),
    "pairs": (STRANGE, "rows.jsonl", ["--pairs"], ALWAYS),
    "one": ("words", "lines.txt", ["--max-examples", "1"], ALWAYS),
}
DRAWN = ("strange",)  # the other pages have blank figures


@pytest.fixture(scope="module")
def made(folder, tmp_path_factory):
    """Run name -> (text, page, numbers, arrays), made when it is asked for."""
    kept = {}

    def get(name):
        if name not in kept:
            model, file, more, _ = RUNS[name]
            more = [folder / each if each in (STRANGE, "trees.conllu") else each for each in more]
            output = tmp_path_factory.mktemp("out") / name
            with pytest.MonkeyPatch.context() as patch:
                if name in DRAWN:
                    blank_figures.replace(patch, blank_figures.DRAWN)
                assert call(folder, model, file, output, *more) == 0
            assert {path.name for path in output.iterdir()} == {
                f"report.{e}" for e in ("html", "json", "npz")
            }
            text = (output / "report.html").read_text()
            numbers = json.loads((output / "report.json").read_text())
            kept[name] = text, Page(text), numbers, np.load(output / "report.npz")
        return kept[name]

    return get


@pytest.mark.parametrize("name", RUNS)
def test_a_page_is_whole_and_asks_for_nothing(made, name):
    text, page, numbers, _ = made(name)
    assert len(page.ids) == len(set(page.ids))
    assert page.wanted <= set(page.ids)
    assert page.loads == []
    for tag in ("script", "link", "iframe", "object", "embed", "base"):
        assert tag not in page.tags
    assert "@import" not in text
    assert not re.search(r"\son\w+=", re.sub(r">[^<]*<", "><", text))
    sections = [each for each in page.ids if each in (*ALWAYS, "change", *OF_TREES)]
    assert sections == RUNS[name][3]
    assert list(numbers["sections"]) == sections[1:]
    # a name for each figure, for those who do not see it
    assert page.tags["figure"] == page.tags["svg"] == len(page.texts["title"]) - 1
    assert all(page.texts["title"])


@pytest.mark.parametrize("name", RUNS)
def test_every_number_is_in_the_json_file(made, name):
    _, page, numbers, _ = made(name)
    assert len(page.shown) > 100
    for path, value, text in page.shown:
        found = value_at(numbers, path)
        if value is None:
            assert found == text
        else:
            assert float(value) == found
            assert is_rounding(text, found), (path, found, text)
    # and none is written in a cell by hand
    assert [text for text in page.bare if re.search(r"\d", text)] == []


def test_every_number_of_a_figure_has_its_place(made):
    """The extremes that a caption names are those of the arrays."""
    _, page, numbers, arrays = made("words")
    found = numbers["sections"]["attention"]["figures"]["to-words"]
    means = arrays["attention/to_words"].mean(0)
    assert found["lowest"]["value"] == pytest.approx(means.min())
    assert found["highest"]["value"] == pytest.approx(means.max())
    layer, head = np.unravel_index(means.argmax(), means.shape)
    assert found["highest"]["name"] == f"{layer + 1}-{head + 1}"
    captions = [text for text in page.texts["figcaption"] if text.startswith("Attention to words")]
    assert f"highest {means.max():.1%} (head {layer + 1}-{head + 1})" in captions[0]


def test_the_numbers_are_the_librarys(folder, made):
    _, _, numbers, arrays = made("words")
    model = fastbert.AutoModelForMaskedLM.from_pretrained(folder / "words").eval()
    examples = tokenized(load_tokenizer(folder / "words"), **read(folder / "lines.txt"))
    found = attention_statistics(model, examples)
    np.testing.assert_allclose(arrays["attention/entropy"], found.entropy, rtol=1e-5)
    entropy = numbers["sections"]["attention"]["intervals"]["entropy"]
    assert entropy == pytest.approx(found.intervals(seed=3)["entropy"]._asdict())
    assert (entropy["n"], entropy["seed"]) == (6, 3)
    shares = numbers["sections"]["patterns"]["intervals"]
    assert {name: each["mean"] for name, each in shares.items()} == pytest.approx(found.shares())
    scored = ablate(model, masked(examples, 4, seed=3))
    for name, each in numbers["sections"]["maps"]["maps"].items():
        layer, head = each["layer"], each["head"]
        assert each["name"] == f"{layer + 1}-{head + 1}"
        assert each["loss"]["mean"] == pytest.approx(scored.loss_change()[layer, head], abs=1e-5)
        here = each["example"]
        assert each["number"] == here + 1
        change = scored.loss[here, layer, head] - scored.base_loss[here]
        assert each["loss here"] == pytest.approx(change, abs=1e-5)
        ids = examples.ids[examples.starts[here] : examples.starts[here + 1]]
        assert each["tokens"] == [WORDS.split()[i] for i in ids]
        assert arrays[f"maps/{name}"].shape == (len(ids), len(ids))


@pytest.mark.parametrize("name", ["words", "classes"])
def test_each_map_has_its_ablation_beside_it(made, name):
    _, page, numbers, _ = made(name)
    maps = numbers["sections"]["maps"]["maps"]
    captions = [text for text in page.texts["figcaption"] if "has this pattern on" in text]
    assert len(captions) == len(maps) > 0
    for caption, each in zip(captions, maps.values(), strict=True):
        change = f"{each['loss']['mean']:+.4f} [{each['loss']['low']:+.4f}, {each['loss']['high']:+.4f}]"
        assert f"Without this head the loss changes by {change.replace('-', '−')}" in caption
        assert "examples of the change: n = 6, seed" in caption


def test_without_a_loss_it_says_so(made):
    _, page, numbers, _ = made("strange")
    missing = [text for text in page.texts["p"] if text.startswith("Not computed")]
    assert (
        missing
        == ["Not computed: the model has no head (BertModel), and there are no pairs of texts (--pairs)."] * 3
    )
    captions = [text for text in page.texts["figcaption"] if "has this pattern on" in text]
    assert len(captions) == len(numbers["sections"]["maps"]["maps"]) > 0
    assert all(
        "Without this head: not known, since there is no loss. 1 example of 6" in each for each in captions
    )
    assert "loss" not in next(iter(numbers["sections"]["maps"]["maps"].values()))


def test_pairs_of_an_encoder_are_compared(folder, made):
    """Each text is read alone, two are one case, and what a map's text loses is that of its pair."""
    _, page, numbers, _ = made("pairs")
    model = fastbert.AutoModel.from_pretrained(folder / STRANGE, add_pooling_layer=False).eval()
    examples = paired(load_tokenizer(folder / STRANGE), **read(folder / "rows.jsonl", pairs=True))
    scored = ablate(model, examples, pooling="mean")
    assert (numbers["n"], numbers["sections"]["heads"]["cases"], len(scored.base_loss)) == (12, 6, 6)
    for each in numbers["sections"]["maps"]["maps"].values():
        layer, head, case = each["layer"], each["head"], each["example"] // 2
        change = scored.loss[:, layer, head] - scored.base_loss
        assert each["loss"]["mean"] == pytest.approx(change.mean(), abs=1e-5)
        assert each["loss here"] == pytest.approx(change[case], abs=1e-5)
        assert each["loss"]["n"] == 6
    captions = [text for text in page.texts["figcaption"] if "without each head" in text]
    assert len(captions) == 2
    assert all("examples: n = 6, seed 0" in text for text in captions)
    said = "".join(page.texts["p"])
    assert said.count("A model that makes all texts alike has the largest cosine") == 3
    assert "how wrong the model is" not in said
    assert not any("worse" in text for text in page.texts["figcaption"])
    assert not any("can go" in text or "loss falls" in text for text in page.texts["th"])
    assert [text for text in page.texts["th"] if "heads are worth" in text] == ["What the heads are worth"]
    assert "not known: these pairs have no labels (--labels)" in page.texts["td"]


def test_names_are_text(folder, made):
    """Those of files, directories and tokens, whatever they look like."""
    _, page, _, _ = made("strange")
    assert page.texts["h1"] == [f"What the 9 heads of {folder.name}/{STRANGE} do"]
    assert page.texts["title"][0] == page.texts["h1"][0]
    assert name_of("/c/hub/models--org--all-MiniLM/snapshots/0a1b") == "org/all-MiniLM"
    page = made("words")[1]
    assert ("sections/change/against", None, STRANGE) in [
        (path, value, text.rsplit("/", 1)[-1]) for path, value, text in page.shown
    ]


def test_tokens_are_text(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "token_map", blank_figures.DRAWN["token_map"])
    (tmp_path / "strange.txt").write_text(LINES[4] + "\n" + LINES[4] + "\n")
    assert call(folder, STRANGE, tmp_path / "strange.txt", tmp_path / "out") == 0
    page = Page((tmp_path / "out" / "report.html").read_text())
    for token in ("<", "b", ">", "/", "&", '"', "$", "{", "}"):
        assert token in page.texts["text"]
    assert "cat" not in page.texts.get("b", [])


def test_one_example_has_no_intervals(folder, made, tmp_path, capsys):
    text, _, numbers, _ = made("one")
    assert 'class="interval"' not in text
    assert numbers["sections"]["attention"]["intervals"]["entropy"]["low"] is None
    assert "significant" not in numbers["sections"]["heads"]
    assert "removable" not in numbers["sections"]["importance"]
    capsys.readouterr()
    assert call(folder, STRANGE, "lines.txt", tmp_path / "out", "--max-examples", "1") == 0
    assert "one example: intervals over examples need two" in capsys.readouterr().out
    text, _, _, _ = made("words")
    assert text.count('class="interval"') > 40


def test_one_call_one_result(folder, made, tmp_path):
    model, file, more, _ = RUNS["classes"]
    assert call(folder, model, file, tmp_path / "out", *more) == 0
    text, _, numbers, _ = made("classes")
    assert (tmp_path / "out" / "report.html").read_text() == text
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == numbers


@pytest.mark.parametrize("family", ["roberta", "distilbert", "electra", "albert-groups", "mpnet"])
def test_all_families(folder, tmp_path, family):
    """Numbers, texts and maps of each."""
    save(tmp_path / "model", hf_model(family, transformers.AutoModelForMaskedLM))
    assert call(tmp_path, "model", folder / "lines.txt", tmp_path / "out") == 0
    numbers = json.loads((tmp_path / "out" / "report.json").read_text())
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert [each for each in page.ids if each in ALWAYS] == ALWAYS
    assert "Not computed" not in "".join(page.texts["p"])
    for path, value, text in page.shown:
        assert value is None or is_rounding(text, value_at(numbers, path))


NO_LABELS = "the loss of BertForSequenceClassification needs labels (--labels)."
NO_MEASURE = "this program cannot measure the loss of BertForPreTraining per example."


@pytest.mark.parametrize(
    ("model", "more", "reasons"),
    [
        ("classes", (), [NO_LABELS] * 3),
        ("both", (), [NO_MEASURE] * 3),
        (STRANGE, ("--max-examples", "3"), ["no word is in 5 places of these texts; more text is needed"]),
    ],
)
def test_why_something_is_not_computed(folder, tmp_path, model, more, reasons):
    assert call(folder, model, "lines.txt", tmp_path / "out", *more) == 0
    said = Page((tmp_path / "out" / "report.html").read_text()).texts["p"]
    said = [text for text in said if text.startswith("Not computed: ")]
    assert said[-len(reasons) :] == [f"Not computed: {reason}" for reason in reasons]


def test_a_treebank_of_the_report(folder, made):
    """The numbers and arrays are those of the analyses by themselves."""
    _, page, numbers, arrays = made("words")
    model = fastbert.AutoModelForMaskedLM.from_pretrained(folder / "words").eval()
    sentences = read_conllu(folder / "trees.conllu")
    examples = as_examples(load_tokenizer(folder / "words"), sentences)
    parsing = parse(model, examples, sentences)
    found = numbers["sections"]["syntax"]
    assert (found["sentences"], found["left out"], found["arcs"]) == (64, 0, len(parsing.sentence))
    np.testing.assert_array_equal(arrays["syntax/right"], parsing.right)
    best = parsing.best(seed=3)
    assert len(best) == len(found["best"]) > 1
    for ours, theirs in zip(best, found["best"], strict=True):
        assert theirs["name"] == f"{ours.layer + 1}-{ours.head + 1}"
        assert theirs["accuracy"]["mean"] == pytest.approx(ours.accuracy.mean)
    assert found["figures"]["arcs"]["highest"]["value"] == pytest.approx(parsing.accuracy().max())
    assert "head 8-11: 94.3%; offset: 51.7%" in page.texts["td"]
    probes = numbers["sections"]["probe"]
    counts = arrays["probe/edge/counts"].sum(1)
    f1 = 2 * counts[:, 0] / (counts[:, 1] + counts[:, 2])
    np.testing.assert_allclose(probes["edge"]["f1"], f1)
    assert probes["edge"]["best"]["score"]["mean"] == pytest.approx(f1.max())
    assert probes["edge"]["best"]["layer"] == f1.argmax()
    uuas = arrays["probe/structural/found"].sum(1) / arrays["probe/structural/edges"].sum()
    np.testing.assert_allclose(probes["structural"]["uuas"], uuas)
    at_random = arrays["probe/structural/found_random_weights"].sum(1)
    at_random = at_random / arrays["probe/structural/edges"].sum()
    found = probes["structural"]["random"]
    assert (found["layer"], found["score"]["mean"]) == (at_random.argmax(), pytest.approx(at_random.max()))
    assert len(probes["summary"]) == 2


@pytest.mark.parametrize(
    ("trees", "expected"),
    [
        (TREES[:5], {"syntax": "that the model can read", "probe": "that the model can read"}),
        ((*TREES[:4], *(TREES[3],) * 12), {"probe": "of two words or more"}),
        ((TREES[3],) * 12, {"syntax": "of two words or more", "probe": "of two words or more"}),
    ],
)
def test_too_few_trees(folder, tmp_path, trees, expected):
    (tmp_path / "few.conllu").write_text(conllu(trees))
    assert call(folder, STRANGE, "lines.txt", tmp_path / "out", "--conllu", tmp_path / "few.conllu") == 0
    page = Page((tmp_path / "out" / "report.html").read_text())
    reasons = [text for text in page.texts["p"] if text.startswith("Not computed: the treebank has fewer")]
    assert len(reasons) == len(expected)
    for text, what in zip(reasons, expected.values(), strict=True):
        assert text == f"Not computed: the treebank has fewer than 10 sentences {what}"


def test_fixed_heads_of_the_report(folder, made):
    """The patterns of the report's own statistics, scored on the masked examples."""
    _, _, numbers, arrays = made("words")
    model = fastbert.AutoModelForMaskedLM.from_pretrained(folder / "words").eval()
    examples = tokenized(load_tokenizer(folder / "words"), **read(folder / "lines.txt"))
    assignment = fitting(attention_statistics(model, examples))
    found = fixed_heads(model, masked(examples, 4, seed=3), assignment)
    np.testing.assert_array_equal(arrays["fixed/assignment"], assignment)
    np.testing.assert_array_equal(arrays["fixed/loss"], found.loss)
    ours = numbers["sections"]["fixed"]
    assert (ours["count"], ours["heads"]) == (found.count, assignment.size)
    for key, zero in (("patterns", False), ("zero", True)):
        assert ours[key]["intervals"]["score"]["mean"] == pytest.approx(found.score_change(zero=zero))
        assert ours[key]["intervals"]["loss"]["mean"] == pytest.approx(found.loss_change(zero=zero))
