"""Runs of every recipe: what is trained, saved, grown, refused, and resumed to the same bits."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import fastbert
from fastbert.graphs import training
from fastbert.graphs.recorder import EagerRecorder
from fastbert.models.families import FAMILIES
from fastbert.pretraining.corpus import Corpus
from fastbert.pretraining.recipe import Recipe, RecipeError, names
from fastbert.pretraining.run import Growth, model_of, objective_of, stages
from fastbert.pretraining.vocabulary import train
from fastbert.training import loop
from fastbert.training.loop import TrainingError
from fastbert.training.stream import Stream
from tests.support.small_runs import (
    LENGTHS,
    broken_at,
    config,
    cut_after,
    family_of,
    moments,
    ran,
    small,
    weights,
)
from tests.support.tiny_training import digests, log

# recipe -> its losses, and what else is counted
LOSSES = {
    "albert": ("mlm", "sentence"),
    "bert": ("mlm", "sentence"),
    "bert-lamb": ("mlm", "sentence"),
    "deberta-v3-base": ("mlm", "rtd"),
    "electra-base": ("mlm", "rtd"),
    "electra-small": ("mlm", "rtd"),
    "ernie": ("mlm", "sentence"),
    "left-to-right": ("left_to_right",),
    "mosaic": ("mlm",),
    "permutation": ("permutation",),
    "right-to-left": ("right_to_left",),
    "roberta": ("mlm",),
    "spanbert": ("mlm", "sbo"),
    "structbert": ("mlm", "order", "sentence"),
}
SAVED = {
    "albert": {"model": "AlbertForPreTraining"},
    "deberta-v3-base": {"model": "DebertaV2ForReplacedTokens", "generator": "DebertaV2ForMaskedLM"},
    "electra-base": {"model": "ElectraForPreTraining", "generator": "ElectraForMaskedLM"},
    "electra-small": {"model": "ElectraForPreTraining", "generator": "ElectraForMaskedLM"},
    **{name: {"model": "BertForPreTraining"} for name in ("bert", "bert-lamb", "ernie", "structbert")},
}


@pytest.fixture(scope="module")
def corpus(text_file, tokenizer_dir, tmp_path_factory) -> Corpus:
    """The topics, with a few phrases and entities."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = ({"text": "the expression", "kind": "phrase"}, {"text": "class"}, {"text": "the statement"})
    (folder / "names.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = Corpus.write([text_file], tokenizer_dir, folder / "corpus", spans=[folder / "names.jsonl"])
    assert found.num_spans > 50
    return found


@pytest.fixture(scope="module")
def plain(text_file, tokenizer_dir, tmp_path_factory) -> Corpus:
    """The same without spans."""
    return Corpus.write([text_file], tokenizer_dir, tmp_path_factory.mktemp("plain") / "corpus")


@pytest.fixture(scope="module")
def texts_of(text_file) -> list[str]:
    """Some sentences."""
    return [*list(filter(None, text_file.read_text().splitlines()))[:40], "A [MASK] and a [SEP]."]


def same_logits(folder, corpus: Corpus) -> None:
    """A saved model gives transformers' class and this package's the same outputs."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    kind = "AutoModelForPreTraining" if "PreTraining" in name else "AutoModelForMaskedLM"
    if name == "DebertaV2ForReplacedTokens":  # transformers has its encoder
        kind, name = "AutoModel", "DebertaV2Model"
    theirs, report = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert type(theirs).__name__ == name
    report["unexpected_keys"] = [k for k in report["unexpected_keys"] if "mask_predictions" not in k]
    assert not any(report.values()), report
    ours = getattr(fastbert, name).from_pretrained(folder).eval()
    ids = torch.from_numpy(corpus.tokens(50, 50 + 20).astype(np.int64))[None]
    with torch.no_grad():
        expected, found = theirs.eval()(ids), ours(ids)
    for key, value in expected.items():
        assert value.abs().max() > 1e-3
        assert (getattr(found, key) - value).abs().max() < 2e-5, key


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_recipe_trains_and_is_loaded_by_transformers(name, corpus, texts_of, tmp_path):
    assert names() == sorted(LOSSES)
    recipe = small(name)
    result = ran(corpus, config(corpus, family_of(name)), recipe, tmp_path)
    lines = log(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert (result.step, result.checkpoint) == (4, tmp_path / "step-000004")
    assert {**result.last, "step": 4} == lines[-1]
    for line in lines:
        assert {key for key in line if key.endswith("_loss")} == {f"{loss}_loss" for loss in LOSSES[name]}
        assert {key for key in line if key.endswith("_accuracy")} == {f"{k}_accuracy" for k in LOSSES[name]}
        given = {"rtd": recipe.options.get("weight", 50.0)}
        total = sum(given.get(loss, 1.0) * line[f"{loss}_loss"] for loss in LOSSES[name])
        assert line["loss"] == pytest.approx(total)
        assert 0 < line["grad_norm"] < math.inf
    if "rtd" in LOSSES[name]:
        assert all(0 < line["replaced_share"] <= 1 for line in lines)
    # [special] [token] [special] are as many classes as the vocabulary has
    for loss in set(LOSSES[name]) & {"mlm", "sbo", "order", "permutation", "left_to_right", "right_to_left"}:
        assert abs(lines[0][f"{loss}_loss"] - math.log(corpus.vocab_size)) < 0.6
    sizes = [0, *(line["tokens"] for line in lines)]
    assert all(lines[i]["sequences"] == 4 * (i + 1) for i in range(4))
    mean = np.diff(sizes) / 4
    if len(recipe.phases) == 2:
        assert max(mean[:2]) <= LENGTHS[0] < min(mean[2:]) <= LENGTHS[1]
    else:
        assert 10 < min(mean) <= max(mean) <= LENGTHS[0]
    saved = {path.parent.name for path in result.checkpoint.glob("*/config.json")}
    assert saved == SAVED.get(name, {"model": ""}).keys()
    for folder in saved:
        place = result.checkpoint / folder
        assert json.loads((place / "config.json").read_text())["architectures"] == [
            SAVED.get(name, {"model": "BertForMaskedLM"})[folder]
        ]
        same_logits(place, corpus)
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
        for text in texts_of:
            # between special tokens are the ids of the corpus
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == (
                corpus.tokenizer.encode(text, add_special_tokens=False).ids
            )
        first, last = weights(tmp_path, 1, folder), weights(tmp_path, 4, folder)
        changed = [key for key in last if not torch.equal(first[key], last[key])]
        assert len(changed) > 0.8 * len(last)
        for kind, i in corpus.special_ids.items():
            assert getattr(tokenizer, f"{kind}_token_id") == i
        assert tokenizer.model_max_length == max(phase.max_length for phase in recipe.phases)


def test_the_saved_table_of_words_is_the_sum_of_two(corpus, tmp_path):
    """DeBERTa-v3's model has the generator's table and its own difference, which the heads keep."""
    checkpoint = ran(corpus, config(corpus, "deberta-v2"), small("deberta-v3-base"), tmp_path).checkpoint
    table, difference, total = (
        load_file(checkpoint / name)[f"{prefix}deberta.embeddings.word_embeddings.weight"]
        for name, prefix in (
            ("generator/model.safetensors", ""),
            ("heads.safetensors", "model."),
            ("model/model.safetensors", ""),
        )
    )
    assert difference.abs().max() > 1e-4
    assert torch.equal(total, table + difference)


def test_stages_of_entities_are_options(corpus, plain, tmp_path):
    """JSON's lists of lists; masks are of the stage of the epoch."""
    recipe = small("ernie", options={"stages": [["entity", 0], ["phrase", 2]]})
    objective = objective_of(recipe, recipe.phases[0], corpus, 0)
    assert objective.stages == (("entity", 0), ("phrase", 2))
    assert [objective.stage(epoch).masking.unit for epoch in (0, 1, 2)] == ["entity", "entity", "phrase"]
    ran(corpus, config(corpus), recipe, tmp_path)
    for wrong in (small("ernie"), small("roberta", masking__unit="phrase")):
        with pytest.raises(RecipeError, match=r"objective: .* masks phrases or entities, but .* has none"):
            ran(plain, config(plain), wrong, tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("bert", "roberta"),
        ("bert", "albert"),
        ("roberta", "bert"),
        ("xlm-roberta", "mosaic"),
        ("distilbert", "bert"),
        ("electra", "spanbert"),
        ("albert", "bert"),
        ("ernie", "structbert"),
        ("modernbert", "mosaic"),
    ],
)
def test_other_families(family, name, corpus, tmp_path):
    """Any family learns masked tokens; where its class has no head for pairs, the run has one."""
    recipe = small(name, 2, dropout=0.25)
    options = {"max_position_embeddings": 64, "pad_token_id": 1}
    result = ran(corpus, config(corpus, family, **options), recipe, tmp_path)
    place = result.checkpoint / "model"
    same_logits(place, corpus)
    values = json.loads((place / "config.json").read_text())
    assert values["pad_token_id"] == corpus.special_ids["pad"] == 0
    rates = ["hidden_dropout_prob", "attention_probs_dropout_prob"]
    rates += ["mlp_dropout"] if family == "modernbert" else []
    assert [values[FAMILIES[family].spelt(rate)] for rate in rates] == [0.25] * len(rates)
    assert ("sentence_loss" in result.last) == (recipe.format["kind"] == "segment-pairs")


