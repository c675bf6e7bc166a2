"""Models of transformers, ours with the same weights, and inputs and labels for both."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterable, Sequence

import torch
import transformers

import fastbert
from fastbert.layers.modules import attach
from fastbert.models.bert import BertModel
from fastbert.models.config import EncoderConfig
from fastbert.models.encoder import dropout_seed
from fastbert.models.heads.task_model import TaskModel
from fastbert.ops.dropout import keep_mask_2d
from tests.support.hf_models import FAMILY_NAMES, batch, hf_model

TASKS = (
    "ForMaskedLM",
    "ForPreTraining",
    "ForNextSentencePrediction",
    "ForSequenceClassification",
    "ForMultipleChoice",
    "ForTokenClassification",
    "ForQuestionAnswering",
)
SEQUENCE_TASKS = (
    "ForPreTraining",
    "ForNextSentencePrediction",
    "ForSequenceClassification",
    "ForMultipleChoice",
)
NEXT_SENTENCE = ("bert", "ernie", "mobilebert")
_EMBEDDERS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
# The heads of the families that do not have all of transformers' heads
_HAVE = {
    "modernbert": (*_EMBEDDERS, "ForMultipleChoice", "ForQuestionAnswering"),
    "nomic_bert": _EMBEDDERS,
    "gte": _EMBEDDERS,
    "eurobert": _EMBEDDERS,
    "longformer": (*_EMBEDDERS, "ForMultipleChoice", "ForQuestionAnswering"),
    "deberta-v2": (*_EMBEDDERS, "ForMultipleChoice", "ForQuestionAnswering"),
    "jina_embeddings_v3": (*_EMBEDDERS, "ForQuestionAnswering"),
}
CASES = [
    (n, t)
    for t in TASKS
    for n in FAMILY_NAMES
    if (t != "ForNextSentencePrediction" or n in NEXT_SENTENCE) and t in _HAVE.get(n, TASKS)
]
# the keys of every family
NO_DROPOUT = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "classifier_dropout_prob": 0.0,
    "classifier_dropout": 0.0,
    "embedding_dropout": 0.0,
    "mlp_dropout": 0.0,
}
NUM_LABELS = {"ForSequenceClassification": 5, "ForTokenClassification": 5}


def native(hf: torch.nn.Module) -> BertModel | TaskModel:
    """Our model of the same name with the weights of transformers' one, in eval."""
    model = getattr(fastbert, type(hf).__name__)(EncoderConfig.from_hf(hf.config)).eval()
    model.load_state_dict(hf.state_dict())
    return model


def model_of(name: str, **config) -> BertModel:
    """Our encoder with the weights of transformers' model, in eval."""
    return native(hf_model(name, **config))


def build(name: str, task: str, **config) -> tuple[torch.nn.Module, TaskModel]:
    """(transformers' model, ours with its weights), both in eval."""
    config = {"num_labels": NUM_LABELS.get(task, 2), **config}
    hf = hf_model(name, getattr(transformers, "AutoModel" + task), **config)
    model = getattr(fastbert, "AutoModel" + task).from_config(EncoderConfig.from_hf(hf.config)).eval()
    model.load_state_dict(hf.state_dict(), strict=True)
    return hf, model


pair = functools.lru_cache(maxsize=None)(build)  # shared between tests that change neither


@functools.cache
def trio(name: str, task: str) -> tuple[torch.nn.Module, ...]:
    """(transformers' model, ours, transformers' model accelerated), shared between tests that change none.

    The last is missing for a family that `accelerate` does not fuse.
    """
    hf, model = pair(name, task)
    if not model.family.accelerated:
        return hf, model
    return hf, model, fastbert.accelerate(copy.deepcopy(hf))


def real_task(model: torch.nn.Module) -> str:
    """The task of the model's class, which AutoModelForPreTraining may choose differently."""
    return "For" + type(model).__name__.split("For")[1]


def inputs_for(name: str, task: str, seed: int = 0, **kwargs) -> dict[str, torch.Tensor]:
    """A padded batch that the head accepts. Classifiers read position 0 and get no left padding."""
    inputs = batch(name, seed=seed, **{"batch_size": 4, "seqlen": 18, **kwargs})
    if task in SEQUENCE_TASKS:
        inputs["attention_mask"][:, 0] = 1
        inputs["input_ids"][:, 0] = 7
    if task == "ForMultipleChoice":
        inputs = {k: v.reshape(2, 2, -1) for k, v in inputs.items()}
    return inputs


