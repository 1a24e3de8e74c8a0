"""The files that a checkpoint has beside its weights, with which `transformers` loads it as a model of its own.

They are `config.json`, the tokenizer, and companions, which come from the weights that a run starts from: the ids of
special tokens in `config.json`, `generation_config.json`, and the tokenizer where the data have none. An id means a
token, so ids are kept only where the tokenizer of the data has the same tokens at them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.base.errors import ConfigError, StoreError
from shardwise.base.files import user_path
from shardwise.base.hub import TOKENIZER
from shardwise.base.yaml_and_json import json_value
from shardwise.checkpoint.format.model_files import (
    BEGIN_ID,
    END_ID,
    FilesBesideWeights,
    special_ids,
    with_readable_tokenizer,
)
from shardwise.checkpoint.format.weight_files import GENERATION
from shardwise.checkpoint.format.writing import CONFIG, to_json
from shardwise.checkpoint.storage.checkpoint_folders import companions_folder
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config, FamilyConfig, ModelConfig, family_config
from shardwise.config.hugging_face import to_hugging_face
from shardwise.data.tokens.tokenizer import Tokenizer, special_token_ids

_QWEN2_SPLIT = json.dumps(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|")[1:-1]
"""The beginning of the expression by which Qwen 2's class of transformers splits text."""


def model_files(
    config: ModelConfig, dtype: torch.dtype, tokenizer: Path | None, companions: Companions | None = None
) -> dict[str, bytes]:
    """Name → content of the files that `transformers` reads beside the weights: `config.json` and the tokenizer's.

    A model that generates has a `generation_config.json` with the ids that begin and end a text, if any is known.
    The `config.json` of a user's own model is its `model` section, which only its class reads. The ids that begin and
    end a text are those of the companions, else the tokenizer's, or null: without them transformers would take those of
    its own default tokenizer, which are letters in most vocabularies, and generation would stop there. A model that
    generates nothing has none.
    """
    companions = companions or Companions()
    tokenizer_files: dict[str, bytes] = {}
    ids: dict[str, Any] = {BEGIN_ID: None, END_ID: None}
    if tokenizer is not None:
        tokenizer_files = {name: (tokenizer / name).read_bytes() for name in Root.of(tokenizer).files()}
        if config.causal:
            ids = special_token_ids(tokenizer)
    family = family_config(config)
    if family is None:
        fields = config.model_dump(mode="json")
        ids |= {name: value for name, value in companions.ids.items() if name in ids}
    else:
        fields = to_hugging_face(family)
        # Ids that are keys of the family, such as BERT's padding, stay the model's.
        ids |= {name: value for name, value in companions.ids.items() if name not in type(family).model_fields}
    described = {**fields, "torch_dtype": str(dtype).removeprefix("torch."), **ids}
    generation: dict[str, bytes] = {}
    ends = {name: ids[name] for name in (BEGIN_ID, END_ID) if ids.get(name) is not None}
    if family is not None and family.causal and ends:
        generation[GENERATION] = to_json(ends)
    token_files = with_readable_tokenizer({**companions.files, **tokenizer_files}, pairs=not config.causal)
    return {**generation, **token_files, CONFIG: to_json(described)}


def _qwen2_note(family: FamilyConfig | None, tokenizer: Path | None) -> tuple[str, ...]:
    """A note where transformers takes its own class for the model whatever the files say, and gives other ids."""
    if tokenizer is None or family is None or to_hugging_face(family)["model_type"] != "qwen2":
        return ()
    described = json_value((tokenizer / TOKENIZER).read_text(encoding="utf-8"))
    if described["normalizer"] == {"type": "NFC"} and _QWEN2_SPLIT in json.dumps(described["pre_tokenizer"]):
        return ()
    return (
        "AutoTokenizer of transformers 5 splits text for model_type qwen2 by rules of its own, and gives other ids "
        "than the tokenizer of the data: open it by PreTrainedTokenizerFast.from_pretrained",
    )


@dataclass(frozen=True)
class Companions:
    """The token ids and files that go into each checkpoint of a run."""

    # Fields of `config.json`, such as `eos_token_id`, each with one id or several.
    ids: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # sentences for the user, on what is left out or replaced


