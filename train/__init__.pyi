"""Training, evaluation and use of models.

Example::

    config = train.recipe("quickstart")
    result = train.train(config, "runs/quickstart")
"""

from ..data.common.errors import NonFiniteLoss as NonFiniteLoss
from ..data.common.errors import RunError as RunError
from ..models.token_log_probs import TokenLogProbs as TokenLogProbs
from ..models.token_log_probs import token_log_probs as token_log_probs
from .config import MeshConfig as MeshConfig
from .config import TrainConfig as TrainConfig
from .convert.average_checkpoints import average_checkpoints as average_checkpoints
from .convert.export import export_model as export_model
from .convert.import_hf import import_model as import_model
from .distributed.sharding import make_mesh as make_mesh
from .distributed.sharding import parameter_shardings as parameter_shardings
from .distributed.sharding import shard_batch as shard_batch
from .distributed.sharding import state_shardings as state_shardings
from .engine.sharded_step import ShardedStep as ShardedStep
from .engine.sharded_step import make_sharded_step as make_sharded_step
from .engine.train import Result as Result
from .engine.train import train as train
from .engine.train_step import make_train_step as make_train_step
from .evaluation.evaluate import losses_without_heads as losses_without_heads
from .evaluation.evaluate import score_run as score_run
from .evaluation.predict import predict as predict
from .losses.objective import FurtherModel as FurtherModel
from .losses.objective import Objective as Objective
from .losses.router import with_router as with_router
from .objectives.causal_lm import CAUSAL as CAUSAL
from .objectives.causal_lm import CausalLMConfig as CausalLMConfig
from .objectives.classification import CLASSIFICATION as CLASSIFICATION
from .objectives.classification import MULTI_LABEL as MULTI_LABEL
from .objectives.classification import REGRESSION as REGRESSION
from .objectives.classification import ClassificationConfig as ClassificationConfig
from .objectives.classification import MultipleChoiceConfig as MultipleChoiceConfig
from .objectives.dpo import DPOConfig as DPOConfig
from .objectives.dpo import dpo as dpo
from .objectives.grpo import GRPOConfig as GRPOConfig
from .objectives.grpo import group_advantages as group_advantages
from .objectives.grpo import grpo as grpo
from .objectives.masked_lm import MASKED as MASKED
from .objectives.masked_lm import PRETRAINING as PRETRAINING
from .objectives.masked_lm import MaskedLMConfig as MaskedLMConfig
from .objectives.ppo import PPOConfig as PPOConfig
from .objectives.ppo import ppo as ppo
from .objectives.ppo import ppo_targets as ppo_targets
from .objectives.question_answering import SPAN as SPAN
from .objectives.question_answering import QuestionAnsweringConfig as QuestionAnsweringConfig
from .objectives.reward import RewardConfig as RewardConfig
from .objectives.reward import reward as reward
from .objectives.rloo import RLOOConfig as RLOOConfig
from .objectives.rloo import leave_one_out_advantages as leave_one_out_advantages
from .objectives.rloo import rloo as rloo
from .objectives.seq2seq import Seq2SeqConfig as Seq2SeqConfig
from .objectives.seq2seq import seq2seq as seq2seq
from .objectives.sft import SFTConfig as SFTConfig
from .objectives.sft import supervised as supervised
from .objectives.token_classification import TAGGING as TAGGING
from .objectives.token_classification import TokenClassificationConfig as TokenClassificationConfig
from .optim.optimizer import make_optimizer as make_optimizer
from .optim.schedules import make_schedule as make_schedule
from .optimizer_config import OptimizerConfig as OptimizerConfig
from .plan.plan import make_plan as make_plan
from .plan.topology import parse_topology as parse_topology
from .recipes import recipe as recipe
from .runs.custom import Callback as Callback
from .runs.load_run import open_run as open_run
from .runs.quality import QualityClassifier as QualityClassifier
from .runs.reference import ReferenceModel as ReferenceModel
from .runs.save_run import save_run as save_run
from .state import TrainState as TrainState
from .state import count_parameters as count_parameters
from .state import init_state as init_state
