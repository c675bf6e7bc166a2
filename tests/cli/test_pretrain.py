"""`fastbert pretrain` from raw text: the same command resumes, and every mistake is one line."""

from __future__ import annotations

import functools
import json
import re
import shutil
import signal
from pathlib import Path
from pydoc_data.topics import topics
from unittest import mock

import pytest
import transformers

from fastbert.cli import pretrain as command
from fastbert.cli.main import main
from fastbert.pretraining.corpus import Corpus
from fastbert.training import checkpoints, curves
from tests.cli.conftest import signalled
from tests.support.tiny_training import digests, known_roof, log  # noqa: F401

DRAW = curves.draw
QUICK = ["--batch-size", "4", "--steps", "6", "--max-length", "32", "--lr", "1e-3", "--warmup", "0.2"]
QUICK += ["--workers", "0", "--log-every", "1", "--save-every", "2", "--device", "cpu"]
CONFIG = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with text.jsonl, tokenizer/, shards/ and config.json, made by the commands."""
    folder = tmp_path_factory.mktemp("made")
    texts = [" ".join(topics[name].split()) for name in sorted(topics)[:12]]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    text, tokenizer = str(folder / "text.jsonl"), str(folder / "tokenizer")
    assert main(["train-tokenizer", text, "--vocab-size", "400", "--output", tokenizer]) == 0
    assert main(["prepare", text, "--tokenizer", tokenizer, "--output", str(folder / "shards")]) == 0
    return folder


def arguments(made: Path, output: object, *more: str, recipe: str = "bert") -> list[str]:
    """The command with a recipe and a place for the run; the last of several equal options counts."""
    given = ["pretrain", "--data", made / "shards", "--model", made / "config.json", "--recipe", recipe]
    return [str(each) for each in (*given, "--output", output, *QUICK, *more)]


@pytest.fixture
def call(made):
    """`arguments` of what `made` holds."""
    return functools.partial(arguments, made)


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """No pictures, which take longer than a run."""
    monkeypatch.setattr(curves, "draw", lambda run: None)


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory) -> Path:
    """A run without interruption, of which tests change copies."""
    run = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw", lambda run: None)
        assert main(arguments(made, run)) == 0
    return run


def failed(arguments: list[str], capsys) -> str:
    """The one line of a call that exits with 2."""
    capsys.readouterr()
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert len(lines) == 1, said.err
    assert lines[0].startswith("fastbert: error: ")
    return lines[0].removeprefix("fastbert: error: ")


# --- from text to a model -----------------------------------------------------------------------------------


def test_from_text_to_a_model_that_transformers_loads(call, made, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(curves, "draw", DRAW)
    run = tmp_path / "run"
    assert main(call(run)) == 0
    said = capsys.readouterr()
    last = log(run)[-1]
    assert f"{run / 'step-000006' / 'model'}: after 6 steps" in said.out
    for name in ("loss", "mlm_loss", "sentence_accuracy"):
        assert re.search(rf"^  {name} +{last[name]:.4f}$", said.out, re.M)
    assert "For comparison, what papers report of this recipe" in said.out
    assert "Nothing here measures yours:\nDevlin et al. 2018, table 5" in said.out
    assert "84.4" in said.out
    assert said.err == ""
    names = {path.name for path in run.iterdir()}
    there = {"config.json", "log.jsonl", "speed.jsonl", "step-000004", "step-000006", ".lock"}
    assert names - {"curves.png", "tensorboard"} == there  # two checkpoints are kept
    model = transformers.AutoModelForPreTraining.from_pretrained(run / "step-000006" / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "step-000006" / "model")
    text = "The [MASK] statement."
    assert tokenizer(text)["input_ids"] == Corpus.open(made / "shards").tokenizer.encode(text).ids
    assert model(**tokenizer(text, return_tensors="pt")).prediction_logits.shape[-1] == 400
    # the same call has nothing left to do
    before = digests(run)
    assert main(call(run, "--json")) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {**last, "step": 6, "checkpoint": str(run / "step-000006")}
    assert digests(run) == before


def test_the_config_is_printed_and_kept(call, tmp_path, capsys):
    """What is printed is what a run's config.json has; nothing is written for it."""
    options = ["--static", "5", "--set", "masking.share=0.2", "--set", "optimizer.kind=lamb", "--seed", "3"]
    assert main(call(tmp_path / "run", *options, "--print-config")) == 0
    printed = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "run").exists()
    assert printed["masking"] == {"share": 0.2}
    assert printed["optimizer"]["kind"] == "lamb"
    assert (printed["static"], printed["seed"], printed["dtype"]) == (5, 3, "fp32")
    assert [phase["max_length"] for phase in printed["phases"]] == [32, 32]
    assert [phase["steps"] for phase in printed["phases"]] == [5, 1]
    assert {phase["batch_size"] for phase in printed["phases"]} == {4}
    assert {(phase["lr"], phase["warmup"]) for phase in printed["phases"]} == {(1e-3, 0.2)}
    assert printed["model"]["vocab_size"] == 400
    assert main(call(tmp_path / "run", *options)) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == printed
    lr = [line["lr"] for line in log(tmp_path / "run")]
    assert lr[:2] == [0.0, pytest.approx(1e-3 / 1.2)]
    # no output is needed
    given = call(tmp_path / "run", "--print-config")
    at = given.index("--output")
    assert main(given[:at] + given[at + 2 :]) == 0


