"""Continue a text, token by token, until the model ends it, or it reaches --max-tokens or the model's longest sequence.

The keys and values of all tokens so far are cached, so that each new token takes one forward pass of one token. The
same --seed gives the same text, and in float32 at any layout. The tokenizer may add tokens before the prompt, such as
<s>. The text is printed to standard output, the number of tokens and the speed to standard error.

These keys can be set: {layout}, precision.mode, data.tokenizer, model.family (which must name the class of your own
model: its code runs), model.ignore (fields of config.json that change nothing) and checkpoint.revision (of a hub id).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base import files, hardware, units
from shardwise.base.errors import ConfigError, keys_renamed
from shardwise.cli import output
from shardwise.config import Config, ModelConfig, check_layout
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.launch import environment, rank_process
from shardwise_use.cli import chat, model_argument, sampling

if TYPE_CHECKING:
    from shardwise_use.generation import Continuation

KEYS = (
    *model_argument.LAYOUT_KEYS, "precision.mode", "data.tokenizer", "model.family", "model.ignore",
    "checkpoint.revision",
)  # fmt: skip
_ENDS = {"eos": "ended by the model", "max_tokens": "--max-tokens", "context": "the model's longest sequence is full"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (__doc__ or "").format(layout=", ".join(model_argument.LAYOUT_KEYS))
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=model_argument.HELP)
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="such as parallel.tensor=2")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument("--prompt-file", metavar="F", type=Path, help="a file with the text, in UTF-8")
    prompt.add_argument(
        "--interactive", action="store_true", help="continue each text that you write in the terminal, as `chat` does"
    )
    sampling.add_sampling_options(parser, max_tokens=128, top_p=1.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing before")


def run(arguments: argparse.Namespace) -> int:
    place = rank_process.enter_job(arguments.nproc)
    values = model_argument.parse_overrides(arguments.overrides, KEYS, "generate")
    announce = output.progress if place is None or place.local_rank == 0 else None
    sampling.require_valid_sampling(arguments)
    if arguments.interactive:
        if arguments.json:
            raise ConfigError("--json must not go with --interactive: leave one of them out")
        return chat.talk_with_model(arguments, completes=True)
    text = _prompt_text(arguments)
    with model_argument.open_model_folder(
        arguments.checkpoint, values, cached=environment.is_launched(), announce=announce
    ) as folder:
        config, tokenizer = prepare_generation(arguments, place, folder, values, announce)
        ids, room = _fit(config.model, folder.longest(config.model), tokenizer, text)
        if place is None and config.parallel.model_ranks > 1:
            return model_argument.launch_command("generate", arguments, folder, config.parallel.model_ranks)
        leads = place is None or place.rank == 0
        with rank_process.as_rank(place) as ending:
            from shardwise_use.generation import Prompt
            from shardwise_use.inference_jobs import run_generation

            most_tokens = min(arguments.max_tokens, room)
            stops = folder.stops(tokenizer)
            prompt = Prompt(tuple(ids), most_tokens, stops, arguments.temperature, arguments.top_p, arguments.seed)
            show = _show if leads and not arguments.json else lambda _: None
            show(text)
            with folder, keys_renamed(model_argument.ARGUMENTS):
                answer = run_generation(config, folder.weights, tokenizer, prompt, show)
            if leads:
                is_full = answer.end == "max_tokens" and most_tokens < arguments.max_tokens
                stopped = "context" if is_full else answer.end
                _finish(arguments, folder, text, len(ids), answer, stopped)
        return ending.code


def prepare_generation(
    arguments: argparse.Namespace,
    place: environment.Rank | None,
    folder: model_argument.ModelFolder,
    values: dict[str, Any],
    announce: Callable[[str], None] | None = None,
) -> tuple[Config, Tokenizer]:
    """The configuration and tokenizer of a model that generates text; ConfigError: it is none, or needs other ranks."""
    config = model_argument.generation_config(folder, values)
    if not config.model.causal:
        raise ConfigError(
            f"the model in {folder.name} must be a causal language model, which predicts the next token, and "
            f"{config.model.family} predicts masked ones: `shardwise evaluate` tells how well"
        )
    ranks = config.parallel.model_ranks
    given = place.world if place is not None else arguments.nproc or ranks
    if given != ranks:
        raise ConfigError(
            f"--nproc ({given}) must be {config.parallel.model_ranks_text}: one copy of the model writes one text"
        )
    check_layout(config, ranks)
    if place is None:
        # Before the ranks start, each of which would fail by itself.
        rank_process.check_accelerators(ranks, hardware.accelerators()[1])
    return config, model_argument.tokenizer_of_command(
        config, folder, cached=environment.is_launched(), announce=announce
    )


def _prompt_text(arguments: argparse.Namespace) -> str:
    file: Path | None = arguments.prompt_file
    name = "--prompt" if file is None else f"--prompt-file ({file})"
    try:
        # Python decodes arguments by the terminal's encoding, which need not be UTF-8.
        text = os.fsencode(arguments.prompt).decode() if file is None else file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {files.reason_of(error)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} must be UTF-8, and byte {error.start} is not") from None
    if not text:
        raise ConfigError(f"{name} must not be empty: a model continues a text, and needs one character at least")
    return text


def _fit(model: ModelConfig, limit: int | None, tokenizer: Tokenizer, text: str) -> tuple[list[int], int]:
    """The prompt's ids, and how many tokens may follow. The last one needs no position: the model does not read it."""
    ids = tokenizer.encode_prompt(text)
    if not ids:
        raise ConfigError(f"the prompt ({text!r}) must have at least 1 token, and the tokenizer makes none of it")
    if limit is None or model.extends_positions:
        return ids, sys.maxsize
    if len(ids) > limit:
        raise ConfigError(
            f"the prompt ({len(ids):,} tokens) must be at most model.max_position_embeddings ({limit:,}), the longest "
            f"sequence that the model reads{'' if model.max_position_embeddings else ', by its training'}: shorten it"
        )
    return ids, limit - len(ids) + 1


def _show(piece: str) -> None:
    sys.stdout.write(output.text(piece))
    sys.stdout.flush()


def _finish(
    arguments: argparse.Namespace,
    folder: model_argument.ModelFolder,
    text: str,
    prompt_tokens: int,
    answer: Continuation,
    stopped: str,
) -> None:
    new = len(answer.tokens)
    prefill = prompt_tokens / answer.prefill_seconds
    decode = (new - 1) / answer.decode_seconds if new > 1 else None
    if arguments.json:
        facts = {
            "model": folder.name,
            "prompt": text,
            "text": answer.text,
            "tokens": list(answer.tokens),
            "prompt_tokens": prompt_tokens,
            "stopped": stopped,
            "prefill_tokens_per_second": prefill,
            "decode_tokens_per_second": decode,
            "temperature": arguments.temperature,
            "top_p": arguments.top_p,
            "seed": arguments.seed,
        }
        output.json(facts, indent=None)
        return
    output.line()
    speed = f", then {units.count(decode)} tokens/s" if decode is not None else ""
    output.progress(
        f"{new:,} tokens ({_ENDS[stopped]}); prompt of {prompt_tokens:,} at {units.count(prefill)} tokens/s{speed}"
    )