def find_checkpoint_companions(config: Config, weights: Root | None, tokenizer: Path | None) -> Companions:
    """The companions of checkpoints from the first place that describes text of the same tokens as the data.

    The places are that of `checkpoint.companions`, that of the loaded weights or the file of `model.config`, and the
    folder of `data.tokenizer`.

    Args:
        weights: the folder of `checkpoint.load`; None where it names none.
        tokenizer: the folder of the data's tokenizer; None where it is not known.

    Raises:
        ConfigError: a file cannot be read, or is missing.
    """
    named = config.checkpoint.companions
    try:
        places = _places(named, config.companions, weights, config.data.tokenizer)
        sources = [FilesBesideWeights.read(place) for place in places]
    except StoreError as error:
        raise ConfigError(str(error)) from None
    if named is not None and not (sources[0].ids or sources[0].files):
        raise ConfigError(
            f"checkpoint.companions ({named}) must hold a config.json with ids of special tokens, or a "
            "generation_config.json or tokenizer, and it holds none of them: name a model's folder, or a run's"
        )
    companions = _first_fitting(sources, tokenizer)
    companions = replace(companions, notes=(*companions.notes, *_qwen2_note(config.shapes, tokenizer)))
    if tokenizer is None or not config.data.holds_chat:
        return companions
    return _with_ends_of_answers(companions, tokenizer)


def resumed_companions(checkpoint: Root, tokenizer: Path | None) -> Companions:
    """The companions that a checkpoint of the run has already.

    Raises:
        ConfigError: a file is damaged. StoreError: it cannot be read.
    """
    return _first_fitting([FilesBesideWeights.read(checkpoint)], tokenizer)


def _places(named: str | None, model_file: str | None, weights: Root | None, tokenizer: str | None) -> list[Root]:
    places: list[Root] = []
    if named is not None:
        places.append(companions_folder(named))
    elif model_file is not None and user_path(model_file).exists():
        places.append(Root.of(user_path(model_file)))
    if weights is not None:
        places.append(weights)
    # A name that is no path is a hub id.
    if tokenizer is not None and (path := user_path(tokenizer)).exists():
        places.append(Root.of(path if path.is_dir() else path.parent))
    return places


def _first_fitting(sources: Sequence[FilesBesideWeights], tokenizer: Path | None) -> Companions:
    notes: list[str] = []
    for source in sources:
        # Data of tokens name no tokenizer, so nothing contradicts the source.
        if tokenizer is None and source.files:
            return Companions(source.ids, source.files)
        if not source.ids and GENERATION not in source.files:
            continue
        companions = Companions(source.ids) if tokenizer is None else _fitting(source, tokenizer)
        if companions is not None:
            return companions
        # A BERT names padding alone, and generates nothing: there is nothing to note.
        if source.names_ends_of_texts:
            notes.append(
                "the checkpoints have the special tokens of the data's tokenizer, and not those of "
                f"{source.place}, whose ids mean other tokens"
            )
    return Companions(notes=tuple(notes))


def _with_ends_of_answers(companions: Companions, tokenizer_folder: Path) -> Companions:
    """The companions of a run on conversations: a text also ends where the chat template ends an answer."""
    from shardwise.data.tokens.chat_template import ChatTemplate

    template = ChatTemplate.of(tokenizer_folder)
    if template is None:
        return companions
    tokenizer = template.tokenizer
    known = special_ids({END_ID: companions.ids.get(END_ID, tokenizer.end_of_document_id)})
    stops = [tokenizer.token_id(token) for token in template.stop_tokens]
    ends = list(dict.fromkeys([*known, *special_ids({END_ID: stops})]))
    if ends == known:
        return companions
    files = dict(companions.files)
    if GENERATION in files:
        # transformers prefers the ids of this file.
        generation = json_value(files[GENERATION])
        ids = list(dict.fromkeys([*special_ids(generation, END_ID), *ends]))
        files[GENERATION] = to_json({**generation, END_ID: ids})
    return replace(companions, ids={**companions.ids, END_ID: ends}, files=files)


def _fitting(source: FilesBesideWeights, tokenizer_folder: Path) -> Companions | None:
    """The companions from a source beside the data's tokenizer; None where its ids mean other tokens there.

    A source without a tokenizer fits where one of its ends of a text is the tokenizer's. Where the two tokenizers end a
    document by different tokens, the data's is the user's choice.
    """
    # Ids are compared by their tokens: the same number may be another token in the data's tokenizer.
    tokenizer = Tokenizer.load(tokenizer_folder)
    end = tokenizer.end_of_document_id
    generation_file = {name: content for name, content in source.files.items() if name == GENERATION}
    source_tokenizer = source.tokenizer()
    if source_tokenizer is None:
        return Companions(source.ids, generation_file) if end in source.end_ids else None
    for token_id in [*special_ids(source.ids), *special_ids(source.generation)]:
        if tokenizer.token_of(token_id) != source_tokenizer.token_of(token_id):
            return None
    if end in source.end_ids or end in (None, source_tokenizer.end_of_document_id):
        return Companions(source.ids, generation_file)
    note = (
        f"the checkpoints end a text with {tokenizer.end_of_document}, as the data's tokenizer does, and not with "
        f"{source_tokenizer.end_of_document}, as in {source.place}"
    )
    # transformers prefers the ids of generation_config.json, so the end is replaced in both files.
    replaced = {name: to_json({**source.generation, END_ID: end}) for name in generation_file}
    return Companions({**source.ids, END_ID: end}, replaced, (note,))
