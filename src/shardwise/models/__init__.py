"""The model families, each in one short file that reads like the architecture, and how a model is built."""

from shardwise.models.bert import Bert
from shardwise.models.blocks import Part, Stages, gives_losses
from shardwise.models.build import build_model
from shardwise.models.causal import CausalLM
from shardwise.models.gpt import GPT
from shardwise.models.gpt_neox import GPTNeoX
from shardwise.models.llama import Llama
from shardwise.models.own import build_own, check_own
from shardwise.pipeline.build import build_stages
