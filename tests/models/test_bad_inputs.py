"""Bad inputs, one table: each is refused by an error that names the argument, file or key, and the cause."""

import copy
import functools
import json
import os
import pickle
import re
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

import fastbert
from fastbert.checkpoint import save as saving
from fastbert.checkpoint.files import CheckpointError
from fastbert.models.config import EncoderConfig
from tests.support import checkpoints

SIZES = {**checkpoints.SIZES, "num_hidden_layers": 2, "max_position_embeddings": 24}


class Bad(NamedTuple):
    name: str
    call: object  # (tmp_path) -> anything; raises
    error: type
    match: str


# --- config -------------------------------------------------------------------------------------------------


def config(name, error, match, model_type="bert", **values):
    return Bad(f"config-{name}", lambda _: EncoderConfig(model_type, **{**SIZES, **values}), error, match)


def head(name, error, match, call, model_type="bert", **values):
    """A row: make a head of a config."""
    return Bad(f"head-{name}", lambda _: call(EncoderConfig(model_type, **{**SIZES, **values})), error, match)


CONFIG = [
    config("heads-do-not-divide", ValueError, r"num_attention_heads: 5 heads .* 32", num_attention_heads=5),
    config("activation", ValueError, r"hidden_act: unknown activation 'mish'; expected .*gelu",
        hidden_act="mish"),
    config("relative", ValueError, r"position_embedding_type: 'relative_key'",
        position_embedding_type="relative_key"),
    config("decoder", ValueError, r"is_decoder: True is not supported; transformers' albert is never causal",
        model_type="albert", is_decoder=True),
    config("direction", TypeError, r"right_to_left: expected a boolean, got 1", right_to_left=1),
    config("cross-attention", ValueError, r"add_cross_attention: True is not", add_cross_attention=True),
    config("negative-hidden", ValueError, r"hidden_size: expected an integer >= 1, got -32", hidden_size=-32),
    config("layers-as-text", TypeError, r"num_hidden_layers: expected an integer, got '12'",
        num_hidden_layers="12"),
    config("dropout", ValueError, r"hidden_dropout_prob: .*\[0, 1\), got 1\.5", hidden_dropout_prob=1.5),
    config("eps-nan", ValueError, r"layer_norm_eps: expected a finite number.*nan",
        layer_norm_eps=float("nan")),
    config("pad", ValueError, r"pad_token_id: .*vocab_size 61, got 61", pad_token_id=61),
    config("no-positions", ValueError, r"max_position_embeddings: 2 .*pad_token_id 1", "roberta",
        max_position_embeddings=2),
    config("problem", ValueError, r"problem_type: expected one of regression.*got 'rank'",
        problem_type="rank"),
    Bad("no-labels", lambda _: fastbert.BertForTokenClassification(EncoderConfig(id2label={})), ValueError,
        r"config id2label: expected at least one class"),
    config("labels", ValueError, r"num_labels: expected an integer >= 1, got 0", num_labels=0),
    config("unknown-type", ValueError, r"model_type: 'bort' is not supported: unknown", "bort"),
    config("ernie-task", ValueError, r"use_task_id: True is not supported", "ernie", use_task_id=True),
    config("albert-groups", ValueError, r"num_hidden_groups: 3 groups for 2 layers", "albert",
        num_hidden_groups=3),
    Bad("config-array", lambda _: EncoderConfig.from_dict([SIZES]), TypeError,
        r"config: expected a JSON object, got list"),
    head("of-another-family", ValueError, r"RobertaForMaskedLM is for 'roberta', got 'bert'",
        fastbert.RobertaForMaskedLM),
    head("no-pretraining", ValueError, r"'distilbert' has no head 'ForPreTraining'",
        fastbert.BertForPreTraining, "distilbert"),
    head("no-next-sentence", ValueError, r"'roberta' has no head 'ForNextSentencePrediction'.*bert, ernie",
        fastbert.AutoModelForNextSentencePrediction.from_config, "roberta"),
    head("auto-called", TypeError, r"from_pretrained", fastbert.AutoModelForMaskedLM),
    head("answer-labels", ValueError, r"num_labels: expected 2", fastbert.BertForQuestionAnswering,
        num_labels=3),
    head("summary", ValueError, r"summary_type: only 'first'", fastbert.ElectraForMultipleChoice, "electra",
        summary_type="mean"),
]  # fmt: skip


