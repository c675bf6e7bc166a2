"""Settings of sentence-transformers are used; folders that cannot be read are refused."""

import json
import shutil

import numpy as np
import pytest

from fastbert.sentences import encoder as encoding
from fastbert.sentences.encoder import SentenceEncoder, encode
from fastbert.sentences.settings import sentence_settings
from tests.support.sentence_folders import SENTENCES, rewrite


def test_settings_of_minilm_and_keywords_before_them(directory):
    settings = sentence_settings(directory)
    assert (settings.pooling, settings.normalize, settings.max_length) == ("mean", True, 256)
    assert (settings.transformer, settings.lower_case, settings.prompt) == (directory, False, "")
    settings = sentence_settings(directory, pooling="cls", normalize=False, prompt="query: ")
    assert (settings.pooling, settings.normalize, settings.prompt) == ("cls", False, "query: ")


def test_a_plain_directory(copy):
    (copy / "modules.json").unlink()
    shutil.rmtree(copy / "1_Pooling")
    (copy / "sentence_bert_config.json").unlink()
    settings = sentence_settings(copy)
    expected = ("mean", False, 512)  # model_max_length
    assert (settings.pooling, settings.normalize, settings.max_length) == expected
    rewrite(copy / "tokenizer_config.json", model_max_length=1e30)
    assert sentence_settings(copy).max_length is None


def test_a_length_beyond_the_positions_is_cut_to_them(copy):
    rewrite(copy / "sentence_bert_config.json", max_seq_length=600)
    assert sentence_settings(copy).max_length == 600
    assert SentenceEncoder.from_pretrained(copy, device="cpu").max_length == 512


