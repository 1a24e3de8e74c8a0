"""The families that `model.family` names: their keys, as Hugging Face's `config.json` spells them, and their facts.

This module does not import `annotations` from `__future__`: pydantic would evaluate each annotation, then a string,
again for every class that inherits it.
"""

from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, PrivateAttr, model_validator

from shardwise.base.errors import divisors, listing, nearest_numbers
from shardwise.config.rope_scaling import rope_scaling_problems, with_one_type
from shardwise.config.section import MOST_LAYERS, Origin, Section, reject

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

# Keys that several families have, with their rules and descriptions.
AttentionBias: TypeAlias = Annotated[bool, Field(description="biases on the Q, K, V and output projections")]
Longest: TypeAlias = Annotated[int, Field(gt=0, description="longest sequence the model is made for")]
ProbabilityDropout: TypeAlias = Annotated[
    float, Field(ge=0, lt=1, description="dropout of the attention probabilities")
]
RopeScaling: TypeAlias = Annotated[
    dict[str, Any] | None, Field(description="Hugging Face's rope_scaling: rope_type and its fields; null = none")
]
RotaryBase: TypeAlias = Annotated[float, Field(gt=0, description="base of the rotary frequencies")]
Tied: TypeAlias = Annotated[bool, Field(description="one weight for the embedding and the output head")]
_FeedForwardDropout: TypeAlias = Annotated[
    float,
    Field(ge=0, lt=1, description="dropout after the activation of the feed-forward layer, as in NeMo's GPT"),
]
_LearnedPositions: TypeAlias = Annotated[int, Field(gt=0, description="learned positions: the longest sequence")]
_NormEpsilon: TypeAlias = Annotated[float, Field(gt=0, description="added to the variance in LayerNorm")]


