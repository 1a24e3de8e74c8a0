"""Answer the person at a terminal; only `shardwise chat` and `generate --interactive` start this."""

from __future__ import annotations

import argparse
from contextlib import closing, nullcontext
from pathlib import Path

from shardwise.base import hardware
from shardwise.base.errors import ConfigError, keys_renamed
from shardwise.cli.model_argument import (
    ARGUMENTS,
    generation_config,
    launch_command,
    open_folder,
    open_tokenizer,
    parse_overrides,
)
from shardwise.launch.environment import is_launched
from shardwise.launch.rank_process import as_rank, check_accelerators, enter_job
from shardwise_use.channel import Channel
from shardwise_use.cli.generate import KEYS, require_ranks

_LONGEST_WINDOW = 4096
"""Tokens for which the cache of keys and values has room, where the model reads more."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--socket", metavar="PATH", type=Path, required=True, help="where the terminal listens")
    parser.add_argument("--max-tokens", metavar="N", type=int, required=True)
    parser.add_argument("--system", metavar="TEXT")
    parser.add_argument("--completes", action="store_true", help="without the chat template")
    parser.add_argument("--nproc", metavar="N", type=int)


def run(arguments: argparse.Namespace) -> int:
    place = enter_job(arguments.nproc)
    values = parse_overrides(arguments.overrides, KEYS, "chat")
    with open_folder(arguments.checkpoint, values, cached=is_launched()) as folder:
        config = generation_config(folder, values)
        if not config.model.causal:
            raise ConfigError(
                f"the model in {folder.name} must be a causal language model, which predicts the next token, and "
                f"{config.model.family} predicts masked ones: `shardwise evaluate` tells how well"
            )
        require_ranks(config, place.world if place is not None else arguments.nproc or config.parallel.ranks)
        tokenizer = open_tokenizer(config, folder, cached=is_launched())
        if place is None:
            # Before the ranks start, each of which would fail by itself.
            check_accelerators(config.parallel.ranks, hardware.accelerators()[1])
            if config.parallel.ranks > 1:
                return launch_command("converse", arguments, folder, config.parallel.ranks)
        with as_rank(place) as ending:
            from shardwise.data import hub
            from shardwise.data.tokens.chat_template import ChatTemplate
            from shardwise_use.conversation import Transcript, run_conversation

            template = None
            assert config.data.tokenizer is not None
            if not arguments.completes:
                template = ChatTemplate.of(hub.resolve_tokenizer(config.data.tokenizer, cached=True))
            if arguments.system is not None and template is None:
                raise ConfigError(f"--system must be left out: the tokenizer of {folder.name} has no chat template")
            limit = config.model.max_position_embeddings
            window = _LONGEST_WINDOW if limit is None else min(limit, _LONGEST_WINDOW)
            # An answer leaves half of the window to the question.
            max_tokens = min(arguments.max_tokens, window // 2)
            transcript = Transcript(tokenizer, template, window, max_tokens, arguments.system)
            stops = set(folder.stops(tokenizer))
            if template is not None:
                ids = map(tokenizer.token_id, template.stop_tokens)
                stops |= {number for number in ids if number is not None}
            channel = Channel.connect(arguments.socket) if place is None or place.rank == 0 else None
            with folder, keys_renamed(ARGUMENTS), nullcontext() if channel is None else closing(channel):
                run_conversation(config, folder.weights, transcript, stops, channel)
        return ending.code