def test_pooling_folder_without_modules_json(copy):
    (copy / "modules.json").unlink()
    rewrite(copy / "1_Pooling" / "config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)
    assert sentence_settings(copy).pooling == "cls"
    assert not sentence_settings(copy).normalize


@pytest.mark.parametrize("value", ["max", ["max"]])
def test_pooling_mode_as_newer_versions_write_it(copy, value):
    (copy / "1_Pooling" / "config.json").write_text(
        json.dumps({"embedding_dimension": 384, "pooling_mode": value})
    )
    assert sentence_settings(copy).pooling == "max"


def test_transformer_in_a_folder_of_its_own(directory, copy):
    inner = copy / "0_Transformer"
    inner.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "sentence_bert_config.json"):
        (copy / name).rename(inner / name)
    (copy / "model.safetensors").rename(inner / "model.safetensors")
    modules = json.loads((copy / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (copy / "modules.json").write_text(json.dumps(modules))
    assert sentence_settings(copy).max_length == 256
    rows = encode(copy, SENTENCES[:3], device="cpu")
    assert np.abs(rows - encode(directory, SENTENCES[:3], device="cpu")).max() < 2e-6


def test_an_embedding_of_zeros_stays_zero(encoder, monkeypatch):
    """It is normalised like other vectors, without a division by 0."""
    original = encoding.pool

    def first_is_zero(*args):
        rows = original(*args)
        rows[0] = 0
        return rows

    monkeypatch.setattr(encoding, "pool", first_is_zero)
    rows = encoder.encode(["a cat", "two dogs in a garden"])
    lengths = np.sort(np.linalg.norm(rows, axis=1))
    assert encoder.normalize
    assert lengths[0] == 0
    assert abs(lengths[1] - 1) < 1e-5


def with_modules(*kinds):
    def change(folder):
        modules = [
            {"idx": i, "path": f"{i}_{k}", "type": f"sentence_transformers.models.{k}"}
            for i, k in enumerate(kinds)
        ]
        modules[0]["path"] = ""
        (folder / "modules.json").write_text(json.dumps(modules))

    return change


def with_pooling(**changes):
    return lambda folder: rewrite(folder / "1_Pooling" / "config.json", **changes)


def with_text(name, text):
    return lambda folder: (folder / name).write_text(text)


def only_vocab(text):
    def change(folder):
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.txt").write_bytes(text)

    return change


def with_huge_id(folder):
    model = {"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1, "b": 2**24}, "unk_token": "[UNK]"}
    model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    text = json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    (folder / "tokenizer.json").write_text(text)


BAD_DIRECTORIES = {
    "dense behind Normalize": (
        with_modules("Transformer", "Pooling", "Normalize", "Dense"),
        "modules Transformer, Pooling, Normalize, Dense; expected Transformer, Pooling, Dense or",
    ),
    "clip": (with_modules("CLIPModel"), "module 'CLIPModel'"),
    "no pooling module": (with_modules("Transformer"), "modules Transformer; expected Transformer, Pooling"),
    "modules not a list": (
        with_text("modules.json", "{}"),
        r"modules\.json: expected a JSON array, got dict",
    ),
    "modules without type": (with_text("modules.json", "[{}]"), "modules.json: entry 0 has no type"),
    "pooling file missing": (
        lambda folder: (folder / "1_Pooling" / "config.json").unlink(),
        "1_Pooling/config.json: missing",
    ),
    "two modes": (with_pooling(pooling_mode_cls_token=True), r"pooling cls \+ mean is not implemented"),
    "a mode to come": (with_pooling(pooling_mode_median=True), r"mean \+ pooling_mode_median"),
    "named mode": (with_pooling(pooling_mode="median"), "pooling median is not implemented"),
    "max_seq_length": (
        with_text("sentence_bert_config.json", '{"max_seq_length": "long"}'),
        "max_seq_length 'long'; expected a positive integer",
    ),
    "prompt unknown": (
        with_text("config_sentence_transformers.json", '{"prompts": {}, "default_prompt_name": "q"}'),
        "default_prompt_name 'q' is not among the prompts",
    ),
    "prompt left out of pooling": (
        lambda folder: (
            rewrite(
                folder / "config_sentence_transformers.json",
                prompts={"q": "query: "},
                default_prompt_name="q",
            ),
            rewrite(folder / "1_Pooling" / "config.json", include_prompt=False),
        ),
        "include_prompt false is not implemented",
    ),
    "no tokenizer": (
        lambda folder: [(folder / name).unlink() for name in ("tokenizer.json", "vocab.txt")],
        "no tokenizer.json and no vocab.txt$",
    ),
    "only BPE files": (
        lambda folder: [
            (folder / "tokenizer.json").unlink(),
            (folder / "vocab.txt").rename(folder / "merges.txt"),
        ],
        r"no vocab.txt \(merges.txt is there",
    ),
    "tokenizer truncated": (with_text("tokenizer.json", '{"version": '), "tokenizer.json: not a tokenizer"),
    "vocab without [CLS]": (only_vocab(b"[UNK]\n[SEP]\na\n"), r"vocab.txt: has no cls_token '\[CLS\]'"),
    "modules nested": (
        with_text("modules.json", "[" * 100_000),
        r"modules\.json: is nested deeper than 100 levels",
    ),
    "tokenizer nested": (with_text("tokenizer.json", "[" * 100_000), r"tokenizer\.json: not a tokenizer"),
    "a special token is a list": (
        lambda folder: (
            only_vocab(b"[UNK]\n")(folder),
            rewrite(folder / "tokenizer_config.json", unk_token=["a"]),
        ),
        r"tokenizer_config\.json: unk_token: expected a text, got \['a'\]",
    ),
    "a huge id": (with_huge_id, r"tokenizer\.json: token 'b' has id 16777216; expected ids below 16777216"),
    "similarity a list": (
        with_text("config_sentence_transformers.json", '{"similarity_fn_name": ["dot"]}'),
        r"config_sentence_transformers\.json: similarity_fn_name \['dot'\]; expected one of",
    ),
    "default prompt a list": (
        with_text(
            "config_sentence_transformers.json", '{"prompts": {"a": ""}, "default_prompt_name": ["a"]}'
        ),
        r"config_sentence_transformers\.json: default_prompt_name \['a'\] is not among the prompts",
    ),
    "input names a number": (
        lambda folder: rewrite(folder / "tokenizer_config.json", model_input_names=5),
        r"tokenizer_config\.json: model_input_names 5; expected a list of names",
    ),
    "a switch that is a word": (
        lambda folder: (
            (folder / "tokenizer.json").unlink(),
            rewrite(folder / "tokenizer_config.json", do_lower_case="yes"),
        ),
        r"tokenizer_config\.json: do_lower_case: expected true or false, got 'yes'",
    ),
    "a tokenizer that panics": (
        lambda folder: rewrite(
            folder / "tokenizer.json",
            post_processor={
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {},
            },
        ),
        r"tokenizer\.json: not a whole tokenizer: encoding fails",
    ),
    "vocab not UTF-8": (only_vocab(b"\xff\xfe\n"), "vocab.txt: not UTF-8"),
}


@pytest.mark.parametrize("name", BAD_DIRECTORIES)
def test_refuses_the_directory(copy, name):
    change, words = BAD_DIRECTORIES[name]
    change(copy)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        SentenceEncoder.from_pretrained(copy, device="cpu")


@pytest.mark.parametrize(
    "path", ["../x", "..", ".", "/", "a/b", "a/../../x", "/etc", "..\\x", "a\0b", 3, None, ["1_Pooling"]]
)
@pytest.mark.parametrize("place", [0, 1])
def test_modules_lie_beside_the_file_that_names_them(copy, path, place):
    for folder in (copy.parent / "x", copy / "a" / "b"):  # there, and good
        folder.mkdir(parents=True)
        shutil.copy(copy / "1_Pooling" / "config.json", folder)
    modules = json.loads((copy / "modules.json").read_text())
    modules[place]["path"] = path
    (copy / "modules.json").write_text(json.dumps(modules))
    words = rf"modules\.json: entry {place}: path: expected the name of a folder"
    with pytest.raises(ValueError, match=words):
        sentence_settings(copy)


def test_a_module_path_may_end_in_a_slash(copy):
    modules = json.loads((copy / "modules.json").read_text())
    modules[1]["path"] = "1_Pooling/"
    (copy / "modules.json").write_text(json.dumps(modules))
    assert sentence_settings(copy).pooling == "mean"


def test_a_given_pooling_passes_a_mode_that_is_not_implemented(copy):
    with_pooling(pooling_mode="median")(copy)
    assert sentence_settings(copy, pooling="mean").pooling == "mean"