class TransformerConfig(Section):
    """The keys that all families share, and the facts of their architecture that models and formulas read.

    Models and formulas ask for a fact, never for the family. A family states the facts in which it differs.
    """

    aliases: ClassVar[dict[str, str]] = {}
    """Other spellings of the family's keys."""
    derived: ClassVar[tuple[str, ...]] = ()
    """Keys for which null means the default, as in Hugging Face's files."""
    keys: ClassVar[dict[str, str]] = {}
    """The family's key for each of `activation`, `norm_eps` and the kinds of dropout; kinds it lacks are absent."""

    norm_kind: ClassVar[NormKind] = "layer_norm"
    norm_place: ClassVar[NormPlace] = "input"
    """`input`: x + f(norm(x)) for each of attention and MLP. `sum`: norm(x + f(x)). `output`: x + norm(f(x))."""
    query_key_norm: ClassVar[NormedWidth | None] = None
    """RMSNorm of q and k before they are rotated: over each head, or over all heads at once. None: neither is done."""
    attention_output_bias: ClassVar[bool] = True
    """Whether the output projection has a bias where Q, K and V have one."""
    gated: ClassVar[bool] = False
    """Whether the MLP is `down(act(gate(x)) · up(x))`, else `down(act(up(x)))`."""
    learned_positions: ClassVar[bool] = False
    """Whether positions are a table of embeddings, added to those of the tokens."""
    fused_query_key_value: ClassVar[bool] = False
    """Whether Q, K and V are one canonical tensor."""
    interleaved_heads: ClassVar[bool] = False
    """Whether that tensor is ordered by head: Q, K and V of the first head, then those of the second, and so forth."""
    causal: ClassVar[bool] = True
    """Whether a token attends only to itself and those before it."""
    embedding_norm: ClassVar[bool] = False
    """True if the sum of the embeddings is normalised before the first block."""
    head_transform: ClassVar[bool] = False
    """True if the head computes `norm(act(dense(x)))` before the product with the vocabulary's matrix."""
    objectives: ClassVar[tuple[Objective, ...]] = ("lm",)
    """The losses, each a mean over its own count: next token (`lm`), masked tokens (`mlm`), next sentence (`nsp`)."""

    _origin: Origin = PrivateAttr(default=Origin())

    family: str = Field(description="the architecture")
    vocab_size: int = Field(gt=0, description="rows of the embedding and of the output head")
    hidden_size: int = Field(gt=0, description="width of the residual stream")
    intermediate_size: int = Field(gt=0, description="width of the feed-forward layer")
    num_hidden_layers: int = Field(gt=0, le=MOST_LAYERS, description="number of transformer blocks")
    num_attention_heads: int = Field(gt=0, description="query heads")
    max_position_embeddings: Longest
    initializer_range: float = Field(default=0.02, gt=0, description="standard deviation of initial weights")
    tie_word_embeddings: Tied
    ignore: tuple[str, ...] = Field(
        default=(),
        strict=False,
        examples=[["training_notes"]],
        description="fields of a Hugging Face config.json that are left out, as they change nothing that the model "
        "computes; fields that are known to change it are refused",
    )

    @property
    def origin(self) -> Origin:
        """Where the keys come from."""
        return self._origin

    def came_from(self, origin: Origin) -> None:
        """Note, once, where the keys come from. It is no part of the configuration and is not recorded with it."""
        self._origin = origin

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, data: Any) -> Any:
        """Give each key its own name, leave out null where it means the default, and rename an old `type` of RoPE."""
        if not isinstance(data, dict):
            return data
        reject(
            [
                f"model.{alias} ({data[alias]!r}) and model.{key} ({data[key]!r}) are one quantity: give one of them"
                for alias, key in cls.aliases.items()
                if alias in data and key in data and data[alias] != data[key]
            ]
        )
        named = {cls.aliases.get(key, key): value for key, value in data.items()}
        given = {key: value for key, value in named.items() if key not in cls.derived or value is not None}
        scaling = given.get("rope_scaling")
        if isinstance(scaling, dict):
            given["rope_scaling"] = with_one_type(scaling)
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        reject(self._problems())
        return self

    def _problems(self) -> list[str]:
        """What is wrong with the values of several keys together."""
        scaling = getattr(self, "rope_scaling", None)
        return [] if scaling is None else rope_scaling_problems(scaling, self.rotary_dim)

    @property
    def predicts_masked_tokens(self) -> bool:
        """Return whether masked tokens are predicted, in place of the next token at every position."""
        return "mlm" in self.objectives

    @property
    def predicts_sentences(self) -> bool:
        """Return whether samples are pairs of sentences, of which the model says if the second follows the first."""
        return "nsp" in self.objectives

    @property
    def token_types(self) -> int:
        """Rows of the embedding of token types; 0 where tokens have no types."""
        return 0

    @property
    def rotary_dim(self) -> int:
        """Number of leading dimensions of each head that rotary embeddings turn; 0 where positions are learned."""
        return 0

    def rotates(self, layer: int) -> bool:
        """Whether rotary embeddings turn the heads of this block."""
        return self.rotary_dim > 0

    @property
    def extends_positions(self) -> bool:
        """Whether `rope_scaling` stretches the rotary embedding beyond `max_position_embeddings`."""
        scaling = getattr(self, "rope_scaling", None)
        return scaling is not None and scaling["rope_type"] != "default"

    @property
    def activation(self) -> Activation:
        """The function between the matrices of the MLP."""
        return _ACTIVATIONS[getattr(self, self.keys["activation"])]

    @property
    def norm_eps(self) -> float:
        """What a norm adds to the variance (LayerNorm) or to the mean square (RMSNorm)."""
        return float(getattr(self, self.keys["norm_eps"]))

    @property
    def embedding_dropout_p(self) -> float:
        """Dropout of the first block's input."""
        return self._dropout("embedding_dropout")

    @property
    def hidden_dropout_p(self) -> float:
        """Dropout of what attention and MLP add to the residual stream."""
        return self._dropout("hidden_dropout")

    @property
    def attention_dropout_p(self) -> float:
        """Dropout of the attention probabilities."""
        return self._dropout("attention_dropout")

    @property
    def ffn_dropout_p(self) -> float:
        """Dropout between the activation of the MLP and its second matrix."""
        return self._dropout("ffn_dropout")

    def _dropout(self, kind: str) -> float:
        return float(getattr(self, self.keys[kind])) if kind in self.keys else 0.0

    @property
    def has_dropout(self) -> bool:
        """Whether training drops anything."""
        return any(self._dropout(kind) for kind in self.keys if kind.endswith("_dropout"))


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

    def _problems(self) -> list[str]:
        hidden, heads = self.hidden_size, self.num_attention_heads
        if hidden % heads == 0:
            return super()._problems()
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
    derived: ClassVar[tuple[str, ...]] = ("intermediate_size",)
    keys: ClassVar[dict[str, str]] = {
        "activation": "activation_function",
        "norm_eps": "layer_norm_epsilon",
        "embedding_dropout": "embd_pdrop",
        "hidden_dropout": "resid_pdrop",
        "attention_dropout": "attn_pdrop",
        "ffn_dropout": "ffn_dropout",
    }

    family: Literal["gpt"] = Field(description="the architecture")
    intermediate_size: int = Field(
        default_factory=lambda data: 4 * data.get("hidden_size", 1),
        gt=0,
        description="width of the feed-forward layer; default: 4 × hidden_size",
    )
    max_position_embeddings: _LearnedPositions = 1024
    tie_word_embeddings: Tied = True
    activation_function: GELUName = Field(
        default="gelu_new", description=f"activation of the feed-forward layer: {_GELUS}"
    )
    layer_norm_epsilon: _NormEpsilon = 1e-5
    embd_pdrop: float = Field(default=0.1, ge=0, lt=1, description="dropout of the embeddings")
    resid_pdrop: float = Field(default=0.1, ge=0, lt=1, description="dropout of the outputs of attention and MLP")
    attn_pdrop: ProbabilityDropout = 0.1
    ffn_dropout: _FeedForwardDropout = 0.0