# --- the first weights --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stock(corpus, tmp_path_factory):
    """A directory of transformers' BertForPreTraining."""
    path = tmp_path_factory.mktemp("stock")
    torch.manual_seed(0)
    values = config(corpus).to_dict()
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    made = transformers.BertConfig(max_position_embeddings=51, **{key: values[key] for key in kept})
    transformers.BertForPreTraining(made).save_pretrained(path)
    return path


def test_training_begins_with_the_weights_of_a_directory(corpus, stock, tmp_path):
    """With a learning rate of 0 they are what is saved; files of either kind do."""
    recipe = small("bert", 2, phases__lr=0)
    result = ran(corpus, stock, recipe, tmp_path / "a")
    theirs = transformers.BertForPreTraining.from_pretrained(stock)
    back = transformers.BertForPreTraining.from_pretrained(result.checkpoint / "model")
    for (key, value), other in zip(theirs.state_dict().items(), back.state_dict().values(), strict=True):
        assert torch.equal(value, other), key
    digest = json.loads((tmp_path / "a" / "config.json").read_text())["first_weights"]
    assert len(digest) == 64
    (tmp_path / "bin").mkdir()
    torch.save(theirs.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "config.json").write_text((stock / "config.json").read_text())
    result = ran(corpus, tmp_path / "bin", recipe, tmp_path / "b")
    again = weights(tmp_path / "b", 2)
    assert all(torch.equal(value, again[key]) for key, value in weights(tmp_path / "a", 2).items())
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    ran(corpus, tmp_path / "shards", recipe, tmp_path / "c")
    again = weights(tmp_path / "c", 2)
    assert all(torch.equal(value, again[key]) for key, value in weights(tmp_path / "a", 2).items())
    # a run knows its first weights
    with torch.no_grad():
        theirs.bert.pooler.dense.bias[0] += 1
    theirs.save_pretrained(tmp_path / "other")
    with pytest.raises(TrainingError, match=rf"first_weights: the run in .* has '{digest}', got '"):
        ran(corpus, tmp_path / "other", recipe, tmp_path / "a")


