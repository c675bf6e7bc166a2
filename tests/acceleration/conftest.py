"""What several files of the accelerated models' tests share."""

from __future__ import annotations

import pytest
import transformers

from tests.support.stock_models import TEXTS


@pytest.fixture
def fresh_accelerator():
    """accelerate with a new state: it keeps its precision for the whole process."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    known = " ".join([*TEXTS, "where when"]).split()
    vocabulary = {word: i for i, word in enumerate([*special, *dict.fromkeys(known)])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_max_length=64,
        padding_side="right",
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
