"""Make data of text that runs read as they are: tokenized once, on all cores.

INPUT is a text file, a .jsonl or a .parquet, the first two also packed (.gz); a folder of them, or one that datasets
saved; a data set on the Hugging Face hub; or built-in text: python, tiny. It may also be raw tokens: a .bin of ids
alone, as nanoGPT writes it, which becomes Megatron's .bin and .idx. With OUTPUT lies a manifest that tells what
it was made of: a run with another tokenizer is refused. A preparation that was cut off leaves nothing that a run would
read, and the same command goes on from what is finished. What is there already is not made again.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli import text
from shardwise.cli.data import arguments_named
from shardwise.config import DataConfig, data_from
from shardwise.config.data import MASKED_FRACTION
from shardwise.errors import ConfigError, listing
from shardwise.units import count

if TYPE_CHECKING:
    from shardwise.prepare import Outcome

DTYPES = ("uint16", "uint32")
FORMATS = ("megatron", "arrow", "hdf5")
_PATH_ENDS = ("/", ".txt", ".json", ".jsonl", ".parquet", ".gz")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "megatron": {"append_eod": True, "split_sentences": False},
    "arrow": {"append_eod": True, "sequence_length": 1024},
    "hdf5": {
        "sequence_length": 128,
        "max_predictions": None,
        "masked_fraction": MASKED_FRACTION,
        "whole_word": False,
        "dupe_factor": 1,
        "seed": 0,
    },
}
"""The options of each format."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="INPUT", help="text: a file, a folder or a hub id (ID or ID@REVISION)")
    parser.add_argument(
        "output", metavar="OUTPUT", help="megatron: PREFIX of PREFIX.bin and PREFIX.idx; arrow, hdf5: a new folder"
    )
    parser.add_argument("--format", choices=FORMATS, required=True, help="what is made")
    parser.add_argument(
        "--tokenizer", metavar="PATH|ID", help="as data.tokenizer: a file, its folder or a hub id; text needs one"
    )
    parser.add_argument("--text-key", metavar="KEY", default="text", help="the field or column with the text (text)")
    parser.add_argument("--config", metavar="NAME", help="the configuration of a hub data set that has several")
    parser.add_argument("--split", metavar="NAME,…", help="a data set's splits, one after another (default: train)")
    parser.add_argument("--force", action="store_true", help="replace an OUTPUT that was prepared otherwise")
    raw = parser.add_argument_group("options of raw tokens")
    raw.add_argument("--token-dtype", choices=DTYPES, help="of the ids in INPUT (default: as its bytes look)")
    raw.add_argument(
        "--eod-token", metavar="ID", type=int, help="ends each document (default: the tokenizer's, where one is named)"
    )
    made = parser.add_argument_group("options of megatron and arrow")
    made.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        help="close each document by the tokenizer's end of document (default: yes)",
    )
    made.add_argument(
        "--split-sentences", action="store_true", default=None, help="megatron: a sequence for each sentence, for BERT"
    )
    made = parser.add_argument_group("options of arrow and hdf5")
    made.add_argument(
        "--sequence-length", metavar="N", type=int, help="tokens of a block or a pair (arrow: 1024, hdf5: 128)"
    )
    made = parser.add_argument_group("options of hdf5")
    made.add_argument("--masked-fraction", metavar="F", type=float, help=f"part that is masked ({MASKED_FRACTION})")
    made.add_argument("--max-predictions", metavar="N", type=int, help="most masked tokens of a pair (⌈F × length⌉)")
    made.add_argument("--whole-word", action="store_true", default=None, help="mask whole words")
    made.add_argument("--dupe-factor", metavar="N", type=int, help="times that each text is there, masked anew (1)")
    made.add_argument("--seed", metavar="N", type=int, help="of pairs and masks (0)")


