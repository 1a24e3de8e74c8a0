"""The families that `model.family` names, their sizes by the names that Hugging Face's `config.json` uses.

Annotations are no text here (`from __future__`), which would be evaluated again for each class that inherits them.
"""

from typing import Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from shardwise.config.base import MOST_LAYERS, Section, reject
from shardwise.config.rope import rope_scaling_problems
from shardwise.errors import divisors, listing, nearest_numbers

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu"]
Objective: TypeAlias = Literal["lm", "mlm", "nsp"]
NormKind: TypeAlias = Literal["layer_norm", "rms_norm"]
NormPlace: TypeAlias = Literal["input", "sum", "output"]
NormedWidth: TypeAlias = Literal["head", "all_heads"]
GELUName: TypeAlias = Literal["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu"]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_GELUS = "gelu (erf), gelu_new, gelu_fast and gelu_pytorch_tanh (tanh), or relu"


class TransformerConfig(Section):
    """What the families share: their sizes, and the facts of their architecture that models and formulas read.

    A fact that differs between families is stated here once. Formulas ask for the fact, never for the family.
    """

    aliases: ClassVar[dict[str, str]] = {}
    """Other spellings of the family's keys."""
    keys: ClassVar[dict[str, str]] = {}
    """The family's names of the quantities below; a quantity that the family lacks is left out."""

    norm_kind: ClassVar[NormKind] = "layer_norm"
    norm_place: ClassVar[NormPlace] = "input"
    """`input`: x + f(norm(x)) for each of attention and MLP. `sum`: norm(x + f(x)). `output`: x + norm(f(x))."""
    query_key_norm: ClassVar[NormedWidth | None] = None
    """What RMSNorm of q and k spans, before they are rotated: each head, or all heads at once; None: there is none."""
    attention_output_bias: ClassVar[bool] = True
    """Whether the output projection has a bias where Q, K and V have one."""
    gated: ClassVar[bool] = False
    """Whether the MLP is `down(act(gate(x)) · up(x))`, else `down(act(up(x)))`."""
    learned_positions: ClassVar[bool] = False
    """Whether positions are a table of embeddings, added to those of the tokens."""
    fused_query_key_value: ClassVar[bool] = False
    """Whether Q, K and V are one canonical tensor."""
    interleaved_heads: ClassVar[bool] = False
    """Whether that tensor goes head by head, so that Q, K and V of a head lie next to each other."""

    family: str = Field(description="the architecture")
    vocab_size: int = Field(gt=0, description="rows of the embedding and of the output head")
    hidden_size: int = Field(gt=0, description="width of the residual stream")
    intermediate_size: int = Field(gt=0, description="width of the feed-forward layer")
    num_hidden_layers: int = Field(gt=0, le=MOST_LAYERS, description="number of transformer blocks")
    num_attention_heads: int = Field(gt=0, description="query heads")
    max_position_embeddings: int = Field(gt=0, description="longest sequence the model is made for")
    initializer_range: float = Field(default=0.02, gt=0, description="standard deviation of initial weights")
    tie_word_embeddings: bool = Field(description="one weight for the embedding and the output head")

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that rotary embeddings turn; 0 where positions are learned."""
        return 0

    def rotates(self, layer: int) -> bool:
        """Whether rotary embeddings turn the heads of that block."""
        return self.rotary_dim > 0

    @property
    def activation(self) -> Activation:
        """What the feed-forward layer computes between its matrices."""
        return _ACTIVATIONS[getattr(self, self.keys["activation"])]

    @property
    def norm_eps(self) -> float:
        """What normalisation adds to the variance, or to the mean square."""
        return float(getattr(self, self.keys["norm_eps"]))

    @property
    def embedding_dropout_p(self) -> float:
        """Dropout of what enters the first block."""
        return self._dropout("embedding_dropout")

    @property
    def hidden_dropout_p(self) -> float:
        """Dropout of what attention and feed-forward layer add to the residual stream."""
        return self._dropout("hidden_dropout")

    @property
    def attention_dropout_p(self) -> float:
        """Dropout of the attention probabilities."""
        return self._dropout("attention_dropout")

    def _dropout(self, role: str) -> float:
        return float(getattr(self, self.keys[role])) if role in self.keys else 0.0

    @property
    def has_dropout(self) -> bool:
        """Whether training drops anything."""
        return max(self.embedding_dropout_p, self.hidden_dropout_p, self.attention_dropout_p) > 0

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return True

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """The losses, each a mean over its own count: next token, or masked tokens and next sentence."""
        return ("lm",)

    @property
    def extends_positions(self) -> bool:
        """Whether sequences longer than `max_position_embeddings` have positions."""
        return False


class MultiHeadConfig(TransformerConfig):
    """Families whose heads divide the hidden size and have a key and a value each, with biases in every layer."""

    mlp_bias: ClassVar[bool] = True

    @property
    def num_key_value_heads(self) -> int:
        """As many as query heads."""
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_attention_heads

    def _head_problems(self) -> list[str]:
        hidden, heads = self.hidden_size, self.num_attention_heads
        if hidden % heads == 0:
            return []
        near = nearest_numbers(heads, divisors(hidden))
        return [
            f"model.hidden_size ({hidden}) must be a multiple of model.num_attention_heads ({heads}): "
            f"nearest {listing(near, 'or')} heads"
        ]


class GPTConfig(MultiHeadConfig):
    """GPT-2 and GPT-3: learned positions, LayerNorm before each layer, biases, a tied or untied output head.

    GPT-2's own spellings are read too: n_embd, n_inner, n_layer, n_head, n_positions, layer_norm_eps, hidden_act.
    """

    learned_positions: ClassVar[bool] = True
    fused_query_key_value: ClassVar[bool] = True
    attention_bias: ClassVar[bool] = True
    parallel_residual: ClassVar[bool] = False

    aliases: ClassVar[dict[str, str]] = {
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "layer_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    }

    keys: ClassVar[dict[str, str]] = {
        "activation": "activation_function",
        "norm_eps": "layer_norm_epsilon",
        "embedding_dropout": "embd_pdrop",
        "hidden_dropout": "resid_pdrop",
        "attention_dropout": "attn_pdrop",
    }

    family: Literal["gpt"] = Field(description="the architecture")
    intermediate_size: int = Field(
        default_factory=lambda data: 4 * data["hidden_size"],
        gt=0,
        description="width of the feed-forward layer; default: 4 × hidden_size",
    )
    max_position_embeddings: int = Field(default=1024, gt=0, description="learned positions: the longest sequence")
    tie_word_embeddings: bool = Field(default=True, description="one weight for the embedding and the output head")
    activation_function: GELUName = Field(default="gelu_new", description=f"of the feed-forward layer: {_GELUS}")
    layer_norm_epsilon: float = Field(default=1e-5, gt=0, description="added to the variance in LayerNorm")
    embd_pdrop: float = Field(default=0.1, ge=0, lt=1, description="dropout of the embeddings")
    resid_pdrop: float = Field(default=0.1, ge=0, lt=1, description="dropout of what attention and MLP add")
    attn_pdrop: float = Field(default=0.1, ge=0, lt=1, description="dropout of the attention probabilities")

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, data: Any) -> Any:
        return without_nulls(_with_one_spelling(data, cls.aliases), ("intermediate_size",))

    @model_validator(mode="after")
    def _check(self) -> Self:
        reject(self._head_problems())
        return self


class GPTNeoXConfig(MultiHeadConfig):
    """GPT-NeoX and Pythia: partly rotary heads, attention and feed-forward layer side by side, biases.

    Older Hugging Face files spell rope_theta as rotary_emb_base; that is read too.
    """

    fused_query_key_value: ClassVar[bool] = True
    interleaved_heads: ClassVar[bool] = True

    aliases: ClassVar[dict[str, str]] = {"rotary_emb_base": "rope_theta"}

    keys: ClassVar[dict[str, str]] = {
        "activation": "hidden_act",
        "norm_eps": "layer_norm_eps",
        "embedding_dropout": "hidden_dropout",
        "hidden_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
    }

    family: Literal["gpt_neox"] = Field(description="the architecture")
    max_position_embeddings: int = Field(default=2048, gt=0, description="longest sequence the model is made for")
    tie_word_embeddings: bool = Field(default=False, description="one weight for the embedding and the output head")
    hidden_act: GELUName = Field(default="gelu", description=f"of the feed-forward layer: {_GELUS}")
    layer_norm_eps: float = Field(default=1e-5, gt=0, description="added to the variance in LayerNorm")
    rotary_pct: float = Field(default=0.25, gt=0, le=1, description="leading part of each head that is rotary")
    rope_theta: float = Field(default=10000.0, gt=0, description="base of the rotary frequencies")
    rope_scaling: dict[str, Any] | None = Field(
        default=None, description="Hugging Face's rope_scaling: rope_type and its fields; null = none"
    )
    use_parallel_residual: bool = Field(
        default=True,
        description="attention and MLP read the same x, both add to it; false = one after the other",
    )
    attention_bias: bool = Field(default=True, description="biases on the Q, K, V and output projections")
    hidden_dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout of embeddings, attention and MLP")
    attention_dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout of the attention probabilities")

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, data: Any) -> Any:
        return with_rope_type(_with_one_spelling(data, cls.aliases))

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = self._head_problems()
        if not problems and (self.rotary_dim == 0 or self.rotary_dim % 2):
            problems.append(
                f"model.rotary_pct ({self.rotary_pct}) × head width ({self.head_dim}) = {self.rotary_dim} must be "
                "even and at least 2: rotary embeddings turn pairs"
            )
        if not problems and self.rope_scaling is not None:
            problems += rope_scaling_problems(self.rope_scaling, self.rotary_dim)
        reject(problems)
        return self

    @property
    def parallel_residual(self) -> bool:
        """Whether attention and MLP read the same x."""
        return self.use_parallel_residual

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that rotary embeddings turn: ⌊rotary_pct · head_dim⌋."""
        return int(self.head_dim * self.rotary_pct)

    @property
    def extends_positions(self) -> bool:
        """Whether `rope_scaling` stretches the rotary embedding beyond `max_position_embeddings`."""
        return self.rope_scaling is not None and self.rope_scaling["rope_type"] != "default"


