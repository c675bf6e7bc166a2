"""Small runs of pre-training: a recipe's own objective with short sequences, small batches and few steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from fastbert.models.config import EncoderConfig
from fastbert.pretraining.corpus import Corpus
from fastbert.pretraining.recipe import Recipe
from fastbert.pretraining.run import pretrain
from fastbert.training.loop import Result, Trainer

LENGTHS = (24, 48)  # of the first phase and of the second
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}

# How DeBERTa-v3 scores distances
V3 = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 16,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}


class Broken(Exception):
    """What ends a run in its middle."""


def small(name: str, steps: int = 4, **changes: Any) -> Recipe:
    """A recipe with batches of 4 sequences in 2 micro-batches. `__` in a change's name is a dot."""
    recipe = Recipe.load(name).with_steps(steps)
    for number, length in list(enumerate(LENGTHS))[: len(recipe.phases)]:
        recipe = recipe.changed(f"phases.{number}.max_length", length)
        recipe = recipe.changed(f"phases.{number}.steps", steps // len(recipe.phases))
    recipe = recipe.changed("phases.batch_size", 4).changed("micro_batch", 2)
    recipe = recipe.changed("phases.warmup", 0).changed("phases.lr", 1e-3)
    for path, value in changes.items():
        recipe = recipe.changed(path.replace("__", "."), value)
    return recipe


def family_of(name: str) -> str:
    """The family that a recipe is for."""
    families = {"electra": "electra", "albert": "albert", "deberta": "deberta-v2"}
    return families.get(name.partition("-")[0], "bert")


def config(corpus: Corpus, family: str = "bert", **values: Any) -> EncoderConfig:
    """A config of a tiny model."""
    given = {"model_type": family, "vocab_size": corpus.vocab_size, "max_position_embeddings": 51}
    return EncoderConfig.from_dict({**given, **SIZES, **(V3 if family == "deberta-v2" else {}), **values})


def ran(corpus: Corpus, model: Any, recipe: Any, output: Path, **options: Any) -> Result:
    """A run in which every checkpoint remains, and every step is in the log."""
    quiet = {"save_every": 1, "keep": 100, "log_every": 1, "tensorboard": False, "progress": False}
    return pretrain(corpus, model, recipe, output, **{**quiet, **options})


def broken_at(step: int, *arguments: Any, **options: Any) -> None:
    """The same run, which breaks within a step, counted from 0."""
    whole = Trainer._step

    def fails(self: Trainer, *given: Any) -> dict[str, Any]:
        if self.step == step:
            raise Broken
        return whole(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", fails)
        with pytest.raises(Broken):
            ran(*arguments, **options)


def cut_after(run: Path, step: int, to: Path) -> Path:
    """A copy of a run without its checkpoints after a step."""
    shutil.copytree(run, to)
    for folder in to.glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    return to


def weights(run: Path, step: int, folder: str = "model") -> dict[str, Tensor]:
    """The weights of a checkpoint."""
    return load_file(run / f"step-{step:06d}" / folder / "model.safetensors")


def moments(run: Path, step: int) -> dict[str, Tensor]:
    """The state of a checkpoint's optimizer, "name/key" -> value."""
    return load_file(run / f"step-{step:06d}" / "optimizer.safetensors")
