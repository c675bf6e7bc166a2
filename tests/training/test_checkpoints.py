"""Checkpoints of a run: whole or absent, damage is found and named, older ones go last."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from fastbert.checkpoint.files import CheckpointError
from fastbert.training import checkpoints
from fastbert.training.loop import TrainingError
from tests.support import tiny_training
from tests.support.lives import Operations, life
from tests.support.tiny_training import Numbered, digests, trainer


def write(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "weights").write_bytes(bytes(range(200)))
    (folder / "state").write_text("state")


def made(run: Path, *steps: int, keep: int = 10) -> Path:
    """A run's directory with checkpoints."""
    checkpoints.begin(run)
    for step in steps:
        checkpoints.save(run, step, write, keep)
    return run


def steps(run: Path) -> list[int]:
    return checkpoints.steps_in(run)


def damage(run: Path, step: int, name: str = "state") -> None:
    (run / checkpoints.name_of(step) / name).write_bytes(b"damaged")


def test_a_checkpoint_holds_what_was_written(tmp_path):
    run = made(tmp_path / "new" / "run", 3)
    assert checkpoints.newest(run) == (run / "step-000003", [])
    manifest = json.loads((run / "step-000003" / "manifest.json").read_text())
    assert manifest["step"] == 3
    assert sorted(manifest["sha256"]) == ["inner/weights", "state"]
    assert os.listdir(run) == ["step-000003"]
    assert checkpoints.steps_in(tmp_path / "none") == []
    assert checkpoints.newest(tmp_path / "none") == (None, [])


def test_the_newest_remain(tmp_path):
    run = made(tmp_path / "run", 1, 2, 10, 999_999, 1_000_000, keep=2)
    assert steps(run) == [999_999, 1_000_000]
    assert made(run, 1_000_001, keep=1)
    assert os.listdir(run) == ["step-1000001"]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_one_is_never_kept_instead_of_a_whole_one(keep, tmp_path):
    """After a damaged step 6 the run resumes from 4, and its next checkpoint is of step 5."""
    run = made(tmp_path / "run", 2, 4, 6)
    damage(run, 6)
    checkpoints.save(run, 5, write, keep)
    assert checkpoints.newest(run)[0] == run / "step-000005"
    assert steps(run) == ([5, 6] if keep == 1 else [4, 5, 6])
    checkpoints.save(run, 6, write, keep)
    assert checkpoints.newest(run) == (run / "step-000006", [])


def flips(run: Path, name: str, at: int) -> None:
    path = run / "step-000004" / name
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda run: (run / "step-000004/manifest.json").unlink(), r"manifest\.json: no such file"),
        (lambda run: flips(run, "manifest.json", 0), r"manifest\.json: is not valid JSON"),
        (lambda run: (run / "step-000004/manifest.json").write_text("{}"), r"manifest\.json: lists no files"),
        (
            lambda run: (run / "step-000004/manifest.json").write_text('{"sha256": ["state"]}'),
            r"manifest\.json: lists no files",
        ),
        (
            lambda run: shutil.copy(run / "step-000002/manifest.json", run / "step-000004/manifest.json"),
            r"manifest\.json: is of step 2",
        ),
        (
            lambda run: shutil.rmtree(run / "step-000004") or (run / "step-000004").write_text(""),
            r"step-000004.manifest\.json",
        ),
    ],
)
def test_damage_is_named_and_the_one_before_is_taken(change, says, tmp_path):
    run = made(tmp_path / "run", 2, 4)
    change(run)
    found, (why,) = checkpoints.newest(run)
    assert found == run / "step-000002"
    assert why.startswith(str(run / "step-000004"))
    assert re.search(says, why), why
    assert "\n" not in why


def test_names_that_are_no_checkpoints(tmp_path):
    run = made(tmp_path / "run", 4)
    for name in ("step-4", "step-0000005", "step-000006.old", "xstep-000007", ".saving-step-000008-x"):
        (run / name).mkdir()
    assert steps(run) == [4]


