"""`model.*`: what is trained, a family of this package or a class of the user's own."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, Tag

from shardwise.config.base import Section
from shardwise.config.families import BertConfig, GPTConfig, GPTNeoXConfig, LlamaConfig, Objective


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


FamilyConfig: TypeAlias = LlamaConfig | GPTConfig | GPTNeoXConfig | BertConfig
ModelConfig: TypeAlias = FamilyConfig | OwnConfig

OWN = "own"
FAMILIES: dict[str, type[FamilyConfig]] = {
    "llama": LlamaConfig,
    "gpt": GPTConfig,
    "gpt_neox": GPTNeoXConfig,
    "bert": BertConfig,
}


def _family_tag(value: Any) -> str | None:
    """Which class reads a `model` section: its family's, or `OwnConfig` for package.module:Class."""
    family = value.get("family") if isinstance(value, dict) else getattr(value, "family", None)
    if not isinstance(family, str):
        return None
    return OWN if ":" in family else family


# What a `model` section is read as: the class is chosen first, so that only its own errors are told.
AnyModel = Annotated[
    Annotated[LlamaConfig, Tag("llama")]
    | Annotated[GPTConfig, Tag("gpt")]
    | Annotated[GPTNeoXConfig, Tag("gpt_neox")]
    | Annotated[BertConfig, Tag("bert")]
    | Annotated[OwnConfig, Tag(OWN)],
    Discriminator(_family_tag),
]
