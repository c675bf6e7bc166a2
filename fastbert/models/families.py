"""What each model family changes against BERT, as data.

A family says how its checkpoints name the parts of an encoder, which config keys it spells differently, how
it counts positions and which heads it has. `layers/`, `bert.py`, `heads/` and `acceleration/` read this
table. So every parameter has HuggingFace's name and shape in every family.

To add a family with BERT's mathematics, add an entry here and its classes in a file named after its
model_type (copy `roberta.py`), and list them in `fastbert/__init__.py`.

Families that need other mathematics are refused, with the reason in `REFUSED`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fastbert.layers.form import LayerNames, StockLayer
from fastbert.models.paths import ClassifierHead, LMHead, StockModel

_AFTER_POOLER = ClassifierHead(None, None, "classifier")
_SPANS = ClassifierHead(None, None, "qa_outputs", dropout="")


@dataclass(frozen=True)
class Family:
    """One model family. See the module docstring.

    Attributes:
        prefix: name of the encoder inside a model with a head ("bert" in `bert.encoder…`).
        class_prefix: first part of HuggingFace's class names ("Bert" in `BertModel`).
        aliases: config key as this family spells it -> EncoderConfig's key.
        defaults: the config defaults that differ from BERT's.
        pad_positions: positions start at pad_token_id + 1 and skip padding (RoBERTa) instead of counting
            from 0.
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
        attention_output_dropout, ffn_dropout: whether there is dropout after the attention's output layer,
            and after the feed-forward block.
        stock_layer, stock_model: see `StockLayer` and `StockModel`.
        own_heads: first parts of the keys of heads that only this family has.
        tokens, spans: the heads of one label per token and of question answering.
        lacks: tasks for which transformers has no class of this family; of ForMultipleChoice and
            ForQuestionAnswering.
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
    segments: bool = True
    pooler: str | None = "pooler.dense"
    projection: str | None = None
    projects_first: bool = False
    projection_always: bool = False
    relative_bias: str | None = None
    group_layers: str | None = None
    norm_eps: float | None = None
    attention_output_dropout: bool = True
    ffn_dropout: bool = True
    position_padding_idx: bool = False
    classifier: ClassifierHead = _AFTER_POOLER
    choice: ClassifierHead = _AFTER_POOLER
    next_sentence: str = ""  # path of the sentence-pair classifier, "" if the family has none
    next_sentence_dropout: tuple[str, str] | None = None  # path and config key of the dropout before it
    tokens: ClassifierHead = _AFTER_POOLER
    spans: ClassifierHead = _SPANS
    lacks: tuple[str, ...] = ()
    accelerated: bool = True
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
    def counts_columns(self) -> bool:
        """Whether attention depends on the padded columns of tokens, not on their order alone."""
        return self.relative_bias is not None or self.windows or self.disentangled

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
        return known.union(name.replace("-", "_") for name in REFUSED) - {self.prefix}

    def spelt(self, key: str) -> str:
        """A config key as the family's config.json spells it."""
        return next((theirs for theirs, ours in self.aliases.items() if ours == key), key)