def test_a_head_that_the_directory_lacks_is_new(corpus, stock, tmp_path):
    whole = transformers.BertForPreTraining.from_pretrained(stock)
    path = tmp_path / "base"
    whole.bert.save_pretrained(path)
    with pytest.warns(UserWarning, match=r"has no weights for cls\..*freshly initialised"):
        ran(corpus, path, small("bert", 2, phases__lr=0), tmp_path / "run")
    found = weights(tmp_path / "run", 2)
    for key, value in whole.bert.state_dict().items():
        assert torch.equal(found[f"bert.{key}"], value)
    assert found["cls.seq_relationship.weight"].std() > 0.01


def test_models_that_do_not_fit(corpus, stock, tokenizer_dir, text_file, tmp_path):
    run, recipe = tmp_path / "run", small("bert", 2)
    for values, match in (
        ({"vocab_size": 599}, r"model: vocab_size is 599, but the corpus .* has ids below 600"),
        ({"model_type": "mpnet"}, r"model: mpnet's \[PAD\] must have the id 1, but the corpus has 0"),
        ({"max_position_embeddings": 47}, "model: has 47 positions, but the recipe has sequences of 48"),
    ):
        with pytest.raises(ValueError, match=match):
            ran(corpus, config(corpus, **values), recipe, run)
    # RoBERTa's first two places are not used, or one if padding is id 0
    with pytest.raises(ValueError, match="model: has 47 positions"):
        ran(corpus, config(corpus, "roberta", max_position_embeddings=48), recipe, run)
    with pytest.raises(ValueError, match=r"model: .*expected a config\.json, or a directory with one"):
        ran(corpus, tmp_path, recipe, run)
    train([text_file], tmp_path / "other", vocab_size=500)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "other" / name).write_bytes((stock / name).read_bytes())
    with pytest.raises(ValueError, match=r"model: .*tokenizer\.json differs from the tokenizer that made"):
        ran(corpus, tmp_path / "other", recipe, run)
    (tmp_path / "other" / "tokenizer.json").write_bytes((tokenizer_dir / "tokenizer.json").read_bytes())
    values = json.loads((stock / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**values, "pad_token_id": 3}))
    with pytest.raises(ValueError, match="model: pad_token_id is 3, but the corpus has 0"):
        ran(corpus, tmp_path / "other", recipe, run)
    assert not run.exists()


