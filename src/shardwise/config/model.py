"""`model.*`: what is trained, a family of this package or a class of the user's own."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, get_args

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, SerializationInfo
from pydantic_core import CoreSchema, core_schema

from shardwise.config.base import Section, reject
from shardwise.config.decoders import Decoder
from shardwise.config.families import BertConfig, GPTConfig, GPTNeoXConfig, Objective
from shardwise.errors import listing


class OwnConfig(Section):
    """A causal language model of your own: `family` names its class, which gets every key under `model`."""

    model_config = ConfigDict(extra="allow")

    family: str = Field(pattern=r"^\w+(\.\w+)*:\w+$", description="your class: package.module:Class")
    vocab_size: int = Field(gt=0, description="rows of the embedding and of the output head")
    max_position_embeddings: int | None = Field(
        default=None, gt=0, description="longest sequence, checked against train.sequence_length; null = any"
    )
    num_attention_heads: int | None = Field(
        default=None, gt=0, description="query heads, which parallel.tensor must divide; null = not checked"
    )
    num_key_value_heads: int | None = Field(
        default=None, gt=0, description="key and value heads, checked likewise; null = as many as query heads"
    )
    intermediate_size: int | None = Field(
        default=None, gt=0, description="width of the feed-forward layer, checked likewise; null = not checked"
    )

    @property
    def has_dropout(self) -> bool:
        """Dropout of an own model is its own: none that a layout-invariant key draws."""
        return False

    @property
    def causal(self) -> bool:
        """A token sees only those before it."""
        return True

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """Next token."""
        return ("lm",)

    @property
    def extends_positions(self) -> bool:
        """A limit, where one is given, is a limit."""
        return False


FamilyConfig: TypeAlias = Decoder | GPTConfig | GPTNeoXConfig | BertConfig
ModelConfig: TypeAlias = FamilyConfig | OwnConfig

FAMILIES: dict[str, type[FamilyConfig]] = {
    get_args(family.model_fields["family"].annotation)[0]: family for family in get_args(FamilyConfig)
}
"""By the values of `model.family`."""


def _read(value: Any) -> ModelConfig:
    """A `model` section as its family's class reads it, or `OwnConfig` for package.module:Class."""
    name = value.get("family") if isinstance(value, dict) else getattr(value, "family", None)
    if isinstance(name, str) and ":" in name:
        return OwnConfig.model_validate(value)
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        reject([_family_problem(value)])
        raise AssertionError("reject raises")
    return family.model_validate(value)


def _family_problem(model: Any) -> str:
    """Why no class reads this `model` section."""
    if not isinstance(model, dict):
        return f"model ({model!r}) must be a mapping of keys"
    valid = f"{listing(FAMILIES, 'or')}, or package.module:Class for your own"
    if model.get("family") is None:
        return f"model.family is missing (the architecture: {valid})"
    return f"model.family ({model['family']!r}) must be {valid}"


def _dump(model: ModelConfig, info: SerializationInfo) -> dict[str, Any]:
    return model.model_dump(mode=info.mode)


class _ChosenByFamily:
    """Lets pydantic call the one class: only its errors are reported, and of no other class a validator is built."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        dump = core_schema.plain_serializer_function_ser_schema(_dump, info_arg=True)
        return core_schema.no_info_plain_validator_function(_read, serialization=dump)


AnyModel = Annotated[ModelConfig, _ChosenByFamily()]
"""What a `model` section is read as."""
