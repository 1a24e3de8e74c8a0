"""Tokenize text once, on all cores, into data that runs read without conversion.

INPUT is a text file, JSON lines or parquet, the first two also packed (gzip, zstd, xz, bzip2, lz4); a folder of such
files, or a folder that datasets saved; a data set on the Hugging Face hub; or built-in text: stories, python, tiny. It
may also be raw tokens, in a .bin, .npy or .ds as nanoGPT and llm.c write it, which become Megatron's files. Beside
OUTPUT is a manifest of its source and tokenizer: a run with another tokenizer is refused. A preparation that was
interrupted leaves nothing that a run would read, and the same command continues it. Complete output is not made again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import ConfigError
from shardwise.base.files import user_path
from shardwise.base.units import count, counted
from shardwise.cli import output
from shardwise.cli.data import add_marks, add_reading, arguments_named
from shardwise.cli.help import add_json
from shardwise.config import checked_data_section

if TYPE_CHECKING:
    from shardwise.data.prepare.output import PreparationOutcome

DTYPES = ("uint16", "uint32", "int64")
_PATH_ENDS = ("/", ".txt", ".json", ".jsonl", ".parquet", ".csv", ".gz", ".zst", ".xz", ".bz2")
_DEFAULTS = {"append_eod": True, "prepend_bos": False, "split_sentences": False}
"""The options of text, with their defaults."""
_INSTEAD = "a run cuts Megatron's files into samples of train.sequence_length, and masks BERT's pairs as it reads them"
_RETIRED = {
    "--sequence-length": "store",
    "--masked-fraction": "store",
    "--max-predictions": "store",
    "--whole-word": "store_true",
    "--dupe-factor": "store",
    "--seed": "store",
}
"""Options of formats that are no longer written, with what argparse does with them."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("input", metavar="INPUT", help="text: a file, a folder or a hub id (ID or ID@REVISION)")
    add("output", metavar="OUTPUT", help="PREFIX of PREFIX.bin and PREFIX.idx")
    add("--format", metavar="megatron", default="megatron", help="format of OUTPUT: megatron, the only one")
    add("--tokenizer", metavar="PATH|ID", help="as data.tokenizer: a file, its folder or a hub id; text needs one")
    add_reading(parser)
    add("--config", metavar="NAME", help="the configuration of a hub data set that has several")
    add("--split", metavar="NAME,…", help="a data set's splits, one after another (default: train)")
    add("--force", action="store_true", help="replace an OUTPUT of other text or options")
    add_raw = parser.add_argument_group("options of raw tokens").add_argument
    add_raw("--token-dtype", choices=DTYPES, help="dtype of the ids in INPUT (default: by its header or its bytes)")
    eod_token_help = "id that separates documents (default: the one of llm.c's header or of --tokenizer)"
    add_raw("--eod-token", metavar="ID", type=int, help=eod_token_help)
    text = parser.add_argument_group("options of text")
    add_marks(text)
    split_help = "a sequence for each sentence, for BERT"
    text.add_argument("--split-sentences", action="store_true", default=None, help=split_help)
    add_json(parser)
    for option, action in _RETIRED.items():
        add(option, action=action, default=None, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    from shardwise.data.prepare.from_raw_tokens import RawConversionJob, convert_raw_tokens
    from shardwise.data.prepare.from_text import TextConversionJob, convert_text
    from shardwise.data.reading.megatron_files import megatron_prefix
    from shardwise.data.reading.raw_tokens import is_raw_tokens

    source = user_path(arguments.input)
    # The user may give PREFIX, PREFIX.bin or PREFIX.idx.
    target = megatron_prefix(user_path(arguments.output))
    is_raw = arguments.token_dtype is not None or is_raw_tokens(source)
    _require_fitting(arguments, source, is_raw)
    with arguments_named("INPUT"):
        if is_raw:
            raw = RawConversionJob(source, target, arguments.token_dtype, arguments.eod_token, arguments.tokenizer)
            outcome = convert_raw_tokens(raw, force=arguments.force, announce=output.progress)
        else:
            job = TextConversionJob(
                checked_data_section(_data_keys(arguments, source)), target, arguments.tokenizer, _options(arguments)
            )
            outcome = convert_text(job, force=arguments.force, announce=output.progress)
    _show(target, outcome, as_json=arguments.json)
    return 0


def _data_keys(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    name: str = arguments.input
    # An INPUT that exists is meant as a path, and so is one that cannot be a hub id.
    is_path = source.exists() or name.startswith((".", "/", "~")) or name.endswith(_PATH_ENDS)
    keys = {"path" if is_path else "dataset": name}
    given = {key: getattr(arguments, key) for key in ("config", "split", "text_key")}
    given["format"] = arguments.read_as
    return keys | {key: value for key, value in given.items() if value is not None}


def _require_fitting(arguments: argparse.Namespace, source: Path, is_raw: bool) -> None:
    if arguments.format != "megatron":
        raise ConfigError(f"--format ({arguments.format}) must be megatron, or left out: {_INSTEAD}")
    for option in _RETIRED:
        if getattr(arguments, _name(option)) is not None:
            raise ConfigError(f"{option} must be left out: {_INSTEAD}")
    problems = []
    if is_raw:
        if not source.is_file():
            problems.append(f"INPUT ({source}) must be a file of raw tokens")
        for name in ("append_eod", "config", "prepend_bos", "split", "split_sentences"):
            if getattr(arguments, name) is not None:
                problems.append(f"--{name.replace('_', '-')} must be left out with raw tokens")
        if arguments.eod_token is not None and arguments.eod_token < 0:
            problems.append(f"--eod-token ({arguments.eod_token}) must be at least 0")
    elif arguments.eod_token is not None:
        problems.append("--eod-token must be left out with text: it belongs to raw tokens")
    elif arguments.tokenizer is None:
        problems.append("--tokenizer is missing: text becomes tokens by one")
    if problems:
        raise ConfigError(problems)


def _name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _options(arguments: argparse.Namespace) -> dict[str, bool]:
    given = {name: getattr(arguments, name) for name in _DEFAULTS}
    return _DEFAULTS | {name: value for name, value in given.items() if value is not None}


def _show(target: Path, outcome: PreparationOutcome, *, as_json: bool) -> None:
    manifest = outcome.manifest
    facts = {
        "files": [f"{target}.bin", f"{target}.idx"],
        "was_there": outcome.was_there,
        "documents": manifest["documents"],
        "tokens": manifest["tokens"],
        "token_dtype": manifest["dtype"],
        "source_bytes": manifest["source"].get("bytes"),
    }
    state = " (there already)" if outcome.was_there else ""
    if (read := manifest["options"].get("token_dtype")) is not None:
        origin = f"of ids in {read}"
    else:
        origin = f"{facts['source_bytes'] / max(facts['tokens'], 1):.2f} bytes of text a token"
    contents = f"{counted(facts['documents'], 'document')}, {count(facts['tokens'])} tokens"
    output.answer(facts, [f"{' and '.join(facts['files'])}{state}; {contents}, {origin}"], as_json=as_json)
