"""What a model family may change against BERT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastbert.layers.form import LayerNames, StockLayer
from fastbert.models.paths import ClassifierHead, LMHead, StockModel

_AFTER_POOLER = ClassifierHead(None, None, "classifier")
_SPANS = ClassifierHead(None, None, "qa_outputs", dropout="")


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        prefix: name of the encoder inside a model with a head ("bert" in `bert.encoder…`).
        class_prefix: first part of HuggingFace's class names ("Bert" in `BertModel`).
        aliases: config key as this family spells it -> EncoderConfig's key.
        defaults: the config defaults that differ from BERT's.
        pad_positions: positions start at pad_token_id + 1 and skip padding (RoBERTa) instead of counting
            from 0.
        counts_from: the id in place of pad_token_id in `pad_positions`, whatever the config says (MPNet).
        segments: has token-type embeddings.
        pooler: path of the pooler's linear layer; None if the family has none.
        projection: path of the linear layer from the embedding to the hidden size; None if there is none.
        projects_first: whether the norm of the embeddings follows that layer, which is one of their modules.
        projection_always: whether it is there even if the two sizes are equal.
        layers: path of the list of layers.
        embeddings: name of the module before the layers.
        word_table: path of the word embeddings.
        final_norm: path of the norm after the last layer, or None.
        rotary: whether layers rotate queries and keys by position, so that no table limits the positions
            (`fastbert.models.config_rope`).
        windows: whether such layers differ in their angles, and may see a window of tokens
            (`fastbert.models.config_windows`).
        pre_norm: whether the norms of a layer that rotates come before the blocks.
        rms_norm: whether norms are RMSNorms.
        disentangled: whether layers score distances between tokens (`fastbert.layers.disentangled`).
        bottleneck: whether layers compute in a narrower width (`fastbert.layers.bottleneck`).
        block_sparse: whether layers attend by blocks of tokens if config attention_type says so
            (`fastbert.layers.block_sparse`).
        global_tokens: whether layers have windows of config attention_window, and some tokens are global
            (`fastbert.layers.global_tokens`).
        two_streams: whether layers score distances by sinusoids, and may have a second stream of tokens to
            predict (`fastbert.layers.two_streams`).
        alibi: whether layers subtract a multiple of the distance from scores (`fastbert.layers.alibi`).
        variant_of: (model_type, config key, value) of this family's files, which have another family's
            model_type and differ by the key's value; None for files with its own model_type.
        shares_keys: whether config num_key_value_heads says how many heads of keys and values there are.
        unbiased: paths of a layer's linear layers that never have a bias.
        refused: first parts of config keys that have other mathematics.
        spellings: part of a key in files -> our spelling, or several, whose tensors are stored as one.
        pooler_asked: whether transformers' encoder has the pooler only if its head reads it.
        biases: path of a linear layer, in a layer or a head -> the config key that says whether it has a
            bias. The config key `norm_bias`, if there is one, says the same of all norms.
        out_layers: endings of the paths of linear layers whose first weights are smaller the more layers
            there are, because their outputs are summed.
        relative_bias: path of the bucketed relative attention bias shared by all layers, or None.
        group_layers: name of a group's list of layers if layers come in groups of shared weights (ALBERT);
            else None.
        norm_eps: the fixed eps of every LayerNorm; None means the config's `layer_norm_eps`.
        stock_layer, stock_model: see `StockLayer` and `StockModel`.
        inner: config intermediate_size -> columns of a feed-forward block.
        own_heads: first parts of the keys of heads that only this family has.
        tokens, spans: the heads of one label per token and of question answering.
        class_names: task -> the last part of transformers' name of its class, where it is not the task.
        lacks: tasks for which transformers has no class of this family; of ForMultipleChoice,
            ForTokenClassification and ForQuestionAnswering.
        accelerated: whether `fastbert.accelerate` fuses the layers of transformers' models.
        lm_head: paths of the masked-LM head.
        new_lm_head: those of config legacy False, if the family has that key.
        may_be_causal: whether transformers' classes of this family attend causally if config is_decoder.
        positional: name of a class's task ("" for all) -> how many leading arguments of forward are in
            BERT's order in transformers; further arguments must be passed by name.
    """

    model_type: str
    prefix: str
    class_prefix: str
    lm_head: LMHead
    layer: LayerNames = field(default_factory=LayerNames)
    layers: str = "encoder.layer"
    embeddings: str = "embeddings"
    word_table: str = "embeddings.word_embeddings"
    final_norm: str | None = None
    rotary: bool = False
    windows: bool = False
    pre_norm: bool = False
    rms_norm: bool = False
    disentangled: bool = False
    bottleneck: bool = False
    block_sparse: bool = False
    global_tokens: bool = False
    two_streams: bool = False
    alibi: bool = False
    variant_of: tuple[str, str, Any] | None = None
    shares_keys: bool = False
    unbiased: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    spellings: dict[str, tuple[str, ...]] = field(default_factory=dict)
    pooler_asked: bool = False
    biases: dict[str, str] = field(default_factory=dict)
    out_layers: tuple[str, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    pad_positions: bool = False
    counts_from: int | None = None
    segments: bool = True
    pooler: str | None = "pooler.dense"
    projection: str | None = None
    projects_first: bool = False
    projection_always: bool = False
    relative_bias: str | None = None
    group_layers: str | None = None
    norm_eps: float | None = None
    position_padding_idx: bool = False
    classifier: ClassifierHead = _AFTER_POOLER
    choice: ClassifierHead = _AFTER_POOLER
    next_sentence: str = ""  # path of the sentence-pair classifier, "" if the family has none
    next_sentence_dropout: tuple[str, str] | None = None  # path and config key of the dropout before it
    tokens: ClassifierHead = _AFTER_POOLER
    spans: ClassifierHead = _SPANS
    class_names: dict[str, str] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    accelerated: bool = True
    inner: Callable[[int], int] = int
    own_heads: tuple[str, ...] = ()
    new_lm_head: LMHead | None = None
    may_be_causal: bool = True
    stock_layer: StockLayer = field(default_factory=StockLayer)
    stock_model: StockModel = field(default_factory=StockModel)
    positional: dict[str, int] = field(default_factory=dict)

    @property
    def shared_layers(self) -> bool:
        """Whether layers come in groups of shared weights."""
        return self.group_layers is not None

    @property
    def unlimited(self) -> bool:
        """Whether layers compute with the numbers of positions, which no table limits."""
        return self.rotary or self.two_streams

    @property
    def counts_columns(self) -> bool:
        """Whether results depend on the padded columns of tokens, not on their order alone."""
        counts = self.windows or self.disentangled or self.global_tokens or self.two_streams or self.alibi
        # MobileBERT's embeddings read neighbours
        return counts or self.bottleneck or self.relative_bias is not None

    @property
    def unknown_to_graphs(self) -> str | None:
        """Why recorded graphs do not have the family's layers; None if they may."""
        kinds = {"have two streams": self.two_streams, "have global tokens": self.global_tokens}
        found = next((kind for kind, there in kinds.items() if there), None)
        return None if found is None else f"its layers {found}, which graphs do not know"

    @property
    def shares_head(self) -> bool:
        """Whether heads share layers, so that a file of one head has a part of another head."""
        return self.lm_head.dense == self.classifier.dense

    @property
    def stock_module(self) -> str:
        """The module of transformers that has the family's classes."""
        return f"transformers.models.{self.module}.modeling_{self.module}"

    @property
    def module(self) -> str:
        """The module of `fastbert.models` that has the family's classes."""
        return self.model_type.replace("-", "_")

    @property
    def stored_type(self) -> str:
        """The model_type in files."""
        return self.model_type if self.variant_of is None else self.variant_of[0]

    @property
    def head_roots(self) -> set[str]:
        """First parts of the keys of the family's heads."""
        paths = [self.next_sentence, *self.own_heads]
        paths += [self.lm_head.dense, self.lm_head.norm, self.lm_head.decoder, self.lm_head.bias]
        for head in (self.classifier, self.choice, self.tokens, self.spans):
            paths += [head.dense, head.out]
        return {path.partition(".")[0] for path in paths if path}

    @property
    def known_head_roots(self) -> set[str]:
        """First parts of the keys of all families' heads: a file may hold heads that its model lacks.

        A head beside an encoder called "model" has names that any file may have, so it counts for its own
        family alone.
        """
        others = (family for family in FAMILIES.values() if family.prefix != "model")
        return self.head_roots.union(*(family.head_roots for family in others))

    @property
    def foreign_prefixes(self) -> set[str]:
        """First parts of the keys of other architectures."""
        known = {family.prefix for family in FAMILIES.values()}
        own = {self.prefix, self.layers.partition(".")[0]}
        return known.union(name.replace("-", "_") for name in REFUSED) - own

    def spelt(self, key: str) -> str:
        """A config key as the family's config.json spells it."""
        return next((theirs for theirs, ours in self.aliases.items() if ours == key), key)


# model_type -> its family; `fastbert.models.families` fills it
FAMILIES: dict[str, Family] = {}

# model_type -> why its mathematics is not ours
REFUSED: dict[str, str] = {
    "deberta": "disentangled attention adds content-to-position terms inside the softmax",
    "megatron-bert": "LayerNorm comes before the blocks (pre-norm), not after",
    "roformer": "rotary positions",
    "funnel": "pools the sequence between blocks",
    "convbert": "convolutions mixed into attention",
    "squeezebert": "grouped convolutions instead of linear layers",
    "ibert": "integer-only arithmetic",
    "roberta-prelayernorm": "LayerNorm comes before the blocks (pre-norm), not after",
    "xlm-roberta-xl": "LayerNorm comes before the blocks (pre-norm), not after",
    "xlm": "causal and masked variants with language embeddings",
    "bert-generation": "decoder with cross attention",
    "layoutlm": "two-dimensional layout embeddings",
    "t5": "an encoder-decoder with RMSNorm and relative bias",
    "gpt2": "a decoder",
}