# --- files --------------------------------------------------------------------------------------------------


@functools.cache
def model(name="BertForMaskedLM", **values):
    """A small model, made once, that tests only read."""
    prefix = re.split(r"Model|For", name)[0]
    model_type = prefix.lower()
    torch.manual_seed(0)
    cls = getattr(fastbert, name)
    return cls(EncoderConfig(model_type, **{**SIZES, **values})).eval()


def directory(
    tmp_path, saved="BertForMaskedLM", config=None, state=None, drop=(), stored="model.safetensors"
):
    """A checkpoint of `model(saved)` with changed config keys, other tensors, and missing keys."""
    values = {**model(saved).config.to_dict(), **(config or {})}
    (tmp_path / "config.json").write_text(json.dumps(values))
    tied = model(saved).tied_weights()
    tensors = {key: value.clone() for key, value in model(saved).state_dict().items() if key not in tied}
    tensors = {key: value for key, value in {**tensors, **(state or {})}.items() if key not in drop}
    if stored.endswith(".safetensors"):
        save_file(tensors, tmp_path / stored, {"format": "pt"})
    elif stored:
        torch.save(tensors, tmp_path / stored)
    return tmp_path


def load(path, name="BertForMaskedLM", **options):
    return getattr(fastbert, name).from_pretrained(path, **options)


def file(name, match, load_as="BertForMaskedLM", error=CheckpointError, options=None, **changes):
    """A row: load a directory with `changes`."""
    return Bad(
        f"file-{name}",
        lambda path: load(directory(path, **changes), load_as, **(options or {})),
        error,
        match,
    )


def damaged(name, match, damage, stored="model.safetensors"):
    """A row: load a good directory after `damage(path)`."""

    def call(path):
        directory(path, stored=stored)
        damage(path)
        return load(path)

    return Bad(f"file-{name}", call, CheckpointError, match)


def truncate(name, keep):
    def damage(path):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[: int(len(content) * keep)])

    return damage


def index(content, shards=None):
    """Replace the weights by shards {file name: {key: tensor}} and an index."""

    def damage(path):
        (path / "model.safetensors").unlink()
        for name, tensors in (shards or {}).items():
            save_file(tensors, path / name)
        text = content if isinstance(content, str) else json.dumps(content)
        (path / "model.safetensors.index.json").write_text(text)

    return damage