# --- resume -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(corpus, tmp_path_factory):
    """The directory of a run without interruption, by its recipe and its growth."""
    found = {}

    def of(name: str, growth: Growth | None = None) -> Path:
        if (name, id(growth)) not in found:
            run = found[name, id(growth)] = tmp_path_factory.mktemp("whole") / "run"
            recipe, layers = (small(name), 2) if growth is None else (constant(name), 4)
            ran(corpus, config(corpus, family_of(name), num_hidden_layers=layers), recipe, run, growth=growth)
        return found[name, id(growth)]

    return of


@pytest.mark.sweep
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("name", ["bert", "bert-lamb", "electra-small", "deberta-v3-base", "spanbert"])
def test_a_run_that_resumes_from_any_checkpoint_has_the_same_bits(name, step, whole_run, corpus, tmp_path):
    expected = digests(whole_run(name))
    assert expected["step"] == 4
    run, said = cut_after(whole_run(name), step, tmp_path / "run"), []
    ran(corpus, config(corpus, family_of(name)), small(name), run, say=said.append, workers=int(step == 2))
    assert f"{run / f'step-{step:06d}'}: resumes from step {step}" in said
    assert digests(run) == expected


def test_a_run_with_layerdrop_resumes_to_the_same_bits(corpus, tmp_path):
    recipe = small("electra-small", layerdrop=0.5)
    given = corpus, config(corpus, "electra", num_hidden_layers=4), recipe
    ran(*given, tmp_path / "whole")
    ran(*given, cut_after(tmp_path / "whole", 2, tmp_path / "run"))
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")
    ran(*given[:2], small("electra-small"), tmp_path / "plain")
    assert log(tmp_path / "plain") != log(tmp_path / "whole")
    for bad in (1.0, -0.1, "x", True):
        with pytest.raises(RecipeError, match=r"layerdrop: expected a number in \[0, 1\)"):
            small("electra-small", layerdrop=bad)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("dtype", {"dtype": "bf16"}),
        ("masking.share", {"recipe": {"masking__share": 0.2}}),
        ("model.num_hidden_layers", {"layers": 3}),
        ("growth", {"growth": Growth(((1, 1), (2, None)))}),
        ("corpus", {"plain": True}),
    ],
)
def test_what_a_run_depends_on_must_stay(field, options, whole_run, corpus, plain):
    run, options = whole_run("bert"), dict(options)
    model = config(corpus, num_hidden_layers=options.pop("layers", 2))
    text = plain if options.pop("plain", False) else corpus
    recipe = small("bert", **options.pop("recipe", {}))
    with pytest.raises(TrainingError, match=rf"^{field}: the run in {re.escape(str(run))} has "):
        ran(text, model, recipe, run, **options)


# --- growth -------------------------------------------------------------------------------------------------

GROWN = Growth(((1, 2), (2, 2), (4, None)))
COPIED = Growth(GROWN.stages, moments="copied")
FROZEN = Growth(GROWN.stages, freeze=True)


