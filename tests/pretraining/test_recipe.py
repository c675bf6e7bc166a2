"""Recipes: the published numbers, what overrides them, and errors that name the field."""

from __future__ import annotations

import json
import math

import pytest

from fastbert.pretraining import recipe as module
from fastbert.pretraining.recipe import Phase, Recipe, RecipeError, names
from fastbert.pretraining.run import OBJECTIVES

TWO = [(128, 256, 900_000, 1e-4, 10_000, 20), (512, 256, 100_000, 1e-4, 10_000, 77)]  # BERT's phases
UNLIMITED = [(*phase[:5], None) for phase in TWO]
ADAM = (0.9, 0.999)
RIGHT, PLAIN, LAMB = ((kind, ADAM, 1e-6, 0.01) for kind in ("adamw-google", "adamw", "lamb"))
FAST, SPAN = ("adamw", (0.9, 0.98), 1e-6, 0.01), ("adamw", ADAM, 1e-8, 0.1)
ONCE, GOOGLE = {"kind": "linear"}, {"kind": "linear-google"}
NEXT, ORDER, THREE = (("segment-pairs", relation) for relation in ("next", "order", "three"))
FULL = ("full-sentences", None)
LAMB_PHASES = [(128, 65_536, 7_038, 6e-3, 0.2843, 20), (512, 32_768, 1_563, 4e-3, 0.128, 77)]
MOSAIC = {"kind": "linear", "final_share": 0.02}


def one(*phase):
    """The phases of a recipe with one, without a limit of predictions."""
    return [(*phase, None)]


# recipe -> objective, (format, relation), phases (tokens, batch, steps, lr, warm-up, predictions), optimizer
# (kind, betas, eps, decay), schedule, clip
PUBLISHED = {
    "bert": ("masked", NEXT, TWO, RIGHT, GOOGLE, 1.0),
    "bert-lamb": ("masked", NEXT, LAMB_PHASES, LAMB, {"kind": "poly", "power": 0.5}, 1.0),
    "roberta": ("masked", FULL, one(512, 8_192, 500_000, 6e-4, 24_000), FAST, ONCE, None),
    "albert": ("masked", ORDER, one(512, 4_096, 125_000, 1.76e-3, 3_125), LAMB, ONCE, 1.0),
    "deberta-v3-base": ("replaced-tokens", FULL, one(512, 256, 1_000_000, 1e-4, 10_000), RIGHT, GOOGLE, 1.0),
    "electra-small": ("replaced-tokens", FULL, one(128, 128, 1_000_000, 5e-4, 10_000), RIGHT, GOOGLE, 1.0),
    "electra-base": ("replaced-tokens", FULL, one(512, 256, 766_000, 2e-4, 10_000), RIGHT, GOOGLE, 1.0),
    "spanbert": ("span-boundary", FULL, one(512, 256, 2_400_000, 1e-4, 10_000), SPAN, ONCE, 1.0),
    "mosaic": ("masked", FULL, one(128, 4_096, 70_000, 5e-4, 0.06), (*FAST[:3], 1e-5), MOSAIC, None),
    "structbert": ("word-order", THREE, TWO, RIGHT, GOOGLE, 1.0),
    "ernie": ("entities", NEXT, TWO, RIGHT, GOOGLE, 1.0),
    "left-to-right": ("left-to-right", FULL, UNLIMITED, RIGHT, GOOGLE, 1.0),
    "right-to-left": ("right-to-left", FULL, UNLIMITED, RIGHT, GOOGLE, 1.0),
    "permutation": ("permutation", FULL, one(512, 8_192, 500_000, 4e-4, 40_000), PLAIN, ONCE, 1.0),
}
MASKING = {
    "albert": {"unit": "ngram"},
    "mosaic": {"share": 0.3},
    "spanbert": {"unit": "span"},
    "deberta-v3-base": {"mask_share": 1.0, "random_share": 0.0},
    "electra-small": {"mask_share": 0.85, "random_share": 0.0},
    "electra-base": {"mask_share": 0.85, "random_share": 0.0},
}
OPTIONS = {
    "electra-small": {"generator_share": 1 / 4},
    "electra-base": {"generator_share": 1 / 3},
    "deberta-v3-base": {
        "generator_share": 1,
        "generator_depth": 0.5,
        "embeddings": "disentangled",
        "weight": 10,
    },
}
SMALL = {
    "source": "a test",
    "objective": "masked",
    "format": {"kind": "full-sentences"},
    "phases": [{"max_length": 64, "batch_size": 12, "steps": 10, "lr": 1e-3}],
}


