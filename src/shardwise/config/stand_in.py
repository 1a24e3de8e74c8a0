"""The model of a family that stands in formulas for a class of the user's own."""

from __future__ import annotations

from pydantic import Field

from shardwise.config.decoders import LlamaConfig
from shardwise.config.model import UserModelConfig
from shardwise.config.run_config import Config

_INT64 = 2**63 - 1  # the limit of keys is too low for counts of a large model


class StandIn(LlamaConfig):
    """The Llama of the same width, depth and matrices as a class of the user's own."""

    own: UserModelConfig  # the user's section: the sizes that it names, and no others, limit the layout
    parameters: int = Field(le=_INT64)  # elements of the parameters of the class
    # Bytes that a sample's activations take beyond those of the Llama, before they are cut.
    held_bytes: int = Field(default=0, le=_INT64)

    def cut_over(self, tensor: int) -> StandIn:
        """This model with heads, and an inner width of its MLP, of as good as the same size that `tensor` divides."""
        heads, kv_heads, inner = self.num_attention_heads, self.num_key_value_heads, self.intermediate_size
        cut = -(-heads // tensor) * tensor
        update = {"num_attention_heads": cut, "num_key_value_heads": cut if kv_heads == heads else kv_heads}
        update |= {"intermediate_size": -(-inner // tensor) * tensor}
        return self.model_copy(update=update | {"head_dim": max(2, heads * self.head_dim // cut // 2 * 2)})


def config_as_given(config: Config) -> Config:
    """`config` as the user gave it, whose rules count: with the class in whose place a model of a family stands."""
    return config.model_copy(update={"model": config.model.own}) if isinstance(config.model, StandIn) else config