def test_options_of_masks_and_formats(call, capsys):
    for options, expected in (
        (["--random-specials"], {"masking": {"random_specials": True}}),
        (
            ["--set", "masking.unit=word", "--word-budget", "words", "--set", "masking.max_predictions=9"],
            {"masking": {"unit": "word", "word_budget": "words", "max_predictions": 9}},
        ),
        (["--dropout", "0.3"], {"dropout": 0.3}),
        (["--micro-batch", "2"], {"micro_batch": 2}),
        (["--pack"], {"format": {"kind": "doc-sentences"}}),
        (["--dtype", "bf16"], {"dtype": "bf16"}),
        (
            ["--grow", "1:3,2:*", "--grow-moments"],
            {"growth": {"stages": [[1, 3], [2, None]], "moments": "copied", "freeze": False}},
        ),
    ):
        recipe = "roberta" if "--pack" in options or "masking.unit=word" in options else "bert"
        assert main([*call("x", *options, recipe=recipe), "--print-config"]) == 0, options
        printed = json.loads(capsys.readouterr().out)
        for key, value in expected.items():
            assert printed[key] == value


@pytest.mark.parametrize(
    "options",
    [
        ["--pack", "--workers", "1"],
        ["--grow", "1:3,2:*", "--grow-freeze", "--grow-moments"],
        ["--dtype", "bf16"],
        ["--no-verify", "--progress"],
    ],
    ids=["packed", "grown", "bf16", "progress"],
)
def test_runs_with_options(options, call, tmp_path, capsys):
    assert main(call(tmp_path / "run", *options, recipe="roberta")) == 0
    said = capsys.readouterr()
    assert "after 6 steps" in said.out
    assert ("step 6 of 6" in said.err) == ("--progress" in options)
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "step-000006" / "model")
    assert model.config.num_hidden_layers == 2


# --- interruptions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_call_goes_on(number, whole, call, tmp_path, capsys):
    capsys.readouterr()
    with signalled(number, 2):
        assert main(call(tmp_path / "run")) == 128 + number
    said = capsys.readouterr().err
    place = tmp_path / "run" / "step-000003"
    assert said == f"fastbert: stopped by {number.name}; saved {place}\n"
    assert checkpoints.fault_of(place) is None
    assert main(call(tmp_path / "run")) == 0
    assert capsys.readouterr().err == f"fastbert: {place}: resumes from step 3\n"
    assert digests(tmp_path / "run") == digests(whole)


def test_what_changes_the_result_cannot_be_changed(whole, call, tmp_path, capsys):
    run = shutil.copytree(whole, tmp_path / "run")
    for options, message in (
        (
            ["--lr", "2e-3"],
            r"phases\.0\.lr: the run in .*run has 0\.001, got 0\.002; resume with its own value",
        ),
        (["--steps", "8"], r"phases\.0\.steps: the run in .* has 5, got 7"),
        (["--seed", "1"], "seed: the run in .* has 0, got 1"),
        (["--dtype", "bf16"], "dtype: the run in .* has 'fp32', got 'bf16'"),
        (["--micro-batch", "1"], "micro_batch: the run in .* has None, got 1"),
        (["--grow", "1:2,2:*"], "growth: the run in .* has None, got {"),
    ):
        assert re.match(message, failed(call(run, *options), capsys))
    # what does not may be
    more = [
        "--save-every",
        "3",
        "--keep",
        "1",
        "--log-every",
        "2",
        "--workers",
        "1",
        "--no-verify",
        "--no-graphs",
    ]
    assert main(call(run, *more)) == 0