def test_every_recipe_is_in_the_table():
    assert names() == sorted(PUBLISHED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_numbers_are_the_published_ones(name):
    recipe = Recipe.load(name)
    objective, (form, relation), phases, optimizer, schedule, clip = PUBLISHED[name]
    assert objective in OBJECTIVES
    assert recipe.objective == objective
    assert recipe.format == {"kind": form, **({"relation": relation} if relation else {})}
    assert recipe.phases == tuple(Phase(*phase) for phase in phases)
    kind, betas, eps, decay = optimizer
    assert recipe.optimizer == {"kind": kind, "betas": list(betas), "eps": eps, "weight_decay": decay}
    assert recipe.schedule == schedule
    assert recipe.masking == MASKING.get(name, {})
    assert recipe.options == OPTIONS.get(name, {})
    assert (recipe.clip, recipe.dropout, recipe.static, recipe.micro_batch) == (clip, 0.1, None, None)
    assert recipe.fresh_optimizer == (name == "bert-lamb")
    assert recipe.source


def test_bert_goes_on_and_lamb_begins_anew():
    """One schedule over both phases, or one for each."""
    bert, lamb = Recipe.load("bert"), Recipe.load("bert-lamb")
    first, second = (bert.schedule_of(phase) for phase in bert.phases)
    assert bert.steps == 1_000_000
    assert first == second
    assert first(10_000) == pytest.approx(1e-4 * 0.99)
    assert first(950_000) == pytest.approx(1e-4 * 0.05)
    first, second = (lamb.schedule_of(phase) for phase in lamb.phases)
    assert (first.steps, second.steps) == (7_038, 1_563)
    assert first.warmup_steps == pytest.approx(2_001, abs=1)
    assert second.warmup_steps == pytest.approx(200, abs=1)
    assert first(5_999) == pytest.approx(6e-3 * math.sqrt(1 - 6_000 / 7_038))
    mosaic = Recipe.load("mosaic").schedule_of(Recipe.load("mosaic").phases[0])
    assert mosaic(70_000) == pytest.approx(1e-5)


def test_a_file_and_its_dictionary_are_the_recipe(tmp_path):
    for name in names():
        recipe = Recipe.load(name)
        assert Recipe.of(recipe.to_dict()) == recipe
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(recipe.to_dict()))
        assert Recipe.load(str(path)) == recipe


# --- overriding ---------------------------------------------------------------------------------------------


def test_a_changed_field_is_the_only_change():
    recipe = Recipe.load("bert")
    before = recipe.to_dict()
    for path, value, get in (
        ("masking.share", 0.3, lambda r: r.masking["share"]),
        ("masking", {"unit": "word"}, lambda r: dict(r.masking)),
        ("phases.1.lr", 3e-5, lambda r: r.phases[1].lr),
        ("phases.lr", 3e-5, lambda r: {p.lr for p in r.phases}.pop()),
        ("phases.max_predictions", None, lambda r: {p.max_predictions for p in r.phases}.pop()),
        ("optimizer.eps", 1e-8, lambda r: r.optimizer["eps"]),
        ("optimizer.kind", "lamb", lambda r: r.optimizer["kind"]),
        ("clip", None, lambda r: r.clip),
        ("dropout", 0, lambda r: r.dropout),
        ("static", 10, lambda r: r.static),
        ("micro_batch", 32, lambda r: r.micro_batch),
        ("format.short_share", 0.0, lambda r: r.format["short_share"]),
        ("objective", "word-order", lambda r: r.objective),
    ):
        changed = recipe.changed(path, value)
        assert get(changed) == value, path
        at = path.split(".")[0]
        after = changed.to_dict()
        assert after[at] != before[at]
        assert {k: v for k, v in after.items() if k != at} == {k: v for k, v in before.items() if k != at}
    assert recipe.changed("phases.1.lr", 3e-5).phases[0].lr == 1e-4
    assert recipe.to_dict() == before


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("nothing", 1, r"nothing: is no field of a recipe; expected clip, dropout"),
        ("phases.0.nothing", 1, r"phases\.0\.nothing: is no field; expected batch_size, lr"),
        ("phases.7.lr", 1, r"phases\.7\.lr: there is no 7"),
        ("phases", [{"lr": 1}], r"phases\.0\.max_length: is missing"),
        ("phases.1.batch_size", 2.0, r"phases\.1\.batch_size: expected an integer >= 1, got 2\.0"),
        ("phases.lr", -1, r"phases\.0\.lr: expected a finite number >= 0, got -1"),
        ("phases.warmup", math.nan, r"phases\.0\.warmup: expected a finite number"),
        ("phases.warmup", 2_000_000, r"schedule \(phase 0\): warmup: expected steps in \[0, 1000000\]"),
        ("objective", ["masked"], "objective: expected a text"),
        ("masking.unit", "letter", r"masking \(phase 0\): unit: expected one of token"),
        ("masking.random_specials", 1, r"masking\.random_specials: expected true or false, got 1"),
        ("format.kind", {}, r"format\.kind: expected one of segment-pairs, full-sentences"),
        ("schedule.power", 2, r"schedule \(phase 0\): power: only poly has it"),
        ("optimizer.betas", ["a", 0], "optimizer: betas: expected two numbers"),
        ("optimizer.kind", "sgd", r"optimizer: kind: expected one of adamw, adamw-google, lamb, got 'sgd'"),
        ("dropout", 1, r"dropout: expected a number in \[0, 1\), or null, got 1"),
        ("micro_batch", 100, "micro_batch: expected a divisor of batch_size, 256, got 100"),
        ("fresh_optimizer", 1, "fresh_optimizer: expected true or false, got 1"),
        ("published", [{}], r"published\.0\.source: expected a text, got None"),
        ("published", [{"source": "x", "columns": ["a"], "rows": {}}], r"published\.0\.rows: expected"),
    ],
)
def test_wrong_values_are_named(path, value, match):
    with pytest.raises(RecipeError, match=match):
        Recipe.load("bert").changed(path, value)


