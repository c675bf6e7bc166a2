"""The `fastbert` command: encode loses nothing and names bad lines; env, verify and bench tell the truth."""

import argparse
import io
import json
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import fastbert
from fastbert import testing
from fastbert.cli import bench, encode
from fastbert.cli import main as cli
from fastbert.cli import output as output_file
from fastbert.ops.pooling import MODES as POOLINGS
from fastbert.runtime import dispatch, loader
from fastbert.sentences.encoder import SentenceEncoder
from fastbert.sentences.sparse_encoder import SparseEncoder
from tests.support.cpu_fixtures import ISAS
from tests.support.hf_models import hf_config
from tests.support.tiny_folders import colbert, splade

ROOT = Path(fastbert.__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
LETTERS = "abcdefghijklmnopqrstuvwxyzéß"
LINES = [
    "hello world",
    "",
    "a",
    "the quick brown fox jumps over the lazy dog",
    "naïveté",
    "b c d",
    "zzz " * 9,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random BERT that reads any lower-case word letter by letter."""
    import transformers

    folder = tmp_path_factory.mktemp("tiny")
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{c}" for c in LETTERS)]
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 48}
    transformers.BertModel(hf_config("bert", vocab_size=len(vocab), **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def run(model, capsys):
    """Call the command in this process: (exit status, stdout, stderr)."""

    def call(*arguments, status=0):
        code = cli.main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert code == status, err
        return out, err

    return call


def encode_args(model, source, target, *more):
    return ["encode", "--model", model, "--input", source, "--output", target, "--device", "cpu", *more]


def left(folder):
    """The names in a folder, including hidden ones."""
    return sorted(os.listdir(folder))


# -------------------------------------------------------------------------------------------- what it writes


def test_the_three_kinds_hold_the_same(run, model, text, tmp_path):
    truth = SentenceEncoder.from_pretrained(model, device="cpu").encode(LINES)
    for kind in ("npy", "safetensors", "jsonl"):
        out, err = run(*encode_args(model, text, tmp_path / f"out.{kind}"))
        assert out == ""
        assert err == ""
    npy = np.load(tmp_path / "out.npy")
    assert npy.dtype == np.dtype("<f4")
    assert npy.shape == (len(LINES), 32)
    assert np.abs(npy - truth).max() < 2e-6
    tensors = load_file(tmp_path / "out.safetensors")
    assert list(tensors) == ["embeddings"]
    assert np.array_equal(tensors["embeddings"], npy)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["text"] for row in rows] == LINES
    assert np.array_equal(np.array([row["embedding"] for row in rows], dtype=np.float32), npy)
    assert left(tmp_path) == ["in.txt", "out.jsonl", "out.npy", "out.safetensors"]


def test_splade_is_written_dense_and_colbert_is_refused(run, minilm, text, tmp_path):
    folder = splade(minilm, tmp_path / "splade")
    run(*encode_args(folder, text, tmp_path / "o.npy"))
    truth = SparseEncoder.from_pretrained(folder, device="cpu").encode(LINES)
    assert np.abs(np.load(tmp_path / "o.npy") - truth).max() < 1e-5
    _, err = run(*encode_args(folder, text, tmp_path / "p.npy", "--pooling", "cls"), status=2)
    assert "--pooling, --normalize: do not apply to " in err
    _, err = run(*encode_args(colbert(minilm, tmp_path / "colbert"), text, tmp_path / "p.npy"), status=2)
    assert "makes one vector per token (ColBERT)" in err
    assert not (tmp_path / "p.npy").exists()


def test_chunks_and_batches_do_not_change_the_result(run, model, text, tmp_path):
    run(*encode_args(model, text, tmp_path / "a.npy"))
    run(*encode_args(model, text, tmp_path / "b.npy", "--chunk-lines", 2, "--batch-tokens", 48))
    a, b = (np.load(tmp_path / f"{n}.npy") for n in "ab")
    assert a.shape == b.shape == (len(LINES), 32)
    assert np.abs(a - b).max() < 2e-6


def test_stdin(run, model, text, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes())))
    run(*encode_args(model, "-", tmp_path / "stdin.npy"))
    run(*encode_args(model, text, tmp_path / "file.npy"))
    assert (tmp_path / "stdin.npy").read_bytes() == (tmp_path / "file.npy").read_bytes()


def test_stdin_that_is_the_output_is_kept(run, model, text, tmp_path, monkeypatch):
    file = tmp_path / "o.jsonl"
    file.write_bytes(text.read_bytes())
    with file.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        _, err = run(*encode_args(model, "-", file, "--overwrite"), status=2)
    assert "o.jsonl: is the input file" in err
    assert file.read_bytes() == text.read_bytes()


def test_flags_reach_the_encoder(run, model, text, tmp_path):
    encoder = SentenceEncoder.from_pretrained(
        model, pooling="max", normalize=True, max_length=5, device="cpu"
    )
    _, err = run(
        *encode_args(model, text, tmp_path / "o.npy", "--pooling", "max", "--normalize", "--max-length", 5)
    )
    assert np.abs(np.load(tmp_path / "o.npy") - encoder.encode(LINES)).max() < 2e-6
    assert "fastbert: 4 of 7 lines held more than 5 tokens and were cut there (the first: line 1)" in err
    run(*encode_args(model, text, tmp_path / "p.npy", "--prompt", "xyz ", "--no-normalize", "--threads", 1))
    truth = SentenceEncoder.from_pretrained(model, prompt="xyz ", device="cpu").encode(LINES)
    assert np.abs(np.load(tmp_path / "p.npy") - truth).max() < 2e-6
    run(*encode_args(model, text, tmp_path / "h.npy", "--dtype", "bfloat16"))
    half = np.load(tmp_path / "h.npy")
    assert half.dtype == np.float32
    full = SentenceEncoder.from_pretrained(model, device="cpu").encode(LINES)
    assert 1e-5 < np.abs(half - full).max() < 0.1


def test_int8_quantises_the_model(run, model, text, tmp_path, monkeypatch):
    run(*encode_args(model, text, tmp_path / "q.npy", "--dtype", "int8"))
    truth = SentenceEncoder.from_pretrained(model, device="cpu").quantize("int8").encode(LINES)
    assert np.array_equal(np.load(tmp_path / "q.npy"), truth)
    full = SentenceEncoder.from_pretrained(model, device="cpu").encode(LINES)
    assert 1e-5 < np.abs(truth - full).max() < 0.1
    monkeypatch.setattr(encode, "device_of", lambda name: torch.device("cuda:0"))
    _, err = run(*encode_args(model, text, tmp_path / "r.npy", "--dtype", "int8"), status=2)
    assert "fastbert: error: --dtype int8: runs on a CPU, not on cuda:0; add --device cpu" in err
    assert not (tmp_path / "r.npy").exists()


def test_threads_are_put_back(run, model, text, tmp_path, monkeypatch):
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    run(*encode_args(model, text, tmp_path / "o.npy", "--threads", before + 1))
    assert torch.get_num_threads() == before
    assert "RAYON_NUM_THREADS" not in os.environ


def test_sentence_transformers_files_are_read(run, model, text, tmp_path):
    folder = tmp_path / "st"
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"path": p, "type": f"sentence_transformers.models.{k}"} for p, k in zip(paths, kinds, strict=True)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    truth = SentenceEncoder.from_pretrained(model, pooling="cls", normalize=True, device="cpu").encode(LINES)
    run(*encode_args(folder, text, tmp_path / "o.npy"))
    assert np.abs(np.load(tmp_path / "o.npy") - truth).max() < 2e-6
    modules.append({"path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    _, err = run(*encode_args(folder, text, tmp_path / "p.npy"), status=2)
    assert "modules Transformer, Pooling, Normalize, Dense; expected" in err


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"\xef\xbb\xbfa\nb\n", ["a", "b"]),
        ("a\u2028b\x0bc\x85d\n".encode(), ["a\u2028b\x0bc\x85d"]),  # no line ends but LF and CRLF
        (b"\n\na\n\n", ["", "", "a", ""]),
    ],
)
def test_lines(run, model, tmp_path, content, texts):
    (tmp_path / "in.txt").write_bytes(content)
    _, err = run(*encode_args(model, tmp_path / "in.txt", tmp_path / "o.jsonl"))
    rows = (tmp_path / "o.jsonl").read_text(encoding="utf-8").split("\n")
    assert rows.pop() == ""
    assert [json.loads(row)["text"] for row in rows] == texts
    assert ("no lines" in err) == (not texts)
    run(*encode_args(model, tmp_path / "in.txt", tmp_path / "o.npy"))
    run(*encode_args(model, tmp_path / "in.txt", tmp_path / "o.safetensors"))
    assert np.load(tmp_path / "o.npy").shape == (len(texts), 32)
    assert load_file(tmp_path / "o.safetensors")["embeddings"].shape == (len(texts), 32)


def test_progress_is_for_terminals_unless_asked_for(run, model, text, tmp_path):
    _, err = run(*encode_args(model, text, tmp_path / "a.npy"))
    assert err == ""
    _, err = run(*encode_args(model, text, tmp_path / "b.npy", "--progress"))
    assert "7 sentences" in err
    assert "\r" not in err
    assert "sentences/s" in err
    assert "tokens/s" in err
    assert "100%" in err


# --------------------------------------------------------------------------------------------- loses nothing


def test_an_existing_output_is_kept_unless_overwritten(run, model, text, tmp_path):
    output = tmp_path / "o.npy"
    output.write_bytes(b"precious")
    output.chmod(0o640)
    _, err = run(*encode_args(model, text, output), status=2)
    assert err == f"fastbert: error: --output {output}: exists; --overwrite replaces it\n"
    assert output.read_bytes() == b"precious"
    run(*encode_args(model, text, output, "--overwrite"))
    assert np.load(output).shape == (7, 32)
    assert output.stat().st_mode & 0o777 == 0o640


def test_through_a_link_the_file_is_replaced_if_asked(run, model, text, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "o.npy", tmp_path / "elsewhere" / "new.npy"
    link.symlink_to(target)
    _, err = run(*encode_args(model, text, link), status=2)
    assert f"--output {link}: is a link to {target}, which is not there; --overwrite makes it" in err
    assert left(target.parent) == []
    run(*encode_args(model, text, link, "--overwrite"))
    assert link.is_symlink()
    assert np.load(target).shape == (7, 32)
    target.write_bytes(b"old")
    run(*encode_args(model, text, link, "--overwrite"))
    assert link.is_symlink()
    assert np.load(target).shape == (7, 32)
    assert left(target.parent) == ["new.npy"]


def test_leftovers_go_also_where_the_output_is_refused(tmp_path):
    output, left = tmp_path / "o.npy", tmp_path / f".o.npy.ab.{socket.gethostname()}.999999999.tmp"
    for path in (output, left):
        path.write_text("x")
    with (
        pytest.raises(output_file.UsageError, match="exists; --overwrite"),
        output_file.replacing(output, False),
    ):
        pass
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.sweep
def test_leftovers_of_killed_runs_are_removed(run, model, text, tmp_path):
    """A run that was killed, and one that still runs."""
    output = tmp_path / "o.npy"
    arguments = [sys.executable, "-m", "fastbert", *map(str, encode_args(model, "-", output, "--overwrite"))]
    runs = [subprocess.Popen(arguments, stdin=subprocess.PIPE, env=ENVIRONMENT) for _ in range(2)]
    try:
        deadline = time.monotonic() + 240
        while len(there := list(tmp_path.glob(".o.npy.*.tmp"))) < 2:
            assert time.monotonic() < deadline, f"nothing begun: {left(tmp_path)}"
            time.sleep(0.02)
        runs[0].kill()
        runs[0].wait()
        (dead,) = [path for path in there if f".{runs[0].pid}." in path.name]
        (living,) = [path for path in there if f".{runs[1].pid}." in path.name]
        host = socket.gethostname()
        others = [
            f".o.npy.0.x{host}.4194305.tmp",  # of another machine
            f".p.npy.0.{host}.4194305.tmp",  # of another output
            f".o.npy.0.{host}.4194305.txt",
            ".o.npy.mine.tmp",
        ]
        for name in others:
            (tmp_path / name).touch()
        run(*encode_args(model, text, output, "--overwrite"))
        assert not dead.exists()
        assert left(tmp_path) == sorted([*others, "in.txt", "o.npy", living.name])
        _, err = runs[1].communicate(b"a\n", timeout=240)
        assert runs[1].returncode == 0, err
        assert np.load(output).shape == (1, 32)  # the run that still runs was not disturbed
    finally:
        for process in runs:
            process.kill()
            process.wait()


@pytest.mark.parametrize("limit", [0, 400])
@pytest.mark.parametrize("kind", ["npy", "safetensors", "jsonl"])
def test_a_full_disk_names_the_output_and_leaves_it_whole(run, model, text, tmp_path, kind, limit):
    output = tmp_path / f"o.{kind}"
    output.write_bytes(b"precious")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))  # a write past it fails, like one to a full disk
    try:
        call = encode_args(model, text, output, "--overwrite", "--chunk-lines", 2)
        _, err = run(*call, status=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert err.startswith(
        f"fastbert: error: --output {output}: could not be written ([Errno 27] File too large"
    )
    assert err.endswith("what was there is unchanged\n")
    assert output.read_bytes() == b"precious"
    assert left(tmp_path) == ["in.txt", output.name]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_at_the_end_names_the_output(run, model, text, tmp_path, monkeypatch, call):
    output = tmp_path / "o.npy"
    output.write_bytes(b"precious")
    fails = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        _, err = run(*encode_args(model, text, output, "--overwrite"), status=2)
    assert f"--output {output}: could not be written ([Errno 28] No space left on device)" in err
    assert output.read_bytes() == b"precious"
    assert left(tmp_path) == ["in.txt", "o.npy"]


@pytest.mark.skipif(os.name != "posix", reason="elsewhere a folder cannot be opened")
def test_the_folder_is_synced_after_the_rename(run, model, text, tmp_path, monkeypatch):
    """Otherwise a crash of the machine could lose the name of a file whose content is on disk."""
    output, synced, fsync = tmp_path / "o.npy", [], os.fsync

    def record(descriptor):
        info = os.fstat(descriptor)
        synced.append((stat.S_ISDIR(info.st_mode), info.st_ino, output.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    run(*encode_args(model, text, output))
    written = os.stat(output).st_ino
    assert synced == [(False, written, False), (True, os.stat(tmp_path).st_ino, True)]


def test_a_file_that_comes_into_being_meanwhile_is_kept(run, model, text, tmp_path, monkeypatch):
    output = tmp_path / "o.npy"
    close = output_file._NpyWriter.close

    def late(self):
        close(self)
        output.write_bytes(b"another program's")

    monkeypatch.setattr(output_file._NpyWriter, "close", late)
    _, err = run(*encode_args(model, text, output), status=2)
    assert "was created in the meantime" in err
    assert output.read_bytes() == b"another program's"
    assert left(tmp_path) == ["in.txt", "o.npy"]


@pytest.mark.parametrize("where", ["tokenize", "encode_tokens"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("a bug")])
def test_an_error_midway_leaves_the_old_file(model, text, tmp_path, monkeypatch, capsys, where, error):
    output = tmp_path / "o.npy"
    output.write_bytes(b"precious")
    original, calls = getattr(SentenceEncoder, where), []

    def fails_later(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            assert any(name.endswith(".tmp") for name in left(tmp_path))
            raise error
        return original(self, *args, **kwargs)

    monkeypatch.setattr(SentenceEncoder, where, fails_later)
    arguments = [str(a) for a in encode_args(model, text, output, "--overwrite", "--chunk-lines", 1)]
    if isinstance(error, OSError):
        assert cli.main(arguments) == 2
        assert "fastbert: error: [Errno 28] No space left on device" in capsys.readouterr().err
    else:  # not the user's mistake: show the traceback
        with pytest.raises(RuntimeError, match="a bug"):
            cli.main(arguments)
    assert output.read_bytes() == b"precious"
    assert left(tmp_path) == ["in.txt", "o.npy"]


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX knows them")
@pytest.mark.sweep
@pytest.mark.parametrize(("name", "kind"), [("SIGTERM", "npy"), ("SIGINT", "jsonl")])
def test_stopped_by_a_signal_midway(model, tmp_path, name, kind):
    output = tmp_path / f"o.{kind}"
    output.write_bytes(b"precious")
    arguments = encode_args(model, "-", output, "--overwrite", "--chunk-lines", 2)
    process = subprocess.Popen(
        [sys.executable, "-m", "fastbert", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        # a shell's background job ignores SIGINT, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        process.stdin.write("".join(f"{c}\n" for c in LETTERS[:8]).encode())  # and the pipe stays open
        process.stdin.flush()
        deadline = time.monotonic() + 60
        while True:
            sizes = [p.stat().st_size for p in tmp_path.glob(f".o.{kind}.*.tmp")]
            if sizes and sizes[0] >= 8 * 32 * 4:  # four chunks are written, the fifth is waited for
                break
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < deadline, f"nothing written: {left(tmp_path)}"
            time.sleep(0.02)
        process.send_signal(getattr(signal, name))
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + getattr(signal, name)
    assert err.decode() == f"fastbert: stopped by {name}\n"
    assert output.read_bytes() == b"precious"
    assert left(tmp_path) == [output.name]


INTERRUPT = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)"
SWALLOW = f"try:\n    {INTERRUPT}\nexcept BaseException as error:\n    raise ImportError from error"
SCRIPT = re.search(r'^fastbert = "(.*):(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE).groups()


@pytest.mark.sweep
@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX knows them")
@pytest.mark.parametrize(
    ("start", "module", "code", "arguments"),
    [
        (["-m", "fastbert"], "torch", INTERRUPT, ["env"]),
        (["-c", "import sys; from {0} import {1}; sys.exit({1}())"], "torch", SWALLOW, ["env"]),
        # one that the command imports, after the parser's
        (["-m", "fastbert"], "tokenizers", SWALLOW, encode_args("none", "-", "o.npy")),
    ],
    ids=["module", "script", "command"],
)
def test_interrupted_while_it_imports(tmp_path, start, module, code, arguments):
    """It stops quietly, even if an imported module catches the exception of Ctrl-C."""
    (tmp_path / f"{module}.py").write_text(code + "\n")
    done = subprocess.run(
        [sys.executable, *(each.format(*SCRIPT) for each in start), *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_every_option_says_what_it_does():
    (commands,) = (a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, parser in commands.choices.items():
        for action in parser._actions:
            option = f"{name} {action.dest}"
            assert action.help, option
            takes_value = action.option_strings and action.nargs is None
            if takes_value and not action.required:
                assert "default" in action.help or action.choices == POOLINGS, option
                if isinstance(action.default, (int, str)):
                    assert "(default" in action.help, option


def test_signal_handlers_are_put_back(run):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    run("bench")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


# ------------------------------------------------------------------------------------------------ bad inputs


LONG = ("--on-long", "error", "--max-length", "9")
BAD_LINES = {
    "not UTF-8": (b"fine\nb\xffd\n", (), "line 2: not UTF-8 (byte 2 is 0xff)"),
    "cut in a character": (b"fine\nfine\ncaf\xc3", (), "line 3: not UTF-8 (byte 4 is 0xc3)"),
    "too long": (b"a\n" * 6 + b"abc " * 9, LONG, "line 7: 29 tokens; at most 9 fit"),
}


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(run, model, tmp_path, name, chunk):
    content, flags, words = BAD_LINES[name]
    (tmp_path / "in.txt").write_bytes(content)
    _, err = run(
        *encode_args(model, tmp_path / "in.txt", tmp_path / "o.npy", "--chunk-lines", chunk, *flags), status=2
    )
    assert err.startswith("fastbert: error: ")
    assert words in err
    assert err.count("\n") == 1
    assert left(tmp_path) == ["in.txt"]


@pytest.mark.parametrize("chunk", [1, 3])
def test_the_first_line_that_was_cut_is_that_of_all_chunks(run, model, tmp_path, chunk):
    lines = ["a", "b", "c", "a b c d e f g", "a", "a b c d e f", "b", "a b c d e f g h", "c"]
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    flags = ["--max-length", 6, "--chunk-lines", chunk]
    _, err = run(*encode_args(model, tmp_path / "in.txt", tmp_path / "o.npy", *flags))
    words = "fastbert: 3 of 9 lines held more than 6 tokens and were cut there (the first: line 4)"
    assert words in err


def test_a_line_whose_embedding_is_not_finite_is_named(run, model, text, tmp_path, monkeypatch):
    original = SentenceEncoder._forward

    def overflows(self, tokens):
        rows = original(self, tokens)
        rows[tokens.lengths == 3, 5] = np.inf  # the line "a"
        return rows

    monkeypatch.setattr(SentenceEncoder, "_forward", overflows)
    _, err = run(*encode_args(model, text, tmp_path / "o.npy", "--chunk-lines", 2), status=2)
    assert f"fastbert: error: {text}: line 3: the embedding is not finite" in err
    assert left(tmp_path) == ["in.txt"]


BAD_CALLS = [
    ("", "arguments are required: COMMAND"),
    ("encod", "(see fastbert --help); did you mean 'encode'?"),
    ("{encode} --dtype float-32", "did you mean 'float32'?"),
    ("encode --input {text} --output {out}", "arguments are required: --model"),
    ("{encode} --output {dir}/o.csv", "o.csv: unknown kind '.csv'; expected .npy, .safetensors, .jsonl"),
    ("{encode} --output {dir}/none/o.npy", "none does not exist"),
    ("{encode} --output {dir}/folder.npy --overwrite", "exists and is no plain file"),
    ("{encode} --input {dir}/in.jsonl --output {dir}/in.jsonl --overwrite", "is the input"),
    ("{encode} --input {dir}/none.txt", "No such file or directory: '{dir}/none.txt'"),
    ("{encode} --input {dir}", "Is a directory"),
    ("{encode} --model {dir}/none", "none"),
    ("{encode} --model {dir}", "no tokenizer.json and no vocab.txt"),
    ("{encode} --batch-tokens 47", "batch_tokens: 47; expected an integer >= max_length = 48"),
    ("{encode} --batch-tokens 47 --input {empty}", "batch_tokens: 47;"),
    ("{encode} --max-length 49", "max_length: 49; expected an integer from 3"),
    ("{encode} --chunk-lines 0", "--chunk-lines 0: expected at least 1"),
    ("{encode} --threads 0", f"--threads 0: expected 1 to {4 * os.cpu_count()}, four per CPU"),
    ("{encode} --device toaster", "--device toaster: "),
    ("{encode} --device meta", "--device meta: expected cpu, cuda or cuda:N"),
    ("{encode} --device cuda:99", "--device cuda:99: this machine shows torch"),
    ("verify --op layer_norm --backend cuda --device cpu", "nothing to verify on cpu: layer_norm by cuda in"),
    ("bench nothing_of_the_kind", "bench nothing_of_the_kind: not among"),
]


@pytest.mark.parametrize(("line", "words"), BAD_CALLS)
def test_a_bad_call_is_one_line_and_writes_nothing(run, model, text, tmp_path, line, words):
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "in.jsonl").write_text("a\n")
    (tmp_path / "empty.txt").touch()
    before = left(tmp_path)
    places = {"empty": tmp_path / "empty.txt", "text": text, "out": tmp_path / "o.npy", "dir": tmp_path}
    places["encode"] = " ".join(map(str, encode_args(model, text, tmp_path / "o.npy")))
    _, err = run(*line.format(**places).split(), status=2)
    assert err.startswith("fastbert: error: ")
    assert err.count("\n") == 1
    assert words.format(**places) in err
    assert left(tmp_path) == before


def test_debug_shows_the_traceback(run, model, text, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTBERT_LOG", "debug")
    _, err = run(*encode_args(model, tmp_path / "none.txt", tmp_path / "o.npy"), status=2)
    assert "Traceback" in err
    assert "fastbert: error: [Errno 2]" in err
    monkeypatch.setenv("FASTBERT_LOG", "loud")
    _, err = run("env", status=2)
    assert err == "fastbert: error: FASTBERT_LOG=loud: expected debug, info, warning or error\n"


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"fastbert {fastbert.__version__}\n"


# ---------------------------------------------------------------------------------------- env, verify, bench


def test_env_json(run):
    report = json.loads(run("env", "--json")[0])
    assert report["versions"]["fastbert"] == fastbert.__version__
    assert report["versions"]["torch"] == torch.__version__
    assert report["devices"][0]["device"] == "cpu"
    assert isinstance(report["extension"]["built"], bool)
    if report["extension"]["built"]:
        assert report["extension"]["cpu_isa"] in ("none", *ISAS)
    served = {(r["op"], r["dtype"]): r for r in report["backends"] if r["device"] == "cpu"}
    assert {op for op, _ in served} == set(dispatch.OPS)
    for row in served.values():
        assert row["backend"] in dispatch.BACKENDS
        assert row["why"]


def test_env_without_the_extension(run, monkeypatch):
    monkeypatch.setattr(loader, "extension", None)
    monkeypatch.setattr(loader, "missing", "is not built")
    extension = json.loads(run("env", "--json")[0])["extension"]
    assert extension == {"built": False, "reason": "is not built"}


def test_verify_passes_and_prints_each_group(run):
    backends = ("--backend", "reference", "--backend", "aten")
    out, _ = run("verify", "--op", "layer_norm", "--dtype", "float32", *backends, "--device", "cpu")
    assert len([line for line in out.splitlines() if line.endswith("pass")]) == 2
    assert out.splitlines()[-1].endswith("checks on cpu, 0 failed")


def test_quick_verify_runs_the_small_cases(run):
    choice = ("--op", "layer_norm", "--backend", "aten", "--dtype", "float32", "--device", "cpu", "--json")
    for flags, cases in (((), testing.cases), (("--quick",), testing.small_cases)):
        rows = json.loads(run("verify", *choice, *flags)[0])["rows"]
        assert {row["case"] for row in rows} == {case.id for case in cases("layer_norm")}


def test_verify_fails_with_status_1(run, monkeypatch):
    """A wrong result, and a kernel that raises."""

    def row(passed, reason="", error=0.5):
        return testing.Row(
            "linear", "8x8", "aten", "float32", "cpu", "y", error, 0.25, 0.1, 0.1, passed, reason
        )

    def broken(ops, backends, dtypes, device, quick):
        yield row(True, error=float("inf"))
        yield row(False, "max error over eager's")
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(testing, "verify", broken)
    flags = ("verify", "--op", "linear", "--backend", "aten", "--dtype", "float32", "--device", "cpu")
    out, _ = run(*flags, status=1)
    assert "FAIL" in out.splitlines()[1]
    assert "8x8 y: 0.5, eager's 0.25  FAIL: max error over eager's" in out
    assert "FAIL: RuntimeError: illegal memory access" in out
    assert "3 checks on cpu, 2 failed" in out
    report = json.loads(run(*flags, "--json", status=1)[0])
    assert report["passed"] is False
    assert [r["passed"] for r in report["rows"]] == [True, False, False]
    assert report["rows"][0]["max_error"] is None  # JSON has no infinity
    assert report["rows"][2]["reason"] == "RuntimeError: illegal memory access"


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A source checkout's bench/ with one script and one file of the suite."""
    folder = tmp_path / "bench"
    (folder / "suite").mkdir(parents=True)
    monkeypatch.setattr(bench, "FOLDER", folder)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # with it pytest-benchmark measures nothing
    (folder / "helper.py").write_text("x = 1\n")
    script = "import sys\nif __name__ == '__main__':\n    print(sys.argv[1:])\n    sys.exit(7)\n"
    (folder / "bench_kernels.py").write_text('"""Kernels.\n\nMore."""\n' + script)
    (folder / "suite" / "test_ops.py").write_text(
        '"""Ops."""\n\ndef test_ops(benchmark):\n    benchmark(len, "")\n'
    )
    (tmp_path / "pyproject.toml").write_text("")
    return folder


def test_bench_lists_and_runs_the_scripts(checkout, capfd):
    assert cli.main(["bench"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        f"fastbert bench {'ops':<12} Ops.",
        f"fastbert bench {'kernels':<12} Kernels.",
    ]
    for name in ("kernels", "bench_kernels"):
        assert cli.main(["bench", name, "--json", "x"]) == 7
        assert capfd.readouterr().out == "['--json', 'x']\n"
    assert cli.main(["bench", "nothing"]) == 2
    assert "bench nothing: not among ops, kernels, all" in capfd.readouterr().err


@pytest.mark.sweep
def test_bench_runs_the_suite(checkout, tmp_path):
    file = tmp_path / "found.json"
    options = ["--benchmark-min-rounds=1", "--benchmark-max-time=0.001"]
    assert cli.main(["bench", "all", f"--json={file}", "--save", *options]) == 0
    (found,) = json.loads(file.read_text())["benchmarks"]
    assert found["fullname"] == "bench/suite/test_ops.py::test_ops"
    (saved,) = (checkout / "results").rglob("*.json")
    assert [each["fullname"] for each in json.loads(saved.read_text())["benchmarks"]] == [found["fullname"]]
    with_a_fault = '"""Ops."""\n\ndef test_ops(benchmark):\n    assert not benchmark(int, 1)\n'
    (checkout / "suite" / "test_ops.py").write_text(with_a_fault)
    assert cli.main(["bench", "ops"]) == 1


def test_bench_needs_a_checkout_and_pytest_benchmark(checkout, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "ops"]) == 2
    assert "bench: needs pytest: pip install '.[test,bench]'" in capfd.readouterr().err
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "nothing")
    assert cli.main(["bench"]) == 2
    assert "the benchmarks are in the source checkout" in capfd.readouterr().err