def labels_for(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor], seed: int = 0
) -> dict[str, torch.Tensor]:
    """Labels of the head's kind, none of them on a masked token."""
    g = torch.Generator().manual_seed(seed)
    kept, config, task = inputs["attention_mask"].bool(), model.config, real_task(model)
    size, seqlen = kept.shape[0], kept.shape[-1]
    if task == "ForMaskedLM" or (task == "ForPreTraining" and config.model_type != "electra"):
        chosen = kept & (torch.rand(kept.shape, generator=g) < 0.4)
        labels = torch.randint(0, config.vocab_size, kept.shape, generator=g).where(chosen, -100)
        pair_name = {"albert": "sentence_order_label"}.get(config.model_type, "next_sentence_label")
        pair_label = torch.randint(0, 2, (size,), generator=g)
        return {"labels": labels} if task == "ForMaskedLM" else {"labels": labels, pair_name: pair_label}
    if task == "ForPreTraining":
        return {"labels": torch.randint(0, 2, kept.shape, generator=g)}
    if task == "ForTokenClassification":
        return {"labels": torch.randint(0, config.num_labels, kept.shape, generator=g).where(kept, -100)}
    if task == "ForQuestionAnswering":
        return {
            k: torch.randint(0, seqlen, (size,), generator=g) for k in ("start_positions", "end_positions")
        }
    classes = config.num_labels if task == "ForSequenceClassification" else 2
    return {"labels": torch.randint(0, classes, (size,), generator=g)}


def token_level(t: torch.Tensor, kept: torch.Tensor) -> bool:
    """Whether `t` has a value, or a vector, for every token of the mask `kept`."""
    return t.shape[: kept.dim()] == kept.shape


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert a.shape == b.shape
    error = (a - b).abs().max().item() if a.numel() else 0.0
    assert error <= tolerance, f"max error {error:.3g}"


def kept_rows(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The hidden states of the tokens that the mask keeps."""
    return model(**inputs).last_hidden_state[inputs["attention_mask"].bool()]


@torch.no_grad()
def half_errors(
    models: Sequence[torch.nn.Module], dtype: torch.dtype, batches: Iterable[dict[str, torch.Tensor]]
) -> list[torch.Tensor]:
    """Per model in `dtype`: distances from the last model in float64 with the same rounded weights."""
    halves = [copy.deepcopy(model).to(dtype) for model in models]
    for model, half in zip(models, halves, strict=True):
        # `from_pretrained(dtype=…)` does not round the frequencies of rotary positions
        for own, given in zip(half.buffers(), model.buffers(), strict=True):
            own.data = given.clone()
    exact, errors = copy.deepcopy(halves[-1]).double(), [[] for _ in models]
    for inputs in batches:
        truth = kept_rows(exact, inputs)
        for model, found in zip(halves, errors, strict=True):
            out = kept_rows(model, inputs)
            assert out.dtype == dtype
            found.append((out.double() - truth).abs().flatten())
    return [torch.cat(found) for found in errors]


def no_larger_errors(models: Sequence[torch.nn.Module], *how: object, most: float = 1.0) -> None:
    """The first model's `half_errors` are no larger than the last one's, times `most`."""
    mine, theirs = half_errors(models, *how)
    assert mine.mean() <= most * theirs.mean()
    assert mine.square().mean() <= most * theirs.square().mean()


def ragged(lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    """A batch with padding on the right."""
    ids = torch.randint(5, 120, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}


def same_packed_and_alone(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor], rows: torch.Tensor
) -> None:
    """`rows`, the hidden states of the tokens of a `ragged` batch, are those of any other batch."""
    inputs = dict(inputs)
    kept = inputs.pop("attention_mask").bool()
    ends = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).int()
    packed = model(**{name: t[kept] for name, t in inputs.items()}, cu_seqlens=ends).last_hidden_state
    close(packed, rows, 1e-12)
    for row, (begin, end) in enumerate(itertools.pairwise(ends.tolist())):
        alone = model(**{name: t[row : row + 1, : end - begin] for name, t in inputs.items()})
        close(alone.last_hidden_state[0], rows[begin:end], 1e-12)


def drops_as_its_module(model: torch.nn.Module, ids: torch.Tensor, path: str, site: int) -> None:
    """Dropout at `path` on packed tokens, by the mask of a call site, is that of a module in its place."""
    plain = model.eval()(ids).last_hidden_state
    for name, module in model.train().named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5 if name == path else 0.0
    torch.manual_seed(3)
    found = model(ids).last_hidden_state
    torch.manual_seed(3)
    seed = dropout_seed(model.device)

    class Kept(torch.nn.Module):
        def forward(self, x):
            return 2 * x * keep_mask_2d(seed, site, x.shape[:-1].numel(), x.shape[-1], 0.5).view_as(x)

    attach(model, path, Kept())
    close(found, model(ids).last_hidden_state, 1e-12)
    assert (found - plain).abs().max() > 0.1
