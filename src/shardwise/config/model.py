"""The section `model`: the model that is trained, of a family of this package or a class of the user's."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, MutableMapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from shardwise.base.errors import listing
from shardwise.config.base_section import Origin, Section, reject
from shardwise.config.decoders import DECODERS
from shardwise.config.families import BertConfig, FamilyConfig, GPTConfig, GPTNeoXConfig, Objective
from shardwise.config.hugging_face_names import WeightNames

PLAIN_MODULE = (
    "of a plain module that takes ids [batch, sequence] and returns logits, `Trained = shardwise.batch_first(Module)` "
    "makes the class to name"
)
"""The fix of the usual first error with a class of the user's, for the end of a message."""


class UserModelConfig(Section):
    """A causal language model of your own: `family` names its class, which gets every key under `model`.

    The facts are those of `FamilyConfig`. They are attributes of this class, and a key of the user's with the name of
    one is in `model_extra` alone.
    """

    model_config = ConfigDict(extra="allow")

    is_own: ClassVar[Literal[True]] = True
    has_dropout: ClassVar[bool] = False
    """False, as shardwise draws no dropout for it: the class may drop what it likes."""
    causal: ClassVar[bool] = True
    objectives: ClassVar[tuple[Objective, ...]] = ("lm",)
    predicts_masked_tokens: ClassVar[bool] = False
    predicts_sentences: ClassVar[bool] = False
    attention_dropout_p: ClassVar[float] = 0.0
    rotary_dim: ClassVar[int] = 0
    extends_positions: ClassVar[bool] = False
    ignore: ClassVar[tuple[str, ...]] = ()
    origin: ClassVar[Origin] = Origin()

    family: str = Field(pattern=r"^\w+(\.\w+)*:\w+$", description="your class: package.module:Class")
    vocab_size: int = Field(gt=0, description="rows of the embedding and of the output head")
    max_position_embeddings: int | None = Field(
        default=None, gt=0, description="longest sequence; train.sequence_length must not exceed it; null = any"
    )
    hidden_size: int | None = Field(
        default=None, gt=0, description="width of x between blocks, which parallel.pipeline needs; null = not checked"
    )
    num_hidden_layers: int | None = Field(
        default=None, gt=0, description="blocks, which parallel.pipeline needs and cuts into stages; null = not checked"
    )
    num_attention_heads: int | None = Field(
        default=None, gt=0, description="query heads, which parallel.tensor must divide; null = not checked"
    )
    num_key_value_heads: int | None = Field(
        default=None,
        gt=0,
        description="key and value heads, which parallel.tensor must divide or be a multiple of; null = as many as "
        "query heads",
    )
    intermediate_size: int | None = Field(
        default=None,
        gt=0,
        description="width of the feed-forward layer, which parallel.tensor must divide; null = not checked",
    )


ModelConfig: TypeAlias = FamilyConfig | UserModelConfig

_SPARSE = ("olmoe", "qwen3_moe", "mixtral", "glm4_moe")  # the families of `config/sparse.py`
_RECORDS: tuple[type[FamilyConfig], ...] = (*DECODERS, GPTConfig, GPTNeoXConfig, BertConfig)


class _Families(UserDict[str, type[FamilyConfig]]):
    """The records of all families; those of sparse ones, None until then, are made when one of them is asked for."""

    def __getitem__(self, name: str) -> type[FamilyConfig]:
        if self.data[name] is None:
            from shardwise.config.sparse import SPARSE_DECODERS

            self.data |= _by_name(SPARSE_DECODERS)
        return self.data[name]


def _by_name(records: Iterable[type[FamilyConfig]]) -> dict[str, type[FamilyConfig]]:
    return {get_args(record.model_fields["family"].annotation)[0]: record for record in records}


_NAMES: dict[str, Any] = dict.fromkeys((*_by_name(DECODERS), *_SPARSE))
FAMILIES: MutableMapping[str, type[FamilyConfig]] = _Families(_NAMES | _by_name(_RECORDS))
"""The value of `model.family` → the family's record. Everything that goes through all families reads this table."""


def family_config(model: ModelConfig) -> FamilyConfig | None:
    """Return the `model` section of a family, which knows all shapes; None for one of the user's class, which does not.

    It is no attribute of the model: `UserModelConfig` has the user's keys, which may have any name.
    """
    return None if isinstance(model, UserModelConfig) else model


def weight_names(family: str) -> WeightNames:
    """Return the Hugging Face names for a value of the key `model.family`; a user's class has its own names alone."""
    if family not in FAMILIES:
        return WeightNames()
    return FAMILIES[family].weight_names


def _read(value: Any) -> ModelConfig:
    if not isinstance(value, dict | Section):
        reject([f"model ({value!r}) must be a mapping of keys"])
    # A program may give a section that was read before.
    name = value.get("family") if isinstance(value, dict) else getattr(value, "family", None)
    if isinstance(name, str) and ":" in name:
        return UserModelConfig.model_validate(value)
    if str(name) not in FAMILIES:
        valid = f"{listing(FAMILIES, 'or')}, or package.module:Class for your own"
        if name is None:
            reject([f"model.family is missing (the architecture: {valid})"])
        reject([f"model.family ({name!r}) must be {valid}"])
    return FAMILIES[str(name)].model_validate(value)


class _ChosenByFamily:
    """Makes pydantic validate with the one class that `family` names.

    With a plain union it would report the errors of every class, and build the validators of all of them.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        dump = core_schema.plain_serializer_function_ser_schema(
            lambda model, info: model.model_dump(mode=info.mode), info_arg=True
        )
        return core_schema.no_info_plain_validator_function(_read, serialization=dump)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "object"}  # config/schema.py says more


AnyModel = Annotated[ModelConfig, _ChosenByFamily()]
"""The type as which pydantic reads a `model` section."""
