"""Configuration: YAML recipes and command-line overrides become one frozen, checked `Config`."""

from shardwise.config.data import BUILT_IN_TEXTS, CHAT, CHAT_KEYS, DataConfig, names_chat
from shardwise.config.decoders import DecoderConfig, LlamaConfig
from shardwise.config.families import BertConfig, FamilyConfig, GPTConfig, GPTNeoXConfig
from shardwise.config.layout import Layout
from shardwise.config.layout_rules import check_layout
from shardwise.config.load import (
    apply_overrides,
    checked_data_section,
    checked_model_section,
    config_from_sections,
    load_config,
    load_config_with_values,
)
from shardwise.config.model import PLAIN_MODULE, ModelConfig, UserModelConfig, family_config, weight_names
from shardwise.config.optimizer import Frequency, OptimizerConfig
from shardwise.config.pipeline_schedule_specs import Schedule
from shardwise.config.precision import DTYPE_BYTES, DtypeName, Matmul, Precision, PrecisionConfig, Rounding
from shardwise.config.recipe_files import recipe_name, recipe_names, recipe_text, require_data
from shardwise.config.resume_rules import (
    check_changes,
    fixed_changes,
    kept_batch,
    kept_batch_note,
    resume_changes,
    resume_problems,
)
from shardwise.config.run_config import Config
from shardwise.config.sections import (
    BITWISE,
    CheckpointConfig,
    CompileConfig,
    DropoutMode,
    LogConfig,
    ParallelConfig,
    Recompute,
    TrainConfig,
)
from shardwise.config.size_stages import (
    changed_size_stages,
    data_position_after,
    largest_size_stage,
    samples_between,
    size_stage_after,
    size_stage_of_step,
    size_stages_of,
    tokens_of_run,
    values_at_step,
)

__all__ = [
    "BITWISE", "BUILT_IN_TEXTS", "CHAT", "CHAT_KEYS", "DTYPE_BYTES", "PLAIN_MODULE", "BertConfig", "CheckpointConfig",
    "CompileConfig", "Config", "DataConfig", "DecoderConfig", "DropoutMode", "DtypeName",
    "FamilyConfig", "Frequency", "GPTConfig", "GPTNeoXConfig", "Layout", "LlamaConfig", "LogConfig", "Matmul",
    "ModelConfig", "OptimizerConfig", "ParallelConfig", "Precision", "PrecisionConfig", "Recompute", "Rounding",
    "Schedule", "TrainConfig", "UserModelConfig", "apply_overrides", "changed_size_stages", "check_changes",
    "check_layout", "checked_data_section", "checked_model_section", "config_from_sections", "data_position_after",
    "family_config", "fixed_changes", "kept_batch", "kept_batch_note", "largest_size_stage", "load_config",
    "load_config_with_values", "names_chat", "recipe_name", "recipe_names", "recipe_text", "require_data",
    "resume_changes", "resume_problems", "samples_between", "size_stage_after", "size_stage_of_step",
    "size_stages_of", "tokens_of_run", "values_at_step", "weight_names",
]  # fmt: skip