def test_only_the_leftovers_of_dead_processes_are_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host, run = socket.gethostname(), made(tmp_path / "run", 4)
    gone = [
        f".saving-step-000005-1.{host}.{ended.pid}",
        f".removing-step-000003-1.{host}.{ended.pid}",
        # of a process that had this one's number before
        f".saving-step-000006-1.{host}.{os.getpid()}",
    ]
    kept = [
        f".saving-step-000005-1.{host}.{os.getppid()}",
        f".saving-step-000005-1.not-{host}.{ended.pid}",
        f".saving-step-x-1.{host}.{ended.pid}",
        f"saving-step-000005-1.{host}.{ended.pid}",
    ]
    for name in (*gone, *kept):
        (run / name).mkdir()
        (run / name / "weights").write_bytes(b"half")
    (run / f".config.json.1.{host}.{ended.pid}.tmp").write_text("{")
    (run / f".config.json.1.{host}.{os.getppid()}.tmp").write_text("{")
    checkpoints.clear(run)
    left = [*kept, f".config.json.1.{host}.{os.getppid()}.tmp", "step-000004"]
    assert sorted(os.listdir(run)) == sorted(left)
    assert all((run / name / "weights").read_bytes() == b"half" for name in kept)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_the_order_of_operations(tmp_path):
    """All files are on the disk before the name, and the name before older ones go.

    No kill can show it: what a process has written stays though it dies. A power cut would show it.
    """
    names = tmp_path / "names"

    def order(run: Path):
        handle = os.open(names, os.O_CREAT | os.O_WRONLY)
        checkpoints.begin(run)
        Operations(tmp_path, lambda name: None, 0, record=lambda name: os.write(handle, f"{name}\n".encode()))
        checkpoints.save(run, 1, write, 1)
        checkpoints.save(run, 2, write, 1)
        raise ValueError("done")

    assert life(tmp_path / "run", order).said == "done\n"
    found = names.read_text().splitlines()
    begin = [i for i, name in enumerate(found) if name.startswith("os.mkdir run/.saving-step-000002")]
    (folder,) = {name.split("/")[1] for name in found if ".saving-step-000002" in name}
    assert folder.startswith(".saving-step-000002")
    second = [name for name in found[begin[0] :] if not name.startswith(("open", "os.chmod"))]
    place = f"run/{folder}"
    assert second[:9] == [
        f"os.mkdir {place}",
        f"os.mkdir {place}/inner",
        f"write {place}/state",
        f"fsync {place}/inner/weights",
        f"fsync {place}/state",
        f"write {place}/manifest.json",
        f"fsync {place}/manifest.json",
        f"fsync {place}/inner",
        f"fsync {place}",
    ]
    assert second[9:11] == [f"os.rename {place}", "fsync run"]
    assert second[11] == "os.rename run/step-000001"
    assert {name.split()[0] for name in second[12:]} == {"os.remove", "os.rmdir"}