def layer(found: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """The tensors of a layer, by their names in it."""
    prefix = f"bert.encoder.layer.{number}."
    return {key.split(prefix)[1]: value for key, value in found.items() if prefix in key}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    assert a.keys() == b.keys()
    assert a
    return all(torch.equal(value, b[key]) for key, value in a.items())


def constant(name: str = "roberta", steps: int = 6) -> Recipe:
    return small(name, steps, schedule={"kind": "constant"})


@pytest.mark.sweep
@pytest.mark.parametrize("growth", [GROWN, COPIED], ids=["fresh", "copied"])
def test_layers_are_added_at_the_border(growth, corpus, tmp_path):
    """What is saved there is the deep model, stacked from the shallow one; the log and the order continue."""
    ran(corpus, config(corpus, num_hidden_layers=1), constant(steps=2), tmp_path / "one")
    ran(corpus, config(corpus, num_hidden_layers=4), constant(), tmp_path / "grown", growth=growth)
    one, two = weights(tmp_path / "one", 2), weights(tmp_path / "grown", 2)
    assert log(tmp_path / "one") == log(tmp_path / "grown")[:2]
    for number in (0, 1):
        assert equal(layer(two, number), layer(one, 0))
    rest = {key: value for key, value in one.items() if ".layer." not in key}
    assert equal(rest, {key: value for key, value in two.items() if ".layer." not in key})
    before, after = weights(tmp_path / "grown", 3), weights(tmp_path / "grown", 4)
    assert [f"bert.encoder.layer.{n}.output.dense.weight" in before for n in range(3)] == [True, True, False]
    assert equal(layer(after, 2), layer(after, 0))
    assert equal(layer(after, 3), layer(after, 1))
    assert not equal(layer(after, 0), layer(after, 1))
    state = moments(tmp_path / "grown", 2)
    if growth.moments == "fresh":
        assert state == {}
    else:
        old = moments(tmp_path / "one", 2)
        assert equal(layer(state, 1), layer(old, 0))
        assert equal(layer(state, 0), layer(old, 0))
        kept = {key: value for key, value in old.items() if ".layer." not in key}
        assert equal(kept, {key: value for key, value in state.items() if ".layer." not in key})
    steps = {int(v) for key, v in moments(tmp_path / "grown", 6).items() if key.endswith("/step")}
    assert steps == ({2} if growth.moments == "fresh" else {6})
    assert log(tmp_path / "grown")[-1]["sequences"] == 24
    last = json.loads((tmp_path / "grown/step-000006/model/config.json").read_text())
    assert last["num_hidden_layers"] == 4


def test_only_new_layers_train_but_for_the_first_and_the_last_depth(corpus, tmp_path):
    ran(corpus, config(corpus, num_hidden_layers=4), constant(), tmp_path, growth=FROZEN)
    found = {step: weights(tmp_path, step) for step in range(1, 7)}
    words = "bert.embeddings.word_embeddings.weight"
    for step, new in ((1, (0,)), (3, (1,)), (5, (0, 1, 2, 3))):  # of the steps from `step` to the next
        depth = {1: 1, 3: 2, 5: 4}[step]
        for number in range(depth):
            same = equal(layer(found[step], number), layer(found[step + 1], number))
            assert same == (number not in new), (step, number)
        assert torch.equal(found[step][words], found[step + 1][words]) == (step == 3)


def test_a_new_phase_with_a_fresh_optimizer_has_no_copied_moments(corpus):
    made = stages(
        corpus, config(corpus), None, constant("bert-lamb", 8), 0, Growth(((1, 4), (2, None)), "copied")
    )
    assert [(stage.enter is not None, stage.moments) for stage in made] == [(False, None), (True, None)]
    made = stages(corpus, config(corpus), None, constant("bert", 8), 0, Growth(((1, 4), (2, None)), "copied"))
    assert made[1].moments is not None


@pytest.mark.sweep
@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("growth", [GROWN, COPIED, FROZEN], ids=["fresh", "copied", "frozen"])
def test_a_run_that_breaks_at_a_border_goes_on_to_the_same_bits(
    growth, every, step, whole_run, corpus, tmp_path
):
    """Before, at and after each border, whether or not there is a checkpoint of the step before."""
    given = corpus, config(corpus, num_hidden_layers=4), constant(), tmp_path
    broken_at(step, *given, growth=growth, save_every=every)
    assert not (tmp_path / "step-000006").exists()
    ran(*given, growth=growth, save_every=every)
    assert digests(tmp_path) == digests(whole_run("roberta", growth))


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["electra-small", "deberta-v3-base", "spanbert", "albert"])
def test_other_objectives_grow(name, corpus, tmp_path):
    """All exported models, and heads of the objective are kept."""
    groups = {"num_hidden_groups": 1} if name == "albert" else {}
    model = config(corpus, family_of(name), num_hidden_layers=2, **groups)
    growth = Growth(((1, 2), (2, None)), moments="copied")
    ran(corpus, model, constant(name, 4), tmp_path / "whole", growth=growth)
    for path in (tmp_path / "whole" / "step-000004").glob("*/config.json"):
        half = (name, path.parent.name) == ("deberta-v3-base", "generator")
        assert json.loads(path.read_text())["num_hidden_layers"] == (1 if half else 2)
        same_logits(path.parent, corpus)
    broken_at(3, corpus, model, constant(name, 4), tmp_path / "broken", growth=growth, save_every=2)
    ran(corpus, model, constant(name, 4), tmp_path / "broken", growth=growth, save_every=2)
    assert digests(tmp_path / "broken") == digests(tmp_path / "whole")
    # what the objective has besides the models, and the moments of it
    shallow = config(corpus, family_of(name), num_hidden_layers=1, **groups)
    ran(corpus, shallow, constant(name, 2), tmp_path / "one")
    own = [run / "step-000002" / "heads.safetensors" for run in (tmp_path / "one", tmp_path / "whole")]
    old, new = map(load_file, own)
    assert old.keys() == new.keys()
    assert all(torch.equal(value, new[key]) for key, value in old.items())
    assert bool(old) == (name in ("spanbert", "deberta-v3-base"))
    before, after = (moments(tmp_path / run, 2) for run in ("one", "whole"))
    assert {int(value) for key, value in after.items() if key.endswith("/step")} == {2}
    outside = [key for key in before if ".layer." not in key and "_layers" not in key]
    assert len(outside) > 10
    assert all(torch.equal(before[key], after[key]) for key in outside)


