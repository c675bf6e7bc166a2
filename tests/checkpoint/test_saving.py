"""Saves that lose nothing: views, refusals, a full disk, and a kill at any step."""

import functools
import itertools
import os
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fastbert.checkpoint import files
from fastbert.checkpoint import save as saving
from fastbert.checkpoint.files import CheckpointError
from fastbert.models.config import EncoderConfig
from tests.support.checkpoints import LAYOUTS, SIZES, assert_same_state, load, ours, randomise, two_models
from tests.support.killed import killed

# of the old checkpoint (also none, and what other programs write), of the new one; each how manieth step
SAVES = [("single", "single", 1), (None, "shards", 3), ("shards", "single", 3), ("shards", "shards", 3)]
SAVES += [("of others", "shards", 3), ("bin", "single", 3)]


def test_save_of_views_and_shared_storage(tmp_path):
    model = randomise(ours("BertModel")(EncoderConfig("bert", **SIZES)))
    storage = torch.randn(32 * 32 + 32)
    one, two, three = (layer.attention.self for layer in model.encoder.layer)
    one.query.weight = torch.nn.Parameter(torch.randn(32, 32).t())  # not contiguous
    two.query.weight = torch.nn.Parameter(storage[:1024].view(32, 32))  # two that overlap
    two.key.weight = torch.nn.Parameter(storage[32:].view(32, 32))
    three.key.weight = three.query.weight  # one parameter under two names
    saving.save(model, tmp_path)
    assert_same_state(load("BertModel", tmp_path), model)
    assert (tmp_path / "model.safetensors").stat().st_size < 1.1 * 4 * sum(
        v.numel() for v in model.state_dict().values()
    )


def test_save_refuses_what_could_not_be_loaded(tmp_path):
    model = randomise(ours("BertModel")(EncoderConfig("bert", **SIZES)))
    saving.save(model, tmp_path)
    with torch.no_grad():
        model.pooler.dense.bias[0] = float("inf")
    with pytest.raises(CheckpointError, match=r"pooler\.dense\.bias: holds NaN or infinity"):
        saving.save(model, tmp_path)
    load("BertModel", tmp_path)
    with torch.device("meta"):
        model = ours("BertModel")(EncoderConfig("bert", **SIZES))
    with pytest.raises(CheckpointError, match=r"is on the meta device and has no value to save"):
        saving.save(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    for size in ("5 parsecs", 0, "-3GB"):
        with pytest.raises(ValueError, match="max_shard_size"):
            saving.save(model, tmp_path, max_shard_size=size)


def is_checkpoint_of(directory, model):
    """Whether config and weights are this model's; raises if the directory does not load."""
    loaded = ours("BertModel").from_pretrained(directory)
    same = all(
        torch.equal(a, b)
        for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    )
    for key in ("hidden_dropout_prob", "layer_norm_eps", "id2label"):  # never a mix
        assert same == (getattr(loaded.config, key) == getattr(model.config, key)), key
    return same


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_save_over_another_layout(first, second, tmp_path):
    old, new = two_models()
    saving.save(old, tmp_path, max_shard_size=LAYOUTS[first])
    (tmp_path / "tokenizer.json").write_text("{}")
    files = saving.save(new, tmp_path, max_shard_size=LAYOUTS[second])
    assert is_checkpoint_of(tmp_path, new)
    assert_same_state(transformers.BertModel.from_pretrained(tmp_path), new)
    assert {file.stat().st_mode for file in files} == {(tmp_path / "tokenizer.json").stat().st_mode}
    names = {file.name for file in files} | {"config.json", "tokenizer.json"}
    assert {p.name for p in tmp_path.iterdir()} == names | (
        {"model.safetensors.index.json"} if len(files) > 1 else set()
    )


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", [None, *LAYOUTS])
def test_every_failing_step_of_a_save_leaves_one_whole_checkpoint(first, second, tmp_path, monkeypatch):
    old, new = two_models()
    calls = fail_at = 0
    flush = False  # whether a folder is flushed: failures there are ignored

    def failing(function):
        def wrapper(*args, **kwargs):
            nonlocal calls, flush
            calls += 1
            if calls == fail_at:
                flush = function is fsync and stat.S_ISDIR(os.fstat(*args).st_mode)
                raise OSError(28, "No space left on device")
            return function(*args, **kwargs)

        return wrapper

    fsync = os.fsync
    for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (saving, "_write_safetensors")):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    outcomes = []
    for step in range(1, 100):
        directory = tmp_path / str(step)
        calls, fail_at = 0, -1
        directory.mkdir()
        if first is not None:
            saving.save(old, directory, max_shard_size=LAYOUTS[first])
        calls, fail_at, flush = 0, step, False
        try:
            saving.save(new, directory, max_shard_size=LAYOUTS[second])
        except CheckpointError as error:
            assert "No space left on device" in str(error)  # noqa: PT017 - not every step's failure is raised
            assert list(directory.iterdir()) == [] if first is None else is_checkpoint_of(directory, old)
            outcomes.append("old")
        else:
            assert is_checkpoint_of(directory, new)
            if not flush:
                outcomes.append("new")
        if calls < fail_at:  # no step was left to fail
            break
    assert outcomes[-1] == "new"
    assert outcomes.count("old") >= (5 if second == "single" else 10)
    # there is one moment at which the new one replaces the old
    assert outcomes == sorted(outcomes, reverse=True)