# --- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--recipe berd", "recipe: 'berd' is neither a file nor one of albert, bert, bert-lamb"),
        ("--data gone", r"gone/index\.json: no such file|.*no corpus there"),
        ("--model gone", r"model: gone: expected a config\.json, or a directory with one"),
        ("--set masking.share", r"--set masking\.share: expected FIELD=VALUE"),
        ("--set mask.share=1", r"mask\.share: is no field of a recipe; expected"),
        ("--set masking.share=2", r"masking .*share: expected a number in \(0, 1\]"),
        ("--set masking.unit=" + "[" * 10**5, r"--set masking\.unit: is nested deeper than 100 levels"),
        ("--max-length 513", "--max-length 513: bert has sequences of 512 tokens at most; --set phases"),
        ("--grow 1:9,2:*", "grow: 2 layers begin after 9 steps, but the run has 6"),
        ("--grow-freeze", "--grow-freeze: needs --grow"),
        ("--pack", "--pack: bert has pairs of sentences, which are not packed further"),
        ("--keep 0", "keep: expected an integer >= 1, got 0"),
        ("--parallel ddp", "parallel: ddp is for processes that torchrun starts; RANK is not set"),
        ("--device tpu", "--device tpu: "),
    ],
)
def test_mistakes_are_one_line(options, message, call, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    said = failed(call(tmp_path / "run", *options.split()), capsys)
    assert re.match(message, said), said
    assert not list((tmp_path).rglob("step-*"))


def test_what_is_wrong_with_the_data_is_one_line(call, made, tmp_path, capsys):
    tokens = next(path for path in (made / "shards").iterdir() if "tokens" in path.name)
    shards = shutil.copytree(made / "shards", tmp_path / "shards")
    content = bytearray((shards / tokens.name).read_bytes())
    content[100] ^= 1
    (shards / tokens.name).write_bytes(content)
    assert str(shards / tokens.name) in failed(call(tmp_path / "run", "--data", str(shards)), capsys)
    one = tmp_path / "one.txt"
    one.write_text("A first sentence.\nA second one.\nA third one.\n")
    prepare = ["prepare", str(one), "--tokenizer", str(made / "tokenizer"), "--output", str(tmp_path / "one")]
    assert main(prepare) == 0
    said = failed(call(tmp_path / "run", "--data", str(tmp_path / "one")), capsys)
    assert "has one document, but relation = next takes segments of another document" in said
    assert main(call(tmp_path / "alone", "--data", str(tmp_path / "one"), recipe="roberta")) == 0
    train = ["train-tokenizer", str(made / "text.jsonl"), "--vocab-size", "300"]
    assert main([*train, "--output", str(tmp_path / "model")]) == 0
    shutil.copy(made / "config.json", tmp_path / "model")
    said = failed(call(tmp_path / "run", "--model", str(tmp_path / "model")), capsys)
    assert "differs from the tokenizer that made" in said
    assert not (tmp_path / "run").exists()


def test_where_the_run_cannot_be(call, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert failed(call(tmp_path / "file"), capsys).startswith("output: expected a directory")
    given = call(tmp_path)
    at = given.index("--output")
    for output in ([], ["--output", ""]):
        arguments = given[:at] + output + given[at + 2 :]
        assert failed(arguments, capsys) == "--output: expected a directory for the run"
    (tmp_path / "run" / "step-000001").mkdir(parents=True)
    assert re.search(r"config\.json: is missing beside checkpoints", failed(call(tmp_path / "run"), capsys))


def test_a_loss_that_is_not_finite_is_one_line(call, tmp_path, capsys):
    said = failed(call(tmp_path / "run", "--lr", "1e30", "--warmup", "0", "--set", "clip=null"), capsys)
    assert re.match(r"step \d: the gradient of \S+ is not finite; nothing was updated", said)


def test_only_the_first_process_speaks(call, tmp_path, capsys, monkeypatch):
    """Of several processes, all but the first read the corpus without its checks, and print nothing."""
    opened = []
    monkeypatch.setattr(command.Corpus, "open", lambda path, verify: opened.append(verify) or 1 / 0)
    for rank, options, expected in ((0, [], True), (1, [], False), (0, ["--no-verify"], False)):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(ZeroDivisionError):
            main(call(tmp_path, *options))
        assert opened.pop() is expected


def test_the_picture_is_named_if_it_is_drawn(whole, call, tmp_path, capsys, monkeypatch):
    shutil.copytree(whole, tmp_path / "a")
    assert main(call(tmp_path / "a")) == 0
    assert "the curves" not in capsys.readouterr().out
    monkeypatch.setattr(curves, "draw", lambda run: Path(run) / "curves.png")
    assert main(call(tmp_path / "a", recipe="bert")) == 0
    assert f"{tmp_path / 'a' / 'curves.png'}: the curves\n" in capsys.readouterr().out
    fails = mock.Mock(side_effect=ValueError("log.jsonl: line 3: no JSON"))
    monkeypatch.setattr(curves, "draw", fails)  # without it the run is whole
    assert main(call(tmp_path / "a")) == 0
    out, err = capsys.readouterr()
    assert "no curves: log.jsonl: line 3: no JSON\n" in err
    assert "the curves" not in out