def test_growth_that_cannot_be(corpus, stock, tmp_path):
    model, recipe = config(corpus, num_hidden_layers=4), constant()
    for growth, match in (
        (Growth(((1, 3), (2, 3), (4, None))), "grow: 4 layers begin after 6 steps, but the run has 6"),
        (Growth(((1, 3), (2, None))), "grow: ends with 2 layers, but the model has 4"),
    ):
        with pytest.raises(ValueError, match=match):
            ran(corpus, model, recipe, tmp_path / "run", growth=growth)
    names = ["previous", "learned"]
    fixed = [names if layer < 3 else names[::-1] for layer in range(4)]
    model = config(corpus, num_hidden_layers=4, num_attention_heads=2, fixed_heads=fixed)
    with pytest.raises(ValueError, match="grow: needs one list of fixed heads for all layers"):
        ran(corpus, model, recipe, tmp_path / "run", growth=Growth(((2, 1), (4, None))))
    with pytest.raises(ValueError, match="grow: needs a model without weights"):
        ran(corpus, stock, recipe, tmp_path / "run", growth=Growth(((1, 1), (2, None))))
    with pytest.raises(ValueError, match="moments: expected fresh or copied, got 'old'"):
        Growth(((1, 1), (2, None)), moments="old")
    for wrong in ((), ((1, None), (2, None))):
        with pytest.raises(ValueError, match="stages: expected the steps of all stages but the last"):
            Growth(wrong)
    assert not (tmp_path / "run").exists()


def test_stages_go_on_where_the_one_before_ended(corpus):
    """A phase's examples, and the learning rate of all phases or of each."""
    for name, firsts in (("bert", [0, 2, 5, 7]), ("bert-lamb", [0, 2, 0, 2])):
        made = stages(
            corpus,
            config(corpus, num_hidden_layers=4),
            None,
            small(name, 10),
            0,
            Growth(((1, 2), (2, 5), (4, None))),
        )
        assert [stage.first_step for stage in made] == firsts
        assert [stage.first_micro_batch for stage in made] == [0, 4, 0, 4]
        assert [stage.fresh_optimizer for stage in made] == [False, False, name == "bert-lamb", False]
        assert made[0].source is made[1].source
        assert made[2].source is made[3].source
        assert [stage.source.format.max_length for stage in made] == [24, 24, 48, 48]
        assert [len(stage.build().model.base_model.layer_list()) for stage in made] == [1, 2, 2, 4]