def save_as(kind, model, directory):
    """Save in one of our layouts, or as other programs do."""
    if kind in LAYOUTS:
        saving.save(model, directory, max_shard_size=LAYOUTS[kind])
        return
    saving.save(model, directory)
    state = load_file(directory / "model.safetensors")
    if kind == "of others":
        save_file(state, directory / "model.safetensors", {"format": "pt"})
    else:
        (directory / "model.safetensors").unlink()
        torch.save(state, directory / "pytorch_model.bin")


def left_by(error_allowed: bool, directory, old, new) -> str:
    """Whose checkpoint the directory holds, which reading does not change; "old" may be none at all."""
    before = sorted(os.listdir(directory))
    try:
        found = "old" if is_checkpoint_of(directory, old) else "new"
    except CheckpointError as error:
        if not error_allowed or not re.search(r"no such file|is of a save that was killed", str(error)):
            raise
        return "old"
    finally:
        assert sorted(os.listdir(directory)) == before
    model = old if found == "old" else new
    for given in ({"pretrained": directory}, {"pretrained": directory.parent, "subfolder": directory.name}):
        path = given.pop("pretrained")
        assert EncoderConfig.from_pretrained(path, **given).layer_norm_eps == model.config.layer_norm_eps
        assert_same_state(ours("BertModel").from_pretrained(path, **given), model)
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
@pytest.mark.parametrize(
    ("first", "second", "stride"),
    [("single", "single", 6), *(pytest.param(*case, marks=pytest.mark.sweep) for case in SAVES)],
)
def test_a_kill_at_any_file_operation_leaves_old_or_new(first, second, stride, tmp_path):
    """A real kill of a process that saves; the next save survives one too, and then cleans up."""
    old, new = two_models()
    seen, renamed_config = [], 0
    for at in itertools.count(1, stride):
        directory = tmp_path / str(at) / "m"
        directory.mkdir(parents=True)
        if first is not None:
            save_as(first, old, directory)
        save = functools.partial(save_as, second, new, directory)
        if not killed(save, directory, at):
            break
        seen.append(left_by(first is None, directory, old, new))
        config = directory / "config.json"
        renamed_config += seen[-1] == "old" and config.exists() and b"0.001" in config.read_bytes()
        if killed(save, directory, 1 + at % 7):
            left_by(first is None, directory, old, new)
        save_as("single", new, directory)
        assert is_checkpoint_of(directory, new)
        assert {*os.listdir(directory)} - {"pytorch_model.bin"} == {"config.json", "model.safetensors"}
        shutil.rmtree(directory.parent)
    assert len(seen) > 3
    assert seen == sorted(seen, reverse=True)
    assert set(seen) == {"old", "new"}
    assert renamed_config or stride > 1  # the state between the two renames is among them


def test_the_config_is_put_back_where_even_that_failed(tmp_path, monkeypatch):
    """Renaming the weights fails, and then restoring the old config fails too."""
    old, new = two_models()
    saving.save(old, tmp_path)
    replace, calls = os.replace, []

    def fails(source, target):
        calls.append(target)
        if len(calls) > 1:
            raise OSError(5, "Input/output error")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        with pytest.raises(CheckpointError, match="Input/output error"):
            saving.save(new, tmp_path)
    assert len(calls) == 3
    assert is_checkpoint_of(tmp_path, old)


def test_a_save_that_ends_while_its_notes_are_read(tmp_path, monkeypatch):
    new = two_models()[1]
    saving.save(new, tmp_path)
    new_text = (tmp_path / "config.json").read_bytes()
    folder = tmp_path / f".saving-0.{socket.gethostname()}.{os.getpid()}"
    folder.mkdir()
    (folder / "config.json.old").write_bytes(b"{}")
    (folder / "config.json.new").write_bytes(new_text)

    def ends(directory):
        shutil.rmtree(folder)
        return "another config's"

    monkeypatch.setattr(files, "_config_digest", ends)
    assert files.config_of_weights(tmp_path) == b"{}"


def test_notes_of_a_save_long_past_count_for_nothing(tmp_path):
    """A save of another machine died between its renames; later saves, one with its config, completed."""
    old, new = two_models()
    saving.save(new, tmp_path)
    new_text = (tmp_path / "config.json").read_bytes()
    saving.save(old, tmp_path)
    folder = tmp_path / ".saving-0.elsewhere.1"
    folder.mkdir()
    (folder / "config.json.old").write_bytes((tmp_path / "config.json").read_bytes())
    (folder / "config.json.new").write_bytes(new_text)
    (folder / "model.safetensors").write_bytes(b"")
    assert is_checkpoint_of(tmp_path, old)
    saving.save(new, tmp_path)
    assert is_checkpoint_of(tmp_path, new)
    assert folder.exists()


def test_full_disk(tmp_path):
    old, new = two_models()
    saving.save(old, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (30_000, hard)
    )  # a write past it fails, like one to a full disk
    try:
        words = r"/model\.safetensors: could not be saved, what was there is unchanged"
        with pytest.raises(CheckpointError, match=words):
            saving.save(new, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_save_removes_the_folders_of_dead_saves_alone(tmp_path):
    """But not those of living processes, of other machines, or with other names."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = socket.gethostname()
    kept = {
        f".saving-00000001.{host}.{os.getpid()}",
        f".saving-00000002.{host}.{os.getppid()}",
        f".saving-00000003.not-{host}.{dead.pid}",
        f".saving-00000004.{host}.backup",
    }
    for name in (*kept, *(f".saving-00000005.{host}.{pid}" for pid in (dead.pid, 4194305, 10**30))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    saving.save(two_models()[0], tmp_path)
    assert {p.name for p in tmp_path.iterdir() if p.name.startswith(".saving-")} == kept
    assert all((tmp_path / name / "model.safetensors").read_bytes() == b"half" for name in kept)
