"""Answer the person at a terminal; only `shardwise chat` and `generate --interactive` start this."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from multiprocessing.connection import Client

from shardwise.base.errors import ConfigError, keys_renamed
from shardwise.data.tokens.tokenizer_files import resolve_tokenizer
from shardwise.launch.environment import is_launched
from shardwise.launch.rank_process import as_rank, enter_job
from shardwise_use.cli.generate import KEYS, prepare_generation
from shardwise_use.cli.model_argument import ARGUMENTS, launch_command, open_model_folder, parse_overrides

_LONGEST_WINDOW = 4096  # tokens for which the cache of keys and values has room, where the model reads more


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--socket", metavar="PATH", required=True, help="where the terminal listens")
    parser.add_argument("--max-tokens", metavar="N", type=int, required=True)
    parser.add_argument("--system", metavar="TEXT")
    parser.add_argument("--completes", action="store_true", help="without the chat template")
    parser.add_argument("--nproc", metavar="N", type=int)


def run(arguments: argparse.Namespace) -> int:
    place = enter_job(arguments.nproc)
    values = parse_overrides(arguments.overrides, KEYS, "chat")
    with open_model_folder(arguments.checkpoint, values, cached=is_launched()) as folder:
        config, tokenizer = prepare_generation(arguments, place, folder, values)
        if place is None and config.parallel.model_ranks > 1:
            return launch_command("converse", arguments, folder, config.parallel.model_ranks)
        with as_rank(place) as ending:
            from shardwise.data.tokens.chat_template import ChatTemplate
            from shardwise_use.chat_session import ChatTranscript, run_chat_session

            template = None
            assert config.data.tokenizer is not None
            if not arguments.completes:
                template = ChatTemplate.of(resolve_tokenizer(config.data.tokenizer, cached=True))
            if arguments.system is not None and template is None:
                raise ConfigError(f"--system must be left out: the tokenizer of {folder.name} has no chat template")
            limit = folder.longest(config.model)
            window = _LONGEST_WINDOW if limit is None else min(limit, _LONGEST_WINDOW)
            # An answer leaves half of the window to the question.
            max_tokens = min(arguments.max_tokens, window // 2)
            transcript = ChatTranscript(tokenizer, template, window, max_tokens, arguments.system)
            stops = set(folder.stops(tokenizer))
            if template is not None:
                ids = map(tokenizer.token_id, template.stop_tokens)
                stops |= {number for number in ids if number is not None}
            leads = place is None or place.rank == 0
            client = Client(arguments.socket, "AF_UNIX") if leads else nullcontext()
            with folder, keys_renamed(ARGUMENTS), client as channel:
                run_chat_session(config, folder.weights, transcript, stops, channel)
        return ending.code
