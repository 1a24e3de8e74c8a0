"""The section `data`: the texts, tokens or samples that a model reads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from shardwise.base.errors import listing, nearest_name
from shardwise.config.base_section import RuleTable, Section, broken_rules, reject
from shardwise.config.token_counts import step_field

MASKED_FRACTION = 0.15  # BERT's (arXiv:1810.04805 §3.1)
SHUFFLE_BUFFER = 10_000
"""Default of `data.shuffle_buffer`; another value without a stream is refused."""
CHAT = "chat"
"""The value of `data.format` for conversations, and of `data.dataset` for those of this package."""
DataFormatName = Literal["auto", "text", "jsonl", "parquet", "megatron", "hdf5", "datasets", "chat", "tokens"]
TokenDtype = Literal["auto", "uint8", "uint16", "uint32", "uint64"]
"""Values of `data.format`; all but auto, jsonl and parquet are modules of `data.formats`, looked for in this order."""
BEST_FIT = "best_fit"
"""The value of `data.packing` for samples of whole documents."""
_PACKED_DEFAULTS = {"reset_position_ids": True, "reset_attention_mask": True}
"""Each conversation, and each document that is packed, is read by itself."""
CHAT_KEYS = ("text_key", *_PACKED_DEFAULTS)
"""Keys that have other defaults for conversations."""
_NEEDS = {
    "megatron": "data.path=PREFIX or data.blend=[WEIGHT, PREFIX, …]",
    "hdf5": "data.path: a shard, a folder of *_training_*.hdf5 or a glob",
    "tokens": "data.path, a file of token ids, a folder or a glob",
    "datasets": "data.path, a folder that save_to_disk wrote: a data set of the hub is named by data.dataset alone",
}
"""The keys that a run must give, by `data.format`."""
# A name begins with a letter, a weight with a digit: the two kinds of `data.split` cannot be confused.
_SPLIT_NAME = r"(?a)[A-Za-z_]\w*(\.\w+)*"
PYTHON_NAME = r"\w+(\.\w+)*:\w+"
"""The name of code of the user's own: package.module:Name."""
_SOURCE_NAME = r"(?a)[A-Za-z_][\w-]*"


@dataclass(frozen=True)
class _BuiltInText:
    """A text of this package."""

    description: str  # what it holds, in the words of the key `data.dataset`
    file: str | None = None  # its JSON lines, in the folder `data/corpus`; None: code makes the text
    holds_chat: bool = False  # True if it holds conversations


BUILT_IN_TEXTS: Mapping[str, _BuiltInText] = {
    "stories": _BuiltInText("short stories in simple English"),
    "python": _BuiltInText("the standard library's sources and documentation"),
    "tiny": _BuiltInText("a small corpus in the package", file="tiny.jsonl"),
    CHAT: _BuiltInText("small conversations in the package", file="chat.jsonl", holds_chat=True),
}
"""Value of `data.dataset` → the text of this package that it names; any other value is a data set of the hub."""


