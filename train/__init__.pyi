"""Training, evaluation and use of models.

Example::

    config = train.recipe("quickstart")
    result = train.train(config, "runs/quickstart")
"""

from .config import MeshConfig as MeshConfig
from .config import TrainConfig as TrainConfig
from .convert.average_checkpoints import average_checkpoints as average_checkpoints
from .convert.export import export_model as export_model
from .convert.import_hf import import_model as import_model
from .distributed.sharding import make_mesh as make_mesh
from .distributed.sharding import parameter_shardings as parameter_shardings
from .distributed.sharding import shard_batch as shard_batch
from .distributed.sharding import state_shardings as state_shardings
from .engine.compile import ShardedStep as ShardedStep
from .engine.compile import make_sharded_step as make_sharded_step
from .engine.loop import Result as Result
from .engine.loop import train as train
from .engine.train_step import make_train_step as make_train_step
from .errors import NonFiniteLoss as NonFiniteLoss
from .errors import RunError as RunError
from .inference.attend import Attention as Attention
from .inference.attend import TextAttention as TextAttention
from .inference.attend import draw_attention as draw_attention
from .inference.embed import TextEmbedder as TextEmbedder
from .inference.evaluate import losses_without_heads as losses_without_heads
from .inference.evaluate import score_run as score_run
from .inference.fill_mask import MaskFiller as MaskFiller
from .inference.generate import Sample as Sample
from .inference.generate import TextGenerator as TextGenerator
from .inference.predict import predict as predict
from .inference.score_text import NextToken as NextToken
from .inference.score_text import NextWord as NextWord
from .inference.score_text import TextScore as TextScore
from .inference.score_text import TextScorer as TextScorer
from .inference.score_text import TokenScore as TokenScore
from .inference.translate import TextTranslator as TextTranslator
from .inference.translate import Translation as Translation
from .objectives.losses import TokenLogProbs as TokenLogProbs
from .objectives.losses import token_log_probs as token_log_probs
from .objectives.objectives import CAUSAL as CAUSAL
from .objectives.objectives import CLASSIFICATION as CLASSIFICATION
from .objectives.objectives import MASKED as MASKED
from .objectives.objectives import MULTI_LABEL as MULTI_LABEL
from .objectives.objectives import PRETRAINING as PRETRAINING
from .objectives.objectives import REGRESSION as REGRESSION
from .objectives.objectives import SPAN as SPAN
from .objectives.objectives import TAGGING as TAGGING
from .objectives.objectives import Objective as Objective
from .objectives.objectives import translation as translation
from .objectives.policy import group_advantages as group_advantages
from .objectives.policy import grpo as grpo
from .objectives.policy import leave_one_out_advantages as leave_one_out_advantages
from .objectives.policy import rloo as rloo
from .objectives.preferences import dpo as dpo
from .objectives.preferences import reward as reward
from .objectives.supervised import supervised as supervised
from .optim.optimizer import make_optimizer as make_optimizer
from .optim.schedules import make_schedule as make_schedule
from .optimizer_config import OptimizerConfig as OptimizerConfig
from .plan.hardware import parse_topology as parse_topology
from .plan.plan import make_plan as make_plan
from .prompting.answer import Answer as Answer
from .prompting.answer import answer_queries as answer_queries
from .prompting.continuations import ContinuationScore as ContinuationScore
from .prompting.continuations import ContinuationScorer as ContinuationScorer
from .recipes import recipe as recipe
from .runs.custom import Callback as Callback
from .runs.load_run import open_run as open_run
from .runs.quality import QualityClassifier as QualityClassifier
from .runs.save_run import save_run as save_run
from .state import TrainState as TrainState
from .state import count_parameters as count_parameters
from .state import init_state as init_state
