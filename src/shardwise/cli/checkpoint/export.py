"""Write a checkpoint as a plain Hugging Face folder, which `transformers` opens as it is, or as one GGUF file.

The folder has weights, config.json and tokenizer, and nothing that only training needs. Weights in another format than
the stored one come from the float32 masters, if the checkpoint has them. Each byte that is read is verified.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import ConfigError
from shardwise.base.files import user_path
from shardwise.base.registered import provided
from shardwise.base.units import counted, parse_size, size
from shardwise.checkpoint.storage.checkpoint_folders import weights_folder
from shardwise.checkpoint.storage.root import answering_root
from shardwise.cli import output
from shardwise.cli.help import add_json

if TYPE_CHECKING:
    from shardwise.checkpoint.format.export_checkpoint import Export
    from shardwise.checkpoint.storage.root import Root

_MAX_SHARD_SIZE = "5GB"


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a checkpoint, or a run's folder (its newest intact checkpoint); a path, or a URL such as s3://bucket/run",
    )
    add("dest", metavar="DEST", help="the folder to write, which must not exist; a path or a URL; with --gguf the file")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="format of the weights (default: as stored)")
    add_max_shard_size(parser)
    add("--gguf", action="store_true", help="write one file for llama.cpp, such as model.gguf, in place of a folder")
    reader_help = (
        "refuse a model that this program computes wrongly: transformers, llama.cpp, mlx-lm, ctranslate2, vllm or "
        "another one that models were tried with (with --gguf: gguf)"
    )
    add("--for", dest="reader", metavar="NAME", help=reader_help)
    add(
        "--push",
        metavar="ID",
        help="also upload the folder to this repository of the Hugging Face hub, owner/name; a new repository "
        "is private; HF_TOKEN or `hf auth login` gives the token",
    )
    add_json(parser)


def add_max_shard_size(parser: argparse.ArgumentParser) -> None:
    max_shard_size_help = (
        f"largest file with weights, such as 500MB or 2GiB; a larger tensor gets a separate file (default: "
        f"{_MAX_SHARD_SIZE})"
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", default=_MAX_SHARD_SIZE, help=max_shard_size_help)


def run(arguments: argparse.Namespace) -> int:
    from shardwise.checkpoint.format.export_checkpoint import Export

    if arguments.push is not None:
        _require_upload(arguments.dest, arguments.push)
    max_shard_bytes = shard_bytes(arguments.max_shard_size)
    folder = weights_folder(arguments.checkpoint, output.progress).root
    if arguments.gguf:
        return _write_gguf(folder, arguments)
    export = Export(folder, arguments.dtype)
    if arguments.reader is not None:
        _require_readable(export, arguments.reader)
    parent, name = parent_and_name(arguments.dest)
    done = export.write(parent, name, max_shard_bytes)
    formats = " and ".join(sorted(export.dtypes))
    # Of no tensor, of all or of some the weights come from the masters.
    source = {0: "", len(export.weights): ", from the float32 masters"}.get(
        export.masters, f", {export.masters:,} of them from the float32 masters"
    )
    lines = [
        f"{done.folder}: step {export.step:,}, {counted(len(export.weights), 'tensor')} in {formats}{source}; "
        f"{counted(done.files, 'file')}, {size(export.nbytes)} of weights"
    ]
    if p := export.described.get("ffn_dropout"):
        lines.append(
            f"config.json keeps ffn_dropout ({p}), which shardwise reads and transformers ignores: a training there "
            "has no dropout inside the feed-forward layer"
        )
    address = None
    if arguments.push is not None:
        from shardwise.base.hub_upload import upload

        address = upload(done.folder.local(), arguments.push, f"Step {export.step:,} of a training with shardwise")
        lines.append(f"uploaded to {address}")
    facts = {"path": str(done.folder), "files": done.files, "notes": lines[1:], "address": address}
    output.answer(_facts(export, len(export.weights)) | facts, lines, as_json=arguments.json)
    return 0


def _facts(export: Export, tensors: int) -> dict[str, Any]:
    return {
        "step": export.step,
        "tensors": tensors,
        "dtypes": sorted(export.dtypes),
        "tensors_of_masters": export.masters,
        "weights_bytes": export.nbytes,
    }


def _require_readable(export: Export, reader: str) -> None:
    for note in provided("require_readable")(export.model, reader):
        output.progress(f"note: {note}")


def _write_gguf(folder: Root, arguments: argparse.Namespace) -> int:
    if "://" in arguments.dest or arguments.push is not None or arguments.reader not in (None, "gguf"):
        raise ConfigError(
            f"--gguf writes one file for llama.cpp on this machine: DEST ({arguments.dest}) must be a path, and --push "
            "and --for must be left out"
        )
    planned = provided("gguf_export")(folder, arguments.dtype)
    _require_readable(planned.export, "gguf")
    path = user_path(arguments.dest)
    notes = planned.write(path)
    done = (
        f"{path}: step {planned.export.step:,}, {counted(len(planned.tensors), 'tensor')} in "
        f"{' and '.join(sorted(planned.dtypes))}; {size(planned.nbytes)} of weights"
    )
    facts = {"path": str(path), "files": 1, "notes": notes, "weights_bytes": planned.nbytes}
    facts |= {"dtypes": sorted(planned.dtypes), "address": None}
    output.answer(_facts(planned.export, len(planned.tensors)) | facts, [*notes, done], as_json=arguments.json)
    return 0


def _require_upload(dest: str, repository: str) -> None:
    """Refuse `--push` before anything is written where it could not upload."""
    from shardwise.base.hub_upload import require_upload

    if "://" in dest:
        raise ConfigError(f"DEST ({dest}) must be a folder of this machine with --push, which uploads from there")
    require_upload(repository)


def shard_bytes(given: str) -> int:
    """Return the bytes that `--max-shard-size` names."""
    digits = parse_size(given)
    if not digits:
        raise ConfigError(f"--max-shard-size ({given}) must be a size from 1 byte on, such as 500MB or 2GiB")
    return digits


def parent_and_name(location: str) -> tuple[Root, str]:
    """The folder in which `shardwise checkpoint export` makes a new one, and the new name."""
    if "://" in location:
        parent, _, name = location.rstrip("/").rpartition("/")
    else:
        path = user_path(location).absolute()
        parent = str(path.parent)
        name = path.name
    return answering_root(parent), name