class Code:
    """Its pickle calls `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def with_system(path):
    torch.save({"bert.pooler.dense.bias": Code(os.system, f"touch {path}/ran")}, path / "pytorch_model.bin")


def plain_pickle(protocol):
    def damage(path):
        content = {"bert.pooler.dense.bias": Code(open, str(path / "ran"), "w")}
        (path / "pytorch_model.bin").write_bytes(pickle.dumps(content, protocol))

    return damage


def damaged_table(path):
    content = bytearray((path / "pytorch_model.bin").read_bytes())
    content[content.index(b"PK\1\2") + 2] = 9
    (path / "pytorch_model.bin").write_bytes(content)


def with_nested(path):
    state, key = model().state_dict(), LAYER + "output.dense.weight"
    state[key] = torch.nested.nested_tensor([state[key][0], state[key][1][:5]])
    torch.save(state, path / "pytorch_model.bin")


def replace_config(text):
    return lambda path: (path / "config.json").write_text(text)


def only(*names):
    def damage(path):
        (path / "model.safetensors").unlink()
        for name in names:
            (path / name).write_bytes(b"content")

    return damage


def dangling(path):
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to(path / "blob-that-was-removed")


WORD = "bert.embeddings.word_embeddings.weight"
LAYER = "bert.encoder.layer.1."
ZEROS = {"a": torch.zeros(2)}
FILES = [
    damaged("truncated", r"model\.safetensors: truncated", truncate("model.safetensors", 0.7)),
    damaged("empty", r"model\.safetensors: truncated", truncate("model.safetensors", 0)),
    damaged("no-tensors", r"model\.safetensors: holds no tensors",
        lambda path: save_file({}, path / "model.safetensors")),
    damaged("dangling-link", r"model\.safetensors: is not a file, or a link to one that is gone", dangling),
    damaged("none", r"no weights; expected model\.safetensors.*pytorch_model\.bin", only()),
    damaged("only-tensorflow", r"no weights; .*tf_model\.h5 is of a format", only("tf_model.h5")),
    damaged("only-an-adapter", r"adapter_model\.safetensors is a PEFT adapter",
        only("adapter_model.safetensors")),
    file("missing-key", r"model\.safetensors: missing keys: bert\.encoder\.layer\.1\.output\.dense\.bias$",
        drop=[LAYER + "output.dense.bias"]),
    file("unexpected-key", r"unexpected keys: bert\.encoder\.adapter\.weight; strict=False leaves them out$",
        state={"bert.encoder.adapter.weight": torch.zeros(2)}),
    file("layers-too-few", r"unexpected keys: .*layer\.1\..*num_hidden_layers says 1, the file has 2",
        config={"num_hidden_layers": 1}),
    file("another-family",
        r"missing keys: .*model_type says 'bert', but the file's keys begin with 'roberta'",
        saved="RobertaForMaskedLM", config={"model_type": "bert"}),
    file("vocabulary", rf"{WORD}: shape \(61, 32\), .*vocab_size says 50, the file has 61",
        config={"vocab_size": 50}),
    file("labels", r"classifier\.weight: shape \(2, 32\).*num_labels says 5, the file has 2",
        "BertForTokenClassification", saved="BertForTokenClassification", options={"num_labels": 5}),
    file("rank", rf"{LAYER}output\.dense\.bias: shape \(32, 1\).*\(32,\)",
        state={LAYER + "output.dense.bias": torch.zeros(32, 1)}),
    file("nan", rf"model\.safetensors: {LAYER}output\.dense\.bias: holds NaN",
        state={LAYER + "output.dense.bias": torch.full((32,), float("nan"))}),
    file("integers", rf"{WORD}: dtype torch\.int8; expected float32",
        state={WORD: torch.ones(61, 32, dtype=torch.int8)}),
    file("tied-differs",
        r"cls\.predictions\.decoder\.weight: differs from .*word_embeddings.*tie_word_embeddings",
        state={"cls.predictions.decoder.weight": torch.zeros(61, 32)}),
    # the largest sizes do not overflow before the error names them
    file("sizes-at-the-limit", r"vocab_size says 16777216, the file has 61.*hidden_size says .* 32\).* more$",
        config=dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 2**24)),
    file("stored-twice", r"LayerNorm\.weight: the same parameter as .*LayerNorm\.gamma, stored twice",
        state={"bert.embeddings.LayerNorm.gamma": torch.ones(32)}),
    damaged("index-corrupt", r"model\.safetensors\.index\.json: is not valid JSON: .*line 1", index("{")),
    damaged("index-without-map", r"index\.json: weight_map: expected a non-empty object",
        index({"metadata": {}})),
    damaged("index-names-no-file",
        r"index\.json: weight_map: a: expected the name of a file beside it, got 3",
        index({"weight_map": {"a": 3}})),
    damaged("index-path",
        r"weight_map: a: expected the name of a file beside it, got '\.\./\.\./etc/secret\.safetensors'",
        index({"weight_map": {"a": "../../etc/secret.safetensors"}})),
    damaged("missing-shard", r"index\.json: missing shards beside it: two\.safetensors",
        index({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}, {"one.safetensors": ZEROS})),
    damaged("key-in-two-shards", r"two\.safetensors: also in one\.safetensors: a$",
        index({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}},
            {"one.safetensors": ZEROS, "two.safetensors": {**ZEROS, "b": torch.zeros(1)}})),
    damaged("shard-lacks-key", r"one\.safetensors: lacks what .*index\.json says: b$",
        index({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}, {"one.safetensors": ZEROS})),
    damaged("pickle-with-system", r"pytorch_model\.bin: refused: .*would run code: .*system", with_system,
        stored="pytorch_model.bin"),
    damaged("plain-pickle-2", r"pytorch_model\.bin: refused: .*would run code: .*open", plain_pickle(2),
        stored="pytorch_model.bin"),
    damaged("plain-pickle-5", r"pytorch_model\.bin: .*not a PyTorch file \(pickles of other kinds",
        plain_pickle(5), stored="pytorch_model.bin"),
    damaged("truncated-bin", r"pytorch_model\.bin: .*truncated", truncate("pytorch_model.bin", 0.8),
        stored="pytorch_model.bin"),
    damaged("bin-whose-table-is-damaged", r"pytorch_model\.bin: truncated, or not a PyTorch file",
        damaged_table, stored="pytorch_model.bin"),
    damaged("bin-of-meta", r"pytorch_model\.bin: bert\.\S+: was saved from the meta device",
        lambda path: torch.save(copy.deepcopy(model()).to("meta").state_dict(), path / "pytorch_model.bin"),
        stored="pytorch_model.bin"),
    damaged("bin-with-a-nested-tensor",
        # torch 2.15 no longer unpickles one
        rf"pytorch_model\.bin: ({LAYER}output\.dense\.weight: is a nested|refused: .*_rebuild_nested_)",
        with_nested, stored="pytorch_model.bin"),
    damaged("bin-is-a-list", r"pytorch_model\.bin: expected a dictionary of tensors, got list",
        lambda path: torch.save([1], path / "pytorch_model.bin"), stored="pytorch_model.bin"),
    damaged("config-missing", r"config\.json: no such file", lambda path: (path / "config.json").unlink()),
    damaged("config-corrupt", r"config\.json: is not valid JSON: .*line 1",
        replace_config('{"model_type": "bert",')),
    damaged("config-fifo", r"config\.json: is not a plain file",
        lambda path: ((path / "config.json").unlink(), os.mkfifo(path / "config.json"))),
    damaged("config-array", r"config\.json: expected a JSON object, got list", replace_config("[]")),
    Bad("file-override-unknown", lambda p: load(directory(p), num_lables=3), TypeError, r"num_lables"),
    Bad("file-dtype-unknown", lambda p: load(directory(p), dtype="float7"), ValueError, r"dtype: .*'float7'"),
    Bad("file-no-directory", lambda p: load(p / "gone"), CheckpointError, r"gone: no such directory"),
    Bad("file-not-a-directory", lambda p: load(directory(p) / "config.json"), CheckpointError,
        r"config\.json: is a file"),
    Bad("file-empty-name", lambda p: load(""), CheckpointError, r"name_or_path: is empty"),
    Bad("file-name-is-none", lambda p: load(None), TypeError, r"name_or_path: expected a path .*NoneType"),
    Bad("file-not-in-hub-cache", lambda p: load("nobody/nothing", local_files_only=True, cache_dir=p),
        CheckpointError,
        r"nobody/nothing: no such directory here, and it could not be downloaded from the hub: \w+"),
    Bad("file-save-onto-file", lambda p: saving.save(model(), directory(p) / "config.json"),
        CheckpointError, r"config\.json: could not be saved.*exists"),
]  # fmt: skip


# --- forward ------------------------------------------------------------------------------------------------

IDS = torch.arange(1, 13).reshape(2, 6)


def forward(name, error, match, model_name="BertModel", ids=IDS, **arguments):
    """A row: a call of the model with `ids` (None: without) and `arguments`."""

    def call(_):
        given = {} if ids is None else {"input_ids": ids}
        return model(model_name)(**given, **arguments)

    return Bad(f"forward-{name}", call, error, match)


def ids_with(value):
    ids = IDS.clone()
    ids[1, 2] = value
    return ids


def packed(name, error, match, cu_seqlens, max_seqlen=12, ids=None):
    """A row: a call of `forward_packed`."""
    lengths = torch.tensor(cu_seqlens, dtype=torch.int32) if isinstance(cu_seqlens, list) else cu_seqlens
    ids = IDS.reshape(-1) if ids is None else ids
    return Bad(
        f"packed-{name}", lambda _: model("BertModel").forward_packed(ids, lengths, max_seqlen), error, match
    )


ENDS = torch.tensor([0, 6, 12], dtype=torch.int32)


def training(name, match, labels):
    """A row: a step of the masked-LM head, whose loss computes the labelled tokens alone."""
    return Bad(
        f"training-{name}", lambda _: copy.deepcopy(model()).train()(IDS, labels=labels), ValueError, match
    )


FIRST_ONLY = torch.tensor([[1] * 6, [1, 0, 0, 0, 0, 0]])  # the second sequence keeps one token
FORWARD = [
    forward("id-negative", ValueError, r"input_ids: token id -1 is outside \[0, 61\).*vocab_size",
        ids=ids_with(-1)),
    forward("id-huge", ValueError, r"input_ids: token id 4611686018427387904 is", ids=ids_with(2**62)),
    forward("id-masked-out", ValueError, r"input_ids: token id -100 is outside", ids=ids_with(-100),
        attention_mask=(ids_with(-100) > 0).long()),
    forward("ids-float", TypeError, r"input_ids: expected int64 or int32, got torch\.float32",
        ids=IDS.float()),
    forward("ids-sparse", TypeError, r"input_ids: expected a dense tensor, got torch\.sparse_coo",
            ids=IDS.to_sparse()),
    forward("ids-list", TypeError, r"input_ids: expected a torch\.Tensor, got list", ids=IDS.tolist()),
    forward("ids-empty-sequence", ValueError, r"input_ids: expected at least one token.*\(2, 0\)",
        ids=IDS[:, :0]),
    forward("too-long", ValueError, r"input_ids: a sequence of 25 tokens .* 24 .*max_position_embeddings",
        ids=torch.ones(1, 25, dtype=torch.long)),
    forward("too-long-roberta", ValueError, r"a sequence of 24 tokens is longer than the 22", "RobertaModel",
        ids=torch.full((1, 24), 5)),
    forward("types-too-big", ValueError, r"token_type_ids: token type 2 is outside \[0, 2\)",
        token_type_ids=ids_with(2) % 3),
    forward("types-without-segments", ValueError, r"token_type_ids: distilbert has no segment",
        "DistilBertModel", token_type_ids=IDS * 0),
    forward("positions-too-big", ValueError, r"position_ids: position 24 is outside \[0, 24\)",
        position_ids=IDS + 12),
    forward("positions-shape", ValueError, r"position_ids: expected shape \(2, 6\) or \(1, 6\), got \(6,\)",
        position_ids=IDS[0]),
    forward("mask-shape", ValueError, r"attention_mask: expected shape \(2, 6\), got \(2, 5\)",
        attention_mask=IDS[:, 1:]),
    forward("mask-4d-int", ValueError,
        r"attention_mask: expected 2-D .*4-D bool or float, got 4-D torch\.int64",
        attention_mask=torch.ones(2, 1, 6, 6, dtype=torch.long)),
    forward("mask-4d-shape", ValueError, r"attention_mask: expected shape .*got \(2, 3, 6, 6\)",
        attention_mask=torch.zeros(2, 3, 6, 6)),
    forward("mask-complex", TypeError, r"attention_mask: expected bool.*complex64",
        attention_mask=IDS.to(torch.complex64)),
    forward("mask-device", ValueError, r"attention_mask: expected a tensor on cpu.*meta",
        attention_mask=IDS.to("meta")),
    forward("ids-device", ValueError, r"input_ids: expected a tensor on cpu.*meta", ids=IDS.to("meta")),
    forward("neither", ValueError, r"input_ids, inputs_embeds: expected exactly one .*neither", ids=None),
    forward("both", ValueError, r"input_ids, inputs_embeds: expected exactly one .*both",
        inputs_embeds=torch.zeros(2, 6, 32)),
    forward("ids-flat", ValueError, r"input_ids: expected shape \(batch, seqlen\), got \(6,\)", ids=IDS[0]),
    forward("embeds-width", ValueError,
        r"inputs_embeds: expected shape \(batch, seqlen, 32\), got \(2, 6, 33\)", ids=None,
        inputs_embeds=torch.zeros(2, 6, 33)),
    forward("embeds-int", TypeError, r"inputs_embeds: expected float32.*int64", ids=None,
        inputs_embeds=torch.zeros(2, 6, 32, dtype=torch.long)),
    forward("head-mask-shape", ValueError, r"head_mask: expected shape \(4,\) or \(2, 4\), got \(3,\)",
        head_mask=torch.ones(3)),
    forward("head-mask-list", TypeError, r"head_mask: expected a torch\.Tensor, got list",
        head_mask=[1, 1, 0, 1]),
    forward("cross-attention", ValueError, r"encoder_hidden_states: not supported",
        encoder_hidden_states=torch.zeros(2, 6, 32)),
    forward("cache", ValueError, r"past_key_values: not supported", past_key_values=()),
    forward("unknown-argument", TypeError, r"unexpected keyword argument 'token_types'", token_types=IDS),
    forward("labels-too-big", ValueError, r"labels: .*61.*", "BertForMaskedLM", labels=ids_with(61)),
    forward("labels-shape", ValueError, r"labels: expected shape .*\(2, 6\).*got \(2, 5\)",
        "BertForMaskedLM", labels=IDS[:, 1:]),
    forward("labels-float", TypeError, r"labels: expected int64", "BertForMaskedLM", labels=IDS.float()),
    forward("labels-class", ValueError, r"labels: .*2", "BertForSequenceClassification",
        labels=torch.tensor([0, 2])),
    forward("labels-token-class", ValueError, r"labels: .*7", "BertForTokenClassification",
        labels=IDS % 2 + 6),
    forward("next-sentence-label", ValueError, r"next_sentence_label: .*5", "BertForPreTraining", labels=IDS,
        next_sentence_label=torch.tensor([0, 5])),
    forward("sentence-order-label", ValueError, r"sentence_order_label: 3 at", "AlbertForPreTraining",
        labels=IDS, sentence_order_label=torch.tensor([0, 3])),
    forward("choice-mask", ValueError, r"attention_mask: expected shape", "BertForMultipleChoice",
        ids=IDS[None], attention_mask=IDS),
    forward("choice-2d", ValueError, r"input_ids: expected shape \(batch, .*got \(2, 6\)",
        "BertForMultipleChoice"),
    forward("choice-label", ValueError, r"labels: .*2", "BertForMultipleChoice", ids=IDS[None],
        labels=torch.tensor([2])),
    forward("start-positions-shape", ValueError, r"start_positions: expected shape .*got \(3,\)",
        "BertForQuestionAnswering",
        start_positions=torch.tensor([1, 1, 1]), end_positions=torch.tensor([1, 1])),
    forward("end-positions-float", TypeError, r"end_positions: expected int64", "BertForQuestionAnswering",
        start_positions=torch.tensor([1, 1]), end_positions=torch.tensor([1.0, 1.0])),
    forward("label-on-masked-token", ValueError, r"labels: 8 at \(1, 1\), where attention_mask is 0",
        "BertForMaskedLM", labels=ids_with(-100), attention_mask=FIRST_ONLY),
    forward("answer-in-padding", ValueError, r"start_positions: 3 in sequence 1 is a masked token",
        "BertForQuestionAnswering", attention_mask=FIRST_ONLY,
        start_positions=torch.tensor([3, 3]), end_positions=torch.tensor([3, 0])),
    forward("left-padded-classifier", ValueError, r"attention_mask: position 0 of sequence 1,.* masked out",
        "BertForSequenceClassification", attention_mask=torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])),
    training("labels-too-big", r"labels: 61 at", ids_with(61)),
    packed("lengths-int64", TypeError, r"cu_seqlens: expected .*int32.*, got torch.int64 of shape \(3,\)",
           torch.tensor([0, 4, 12])),
    packed("not-from-zero", ValueError, r"cu_seqlens: expected to rise from 0 .*, got 1 to 12", [1, 4, 12]),
    packed("falling", ValueError, r"cu_seqlens: .*smallest step of -2", [0, 6, 4, 12]),
    packed("max-seqlen-too-small", ValueError, r"max_seqlen: 7 is below the longest .*, 8", [0, 4, 12], 7),
    packed("too-long", ValueError, r"input_ids: a sequence of 36 tokens is longer than the 24", [0, 36], 36,
        ids=torch.ones(36, dtype=torch.long)),
    packed("padded-ids", ValueError, r"input_ids: expected shape \(total,\)", [0, 4, 12], ids=IDS),
    packed("max-seqlen-float", TypeError, r"max_seqlen: expected an integer or None, got 12.0", [0, 4, 12],
        12.0),
    forward("max-seqlen-alone", ValueError, r"max_seqlen: expected None without cu_seqlens, got 6",
        max_seqlen=6),
    forward("packed-mask", ValueError, r"attention_mask: expected None or a 4-D mask beside cu_seqlens",
        ids=IDS.reshape(-1), cu_seqlens=ENDS, attention_mask=torch.ones(2, 6)),
    forward("packed-embeds", ValueError, r"inputs_embeds: expected shape \(total, 32\), got \(2, 6, 32\)",
        ids=None, cu_seqlens=ENDS, inputs_embeds=torch.zeros(2, 6, 32)),
    forward("causal-text", TypeError, r"causal: expected True, False or None, got 'yes'", causal="yes"),
    forward("packed-labels", ValueError, r"labels: expected shape \(12,\), got \(2, 6\)", "BertForMaskedLM",
        ids=IDS.reshape(-1), cu_seqlens=ENDS, labels=IDS),
    forward("choices-missing", ValueError, r"choices: expected an integer >= 1 beside cu_seqlens, got None",
        "BertForMultipleChoice", ids=IDS.reshape(-1), cu_seqlens=ENDS),
    forward("choices-divide", ValueError, r"choices: 3 do not divide the 2 packed sequences",
        "BertForMultipleChoice", ids=IDS.reshape(-1), cu_seqlens=ENDS, choices=3),
    forward("choices-padded", ValueError, r"choices: expected None without cu_seqlens, got 2",
        "BertForMultipleChoice", ids=IDS[:, None], choices=2),
]  # fmt: skip

TABLE = CONFIG + FILES + FORWARD


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_bad_input(row, tmp_path):
    with pytest.raises(row.error, match=row.match):
        row.call(tmp_path)
    assert not (tmp_path / "ran").exists()  # no pickle ran its code


def test_a_pad_token_that_was_removed_later():
    config = EncoderConfig("roberta", num_hidden_layers=1, hidden_size=24, intermediate_size=24)
    model = fastbert.RobertaModel(config).eval()
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match="config pad_token_id: roberta counts positions from it, got None"):
        model(torch.zeros(1, 3, dtype=torch.int64))