class SourceConfig(Section):
    """The keys of the section `data` that name data."""

    dataset: str | None = Field(
        default=None,
        min_length=1,
        description="without path and blend: a data set on the Hugging Face hub (ID or ID@REVISION), or "
        "built-in text: " + ", ".join(f"{name} = {text.description}" for name, text in BUILT_IN_TEXTS.items()),
    )
    config: str | None = Field(
        default=None, min_length=1, description="the configuration of a hub data set that has several"
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description="your own text file, .jsonl, .parquet or a directory of them; what save_to_disk of datasets "
        "wrote; the PREFIX of a Megatron PREFIX.bin and PREFIX.idx; BERT's HDF5 shards (a file, their folder or a "
        "glob); or token ids: .ds of datatrove, .bin of llm.c, .npy, JSON lines or .parquet",
    )
    blend: tuple[float | str, ...] | None = Field(
        default=None,
        strict=False,
        description="weights and prefixes of several Megatron data sets, alternating: [0.7, PREFIX, 0.3, PREFIX2]",
    )
    format: DataFormatName = Field(
        default="auto",
        description="the format of path; chat = conversations in JSON lines or parquet, with their answers as "
        "targets; auto = by file names (PREFIX.idx, .hdf5, .h5, state.json of datasets; .bin without .idx, .npy and "
        ".ds are token ids), else by the content of each file; packed files (gzip, zstd, xz, bzip2, lz4) are unpacked",
    )
    token_dtype: TokenDtype = Field(
        default="auto",
        description="the dtype of token ids in flat files without a header (.npy of OLMo-core, .bin of nanoGPT); "
        "auto = the narrowest that holds the vocabulary of the tokenizer, else of the model",
    )
    text_key: str = Field(
        default="text",
        min_length=1,
        description="the field of JSON lines, or the column of a .parquet or data set, that holds the text, or "
        "tokens (lists of integers; without text, input_ids); meta.body is the field body within meta; for "
        "conversations by default messages, else conversations, else prompt and completion",
    )
    split: str = Field(
        default="95,5",
        description="weights of the training and evaluation parts; Megatron data and HDF5 shards may have a test "
        "part: 980,10,10; or the names of a data set's own splits: train,validation,test",
    )
    streaming: bool = Field(
        default=False,
        description="tokenize during training, for large data: text files, .jsonl, .parquet, save_to_disk or a hub "
        "data set; needs a tokenizer",
    )
    shuffle_buffer: int = Field(
        default=SHUFFLE_BUFFER,
        gt=0,
        description="documents of a stream that are shuffled together; an evaluation reads at most this many",
    )

    @model_validator(mode="before")
    @classmethod
    def _set_dependent_defaults(cls, values: Any) -> Any:
        """The keys of conversations and of packed documents that have other defaults than those of text."""
        if not isinstance(values, dict):
            return values
        defaults: dict[str, Any] = {"text_key": "messages"} if names_chat(values) else {}
        sources = [values, *_sections_in(values.get("mixture"))]
        # Other sources of a mixture give the same inputs to the model.
        is_packed = values.get("packing") == BEST_FIT or any(map(names_chat, sources))
        if "reset_position_ids" in cls.model_fields and is_packed:
            defaults |= _PACKED_DEFAULTS
        return {**defaults, **values}

    @property
    def is_chat(self) -> bool:
        """True if the data are conversations."""
        return names_chat(self.__dict__)

    @field_validator("blend", mode="before")
    @classmethod
    def _blend_goes_by_turns(cls, value: object) -> object:
        """Refuse with one message for each wrong value; pydantic would give two, one for each type of the union."""
        if value is None:
            return value
        if not isinstance(value, list | tuple) or not value or len(value) % 2:
            reject([f"data.blend ({value!r}) must hold weights and prefixes in turn: [0.7, PREFIX, 0.3, PREFIX2]"])
            return value
        problems = []
        for place, (weight, prefix) in enumerate(zip(value[::2], value[1::2], strict=True)):
            number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not number or not 0 < weight < math.inf:
                problems.append(f"data.blend.{2 * place} ({weight!r}) must be a weight, a number above 0")
            if not isinstance(prefix, str) or not prefix:
                problems.append(f"data.blend.{2 * place + 1} ({prefix!r}) must be the prefix of a .bin and a .idx")
        reject(problems)
        return value


def names_chat(values: Mapping[str, Any]) -> bool:
    """True if these unchecked keys of the section `data` of a recipe name conversations."""
    is_dataset = values.get("path") is None and values.get("blend") is None
    name = values.get("dataset")
    # The values are not checked yet: a name may be of any type.
    text = BUILT_IN_TEXTS.get(name) if is_dataset and isinstance(name, str) else None
    return values.get("format") == CHAT or (text is not None and text.holds_chat)


def _sections_in(mixture: Any) -> list[dict[str, Any]]:
    if not isinstance(mixture, dict):
        return []
    return [
        source.__dict__ if isinstance(source, Section) else source
        for source in mixture.values()
        if isinstance(source, dict | Section)
    ]


class MixedSource(SourceConfig):
    """A source of `data.mixture`."""

    weight: float | None = Field(
        default=None,
        gt=0,
        description="the part of the samples from the first step on, in proportion to the other weights; null = none, "
        "unless a stage names the source",
    )
    hook: str | None = Field(
        default=None, description="the samples of an object of your own, package.module:Name, as hooks.data"
    )