class GPTNeoXConfig(MultiHeadConfig):
    """GPT-NeoX and Pythia: partly rotary heads, attention and feed-forward layer in parallel, biases.

    Older Hugging Face files call rope_theta rotary_emb_base; this name is read too.
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
        "ffn_dropout": "ffn_dropout",
    }

    family: Literal["gpt_neox"] = Field(description="the architecture")
    max_position_embeddings: Longest = 2048
    tie_word_embeddings: Tied = False
    hidden_act: GELUName = Field(default="gelu", description=f"activation of the feed-forward layer: {_GELUS}")
    layer_norm_eps: _NormEpsilon = 1e-5
    rotary_pct: float = Field(
        default=0.25, gt=0, le=1, description="fraction of each head's dimensions, the first ones, that are rotary"
    )
    rope_theta: RotaryBase = 10000.0
    rope_scaling: RopeScaling = None
    use_parallel_residual: bool = Field(
        default=True,
        description="attention and MLP read the same input, and both outputs are added to it; false = MLP reads the "
        "result of attention",
    )
    attention_bias: AttentionBias = True
    hidden_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="dropout of the embeddings and of the outputs of attention and MLP"
    )
    attention_dropout: ProbabilityDropout = 0.0
    ffn_dropout: _FeedForwardDropout = 0.0

    def _problems(self) -> list[str]:
        if self.hidden_size % self.num_attention_heads or (self.rotary_dim and self.rotary_dim % 2 == 0):
            return super()._problems()
        return [
            f"model.rotary_pct ({self.rotary_pct}) × head width ({self.head_dim}) = {self.rotary_dim} must be "
            "even and at least 2: rotary embeddings turn pairs"
        ]

    @property
    def parallel_residual(self) -> bool:
        """Whether attention and MLP read the same x."""
        return self.use_parallel_residual

    @property
    def rotary_dim(self) -> int:
        """How many leading dimensions of each head rotary embeddings turn: ⌊rotary_pct · head_dim⌋."""
        return int(self.head_dim * self.rotary_pct)


class BertConfig(MultiHeadConfig):
    """BERT: LayerNorm after each layer, token types, padding mask, masked-token and next-sentence heads."""

    norm_place: ClassVar[NormPlace] = "sum"
    learned_positions: ClassVar[bool] = True
    attention_bias: ClassVar[bool] = True
    parallel_residual: ClassVar[bool] = False
    causal: ClassVar[bool] = False
    embedding_norm: ClassVar[bool] = True
    head_transform: ClassVar[bool] = True
    objectives: ClassVar[tuple[Objective, ...]] = ("mlm", "nsp")

    keys: ClassVar[dict[str, str]] = {
        "activation": "hidden_act",
        "norm_eps": "layer_norm_eps",
        "embedding_dropout": "hidden_dropout_prob",
        "hidden_dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    }

    family: Literal["bert"] = Field(description="the architecture")
    max_position_embeddings: _LearnedPositions = 512
    tie_word_embeddings: Literal[True] = Field(default=True, description="the masked-token head shares the embedding")
    type_vocab_size: int = Field(default=2, gt=0, description="token types: first and second sentence")
    pad_token_id: int = Field(
        default=0,
        ge=0,
        description="id of the padding token, whose embedding gets gradients only through the output head",
    )
    hidden_act: GELUName = Field(
        default="gelu", description=f"activation of the feed-forward layer and of the head: {_GELUS}"
    )
    layer_norm_eps: _NormEpsilon = 1e-12
    hidden_dropout_prob: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="dropout of the embeddings and of the outputs of attention and feed-forward layer",
    )
    attention_probs_dropout_prob: ProbabilityDropout = 0.1

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.pad_token_id >= self.vocab_size:
            problems.append(
                f"model.pad_token_id ({self.pad_token_id}) must be less than model.vocab_size ({self.vocab_size})"
            )
        if self.type_vocab_size < 2:
            problems.append(f"model.type_vocab_size ({self.type_vocab_size}) must be at least 2: samples are pairs")
        return problems

    @property
    def token_types(self) -> int:
        """Rows of the embedding of token types."""
        return self.type_vocab_size