def test_files_that_are_no_recipes(tmp_path):
    with pytest.raises(RecipeError, match=r"recipe: 'nope' is neither a file nor one of albert, bert,"):
        Recipe.load("nope")
    with pytest.raises(RecipeError, match=r"recipe: 'gone\.json' is neither"):
        Recipe.load("gone.json")
    path = tmp_path / "own.json"
    for text, match in (
        ("[]", "expected a JSON object, got list"),
        ("{", "not valid JSON"),
        (json.dumps({**SMALL, "speed": 1}), "speed: is no field; expected clip"),
        (json.dumps({k: v for k, v in SMALL.items() if k != "format"}), "format: is missing"),
        (json.dumps({**SMALL, "masking": []}), r"masking: expected an object, got \[\]"),
    ):
        path.write_text(text)
        with pytest.raises(RecipeError, match=rf"recipe .*own\.json: .*{match}"):
            Recipe.load(str(path))


@pytest.mark.parametrize("steps", [2, 3, 7, 10, 600, 999, 1_000_000, 2_000_000])
def test_other_steps_keep_the_shares(steps):
    for name in names():
        recipe = Recipe.load(name)
        made = recipe.with_steps(steps)
        assert made.steps == steps
        assert all(phase.steps >= 1 for phase in made.phases)
        assert abs(made.phases[0].steps - steps * recipe.phases[0].steps / recipe.steps) <= 1
        for old, new in zip(recipe.phases, made.phases, strict=True):
            if old.warmup < 1:
                assert new.warmup == old.warmup
            else:
                assert abs(new.warmup - old.warmup * steps / recipe.steps) <= 0.5
            assert (new.lr, new.batch_size, new.max_length) == (old.lr, old.batch_size, old.max_length)
        made.check()
    assert Recipe.load("bert").with_steps(1000).phases[0].warmup == 10


def test_warm_up_of_a_phase_with_its_own_schedule():
    """Its share is one of the phase's steps, also where rounding leaves the phase more or fewer."""
    phases = [dict(SMALL["phases"][0], steps=n, warmup=w) for n, w in ((90, 9), (10, 10))]
    recipe = Recipe.of({**SMALL, "phases": phases, "fresh_optimizer": True})
    made = recipe.with_steps(14)
    assert [(p.steps, p.warmup) for p in made.phases] == [(13, 1), (1, 1)]
    made.check()
    for steps in (2, 5, 14, 37, 200):
        for old, new in zip(recipe.phases, recipe.with_steps(steps).phases, strict=True):
            assert new.warmup == round(old.warmup * new.steps / old.steps)


@pytest.mark.parametrize("steps", [1, 2.0, None])
def test_too_few_steps(steps):
    with pytest.raises(RecipeError, match="steps: expected an integer >= 2, got"):
        Recipe.load("bert").with_steps(steps)


def test_micro_batches():
    """As many sequences as have 8,192 tokens, a divisor of the batch; or as many as are asked for."""
    for name, cuts in (
        ("bert", [(4, 64), (16, 16)]),
        ("bert-lamb", [(1024, 64), (2048, 16)]),
        ("roberta", [(512, 16)]),
        ("electra-small", [(2, 64)]),
    ):
        recipe = Recipe.load(name)
        assert [recipe.cut(phase) for phase in recipe.phases] == cuts
    for batch, length, cut in ((12, 2048, (3, 4)), (7, 2048, (7, 1)), (5, 10_000, (5, 1)), (3, 8, (1, 3))):
        phase = Phase(length, batch, 1, 1e-3)
        assert Recipe.of(SMALL).cut(phase) == cut
        assert cut[0] * cut[1] == batch
    assert module.MICRO_TOKENS == 8192
    own = Recipe.load("bert").changed("micro_batch", 8)
    assert [own.cut(phase) for phase in own.phases] == [(32, 8), (32, 8)]


def test_masks_of_a_phase():
    bert = Recipe.load("bert")
    assert [bert.masking_of(phase).max_predictions for phase in bert.phases] == [20, 77]
    own = bert.changed("masking.max_predictions", 5)
    assert [own.masking_of(phase).max_predictions for phase in own.phases] == [5, 5]
    assert Recipe.load("roberta").masking_of(Recipe.load("roberta").phases[0]).max_predictions is None
    assert not bert.by_tokens
    assert bert.changed("format", {"kind": "doc-sentences"}).by_tokens