class BertConfig(MultiHeadConfig):
    """BERT: LayerNorm after each layer, token types, padding mask, masked-token and next-sentence heads."""

    norm_place: ClassVar[NormPlace] = "sum"
    learned_positions: ClassVar[bool] = True
    attention_bias: ClassVar[bool] = True
    parallel_residual: ClassVar[bool] = False

    keys: ClassVar[dict[str, str]] = {
        "activation": "hidden_act",
        "norm_eps": "layer_norm_eps",
        "embedding_dropout": "hidden_dropout_prob",
        "hidden_dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    }

    family: Literal["bert"] = Field(description="the architecture")
    max_position_embeddings: int = Field(default=512, gt=0, description="learned positions: the longest sequence")
    tie_word_embeddings: Literal[True] = Field(default=True, description="the masked-token head shares the embedding")
    type_vocab_size: int = Field(default=2, gt=0, description="token types: first and second sentence")
    pad_token_id: int = Field(
        default=0, ge=0, description="padding token, whose embedding learns through the output head alone"
    )
    hidden_act: GELUName = Field(default="gelu", description=f"of the feed-forward layer and head: {_GELUS}")
    layer_norm_eps: float = Field(default=1e-12, gt=0, description="added to the variance in LayerNorm")
    hidden_dropout_prob: float = Field(
        default=0.1, ge=0, lt=1, description="dropout of embeddings, attention and feed-forward layer"
    )
    attention_probs_dropout_prob: float = Field(
        default=0.1, ge=0, lt=1, description="dropout of the attention probabilities"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = self._head_problems()
        if self.pad_token_id >= self.vocab_size:
            problems.append(
                f"model.pad_token_id ({self.pad_token_id}) must be less than model.vocab_size ({self.vocab_size})"
            )
        if self.type_vocab_size < 2:
            problems.append(f"model.type_vocab_size ({self.type_vocab_size}) must be at least 2: samples are pairs")
        reject(problems)
        return self

    @property
    def causal(self) -> bool:
        """Every token sees every other that is not padding."""
        return False

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """Masked tokens and next sentence."""
        return ("mlm", "nsp")


def without_nulls(data: Any, derived: tuple[str, ...]) -> Any:
    """Null in a derived key is the same as the key left out."""
    if not isinstance(data, dict):
        return data
    return {key: value for key, value in data.items() if key not in derived or value is not None}


def with_rope_type(data: Any) -> Any:
    """In `rope_scaling`, `type` is the old spelling of `rope_type`."""
    scaling = data.get("rope_scaling") if isinstance(data, dict) else None
    if not isinstance(scaling, dict) or "type" not in scaling or "rope_type" in scaling:
        return data
    return {**data, "rope_scaling": {"rope_type" if key == "type" else key: v for key, v in scaling.items()}}


def _with_one_spelling(data: Any, aliases: dict[str, str]) -> Any:
    """Other spellings under their own name; two that differ are an error."""
    if not isinstance(data, dict):
        return data
    reject(
        [
            f"model.{alias} ({data[alias]!r}) and model.{key} ({data[key]!r}) are one quantity: give one of them"
            for alias, key in aliases.items()
            if alias in data and key in data and data[alias] != data[key]
        ]
    )
    return {aliases.get(key, key): value for key, value in data.items()}