class StageConfig(Section):
    """An entry of `data.stages`: the weights, and the sizes of a step, from a step on."""

    at: int = step_field(gt=0, description="the number of steps after which the stage begins")
    weights: dict[str, float] = Field(
        default_factory=dict,
        description="the weights of all sources that are read from then on; left out = as before",
        examples=[{"web": 0.5}],
    )
    sequence_length: int | None = Field(
        default=None, gt=0, description="train.sequence_length from then on; null = as before"
    )
    global_batch: int | None = Field(
        default=None, gt=0, description="train.global_batch from then on, a number; null = as before"
    )
    micro_batch: int | None = Field(default=None, gt=0, description="train.micro_batch from then on; null = as before")
    rope_theta: float | None = Field(default=None, gt=0, description="model.rope_theta from then on; null = as before")
    rope_scaling: dict[str, Any] | None = Field(
        default=None,
        examples=[{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}],
        description="model.rope_scaling from then on; null = as before, {rope_type: default} = none",
    )

    @model_serializer(mode="wrap")
    def _without_unset(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in write(self).items() if value}

    @property
    def sizes(self) -> dict[str, Any]:
        """The keys of `train` and `model` that the stage changes, with their values."""
        keys = type(self).model_fields.keys() - {"at", "weights"}
        return {key: value for key in sorted(keys) if (value := getattr(self, key)) is not None}


_OF_CHAT = "{=data.key} ({=data.name}), whose conversations"
_OF_PACKING = "{data.packing=best_fit}, whose documents are read one by one, or left out"
_RULES: RuleTable = {
    "!is_hub_dataset": (
        "{data.config} must be left out with {=data.key} ({=data.name}): only a data set of the hub has "
        "configurations; set data.config=null",
    ),
    "blend": (
        "{data.path} must be left out with data.blend ({=data.name}): name the data by one of them, and set the other "
        "to null",
    ),
    "holds_tokens": ("{data.streaming} must be false with {=data.key} ({=data.name}): tokens are read as they are",),
    "is_built_in !holds_tokens": ("{data.streaming} must be false with {data.dataset}, which is small",),
    "is_chat": (
        f"{{data.streaming}} must be false with {_OF_CHAT} are packed",
        f"{{data.reset_position_ids=false}} must be true with {_OF_CHAT} are read one by one, or left out",
        f"{{data.reset_attention_mask=false}} must be true with {_OF_CHAT} are read one by one, or left out",
    ),
    "!is_chat": (
        f"{{data.reset_position_ids=false}} must be true with {_OF_PACKING}",
        f"{{data.reset_attention_mask=false}} must be true with {_OF_PACKING}",
        "{data.eod_mask_loss} must be left out with {data.packing=best_fit}, by which no token is predicted from "
        "another document",
    ),
}


