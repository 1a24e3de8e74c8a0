"""A conversation with a causal language model: a person writes, and the model answers token by token, at any layout.

Rank 0 gets the requests over a channel, keeps the text and sends the answers. The other ranks get the tokens of each
turn from it, and draw the same answer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config, ParallelConfig
from shardwise.data.tokens.chat_template import ChatTemplate
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Mesh
from shardwise.pipeline.stages import Stages
from shardwise.train.rank_agreement import agree_to_stop
from shardwise_use.generation import GenerativeModel, Prompt, TokenReader, answer_prompt, open_token_reader
from shardwise_use.inference_jobs import inference_mesh, load_generator

_LONGEST_WAIT = 20.0
"""Seconds for which rank 0 waits for the person before it tells the other ranks that there is no request yet."""


@dataclass
class ChatTranscript:
    """The messages of a conversation, as the text that a model reads; each turn adds to its end."""

    tokenizer: Tokenizer
    # Form of a conversation; None: a turn is the beginning of a new text, and an empty turn continues the last one.
    template: ChatTemplate | None
    window: int
    max_tokens: int  # tokens of an answer at most; the transcript leaves room for them
    system: str | None = None
    # Messages so far, or one with all of the text if there is no template.
    messages: list[dict[str, str]] = field(default_factory=list)

    def add(self, role: str, content: str) -> None:
        """Add a message; without a template, text."""
        if self.template is not None:
            self.messages.append({"role": role, "content": content})
        elif role == "user" and content:
            self.messages = [{"role": role, "content": content}]
        elif self.messages:
            self.messages[-1]["content"] += content

    def ids(self) -> list[int]:
        """The tokens that an answer follows; the oldest messages are left out. ConfigError: the last has no room."""
        if not self.messages:
            raise ConfigError("there is no text yet that could be continued: write some")
        room = self.window - self.max_tokens + 1
        if self.template is None:
            return self.tokenizer.encode_prompt(self.messages[0]["content"])[-room:]
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = list(self.messages)
        while True:
            text = self.template.render(first + messages, add_generation_prompt=True)
            ids: list[int] = self.tokenizer.encode(text).tolist()
            if len(ids) <= room:
                self.messages = messages
                return ids
            if len(messages) == 1:
                raise ConfigError(
                    f"your text ({len(ids):,} tokens with its marks) must be at most {room:,} tokens, so that an "
                    f"answer of {self.max_tokens:,} fits into the {self.window:,} that the model reads"
                )
            # A question goes with its answer.
            del messages[: 2 if len(messages) > 2 else 1]


@dataclass(frozen=True)
class _ChatSession:
    """One rank's part in a conversation; `channel`: to the person's terminal, on rank 0 alone."""

    model: GenerativeModel | Stages
    mesh: Mesh
    parallel: ParallelConfig | None
    reader: TokenReader
    transcript: ChatTranscript
    stops: Collection[int]
    channel: Connection | None

    def run(self) -> None:
        transcript = self.transcript
        has_template = transcript.template is not None
        self._send({"ready": True, "has_template": has_template, "max_tokens": transcript.max_tokens})
        while True:
            turn = None if self.channel is None else self._next_turn(self.channel)
            turn = collectives.broadcast_object(turn, self.mesh.world)
            if turn is None:
                return
            if turn.max_tokens:
                self._answer(turn)

    def _next_turn(self, channel: Connection) -> Prompt | None:
        """The next request of the person, without tokens where there is none; None once the terminal is closed."""
        nothing = Prompt((), 0, (), 0.0, 1.0, 0)
        # The other ranks wait in a collective, which gives up after minutes.
        if not channel.poll(_LONGEST_WAIT):
            return nothing
        try:
            request = channel.recv()
        except (EOFError, ConnectionResetError):
            return None
        if request.get("reset"):
            self.transcript.messages.clear()
        # A request to stop that came after the end of the answer asks for nothing more.
        if "text" not in request:
            return nothing
        before = list(self.transcript.messages)
        self.transcript.add("user", request["text"])
        try:
            ids = self.transcript.ids()
        except ConfigError as error:
            self.transcript.messages = before
            self._send({"refused": str(error)})
            return nothing
        sampling = (request["temperature"], request["top_p"], request["seed"])
        return Prompt(ids, self.transcript.max_tokens, self.stops, *sampling)

    def _answer(self, turn: Prompt) -> None:
        given = answer_prompt(
            self.model,
            self.mesh,
            turn,
            self.transcript.tokenizer,
            lambda piece: self._send({"piece": piece}),
            parallel=self.parallel,
            reader=self.reader,
            is_stopped=self._is_stopped,
        )
        self.transcript.add("assistant", given.text)
        seconds = {"prefill_seconds": given.prefill_seconds, "decode_seconds": given.decode_seconds}
        self._send({"end": given.end, "tokens": len(given.tokens), **seconds})

    def _is_stopped(self) -> bool:
        is_asked = self.channel is not None and self.channel.poll()
        return agree_to_stop("the person" if is_asked else None, self.mesh, False)[0] is not None

    def _send(self, message: dict[str, Any]) -> None:
        if self.channel is not None:
            self.channel.send(message)


def run_chat_session(
    config: Config, weights: Root, transcript: ChatTranscript, stops: Collection[int], channel: Connection | None
) -> None:
    """Hold a conversation with the model of a folder, on every rank, until the channel is closed."""
    with inference_mesh(config.parallel, config.train.micro_batch) as mesh:
        model = load_generator(config, weights, mesh)
        reader = open_token_reader(model, mesh, transcript.window, parallel=config.parallel)
        _ChatSession(model, mesh, config.parallel, reader, transcript, stops, channel).run()