def test_a_new_directory_is_flushed_into_the_one_above(tmp_path, monkeypatch):
    flushed = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda f: flushed.append(os.readlink(f"/proc/self/fd/{f}")) or fsync(f))
    checkpoints.begin(tmp_path / "a" / "b")
    assert sorted(flushed) == [str(tmp_path), str(tmp_path / "a")]
    flushed.clear()
    checkpoints.begin(tmp_path / "a" / "b")
    assert flushed == []


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_system_that_cannot_flush_a_folder(number, tmp_path, monkeypatch):
    """EINVAL says that it never can; any other error is one."""
    fsync = os.fsync

    def fails(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    (tmp_path / "run").mkdir()
    monkeypatch.setattr(os, "fsync", fails)
    refused = pytest.raises(CheckpointError, match="Input/output error")
    with contextlib.nullcontext() if number == errno.EINVAL else refused:
        made(tmp_path / "run", 1)
    assert steps(tmp_path / "run") == ([1] if number == errno.EINVAL else [])
    assert len(os.listdir(tmp_path / "run")) == len(steps(tmp_path / "run"))


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    run = made(tmp_path / "run", 4)

    def fails(folder: Path) -> None:
        write(folder)
        raise error

    error: Exception = OSError(28, "No space left on device")
    where = r"run/step-000005: could not be saved, older checkpoints are unchanged: OSError: .*No space left"
    with pytest.raises(CheckpointError, match=where):
        checkpoints.save(run, 5, fails, 1)
    error = RuntimeError("of the caller")
    with pytest.raises(RuntimeError, match="of the caller"):
        checkpoints.save(run, 5, fails, 1)
    assert os.listdir(run) == ["step-000004"]


def test_everybody_may_read_who_may_read_the_folder(tmp_path):
    trainer(tmp_path / "run", 2).run()
    files = [path for path in (tmp_path / "run" / "step-000002").rglob("*") if path.is_file()]
    assert len(files) == 6
    assert {path.stat().st_mode & 0o777 for path in files} == {(tmp_path / "run").stat().st_mode & 0o666}


# --- a trainer among damage ---------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path):
    """A run of six steps with checkpoints of 2, 4 and 6, and its digests; tests copy it."""
    run = tmp_path / "whole"
    trainer(run, keep=3).run()
    return run, digests(run)


FILES = (
    *("heads.safetensors", "optimizer.safetensors", "trainer.json", "manifest.json"),
    *("model/config.json", "model/model.safetensors"),
)


def files_of(run: Path) -> set[str]:
    folder = run / "step-000006"
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["flipped", "missing", "cut"])
@pytest.mark.parametrize("name", FILES)
def test_a_run_goes_on_before_the_damage(name, kind, whole, tmp_path):
    run, expected = tmp_path / "run", whole[1]
    shutil.copytree(whole[0], run)
    assert files_of(run) == set(FILES)
    path = run / "step-000006" / name
    content = path.read_bytes()
    if kind == "missing":
        path.unlink()
    else:
        at = content.index(b"sha256") if name == "manifest.json" else len(content) // 2
        flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        path.write_bytes(flipped if kind == "flipped" else content[:-3])
    said = []
    made = trainer(run, keep=3, say=said.append).run()
    assert made.step == 6
    assert digests(run) == expected
    assert said[0].startswith(f"not usable: {path}: ")
    assert said[1] == f"{run / 'step-000004'}: resumes from step 4"
    assert len(said) == 2
    assert checkpoints.newest(run) == (run / "step-000006", [])