def run(arguments: argparse.Namespace) -> int:
    from shardwise.data.reading.detect import is_raw_tokens
    from shardwise.data.reading.megatron import prefix_of
    from shardwise.prepare import TextJob, convert_text

    output = Path(arguments.output).expanduser()
    if arguments.token_dtype is not None or is_raw_tokens(Path(arguments.input).expanduser()):
        return _convert(arguments, prefix_of(output))
    if arguments.eod_token is not None:
        raise ConfigError("--eod-token must be left out with text: it belongs to raw tokens")
    if arguments.tokenizer is None:
        raise ConfigError("--tokenizer is missing: text becomes tokens by one")
    options = _options(arguments)
    with arguments_named("INPUT"):
        data = _data(arguments)
    job = TextJob(
        data,
        prefix_of(output) if arguments.format == "megatron" else output,
        arguments.format,
        arguments.tokenizer,
        options,
    )
    with arguments_named("INPUT"):
        outcome = convert_text(job, force=arguments.force, announce=text.progress, bar=text.bar)
    _tell(job.output, outcome)
    return 0


def _convert(arguments: argparse.Namespace, output: Path) -> int:
    """Raw tokens to Megatron's files."""
    from shardwise.prepare.raw import RawJob, convert_raw

    path = Path(arguments.input).expanduser()
    problems = [] if path.is_file() else [f"INPUT ({path}) must be a file of raw tokens"]
    if arguments.format != "megatron":
        problems.append(f"--format ({arguments.format}) must be megatron, which raw tokens become")
    given = {name for each in _DEFAULTS.values() for name in each if getattr(arguments, name) is not None}
    given |= {name for name in ("config", "split") if getattr(arguments, name) is not None}
    problems += [f"--{name.replace('_', '-')} must be left out with raw tokens" for name in sorted(given)]
    if arguments.eod_token is not None and arguments.eod_token < 0:
        problems.append(f"--eod-token ({arguments.eod_token}) must be at least 0")
    if problems:
        raise ConfigError(problems)
    job = RawJob(path, output, arguments.token_dtype, arguments.eod_token, arguments.tokenizer)
    with arguments_named("INPUT"):
        outcome = convert_raw(job, force=arguments.force, announce=text.progress)
    _tell(output, outcome)
    return 0


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The format's own options; one of another format is an error."""
    defaults = _DEFAULTS[arguments.format]
    problems = []
    for name in sorted({name for each in _DEFAULTS.values() for name in each} - defaults.keys()):
        if getattr(arguments, name) is not None:
            formats = listing([each for each in FORMATS if name in _DEFAULTS[each]], "or")
            flag = name.replace("_", "-")
            problems.append(f"--{flag} must be left out with --format {arguments.format}: it belongs to {formats}")
    if problems:
        raise ConfigError(problems)
    given = {name: getattr(arguments, name) for name in defaults}
    found = {name: defaults[name] if value is None else value for name, value in given.items()}
    if found.get("max_predictions", 1) is None:
        found["max_predictions"] = math.ceil(found["masked_fraction"] * found["sequence_length"])
    return found


def _data(arguments: argparse.Namespace) -> DataConfig:
    named: str = arguments.input
    values = {"path" if _is_path(named) else "dataset": named, "text_key": arguments.text_key}
    values |= {key: given for key in ("config", "split") if (given := getattr(arguments, key)) is not None}
    return data_from(values)


def _is_path(named: str) -> bool:
    """Whether it is meant as a path: what exists, or reads as no hub id does."""
    return Path(named).expanduser().exists() or named.startswith((".", "/", "~")) or named.endswith(_PATH_ENDS)


def _tell(output: Path, outcome: Outcome) -> None:
    made = outcome.manifest
    names = {
        "megatron": f"{output}.bin and {output}.idx",
        "arrow": f"{output}: {text.of(made['sequences'], 'block')}",
        "hdf5": f"{output}: {text.of(made.get('shards', 0), 'shard')}, {text.of(made['sequences'], 'sample')}",
    }
    shown = names[made["format"]]
    state = " (there already)" if outcome.was_there else ""
    held = f"{text.of(made['documents'], 'document')}, {count(made['tokens'])} tokens"
    if "token_dtype" in made["options"]:
        text.line(f"{shown}{state}; {held}, of ids in {made['options']['token_dtype']}")
        return
    each = made["source"]["bytes"] / max(made["tokens"], 1)
    text.line(f"{shown}{state}; {held}, {each:.2f} bytes of text a token")