class DataConfig(SourceConfig):
    """The data that the model reads."""

    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        description="a tokenizer.json, vocab.json with merges.txt, tokenizer.model, vocab.txt or tekken.json, its "
        "folder, or a hub id (ID or ID@REVISION); null = that of checkpoint.load, else a byte-level BPE of "
        "model.vocab_size that is trained on the data, or none if the data are tokens",
    )
    masked_fraction: float = Field(
        default=MASKED_FRACTION,
        gt=0,
        le=1,
        description="fraction of a sequence's tokens that BERT predicts; no effect on HDF5 shards",
    )
    max_predictions: int | None = Field(
        default=None,
        gt=0,
        description="the most tokens that BERT predicts in a sequence; null = ⌈masked_fraction × sequence length⌉",
    )
    packing: Literal["cut", "best_fit"] = Field(
        default="cut",
        description="cut = samples are cut from the row of all documents; best_fit = whole documents are packed, "
        "each read by itself, and the rest of a sample is padding (causal models; always so for conversations)",
    )
    append_eod: bool | None = Field(
        default=None,
        description="end each document of text with the tokenizer's end-of-document token; null = true; must be null "
        "for bert",
    )
    prepend_bos: bool | None = Field(
        default=None,
        description="begin each document of text with the tokenizer's begin-of-text token, such as <s>; null = false;"
        " must be null for bert",
    )
    eod_mask_loss: bool = Field(
        default=False, description="the token after the end of a document is not predicted (causal models)"
    )
    reset_position_ids: bool = Field(
        default=False,
        description="positions start at 0 in each document (causal models); always true for conversations and with "
        "packing: best_fit",
    )
    reset_attention_mask: bool = Field(
        default=False,
        description="tokens attend only to their own document (causal models); always true for conversations and with"
        " packing: best_fit",
    )
    eod_token: int | None = Field(default=None, ge=0, description="the id that ends a document; null = the tokenizer's")
    workers: int = Field(default=1, ge=1, description="threads that read data ahead, one global batch each")
    mixture: dict[str, MixedSource] = Field(
        default_factory=dict,
        examples=[{"web": {"path": "web.jsonl", "weight": 0.7}, "code": {"path": "code", "weight": 0.3}}],
        description="several sources by name, each with keys that name data (dataset, config, path, blend, format, "
        "text_key, split, streaming, shuffle_buffer) or with hook, and with its weight; all use data.tokenizer",
    )
    stages: tuple[StageConfig, ...] = Field(
        default=(),
        strict=False,
        examples=[[{"at": 1000, "weights": {"web": 0.3, "code": 0.7}}], [{"at": 1000, "sequence_length": 8192}]],
        description="other weights of the mixture's sources, longer sequences, another batch or other rotary positions "
        "from later steps on",
    )

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        problems = self._split_problems() + broken_rules(_RULES, self, "data")
        if self.is_chat:
            problems += self.refused_marks(f"{self.key} ({self.name}), whose conversations a chat template renders")
        if self.append_eod is False and self.needs_document_ends:
            problems.append(
                f"data.append_eod (false) must be true with {self.needs_document_ends}, which needs the token that "
                "ends a document"
            )
        if self.format in _NEEDS and self.path is None and (self.blend is None or self.format == "datasets"):
            problems.append(f"data.format ({self.format}) needs {_NEEDS[self.format]}")
        if self.blend is not None and self.format not in ("auto", "megatron"):
            problems.append(
                f"data.format ({self.format}) must be megatron with data.blend ({self.name}), or left out: other data "
                "come by data.path"
            )
        if not self.streaming and self.shuffle_buffer != SHUFFLE_BUFFER:
            problems.append(f"data.shuffle_buffer ({self.shuffle_buffer}) must be left out without data.streaming=true")
        if self.is_chat and self.path is None and self.dataset != CHAT and not self.is_hub_dataset:
            problems.append(
                f"data.format ({CHAT}) needs data.path: JSON lines or parquet of conversations, or a folder of them; "
                "or data.dataset: a data set of the hub"
            )
        if self.is_chat and (self.eod_mask_loss or self.eod_token is not None):
            problems.append(
                f"data.eod_mask_loss and data.eod_token must be left out with {self.key} ({self.name}), whose "
                "conversations are rendered whole"
            )
        reject(problems + self._mixture_problems())
        return self

    def _mixture_problems(self) -> list[str]:
        problems = self._stage_problems()
        if not self.mixture:
            return problems
        for key, field in SourceConfig.model_fields.items():
            if getattr(self, key) != field.default:
                problems.append(
                    f"data.{key} ({getattr(self, key)}) must be left out with data.mixture: it is a key of each "
                    f"source, as data.mixture.{next(iter(self.mixture))}.{key}"
                )
        for name, source in self.mixture.items():
            problems += [f"data.mixture.{name}: {problem}" for problem in self._source_problems(name, source)]
        if all(source.weight is None for source in self.mixture.values()):
            problems.append("data.mixture must have a source with a weight, which is read from the first step on")
        return problems

    def _source_problems(self, name: str, source: MixedSource) -> list[str]:
        if not re.fullmatch(_SOURCE_NAME, name):
            return ["its name must have letters, digits, _ and - alone, and begin with a letter"]
        given = [key for key in ("dataset", "path", "blend", "hook") if getattr(source, key) is not None]
        if source.hook is not None and not re.fullmatch(PYTHON_NAME, source.hook):
            return [f"its hook ({source.hook!r}) must read package.module:Name"]
        if len(given) != 1:
            named = f"has {listing(given)}" if given else "has none of them"
            return [f"it must name its data by one of dataset, path, blend and hook, and it {named}"]
        try:
            self.source_section(name)
        except ValidationError as error:
            # The values have their types: only rules of several keys can be broken.
            return [text for details in error.errors() for text in details["ctx"]["problems"]]
        return []

    def _stage_problems(self) -> list[str]:
        problems = []
        for number, (stage, before) in enumerate(zip(self.stages, (None, *self.stages), strict=False)):
            key = f"data.stages.{number}"
            if before is not None and stage.at <= before.at:
                problems.append(f"{key}.at ({stage.at}) must be more than that of the stage before ({before.at})")
            if not stage.weights and not stage.sizes:
                named = "weights must name the sources that are read from then on"
                if not self.mixture:
                    named = "sequence_length, or another key of the stage, must be set"
                problems.append(f"{key}.{named}")
            if stage.weights and not self.mixture:
                problems.append(f"{key}.weights must be left out without data.mixture")
                continue
            for name, weight in stage.weights.items():
                if name not in self.mixture:
                    near = nearest_name(name, self.mixture)
                    hint = f"did you mean {near}?" if near else f"there are {listing(self.mixture)}"
                    problems.append(f"{key}.weights.{name} must be a source of data.mixture: {hint}")
                elif not 0 < weight < math.inf:
                    problems.append(
                        f"{key}.weights.{name} ({weight:g}) must be above 0: leave out a source that is not read"
                    )
        return problems

    def late_stage_problems(self, steps: int) -> list[str]:
        """The problems of stages that a run of `steps` steps never reaches."""
        return [
            f"data.stages.{number}.at ({stage.at}) must be less than train.steps ({steps}): leave out a stage that "
            "never begins, or raise train.steps"
            for number, stage in enumerate(self.stages)
            if stage.at >= steps
        ]

    @property
    def holds_out(self) -> bool:
        """True if a part of the data, or of any source of the mixture, is held out for evaluation."""
        sections = [self.source_section(name) for name in self.sources_read] or [self]
        return any(section.split_weights[1] > 0 for section in sections)

    @property
    def holds_chat(self) -> bool:
        """True if the data, or any source of the mixture, are conversations."""
        return self.is_chat or any(source.is_chat for source in self.mixture.values())

    @property
    def is_streamed(self) -> bool:
        """True if the data, or any source of the mixture, are tokenized during training."""
        return self.streaming or any(source.streaming for source in self.mixture.values())

    @property
    def sources_read(self) -> list[str]:
        """The sources of the mixture that are read at any step, in the order of the alphabet."""
        in_stages = {name for stage in self.stages for name in stage.weights}
        return sorted(name for name, source in self.mixture.items() if source.weight is not None or name in in_stages)

    def source_section(self, name: str) -> DataConfig:
        """The section by which a source of the mixture would be read alone; it names none if the source is a hook."""
        shared = DataConfig.model_fields.keys() - SourceConfig.model_fields.keys() - {"mixture", "stages"}
        values = {key: getattr(self, key) for key in shared}
        source = self.mixture[name]
        return DataConfig.model_validate(values | {key: getattr(source, key) for key in SourceConfig.model_fields})

    def _split_problems(self) -> list[str]:
        try:
            # float() reads `inf` and `nan` too: a NaN fails every comparison.
            weights = self.split_weights
            valid = 0 < weights[0] < math.inf and all(0 <= weight < math.inf for weight in weights)
        except ValueError:
            valid = False
        if not valid:
            return [
                f"data.split ({self.split!r}) must be two weights, training (above 0) and evaluation, such as 95,5, or "
                "three with a test part; or up to three names of a data set's own splits, such as train,validation"
            ]
        named = self.is_hub_dataset or (self.path is not None and self.format in ("auto", "datasets"))
        if self.split_names and not named:
            return [
                f"data.split ({self.split!r}) must be weights such as 95,5 with {self.key} ({self.name}): only a data "
                "set of the hub or of save_to_disk has splits with names"
            ]
        return []

    @property
    def packs_documents(self) -> bool:
        """True if samples have whole documents."""
        return self.packing == BEST_FIT

    @property
    def name(self) -> str:
        """The name of the data in messages."""
        if self.mixture:
            return " + ".join(self.mixture)
        if self.blend is not None:
            return " + ".join(prefix for _, prefix in self.weighted_prefixes)
        return self.path or self.dataset or "no data"

    @property
    def is_named(self) -> bool:
        """True if any key says which data are read."""
        return bool(self.mixture) or not (self.path is None and self.blend is None and self.dataset is None)

    @property
    def key(self) -> str:
        """The key that names the data."""
        if self.mixture:
            return "data.mixture"
        if self.blend is not None:
            return "data.blend"
        return "data.dataset" if self.path is None else "data.path"

    @property
    def holds_tokens(self) -> bool:
        """True if the keys say that the data are tokens or samples, and not text."""
        return self.blend is not None or self.format in ("megatron", "hdf5", "tokens")

    @property
    def is_dataset(self) -> bool:
        """True if `dataset` names the data: a built-in text, or a data set of the hub."""
        return self.path is None and self.blend is None and self.dataset is not None

    @property
    def is_built_in(self) -> bool:
        """True if the data are a text of this package, which `dataset` names."""
        return self.is_dataset and self.dataset in BUILT_IN_TEXTS

    @property
    def is_hub_dataset(self) -> bool:
        """True if the data are a data set of the hub, which `dataset` names."""
        return self.is_dataset and self.dataset not in BUILT_IN_TEXTS

    @property
    def weighted_prefixes(self) -> list[tuple[float, str]]:
        """The (weight, prefix) pairs of `data.blend`; for `data.path` one pair of weight 1."""
        if self.blend is None:
            return [] if self.path is None else [(1.0, self.path)]
        return [(float(w), str(p)) for w, p in zip(self.blend[::2], self.blend[1::2], strict=True)]

    @property
    def document_options(self) -> list[str]:
        """The keys for document ends that are true."""
        names = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
        return [f"data.{name}" for name in names if getattr(self, name)]

    @property
    def needs_document_ends(self) -> str | None:
        """The key, with its value, for which the ends of documents must be known; None if there is none."""
        if self.packs_documents:
            return f"data.packing ({self.packing})"
        return next((f"{key} (true)" for key in self.document_options), None)

    @property
    def chosen_marks(self) -> dict[str, bool]:
        """`append_eod` and `prepend_bos` where they differ from what null means: these decide the tokens of a text."""
        # They are part of the key of prepared data, so the default must look the same however it is written.
        chosen = {} if self.append_eod is not False else {"append_eod": False}
        return chosen | ({"prepend_bos": True} if self.prepend_bos else {})

    def refused_marks(self, why: str) -> list[str]:
        """The problems of `append_eod` and `prepend_bos` where none can be put; `why`: the end of the sentence."""
        given = {"append_eod": self.append_eod, "prepend_bos": self.prepend_bos}
        return [
            f"data.{name} ({str(value).lower()}) must be null with {why}"
            for name, value in given.items()
            if value is not None
        ]

    def predictions(self, sequence_length: int) -> int:
        """The most tokens of a sequence that BERT predicts."""
        return self.max_predictions or math.ceil(self.masked_fraction * sequence_length)

    @property
    def split_names(self) -> tuple[str, ...]:
        """The data set's own splits for training, evaluation and test; empty if `data.split` has weights."""
        names = tuple(name.strip() for name in self.split.split(","))
        valid = all(re.fullmatch(_SPLIT_NAME, name) for name in names)
        return names if valid and len(names) <= len(set(names)) <= 3 else ()

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """Weights of the training, evaluation and test parts; 0 for a part that is absent, 1 for a named split."""
        if names := self.split_names:
            return 1.0, float(len(names) > 1), float(len(names) > 2)
        train, evaluation, *test = map(float, self.split.split(","))
        if len(test) > 1:
            raise ValueError(self.split)
        return train, evaluation, test[0] if test else 0.0
