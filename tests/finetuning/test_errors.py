"""Each wrong argument and file is one error that names it, and leaves nothing that stops the next call."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from fastbert.finetuning.run import finetune
from fastbert.finetuning.settings import FreeLB, Smart
from fastbert.finetuning.tasks import NAMES, task_of
from tests.support.rule_tasks import quick, tiny_model, written

NAN, INF = float("nan"), float("inf")
BAD = [
    *(("lr", value) for value in (0.0, -1e-5, NAN, INF, True, "high", [], [1e-3, 1e-3], [1e-3, 0.0], [[1]])),
    *(("epochs", value) for value in (0, -1, NAN, INF, "3", True)),
    *(("batch_size", value) for value in (0, -1, 1.0, "8", True)),
    *(("max_length", value) for value in (0, 2, 8.0, None, True)),
    *(("seed", value) for value in (-1, 0.5, "a", None, True)),
    *(("restarts", value) for value in (0, -1, 1.0, "2", True)),
    *(("dtype", value) for value in ("fp64", None, 16)),
    *(("warmup", value) for value in (-0.1, 1.0, NAN, "0")),
    *(("weight_decay", value) for value in (-0.1, INF, None)),
    *(("layer_decay", value) for value in (0.0, 1.1, NAN)),
    *(("reinit", value) for value in (-1, 0.5, 3, True)),
    *(("freeze", value) for value in ("encoder", 1, None)),
    *(("random_init", value) for value in ("yes", 1, None)),
    *(("decay_to_start", value) for value in ("yes", 1, None)),
    *(("eps", value) for value in (-1e-8, NAN)),
    *((name, value) for name in ("layerdrop", "mixout") for value in (-0.1, 1.0, NAN, True)),
    *((name, value) for name in ("optimizer", "mixout_mask") for value in ("lamb", None)),
    *((name, value) for name in ("freelb", "smart") for value in (3, "yes")),
    *(("qat", value) for value in ("int2", 8, True)),
    ("intermediate", ("ax", "data")),
    ("task", "imdb"),
    ("task", "ax"),
]


@pytest.fixture(scope="module")
def data(memory):
    return written("csv", memory / "data", 24, 12)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_arguments(tmp_path, model, data, name, value):
    given = {"task": "csv", "model": model, "data": data, "output": tmp_path / "run"}
    with pytest.raises((TypeError, ValueError), match=rf"^{name}\b"):
        finetune(**{**given, "lr": 1e-3, "progress": False, name: value})
    quick("csv", model, data, tmp_path / "run", epochs=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"freeze": True, name: value}
            for name, value in (("reinit", 1), ("layer_decay", 0.9), ("layerdrop", 0.5), ("mixout", 0.5))
        ),
        *({"freeze": True, name: True} for name in ("random_init", "decay_to_start", "freelb", "smart")),
        {"reinit": 1, "random_init": True},
        *({name: value, "random_init": True} for name, value in (("mixout", 0.5), ("decay_to_start", True))),
        {"smart": True, "freelb": True},
        {"dtype": "bf16", "smart": True},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_settings_that_exclude_each_other(tmp_path, model, data, changes):
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}: "):
        quick("csv", model, data, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        *((FreeLB, "steps", value) for value in (0, 1.5, True)),
        *((FreeLB, "lr", value) for value in (-0.1, NAN, "1")),
        *((FreeLB, "init", value) for value in (-1, INF)),
        *((FreeLB, "ball", value) for value in (0, -1, NAN)),
        *((Smart, name, value) for name in ("weight", "noise") for value in (0, NAN, True)),
        *((Smart, "momentum", value) for value in (-0.1, 1.0, None)),
    ],
)
def test_fields_of_perturbations(kind, field, value):
    with pytest.raises(ValueError, match=rf"^{kind.__name__.lower()} {field}: expected "):
        kind(**{field: value})


def test_an_unknown_setting_is_named(tmp_path, model, data):
    with pytest.raises(TypeError, match=r"'droput'"):
        quick("csv", model, data, tmp_path / "run", droput=0.1)


# task -> files without which it cannot learn
NEEDED = {
    "cola": ("train.tsv", "dev.tsv"),
    "mnli": ("train.tsv",),
    "squad2": ("train-v2.0.json", "dev-v2.0.json"),
    "swag": ("train.csv", "val.csv"),
    "ner": ("train.txt", "valid.txt"),
    "csv": ("train.csv", "dev.csv"),
}


@pytest.mark.parametrize(("task", "file"), [(task, file) for task, names in NEEDED.items() for file in names])
def test_missing_files(tmp_path, model, task, file):
    data = written(task, tmp_path / "data", 8, 8)
    (data / file).unlink()
    kind = "train" if "train" in file else "dev"
    with pytest.raises(ValueError, match=rf"^data: \S+data has no {kind} file of {task}$"):
        quick(task, model, data, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_folder_has_no_training_file(tmp_path, model, name):
    with pytest.raises(ValueError, match=rf"^data: .* has no train file of {name}$"):
        quick(name, model, tmp_path, tmp_path / "run")


def test_labels_that_training_does_not_have(tmp_path, model, data):
    shutil.copytree(data, tmp_path / "data")
    with open(tmp_path / "data" / "dev.csv", "a") as file:
        file.write("the pink cat,pink\n")
    with pytest.raises(ValueError, match=r"dev\.csv: 'pink' is no label of the training file"):
        quick("csv", model, tmp_path / "data", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_table_of_one_class(tmp_path, model):
    for split in ("train", "dev"):
        (tmp_path / f"{split}.csv").write_text("text,label\nthe cat,a\nthe dog,a\n")
    with pytest.raises(ValueError, match=r"train\.csv: expected two labels or more, found only 'a'"):
        quick("csv", model, tmp_path, tmp_path / "run")


def test_a_broken_test_file_is_found_before_training(tmp_path, model, data):
    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "data" / "test.csv").write_text("words\nthe cat\n")
    with pytest.raises(ValueError, match=r"test\.csv, line 1: expected one column 'text'"):
        quick("csv", model, tmp_path / "data", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_models(tmp_path, model, data):
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "vocab.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"bare: no tokenizer"):
        quick("csv", bare, data, tmp_path / "run")
    with pytest.raises(ValueError, match=r"^model: knows 20 tokens, but its tokenizer makes "):
        quick("csv", tiny_model(tmp_path / "small", vocab_size=20), data, tmp_path / "run")
    short = tiny_model(tmp_path / "short", max_position_embeddings=6)
    with pytest.raises(ValueError, match=r"^max_length: expected at most 6 for this model, got 7 tokens"):
        quick("csv", short, data, tmp_path / "run")
    with pytest.raises((ValueError, OSError), match=r"nowhere"):
        quick("csv", tmp_path / "nowhere", data, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_without_weights_that_are_finite(tmp_path, model, data):
    with pytest.raises(ValueError, match=r"not finite"):
        quick("csv", model, data, tmp_path / "run", lr=1e30)
    quick("csv", model, data, tmp_path / "run")


def test_outputs_that_hold_something_else(tmp_path, model, data):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    copy = shutil.copytree(model, tmp_path / "model")
    for output in ("file", "full", "model"):
        with pytest.raises(ValueError, match=r"^output: expected "):
            quick("csv", copy, data, tmp_path / output)
    (tmp_path / "empty").mkdir()
    trained = quick("csv", copy, data, tmp_path / "empty", epochs=0.1).output
    with pytest.raises(ValueError, match=r"^output: expected another directory than the model's"):
        quick("csv", trained, data, trained)


def test_fsdp(tmp_path, model, data):
    parallel = SimpleNamespace(device=torch.device("cpu"), kind="fsdp", is_first=True, world=2)
    with pytest.raises(ValueError, match=r"^parallel: expected none or ddp for fine-tuning, got fsdp$"):
        quick("csv", model, data, tmp_path / "run", parallel=parallel)
    assert not (tmp_path / "run").exists()


def test_tasks():
    assert [task_of(name).name for name in NAMES] == [*NAMES]
    for name, options in (("cola", {"stride": 1}), ("squad", {"context": 1}), ("ner", {"label": "x"})):
        with pytest.raises(TypeError, match=next(iter(options))):
            task_of(name, **options)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("squad2", {"doc_stride": 0}, "^doc_stride: "),
        ("squad2", {"doc_stride": 128, "max_query": 10}, "^doc_stride: "),
        ("squad2", {"max_query": 0, "doc_stride": 8}, "^max_query: "),
        ("squad2", {"doc_stride": 8}, "^max_query: 64 leaves no context tokens; expected at most 28"),
        ("squad2", {"null_threshold": "best"}, "^null_threshold: expected 'auto' or a finite number"),
        ("squad2", {"null_threshold": NAN}, "^null_threshold: "),
        ("ner", {"context": -1}, "^context: "),
        ("csv", {"text": "words"}, "column 'words'"),
        ("csv", {"label": "y"}, "column 'y'"),
        ("csv", {"pair": "text2"}, "column 'text2'"),
        ("csv", {"regression": True}, "finite float32 as label"),
    ],
)
def test_options_of_tasks(tmp_path, model, task, options, message):
    data = written(task, tmp_path / "data", 8, 8)
    with pytest.raises(ValueError, match=message):
        quick(task, model, data, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
