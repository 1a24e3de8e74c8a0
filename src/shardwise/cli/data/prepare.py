"""Tokenize text once, on all cores, into data that runs read without conversion.

INPUT is a text file, JSON lines or parquet, the first two also packed (gzip, zstd, xz, bzip2, lz4); a folder of such
files, or a folder that datasets saved; a data set on the Hugging Face hub; or built-in text: stories, python, tiny. It
may also be raw tokens, in a .bin, .npy or .ds as nanoGPT and llm.c write it, which become Megatron's files. Beside
OUTPUT is a manifest of its source and tokenizer: a run with another tokenizer is refused. A preparation that was
interrupted leaves nothing that a run would read, and the same command continues it. Complete output is not made again.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import ConfigError, listing
from shardwise.base.files import user_path
from shardwise.base.units import count, counted
from shardwise.cli import output
from shardwise.cli.data import add_marks, add_reading, arguments_named
from shardwise.config import data_from
from shardwise.config.data import MASKED_FRACTION

if TYPE_CHECKING:
    from shardwise.data.prepare.outputs import PreparationOutcome

DTYPES = ("uint16", "uint32", "int64")
# The names of `prepare.from_text.FORMATS`, which help does not import.
FORMATS = ("megatron", "arrow", "hdf5")
_PATH_ENDS = ("/", ".txt", ".json", ".jsonl", ".parquet", ".csv", ".gz", ".zst", ".xz", ".bz2")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "megatron": {"append_eod": True, "prepend_bos": False, "split_sentences": False},
    "arrow": {"append_eod": True, "prepend_bos": False, "sequence_length": 1024},
    "hdf5": {
        "sequence_length": 128,
        "max_predictions": None,
        "masked_fraction": MASKED_FRACTION,
        "whole_word": False,
        "dupe_factor": 1,
        "seed": 0,
    },
}
"""The options of each format, with their defaults."""
_OPTIONS = {name for options in _DEFAULTS.values() for name in options}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="INPUT", help="text: a file, a folder or a hub id (ID or ID@REVISION)")
    parser.add_argument(
        "output", metavar="OUTPUT", help="megatron: PREFIX of PREFIX.bin and PREFIX.idx; arrow, hdf5: a new folder"
    )
    parser.add_argument("--format", choices=FORMATS, required=True, help="format of OUTPUT")
    parser.add_argument(
        "--tokenizer", metavar="PATH|ID", help="as data.tokenizer: a file, its folder or a hub id; text needs one"
    )
    add_reading(parser)
    parser.add_argument("--config", metavar="NAME", help="the configuration of a hub data set that has several")
    parser.add_argument("--split", metavar="NAME,…", help="a data set's splits, one after another (default: train)")
    parser.add_argument("--force", action="store_true", help="replace an OUTPUT of other text or options")
    raw = parser.add_argument_group("options of raw tokens")
    raw.add_argument(
        "--token-dtype", choices=DTYPES, help="dtype of the ids in INPUT (default: by its header or its bytes)"
    )
    raw.add_argument(
        "--eod-token",
        metavar="ID",
        type=int,
        help="id that separates documents (default: the one of llm.c's header or of --tokenizer)",
    )
    made = parser.add_argument_group("options of megatron and arrow")
    add_marks(made)
    made.add_argument(
        "--split-sentences", action="store_true", default=None, help="megatron: a sequence for each sentence, for BERT"
    )
    made = parser.add_argument_group("options of arrow and hdf5")
    made.add_argument(
        "--sequence-length", metavar="N", type=int, help="tokens of a block or a pair (arrow: 1024, hdf5: 128)"
    )
    made = parser.add_argument_group("options of hdf5")
    made.add_argument(
        "--masked-fraction", metavar="F", type=float, help=f"fraction of tokens that are masked ({MASKED_FRACTION})"
    )
    made.add_argument(
        "--max-predictions", metavar="N", type=int, help="largest number of masked tokens of a pair (⌈F × length⌉)"
    )
    made.add_argument("--whole-word", action="store_true", default=None, help="mask whole words")
    made.add_argument("--dupe-factor", metavar="N", type=int, help="copies of each text, each with other masks (1)")
    made.add_argument("--seed", metavar="N", type=int, help="seed of pairs and masks (0)")


def run(arguments: argparse.Namespace) -> int:
    from shardwise.data.prepare.from_raw_tokens import RawJob, convert_raw
    from shardwise.data.prepare.from_text import TextJob, convert_text
    from shardwise.data.reading.megatron_files import prefix_of
    from shardwise.data.reading.raw_tokens import is_raw_tokens

    source = user_path(arguments.input)
    target = user_path(arguments.output)
    is_raw = arguments.token_dtype is not None or is_raw_tokens(source)
    _require_fitting(arguments, source, is_raw)
    if arguments.format == "megatron":
        # The user may give PREFIX, PREFIX.bin or PREFIX.idx.
        target = prefix_of(target)
    with arguments_named("INPUT"):
        if is_raw:
            raw = RawJob(source, target, arguments.token_dtype, arguments.eod_token, arguments.tokenizer)
            outcome = convert_raw(raw, force=arguments.force, announce=output.progress)
        else:
            job = TextJob(
                data_from(_data_keys(arguments, source)),
                target,
                arguments.format,
                arguments.tokenizer,
                _options(arguments),
            )
            outcome = convert_text(job, force=arguments.force, announce=output.progress, bar=output.bar)
    _show(target, outcome)
    return 0


def _data_keys(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    """The keys of the section `data` that the arguments give."""
    name: str = arguments.input
    # An INPUT that exists is meant as a path, and so is one that cannot be a hub id.
    is_path = source.exists() or name.startswith((".", "/", "~")) or name.endswith(_PATH_ENDS)
    keys = {"path" if is_path else "dataset": name}
    given = {key: getattr(arguments, key) for key in ("config", "split", "text_key")}
    given["format"] = arguments.read_as
    return keys | {key: value for key, value in given.items() if value is not None}


def _require_fitting(arguments: argparse.Namespace, source: Path, is_raw: bool) -> None:
    """Refuse the options that do not fit the input or the format, and ask for those that are missing."""
    problems = []
    given = {name for name in (*_OPTIONS, "config", "split") if getattr(arguments, name) is not None}
    if is_raw:
        if not source.is_file():
            problems.append(f"INPUT ({source}) must be a file of raw tokens")
        if arguments.format != "megatron":
            problems.append(f"--format ({arguments.format}) must be megatron, which raw tokens become")
        problems += [f"{_flag(name)} must be left out with raw tokens" for name in sorted(given)]
        if arguments.eod_token is not None and arguments.eod_token < 0:
            problems.append(f"--eod-token ({arguments.eod_token}) must be at least 0")
    elif arguments.eod_token is not None:
        problems.append("--eod-token must be left out with text: it belongs to raw tokens")
    elif arguments.tokenizer is None:
        problems.append("--tokenizer is missing: text becomes tokens by one")
    else:
        for name in sorted(given & _OPTIONS - _DEFAULTS[arguments.format].keys()):
            formats = listing([format for format in FORMATS if name in _DEFAULTS[format]], "or")
            problems.append(f"{_flag(name)} must be left out with --format {arguments.format}: it belongs to {formats}")
    if problems:
        raise ConfigError(problems)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the format, as the arguments give them or by default."""
    options = dict(_DEFAULTS[arguments.format])
    for name in options:
        value = getattr(arguments, name)
        if value is not None:
            options[name] = value
    # As many as are masked of a full pair.
    if options.get("max_predictions", 1) is None:
        options["max_predictions"] = math.ceil(options["masked_fraction"] * options["sequence_length"])
    return options


def _show(target: Path, outcome: PreparationOutcome) -> None:
    manifest = outcome.manifest
    names = {
        "megatron": f"{target}.bin and {target}.idx",
        "arrow": f"{target}: {counted(manifest['sequences'], 'block')}",
        "hdf5": f"{target}: {counted(manifest.get('shards', 0), 'shard')}, {counted(manifest['sequences'], 'sample')}",
    }
    state = " (there already)" if outcome.was_there else ""
    if "token_dtype" in manifest["options"]:
        origin = f"of ids in {manifest['options']['token_dtype']}"
    else:
        origin = f"{manifest['source']['bytes'] / max(manifest['tokens'], 1):.2f} bytes of text a token"
    contents = f"{counted(manifest['documents'], 'document')}, {count(manifest['tokens'])} tokens"
    output.line(f"{names[manifest['format']]}{state}; {contents}, {origin}")
