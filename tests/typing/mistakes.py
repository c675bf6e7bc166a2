"""Mistakes of a user: type checkers must flag each line marked so, and no other; the file is never run."""

from __future__ import annotations

from torch import Tensor

import fastbert
from fastbert import BertForCausalLM  # error

fastbert.Typo  # error
fastbert.BertModell  # error
fastbert.RobertaForPreTraining  # error
fastbert.models.bert.family_classes  # error


def models(path: str, ids: Tensor) -> None:
    model = fastbert.BertForMaskedLM.from_pretrained(path)
    wrong: fastbert.RobertaForMaskedLM = model  # error
    fastbert.AutoModelForMaskedLM.from_pretrained(path).qa_outputz()  # error
    other: fastbert.BertForTokenClassification = fastbert.AutoModelForMaskedLM.from_pretrained(path)  # error
    fastbert.BertModel.from_pretrained()  # error
    fastbert.BertModel.from_pretrained(path, dtype=32)  # error
    fastbert.BertModel.from_pretrained(path, local_files_only="yes")  # error
    fastbert.BertModel.from_pretrained(path, output_loading_info=True).eval()  # error
    fastbert.BertModel.from_pretrained(path, output_loading_info="yes")  # error
    fastbert.BertModel.from_pretrained(path, ignore_mismatched_sizes="yes")  # error
    fastbert.AutoConfig.from_pretrained()  # error
    fastbert.BertModel.from_pretraind(path)  # error
    fastbert.MPNetModel(path)  # error
    fastbert.EncoderConfig(model_type=3)  # error
    model.config.hidden_size.upper()  # error
    model.save_pretrained()  # error
    print(wrong, other)


def calls(path: str, ids: Tensor) -> None:
    model = fastbert.AutoModelForSequenceClassification.from_pretrained(path)
    model(input_idz=ids)  # error
    model("a sentence")  # error
    model(ids, start_positions=ids)  # error
    model(ids).last_hidden_state  # error
    model(ids).loss.item()  # error
    fastbert.BertModel.from_pretrained(path)(ids, labels=ids)  # error
    fastbert.BertModel.from_pretrained(path)(ids).logits  # error
    fastbert.BertForQuestionAnswering.from_pretrained(path)(ids).end_logit  # error
    fastbert.AlbertForPreTraining.from_pretrained(path)(ids, next_sentence_label=ids)  # error
    fastbert.ErnieForPreTraining.from_pretrained(path)(ids).sop_logits  # error


def functions(path: str, model: fastbert.BertModel) -> None:
    fastbert.encode(path, ["a"], poling="mean")  # error
    fastbert.encode(3, ["a"])  # error
    fastbert.explain(model)[0]  # error
    fastbert.explain("cpu").layers  # error
    fastbert.explain(model).layer  # error
    fastbert.accelerate(model, strickt=True)  # error
    fastbert.use_backend(3)  # error
    fastbert.SentenceEncoder.from_pretrained(path, poling="mean")  # error
    encoder = fastbert.SentenceEncoder.from_pretrained(path)
    encoder.encode(["a"], batch_size="all")  # error
    encoder.encode(["a"], batchsize=3)  # error
    encoder.encode(["a"]).logits  # error
    encoder.width.value  # error
    encoder.similarty([], [])  # error