def test_nothing_usable_is_an_error_not_a_beginning(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    for step in (2, 4, 6):
        damage(run, step, "trainer.json")
    log = (run / "log.jsonl").read_bytes()
    with pytest.raises(TrainingError) as error:
        trainer(run).run()
    text = str(error.value)
    assert text.startswith(f"{run}: no checkpoint is usable: ")
    assert text.endswith("remove them to begin anew, or use another directory")
    for step in (2, 4, 6):
        assert f"step-00000{step}/trainer.json: was changed" in text
    assert (run / "log.jsonl").read_bytes() == log
    for step in (2, 4, 6):
        shutil.rmtree(run / checkpoints.name_of(step))
    trainer(run, keep=3).run()
    assert digests(run) == whole[1]


def test_two_runs_into_one_directory(tmp_path):
    run = made(tmp_path / "run")
    hold = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(1); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(run / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    other.stdout.readline()
    with pytest.raises(CheckpointError, match=rf"^{run}: another process is training into it$"):
        trainer(run).run()
    assert os.listdir(run) == [".lock"]
    other.kill()
    other.wait()
    with checkpoints.locked(run):
        with pytest.raises(CheckpointError, match=r"run/\.\./run: this process is training into it already$"):
            trainer(run / ".." / "run").run()
        # the second one has not let go of the first one's lock
        probe = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        probed = [sys.executable, "-c", probe, str(run / ".lock")]
        assert b"BlockingIOError" in subprocess.run(probed, capture_output=True).stderr
    trainer(run).run()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    fails = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr("fcntl.lockf", fails)
    with pytest.raises(CheckpointError, match=r"\.lock: cannot be locked: OSError: .*No locks available"):
        trainer(tmp_path).run()


def test_directories_that_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("text")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(CheckpointError) as error:
            trainer(place).run()
        assert str(error.value) == f"{place}: cannot be created: {tmp_path / 'file'} is not a directory"
    assert (tmp_path / "file").read_text() == "text"
    (tmp_path / "run").mkdir()
    refused = PermissionError(13, "Permission denied")
    with monkeypatch.context() as patch:  # an administrator may write everywhere
        patch.setattr(checkpoints, "open", lambda *args: (_ for _ in ()).throw(refused), raising=False)
        with pytest.raises(CheckpointError, match=r"run: cannot be written: PermissionError: .*denied"):
            trainer(tmp_path / "run").run()


def test_what_must_not_change(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    go_on = "; resume with its own value, or use another directory"
    config = {"steps": 6, "model": {"layers": 2, "dropout": [0.1, None]}}
    for options, says in (
        ({"config": {"steps": 7}}, f"steps: the run in {run} has 6, got 7{go_on}"),
        ({"config": {"steps": 6, "lr": 1}}, f"lr: the run in {run} has None, got 1{go_on}"),
        ({"dtype": "bf16"}, f"dtype: the run in {run} has 'float32', got 'bfloat16'{go_on}"),
    ):
        with pytest.raises(TrainingError) as error:
            trainer(run, **options).run()
        assert str(error.value) == says
    with pytest.raises(TrainingError, match=r"sources\.0: the run .* has 'numbered 37 5 12', got 'numb"):
        trainer(run, source=Numbered(size=38)).run()
    trainer(tmp_path / "nested", config=config).run()
    with pytest.raises(TrainingError, match=r"^model\.layers: the run in .* has 2, got 3; "):
        trainer(tmp_path / "nested", config={**config, "model": {**config["model"], "layers": 3}}).run()
    (run / "config.json").unlink()
    with pytest.raises(TrainingError, match=r"config\.json: is missing beside checkpoints"):
        trainer(run).run()
    (run / "config.json").write_text('{"steps": 6}')
    with pytest.raises(TrainingError, match=r"step 6, but the run has 4"):
        trainer(run, 4, config={"steps": 6}).run()
    assert digests(run) == whole[1]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("step", (-3, 5, 99, "6", None)),
        ("stage", (-1, 99, "0", None)),
        *((name, (-1, "1", None)) for name in ("tokens", "sequences", "skipped")),
        ("log_bytes", (None, 3, [], {"log.jsonl": -1}, {"log.jsonl": "9"})),
        ("log_sha256", (None, 3, {"log.jsonl": 1})),
        ("sizes", (None, [], {"0": 3}, {"0": [[1]]}, {"0": [[1, -2]]})),
        ("scaler", (None, [], {"scale": "x"}, {"scale": 1e400})),
        ("versions", (None, "1", {"torch": 2})),
    ],
)
def test_a_state_that_no_run_has_written_is_named(name, values, tmp_path):
    """Though its manifest agrees."""
    trainer(tmp_path).run()
    folder = tmp_path / "step-000006"
    state, manifest = (json.loads((folder / f"{file}.json").read_text()) for file in ("trainer", "manifest"))
    for value in values:
        content = json.dumps({**state, name: value})
        (folder / "trainer.json").write_text(content)
        manifest["sha256"]["trainer.json"] = hashlib.sha256(content.encode()).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=rf"trainer\.json: {name}: expected"):
            trainer(tmp_path).run()


def test_a_manifest_that_lists_a_part_of_the_files(tmp_path):
    trainer(tmp_path).run()
    path = tmp_path / "step-000006" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["sha256"] = {"trainer.json": manifest["sha256"]["trainer.json"]}
    path.write_text(json.dumps(manifest))
    assert "is not listed in manifest.json" in checkpoints.fault_of(path.parent)
    assert checkpoints.newest(tmp_path)[0].name == "step-000004"


@pytest.mark.parametrize("name", ["log.jsonl", "notes.txt"])
def test_a_run_begins_in_an_empty_directory_alone(name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(CheckpointError, match=rf"holds {name}, and no run; expected a new or an empty"):
        trainer(tmp_path).run()
    assert (tmp_path / name).read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_is_refused_before_the_first_step_binds_nobody(tmp_path):
    """The corrected call begins."""
    (bad,) = tiny_training.stages()
    bad.build = mock.Mock(side_effect=ValueError("model: does not fit"))
    with pytest.raises(ValueError, match="does not fit"):
        trainer(tmp_path, stages=[bad], config={"wrong": 1}).run()
    assert trainer(tmp_path, 2).run().step == 2
