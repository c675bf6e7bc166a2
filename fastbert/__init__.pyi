# The public names and their modules. Type checkers read this file, and `__init__.py` imports each name at its
# first use.

from .acceleration import accelerate as accelerate
from .acceleration import explain as explain
from .acceleration import restore as restore
from .checkpoint.files import CheckpointError as CheckpointError
from .compression.distillation.run import distill as distill
from .compression.early_exit import EarlyExit as EarlyExit
from .compression.elimination import eliminate as eliminate
from .compression.pruning import prune as prune
from .compression.quantization import quantization_report as quantization_report
from .finetuning.predict import predict as predict
from .finetuning.run import finetune as finetune
from .graphs.model import graph as graph
from .graphs.training import graph_training as graph_training
from .models.albert import AlbertForMaskedLM as AlbertForMaskedLM
from .models.albert import AlbertForMultipleChoice as AlbertForMultipleChoice
from .models.albert import AlbertForPreTraining as AlbertForPreTraining
from .models.albert import AlbertForQuestionAnswering as AlbertForQuestionAnswering
from .models.albert import AlbertForSequenceClassification as AlbertForSequenceClassification
from .models.albert import AlbertForTokenClassification as AlbertForTokenClassification
from .models.albert import AlbertModel as AlbertModel
from .models.auto import AutoConfig as AutoConfig
from .models.auto import AutoModel as AutoModel
from .models.auto import AutoModelForMaskedLM as AutoModelForMaskedLM
from .models.auto import AutoModelForMultipleChoice as AutoModelForMultipleChoice
from .models.auto import AutoModelForNextSentencePrediction as AutoModelForNextSentencePrediction
from .models.auto import AutoModelForPreTraining as AutoModelForPreTraining
from .models.auto import AutoModelForQuestionAnswering as AutoModelForQuestionAnswering
from .models.auto import AutoModelForSequenceClassification as AutoModelForSequenceClassification
from .models.auto import AutoModelForTokenClassification as AutoModelForTokenClassification
from .models.bert import BertModel as BertModel
from .models.big_bird import BigBirdForMaskedLM as BigBirdForMaskedLM
from .models.big_bird import BigBirdForMultipleChoice as BigBirdForMultipleChoice
from .models.big_bird import BigBirdForPreTraining as BigBirdForPreTraining
from .models.big_bird import BigBirdForQuestionAnswering as BigBirdForQuestionAnswering
from .models.big_bird import BigBirdForSequenceClassification as BigBirdForSequenceClassification
from .models.big_bird import BigBirdForTokenClassification as BigBirdForTokenClassification
from .models.big_bird import BigBirdModel as BigBirdModel
from .models.camembert import CamembertForMaskedLM as CamembertForMaskedLM
from .models.camembert import CamembertForMultipleChoice as CamembertForMultipleChoice
from .models.camembert import CamembertForQuestionAnswering as CamembertForQuestionAnswering
from .models.camembert import CamembertForSequenceClassification as CamembertForSequenceClassification
from .models.camembert import CamembertForTokenClassification as CamembertForTokenClassification
from .models.camembert import CamembertModel as CamembertModel
from .models.config import EncoderConfig as EncoderConfig
from .models.deberta_v2 import DebertaV2ForMaskedLM as DebertaV2ForMaskedLM
from .models.deberta_v2 import DebertaV2ForMultipleChoice as DebertaV2ForMultipleChoice
from .models.deberta_v2 import DebertaV2ForQuestionAnswering as DebertaV2ForQuestionAnswering
from .models.deberta_v2 import DebertaV2ForReplacedTokens as DebertaV2ForReplacedTokens
from .models.deberta_v2 import DebertaV2ForSequenceClassification as DebertaV2ForSequenceClassification
from .models.deberta_v2 import DebertaV2ForTokenClassification as DebertaV2ForTokenClassification
from .models.deberta_v2 import DebertaV2Model as DebertaV2Model
from .models.distilbert import DistilBertForMaskedLM as DistilBertForMaskedLM
from .models.distilbert import DistilBertForMultipleChoice as DistilBertForMultipleChoice
from .models.distilbert import DistilBertForQuestionAnswering as DistilBertForQuestionAnswering
from .models.distilbert import DistilBertForSequenceClassification as DistilBertForSequenceClassification
from .models.distilbert import DistilBertForTokenClassification as DistilBertForTokenClassification
from .models.distilbert import DistilBertModel as DistilBertModel
from .models.electra import ElectraForMaskedLM as ElectraForMaskedLM
from .models.electra import ElectraForMultipleChoice as ElectraForMultipleChoice
from .models.electra import ElectraForPreTraining as ElectraForPreTraining
from .models.electra import ElectraForQuestionAnswering as ElectraForQuestionAnswering
from .models.electra import ElectraForSequenceClassification as ElectraForSequenceClassification
from .models.electra import ElectraForTokenClassification as ElectraForTokenClassification
from .models.electra import ElectraModel as ElectraModel
from .models.ernie import ErnieForMaskedLM as ErnieForMaskedLM
from .models.ernie import ErnieForMultipleChoice as ErnieForMultipleChoice
from .models.ernie import ErnieForNextSentencePrediction as ErnieForNextSentencePrediction
from .models.ernie import ErnieForPreTraining as ErnieForPreTraining
from .models.ernie import ErnieForQuestionAnswering as ErnieForQuestionAnswering
from .models.ernie import ErnieForSequenceClassification as ErnieForSequenceClassification
from .models.ernie import ErnieForTokenClassification as ErnieForTokenClassification
from .models.ernie import ErnieModel as ErnieModel
from .models.eurobert import EuroBertForMaskedLM as EuroBertForMaskedLM
from .models.eurobert import EuroBertForSequenceClassification as EuroBertForSequenceClassification
from .models.eurobert import EuroBertForTokenClassification as EuroBertForTokenClassification
from .models.eurobert import EuroBertModel as EuroBertModel
from .models.gte import GteForMaskedLM as GteForMaskedLM
from .models.gte import GteForSequenceClassification as GteForSequenceClassification
from .models.gte import GteForTokenClassification as GteForTokenClassification
from .models.gte import GteModel as GteModel
from .models.heads.masked_lm import BertForMaskedLM as BertForMaskedLM
from .models.heads.multiple_choice import BertForMultipleChoice as BertForMultipleChoice
from .models.heads.next_sentence import BertForNextSentencePrediction as BertForNextSentencePrediction
from .models.heads.pretraining import BertForPreTraining as BertForPreTraining
from .models.heads.question_answering import BertForQuestionAnswering as BertForQuestionAnswering
from .models.heads.sequence_classification import (
    BertForSequenceClassification as BertForSequenceClassification,
)
from .models.heads.token_classification import BertForTokenClassification as BertForTokenClassification
from .models.jina_bert import JinaBertForMaskedLM as JinaBertForMaskedLM
from .models.jina_bert import JinaBertForMultipleChoice as JinaBertForMultipleChoice
from .models.jina_bert import JinaBertForQuestionAnswering as JinaBertForQuestionAnswering
from .models.jina_bert import JinaBertForSequenceClassification as JinaBertForSequenceClassification
from .models.jina_bert import JinaBertForTokenClassification as JinaBertForTokenClassification
from .models.jina_bert import JinaBertModel as JinaBertModel
from .models.jina_embeddings_v3 import JinaEmbeddingsV3ForMaskedLM as JinaEmbeddingsV3ForMaskedLM
from .models.jina_embeddings_v3 import (
    JinaEmbeddingsV3ForQuestionAnswering as JinaEmbeddingsV3ForQuestionAnswering,
)
from .models.jina_embeddings_v3 import (
    JinaEmbeddingsV3ForSequenceClassification as JinaEmbeddingsV3ForSequenceClassification,
)
from .models.jina_embeddings_v3 import (
    JinaEmbeddingsV3ForTokenClassification as JinaEmbeddingsV3ForTokenClassification,
)
from .models.jina_embeddings_v3 import JinaEmbeddingsV3Model as JinaEmbeddingsV3Model
from .models.longformer import LongformerForMaskedLM as LongformerForMaskedLM
from .models.longformer import LongformerForMultipleChoice as LongformerForMultipleChoice
from .models.longformer import LongformerForQuestionAnswering as LongformerForQuestionAnswering
from .models.longformer import LongformerForSequenceClassification as LongformerForSequenceClassification
from .models.longformer import LongformerForTokenClassification as LongformerForTokenClassification
from .models.longformer import LongformerModel as LongformerModel
from .models.mobilebert import MobileBertForMaskedLM as MobileBertForMaskedLM
from .models.mobilebert import MobileBertForMultipleChoice as MobileBertForMultipleChoice
from .models.mobilebert import MobileBertForNextSentencePrediction as MobileBertForNextSentencePrediction
from .models.mobilebert import MobileBertForPreTraining as MobileBertForPreTraining
from .models.mobilebert import MobileBertForQuestionAnswering as MobileBertForQuestionAnswering
from .models.mobilebert import MobileBertForSequenceClassification as MobileBertForSequenceClassification
from .models.mobilebert import MobileBertForTokenClassification as MobileBertForTokenClassification
from .models.mobilebert import MobileBertModel as MobileBertModel
from .models.modernbert import ModernBertForMaskedLM as ModernBertForMaskedLM
from .models.modernbert import ModernBertForMultipleChoice as ModernBertForMultipleChoice
from .models.modernbert import ModernBertForQuestionAnswering as ModernBertForQuestionAnswering
from .models.modernbert import ModernBertForSequenceClassification as ModernBertForSequenceClassification
from .models.modernbert import ModernBertForTokenClassification as ModernBertForTokenClassification
from .models.modernbert import ModernBertModel as ModernBertModel
from .models.mpnet import MPNetForMaskedLM as MPNetForMaskedLM
from .models.mpnet import MPNetForMultipleChoice as MPNetForMultipleChoice
from .models.mpnet import MPNetForQuestionAnswering as MPNetForQuestionAnswering
from .models.mpnet import MPNetForSequenceClassification as MPNetForSequenceClassification
from .models.mpnet import MPNetForTokenClassification as MPNetForTokenClassification
from .models.mpnet import MPNetModel as MPNetModel
from .models.neobert import NeoBertForMaskedLM as NeoBertForMaskedLM
from .models.neobert import NeoBertForSequenceClassification as NeoBertForSequenceClassification
from .models.neobert import NeoBertModel as NeoBertModel
from .models.nomic_bert import NomicBertForMaskedLM as NomicBertForMaskedLM
from .models.nomic_bert import NomicBertForSequenceClassification as NomicBertForSequenceClassification
from .models.nomic_bert import NomicBertForTokenClassification as NomicBertForTokenClassification
from .models.nomic_bert import NomicBertModel as NomicBertModel
from .models.roberta import RobertaForMaskedLM as RobertaForMaskedLM
from .models.roberta import RobertaForMultipleChoice as RobertaForMultipleChoice
from .models.roberta import RobertaForQuestionAnswering as RobertaForQuestionAnswering
from .models.roberta import RobertaForSequenceClassification as RobertaForSequenceClassification
from .models.roberta import RobertaForTokenClassification as RobertaForTokenClassification
from .models.roberta import RobertaModel as RobertaModel
from .models.xlm_roberta import XLMRobertaForMaskedLM as XLMRobertaForMaskedLM
from .models.xlm_roberta import XLMRobertaForMultipleChoice as XLMRobertaForMultipleChoice
from .models.xlm_roberta import XLMRobertaForQuestionAnswering as XLMRobertaForQuestionAnswering
from .models.xlm_roberta import XLMRobertaForSequenceClassification as XLMRobertaForSequenceClassification
from .models.xlm_roberta import XLMRobertaForTokenClassification as XLMRobertaForTokenClassification
from .models.xlm_roberta import XLMRobertaModel as XLMRobertaModel
from .models.xlnet import XLNetForMultipleChoice as XLNetForMultipleChoice
from .models.xlnet import XLNetForQuestionAnswering as XLNetForQuestionAnswering
from .models.xlnet import XLNetForQuestionAnsweringSimple as XLNetForQuestionAnsweringSimple
from .models.xlnet import XLNetForSequenceClassification as XLNetForSequenceClassification
from .models.xlnet import XLNetForTokenClassification as XLNetForTokenClassification
from .models.xlnet import XLNetLMHeadModel as XLNetLMHeadModel
from .models.xlnet import XLNetModel as XLNetModel
from .ops.checks import double_backward as double_backward
from .runtime.dispatch import use_backend as use_backend
from .runtime.prepared import clear as clear
from .sentences.cross_encoder import CrossEncoder as CrossEncoder
from .sentences.encoder import SentenceEncoder as SentenceEncoder
from .sentences.encoder import encode as encode
from .sentences.multi_vector import MultiVectorEncoder as MultiVectorEncoder
from .sentences.sparse_encoder import SparseEncoder as SparseEncoder
from .sentences.tokenizer import EncodingError as EncodingError

BertConfig = EncoderConfig
__version__: str