_BERT_LM = LMHead(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
    "cls.predictions.transform.transform_act_fn",
)
_ROBERTA_LM = LMHead(
    "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias", activation="gelu"
)
_ROBERTA_CLASSIFIER = ClassifierHead(
    "classifier.dense", "tanh", "classifier.out_proj", dropout="classifier.dropout", dropout_first=True
)
_MODERN_CLASSIFIER = ClassifierHead(
    "head.dense", None, "classifier", act="head.act", dropout="drop", norm="head.norm"
)
# Norms and dropouts are outside the attention block and the feed-forward block
_ROTARY_LAYER = LayerNames(
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.up_proj",
    "mlp.down_proj",
    "post_mlp_layernorm",
    "mlp.gate_proj",
)
_ROTARY_STOCK = StockLayer(
    containers=("self_attn", "mlp"),
    dropouts=("self_attn.attention_dropout", "post_attention_dropout", "post_mlp_dropout"),
    activation="mlp.act_fn",
    positional=("attention_mask", "position_embeddings"),
)
_CONTEXT_CLASSIFIER = ClassifierHead(
    "pooler.dense",
    None,
    "classifier",
    act="pooler.activation",
    act_key="pooler_hidden_act",
    first_dropout=("pooler.dropout", "pooler_dropout"),
    dropout_key="cls_dropout",
)
_THREE = _ROTARY_LAYER.linears[:3]
_ATTENTION = _ROTARY_LAYER.linears[:4]
_ROBERTA_DEFAULTS = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2)
_ROBERTA: dict[str, Any] = dict(
    pad_positions=True,
    position_padding_idx=True,
    lm_head=_ROBERTA_LM,
    classifier=_ROBERTA_CLASSIFIER,
    choice=ClassifierHead(None, None, "classifier", dropout_key="hidden_dropout_prob"),
    positional={"ForMultipleChoice": 1},
)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("bert", "bert", "Bert", lm_head=_BERT_LM, next_sentence="cls.seq_relationship"),
        Family(
            "roberta", "roberta", "Roberta", defaults=dict(_ROBERTA_DEFAULTS, vocab_size=50265), **_ROBERTA
        ),
        Family("xlm-roberta", "roberta", "XLMRoberta", defaults=_ROBERTA_DEFAULTS, **_ROBERTA),
        Family("camembert", "roberta", "Camembert", defaults=_ROBERTA_DEFAULTS, **_ROBERTA),
        Family(
            "distilbert",
            "distilbert",
            "DistilBert",
            layer=LayerNames(
                "attention.q_lin",
                "attention.k_lin",
                "attention.v_lin",
                "attention.out_lin",
                "sa_layer_norm",
                "ffn.lin1",
                "ffn.lin2",
                "output_layer_norm",
            ),
            layers="transformer.layer",
            aliases=dict(
                dim="hidden_size",
                n_layers="num_hidden_layers",
                n_heads="num_attention_heads",
                hidden_dim="intermediate_size",
                dropout="hidden_dropout_prob",
                attention_dropout="attention_probs_dropout_prob",
                activation="hidden_act",
            ),
            defaults=dict(
                num_hidden_layers=6, qa_dropout=0.1, seq_classif_dropout=0.2, sinusoidal_pos_embds=False
            ),
            attention_output_dropout=False,
            may_be_causal=False,
            segments=False,
            pooler=None,
            norm_eps=1e-12,
            lm_head=LMHead("vocab_transform", "vocab_layer_norm", "vocab_projector", None, "activation"),
            classifier=ClassifierHead(
                "pre_classifier", "relu", "classifier", dropout_key="seq_classif_dropout"
            ),
            choice=ClassifierHead("pre_classifier", "relu", "classifier", dropout_key="seq_classif_dropout"),
            tokens=ClassifierHead(None, None, "classifier", dropout_key="hidden_dropout_prob"),
            spans=ClassifierHead(None, None, "qa_outputs", dropout_key="qa_dropout"),
            positional={"": 2},
            stock_layer=StockLayer(
                name="TransformerBlock",
                containers=("attention", "ffn"),
                dropouts=("attention.dropout", None, "ffn.dropout"),
                activation="ffn.activation",
                positional=("attention_mask",),
                feed_forward="ffn",
                norms_attention=True,
            ),
            stock_model=StockModel("BaseModelOutput", stack_by_name=True, embeds_by_name=False),
        ),
        Family(
            "electra",
            "electra",
            "Electra",
            pooler=None,
            projection="embeddings_project",
            defaults=dict(
                embedding_size=128,
                hidden_size=256,
                num_attention_heads=4,
                intermediate_size=1024,
                summary_last_dropout=0.1,
            ),
            lm_head=LMHead(
                "generator_predictions.dense",
                "generator_predictions.LayerNorm",
                "generator_lm_head",
                None,
                "generator_predictions.activation",
                "gelu",
            ),
            classifier=ClassifierHead(
                "classifier.dense",
                "gelu",
                "classifier.out_proj",
                act="classifier.activation",
                dropout="classifier.dropout",
                dropout_first=True,
            ),
            choice=ClassifierHead(
                "sequence_summary.summary",
                "gelu",
                "classifier",
                act="sequence_summary.activation",
                dropout="sequence_summary.last_dropout",
                dropout_key="summary_last_dropout",
                fixed=dict(
                    summary_type="first",
                    summary_use_proj=True,
                    summary_activation="gelu",
                    summary_first_dropout=0.0,
                    summary_proj_to_labels=False,
                ),
            ),
            own_heads=("discriminator_predictions",),
            stock_model=StockModel("BaseModelOutputWithPastAndCrossAttentions"),
        ),
        Family(
            "albert",
            "albert",
            "Albert",
            layer=LayerNames(
                "attention.query",
                "attention.key",
                "attention.value",
                "attention.dense",
                "attention.LayerNorm",
                "ffn",
                "ffn_output",
                "full_layer_layer_norm",
            ),
            layers="encoder.albert_layer_groups",
            group_layers="albert_layers",
            may_be_causal=False,
            pooler="pooler",
            projection="encoder.embedding_hidden_mapping_in",
            projection_always=True,
            ffn_dropout=False,
            defaults=dict(
                vocab_size=30000,
                embedding_size=128,
                hidden_size=4096,
                num_attention_heads=64,
                intermediate_size=16384,
                hidden_act="gelu_new",
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                num_hidden_groups=1,
                inner_group_num=1,
                classifier_dropout_prob=0.1,
                bos_token_id=2,
                eos_token_id=3,
            ),
            lm_head=LMHead(
                "predictions.dense",
                "predictions.LayerNorm",
                "predictions.decoder",
                "predictions.bias",
                "predictions.activation",
            ),
            classifier=ClassifierHead(None, None, "classifier", dropout_key="classifier_dropout_prob"),
            choice=ClassifierHead(None, None, "classifier", dropout_key="classifier_dropout_prob"),
            next_sentence="sop_classifier.classifier",
            next_sentence_dropout=("sop_classifier.dropout", "classifier_dropout_prob"),
            tokens=ClassifierHead(None, None, "classifier", dropout_key="classifier_dropout_prob"),
            stock_layer=StockLayer(
                containers=("attention",),
                dropouts=("attention.attention_dropout", "attention.output_dropout", None),
                activation="activation",
                positional=("attention_mask",),
                feed_forward="ff_chunk",
            ),
            stock_model=StockModel(
                "BaseModelOutputWithPooling", pooler_activation="pooler_activation", embeds_by_name=False
            ),
        ),
        Family(
            "ernie",
            "ernie",
            "Ernie",
            lm_head=_BERT_LM,
            next_sentence="cls.seq_relationship",
            defaults=dict(task_type_vocab_size=3, use_task_id=False),
            positional={"": 3},
        ),
        Family(
            "mpnet",
            "mpnet",
            "MPNet",
            layer=LayerNames(
                "attention.attn.q",
                "attention.attn.k",
                "attention.attn.v",
                "attention.attn.o",
                "attention.LayerNorm",
            ),
            pad_positions=True,
            position_padding_idx=True,
            may_be_causal=False,
            segments=False,
            relative_bias="encoder.relative_attention_bias",
            defaults=dict(_ROBERTA_DEFAULTS, vocab_size=30527, relative_attention_num_buckets=32),
            lm_head=_ROBERTA_LM,
            classifier=ClassifierHead(
                "classifier.dense",
                "tanh",
                "classifier.out_proj",
                dropout="classifier.dropout",
                dropout_first=True,
                dropout_key="hidden_dropout_prob",
            ),
            choice=ClassifierHead(None, None, "classifier", dropout_key="hidden_dropout_prob"),
            tokens=ClassifierHead(None, None, "classifier", dropout_key="hidden_dropout_prob"),
            positional={"": 2},
            stock_layer=StockLayer(
                containers=("attention", "attention.attn", "intermediate", "output"),
                dropouts=("attention.attn.dropout", "attention.dropout", "output.dropout"),
                positional=("attention_mask", "position_bias", "output_attentions"),
                returns_tuple=True,
                attention_drops_by_itself=False,
            ),
            stock_model=StockModel("BaseModelOutputWithPooling", tuple_keeps_none=True),
        ),
        Family(
            "modernbert",
            "model",
            "ModernBert",
            layer=LayerNames(
                "attn.Wqkv",
                "attn.Wqkv",
                "attn.Wqkv",
                "attn.Wo",
                "attn_norm",
                "mlp.Wi",
                "mlp.Wo",
                "mlp_norm",
            ),
            layers="layers",
            word_table="embeddings.tok_embeddings",
            final_norm="final_norm",
            rotary=True,
            windows=True,
            biases={
                "attn.Wqkv": "attention_bias",
                "attn.Wo": "attention_bias",
                "mlp.Wi": "mlp_bias",
                "mlp.Wo": "mlp_bias",
                "head.dense": "classifier_bias",
                "decoder": "decoder_bias",
            },
            out_layers=("attn.Wo", "mlp.Wo", "head.dense", "decoder"),
            aliases=dict(
                hidden_activation="hidden_act",
                norm_eps="layer_norm_eps",
                embedding_dropout="hidden_dropout_prob",
                attention_dropout="attention_probs_dropout_prob",
            ),
            defaults=dict(
                vocab_size=50368,
                num_hidden_layers=22,
                intermediate_size=1152,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                mlp_dropout=0.0,
                classifier_dropout=0.0,
                max_position_embeddings=8192,
                layer_norm_eps=1e-5,
                pad_token_id=50283,
                bos_token_id=50281,
                eos_token_id=50282,
                cls_token_id=50281,
                sep_token_id=50282,
                norm_bias=False,
                attention_bias=False,
                mlp_bias=False,
                decoder_bias=True,
                classifier_bias=False,
                classifier_pooling="cls",
                classifier_activation="gelu",
                local_attention=128,
                global_attn_every_n_layers=3,
                global_rope_theta=160_000.0,
                local_rope_theta=10_000.0,
                initializer_cutoff_factor=2.0,
                # transformers' choices of kernels, which mean nothing here
                deterministic_flash_attn=False,
                reference_compile=None,
                repad_logits_with_grad=False,
                sparse_prediction=False,
                sparse_pred_ignore_index=-100,
            ),
            may_be_causal=False,
            segments=False,
            pooler=None,
            lm_head=LMHead("head.dense", "head.norm", "decoder", None, "head.act"),
            classifier=_MODERN_CLASSIFIER,
            choice=_MODERN_CLASSIFIER,
            tokens=_MODERN_CLASSIFIER,
            spans=_MODERN_CLASSIFIER,
            positional={"": 2},
            stock_layer=StockLayer(
                name="ModernBertEncoderLayer",
                containers=("attn", "mlp"),
                dropouts=("attn.attention_dropout", "attn.out_drop", "mlp.drop"),
                activation="mlp.act",
                positional=("attention_mask", "position_embeddings"),
            ),
            stock_model=StockModel("BaseModelOutput", dropout="drop"),
        ),
        Family(
            "nomic_bert",
            "nomic_bert",
            "NomicBert",
            layer=_ROTARY_LAYER,
            layers="layers",
            rotary=True,
            unbiased=tuple(path for path in _ROTARY_LAYER.linears),
            # Mixtures of experts, and keys of the hub's own code
            refused=(
                "moe_",
                "num_experts",
                "n_embd",
                "n_head",
                "n_inner",
                "n_layer",
                "n_positions",
                "rotary_",
            ),
            spellings={
                "encoder.layers": ("layers",),
                "emb_ln": ("embeddings.LayerNorm",),
                "attn.Wqkv": _THREE,
                "attn.out_proj": ("self_attn.o_proj",),
                "mlp.fc11": ("mlp.up_proj",),
                "mlp.fc12": ("mlp.gate_proj",),
                "mlp.fc2": ("mlp.down_proj",),
                "norm1": ("post_attention_layernorm",),
                "norm2": ("post_mlp_layernorm",),
            },
            pooler_asked=True,
            defaults=dict(
                vocab_size=30528,
                hidden_act="silu",
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                max_position_embeddings=2048,
                head_dim=None,
                rope_parameters={"rope_theta": 1000.0, "rope_type": "default"},
            ),
            may_be_causal=False,
            lm_head=LMHead(
                "cls.predictions.transform.dense",
                "cls.predictions.transform.layer_norm",
                "cls.predictions.decoder",
                "cls.predictions.bias",
                "cls.predictions.transform.transform_act_fn",
            ),
            lacks=("ForMultipleChoice", "ForQuestionAnswering"),
            positional={"": 6, "Model": 5},
            stock_layer=_ROTARY_STOCK,
            stock_model=StockModel("BaseModelOutputWithPooling"),
        ),
        Family(
            "gte",
            "gte",
            "Gte",
            layer=_ROTARY_LAYER,
            layers="layers",
            rotary=True,
            unbiased=("mlp.up_proj", "mlp.gate_proj"),
            # A key of the hub's own code
            refused=("logn_attention",),
            spellings={
                "new": ("gte",),
                "encoder.layer": ("layers",),
                "attention.qkv_proj": _THREE,
                "attention.o_proj": ("self_attn.o_proj",),
                "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj"),
                "attn_ln": ("post_attention_layernorm",),
                "mlp_ln": ("post_mlp_layernorm",),
                "lm_head.norm": ("lm_head.layer_norm",),
            },
            pooler_asked=True,
            defaults=dict(
                vocab_size=250048,
                attention_probs_dropout_prob=0.0,
                max_position_embeddings=8192,
                type_vocab_size=1,
                pad_token_id=1,
                rope_parameters={"rope_theta": 160_000.0, "rope_type": "default"},
            ),
            may_be_causal=False,
            lm_head=LMHead("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", None, activation="gelu"),
            lacks=("ForMultipleChoice", "ForQuestionAnswering"),
            positional={"": 6, "Model": 5},
            stock_layer=replace(_ROTARY_STOCK, dropouts=(*_ROTARY_STOCK.dropouts, "mlp.dropout")),
            stock_model=StockModel("BaseModelOutputWithPooling"),
        ),
        Family(
            "jina_embeddings_v3",
            "roberta",
            "JinaEmbeddingsV3",
            layer=replace(_ROTARY_LAYER, intermediate="mlp.fc1", output="mlp.fc2", gate=None),
            layers="layers",
            rotary=True,
            # Adapters per task
            refused=("lora_",),
            spellings={
                "encoder.layers": ("layers",),
                "emb_ln": ("embeddings.LayerNorm",),
                "mixer.Wqkv": _THREE,
                "mixer.out_proj": ("self_attn.o_proj",),
                "norm1": ("post_attention_layernorm",),
                "norm2": ("post_mlp_layernorm",),
            },
            defaults=dict(
                _ROBERTA_DEFAULTS,
                vocab_size=250002,
                hidden_size=1024,
                num_hidden_layers=24,
                num_attention_heads=16,
                intermediate_size=4096,
                max_position_embeddings=8194,
                type_vocab_size=1,
                layer_norm_eps=1e-5,
                rope_parameters={"rope_theta": 20_000.0, "rope_type": "default"},
            ),
            may_be_causal=False,
            lm_head=_ROBERTA_LM,
            classifier=_ROBERTA_CLASSIFIER,
            lacks=("ForMultipleChoice",),
            positional={"": 6, "Model": 5, "ForQuestionAnswering": 7},
            stock_layer=replace(_ROTARY_STOCK, activation="mlp.activation_fn"),
            stock_model=StockModel("BaseModelOutputWithPooling"),
        ),
        Family(
            "eurobert",
            "model",
            "EuroBert",
            layer=replace(
                _ROTARY_LAYER, attention_norm="input_layernorm", output_norm="post_attention_layernorm"
            ),
            layers="layers",
            embeddings="embed_tokens",
            word_table="embed_tokens",
            final_norm="norm",
            rotary=True,
            pre_norm=True,
            rms_norm=True,
            shares_keys=True,
            biases={
                **dict.fromkeys(_ATTENTION, "attention_bias"),
                **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "lm_head"), "mlp_bias"),
            },
            aliases=dict(rms_norm_eps="layer_norm_eps", attention_dropout="attention_probs_dropout_prob"),
            defaults=dict(
                vocab_size=128256,
                hidden_act="silu",
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                max_position_embeddings=8192,
                layer_norm_eps=1e-5,
                pad_token_id=128001,
                bos_token_id=128000,
                eos_token_id=128001,
                mask_token_id=128002,
                tie_word_embeddings=False,
                attention_bias=False,
                mlp_bias=False,
                head_dim=None,
                num_key_value_heads=None,
                classifier_pooling="late",
                rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"},
            ),
            may_be_causal=False,
            segments=False,
            pooler=None,
            lm_head=LMHead(None, None, "lm_head", None),
            classifier=ClassifierHead("dense", "gelu", "classifier", act="activation", dropout=""),
            tokens=ClassifierHead(None, None, "classifier", dropout=""),
            lacks=("ForMultipleChoice", "ForQuestionAnswering"),
            accelerated=False,
            positional={"": 2},
            stock_layer=replace(_ROTARY_STOCK, dropouts=("self_attn.attention_dropout", None, None)),
            stock_model=StockModel("BaseModelOutput", embeds_by_name=False),
        ),
        Family(
            "deberta-v2",
            "deberta",
            "DebertaV2",
            layer=LayerNames(
                "attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"
            ),
            disentangled=True,
            projection="embeddings.embed_proj",
            projects_first=True,
            unbiased=("embeddings.embed_proj",),
            may_be_causal=False,
            pooler=None,
            defaults=dict(
                vocab_size=128100,
                hidden_size=1536,
                num_hidden_layers=24,
                num_attention_heads=24,
                intermediate_size=6144,
                type_vocab_size=0,
                layer_norm_eps=1e-7,
                relative_attention=False,
                max_relative_positions=-1,
                position_buckets=-1,
                norm_rel_ebd="none",
                share_att_key=False,
                position_biased_input=True,
                pos_att_type=None,
                pooler_dropout=0.0,
                pooler_hidden_act="gelu",
                cls_dropout=None,
                legacy=True,
                conv_kernel_size=0,
                conv_act="tanh",
                conv_groups=1,
            ),
            lm_head=_BERT_LM,
            classifier=_CONTEXT_CLASSIFIER,
            choice=_CONTEXT_CLASSIFIER,
            tokens=ClassifierHead(None, None, "classifier", dropout_key="hidden_dropout_prob"),
            new_lm_head=LMHead(
                "lm_predictions.lm_head.dense",
                "lm_predictions.lm_head.LayerNorm",
                "",
                "lm_predictions.lm_head.bias",
            ),
            own_heads=("lm_predictions", "mask_predictions"),
            accelerated=False,
            positional={"": 5},
            stock_layer=StockLayer(
                positional=("attention_mask",),
                attention_drops_by_itself=False,
            ),
            stock_model=StockModel("BaseModelOutput"),
        ),
    )
}

# model_type -> why its mathematics is not ours
REFUSED: dict[str, str] = {
    "deberta": "disentangled attention adds content-to-position terms inside the softmax",
    "xlnet": "two-stream relative attention over permutations",
    "longformer": "sliding-window attention with global tokens",
    "big_bird": "block-sparse attention",
    "mobilebert": "bottlenecks and stacked feed-forward blocks in each layer",
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


def families_with(task: str) -> tuple[str, ...]:
    """The model types that have a class for a task which only `Family.lacks` denies."""
    return tuple(name for name, family in FAMILIES.items() if task not in family.lacks)


def family_of(model_type: object) -> Family:
    """The family of a `model_type`.

    Raises:
        TypeError, ValueError: for anything else; the error has the reason if it is known.
    """
    if not isinstance(model_type, str):
        raise TypeError(f"model_type: expected a text, got {repr(model_type)[:80]}")
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    known = ", ".join(FAMILIES)
    if model_type in REFUSED:
        raise ValueError(
            f"model_type: {model_type!r} is not supported: {REFUSED[model_type]}; supported: {known}"
        )
    raise ValueError(f"model_type: {model_type!r} is not supported: unknown architecture; supported: {known}")