# --- packed sequences, static masks -------------------------------------------------------------------------


def test_packed_batches_have_equal_tokens(corpus, tmp_path):
    recipe = small("roberta", 2, format={"kind": "doc-sentences"}, dropout=0)
    recipe = recipe.changed("phases.batch_size", 8).changed("micro_batch", 4)
    model, _ = model_of(config(corpus), corpus, recipe)
    (stage,) = stages(corpus, model, None, recipe, 0)
    assert (stage.tokens, stage.sequences, stage.micro_batches) == (4 * LENGTHS[0], None, 2)
    batch = Stream(stage.source, 0, tokens=stage.tokens).batch(0)
    assert len(batch.lengths) > 4  # shorter rows make room for more
    assert abs(batch.lengths.sum() - stage.tokens) < LENGTHS[0]
    ends = batch.inputs["cu_seqlens"]
    ids, special = batch.inputs["input_ids"], corpus.special_ids
    assert (ids[ends[:-1]] == special["cls"]).all()
    assert (ids[ends[1:] - 1] == special["sep"]).all()
    recipe = small("roberta", 4, format={"kind": "doc-sentences"})
    ran(corpus, config(corpus), recipe, tmp_path)
    tokens = [line["tokens"] for line in log(tmp_path)]
    for step, total in enumerate(tokens, 1):
        assert abs(total - step * 4 * LENGTHS[0]) < LENGTHS[0]


def test_static_masks_repeat(corpus):
    recipe = small("bert", static=2)
    objective = objective_of(recipe, recipe.phases[0], corpus, 0)

    def ids(epoch: int) -> list[int]:
        plan = objective.plan(epoch)
        return [i for n in range(8) for i in objective.example(plan, epoch, n).masked.ids.tolist()]

    assert ids(0) == ids(2) == ids(4)
    assert ids(1) == ids(3) != ids(0)
    dynamic = objective_of(small("bert"), recipe.phases[0], corpus, 0)
    plan = dynamic.plan(2)
    assert [i for n in range(8) for i in dynamic.example(plan, 2, n).masked.ids.tolist()] != ids(0)


# --- errors and tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("objective", "bert", r"objective: expected one of masked, replaced-tokens, .*, got 'bert'"),
        ("objective", "replaced-tokens", "format: replaced tokens have no loss for the 2 classes"),
        ("phases.0.max_length", 3, "max_length: expected an integer >= 5, got 3"),
    ],
)
def test_recipes_that_no_run_can_use(path, value, match, corpus, tmp_path):
    with pytest.raises(ValueError, match=match):
        ran(corpus, config(corpus), small("bert").changed(path, value), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# of the recipes whose attention takes a bias of its own, the model itself computes every step
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_replayed_steps_are_the_same_training(name, corpus, tmp_path, monkeypatch):
    """As on a GPU: recorded encoders, to the same bits also after an interruption."""
    args = corpus, config(corpus, family_of(name)), small(name)
    ran(*args, tmp_path / "plain")
    monkeypatch.setattr(training, "recorder_for", EagerRecorder)
    made = []
    monkeypatch.setattr(
        loop, "encoders_of", lambda module: made.append(training.encoders_of(module)) or made[-1]
    )
    ran(*args, tmp_path / "replayed")
    replays = sum(each.replays for graphed in made for each in graphed)
    assert (replays > 0) == (name != "permutation")
    for step, last in ((1, 1e-6), (4, 1e-4)):
        found, wanted = (weights(tmp_path / run, step) for run in ("replayed", "plain"))
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-3, atol=last, msg=key)
    ran(*args, cut_after(tmp_path / "replayed", 2, tmp_path / "resumed"))
    assert digests(tmp_path / "resumed") == digests(tmp_path / "replayed")
    ran(*args, tmp_path / "without", graphs=False)
    assert digests(tmp_path / "without") == digests(tmp_path / "plain")
