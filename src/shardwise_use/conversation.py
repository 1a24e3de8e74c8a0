"""A conversation with a causal language model: a person writes, and the model answers token by token, at any layout.

Rank 0 gets the requests over a channel, keeps the text and sends the answers. The other ranks get the tokens of each
turn from it, and draw the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config
from shardwise.data.tokens.chat_template import ChatTemplate
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Mesh
from shardwise.models.blocks import Stages
from shardwise.train.rank_agreement import agree_to_stop
from shardwise_use.channel import Channel
from shardwise_use.generation import Detokenizer, Generator, Reader, Sampler, generate, open_reader
from shardwise_use.inference_jobs import joined_mesh, load_model

_LONGEST_WAIT = 20.0
"""Seconds for which rank 0 waits for the person before it tells the other ranks that there is no request yet."""


@dataclass
class Transcript:
    """The messages of a conversation, as the text that a model reads; each turn adds to its end.

    Attributes:
        template: form of a conversation; None: a turn is the beginning of a new text, and an empty turn continues the
            last one.
        window: tokens that the model reads at most.
        max_tokens: tokens of an answer at most; the transcript leaves room for them.
        system: instruction before the conversation; None: there is none.
        messages: messages so far, or one with all of the text if there is no template.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    window: int
    max_tokens: int
    system: str | None = None
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
        """The tokens that an answer follows. The oldest messages are left out once there is no room for them.

        Raises:
            ConfigError: there is no text, or its last message has no room.
        """
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
class Turn:
    """The tokens and the settings of an answer, as all ranks get them.

    Attributes:
        ids: tokens that the answer follows; empty if the person has asked for nothing.
    """

    ids: Sequence[int] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Conversation:
    """One rank's part in a conversation.

    Attributes:
        stops: ids that end an answer.
        channel: connection to the person's terminal, on rank 0; None on the others.
    """

    model: Generator | Stages
    mesh: Mesh
    config: Config
    reader: Reader
    transcript: Transcript
    stops: Collection[int]
    channel: Channel | None

    def run(self) -> None:
        """Answer until the terminal is closed."""
        transcript = self.transcript
        has_template = transcript.template is not None
        self._send({"ready": True, "has_template": has_template, "max_tokens": transcript.max_tokens})
        while True:
            turn = None if self.channel is None else self._next_turn(self.channel)
            turn = collectives.broadcast_object(turn, self.mesh.world)
            if turn is None:
                return
            if turn.ids:
                self._answer(turn)

    def _next_turn(self, channel: Channel) -> Turn | None:
        """The next request of the person; None once the terminal is closed."""
        # The other ranks wait in a collective, which gives up after minutes.
        if not channel.has_message(_LONGEST_WAIT):
            return Turn()
        request = channel.receive()
        if request is None:
            return None
        if request.get("reset"):
            self.transcript.messages.clear()
        # A request to stop that came after the end of the answer asks for nothing more.
        if "text" not in request:
            return Turn()
        before = list(self.transcript.messages)
        self.transcript.add("user", request["text"])
        try:
            ids = self.transcript.ids()
        except ConfigError as error:
            self.transcript.messages = before
            self._send({"refused": str(error)})
            return Turn()
        return Turn(ids, request["temperature"], request["top_p"], request["seed"])

    def _answer(self, turn: Turn) -> None:
        sampler = Sampler(turn.temperature, turn.top_p, turn.seed)
        detokenizer = Detokenizer(self.transcript.tokenizer, turn.ids)
        pieces: list[str] = []
        count = 0
        end = "max_tokens"
        start = time.perf_counter()
        first = start
        drawn = generate(
            self.model,
            self.mesh,
            turn.ids,
            self.transcript.max_tokens,
            sampler,
            stop=self.stops,
            parallel=self.config.parallel,
            reader=self.reader,
        )
        for token in drawn:
            if not count:
                first = time.perf_counter()
            count += 1
            if token in self.stops:
                end = "eos"
                break
            pieces.append(detokenizer.push(token))
            self._send({"piece": pieces[-1]})
            is_stopped = self.channel is not None and self.channel.has_message()
            reason, _ = agree_to_stop("the person" if is_stopped else None, self.mesh, False)
            if reason is not None:
                end = "stopped"
                break
        pieces.append(detokenizer.finish())
        self.transcript.add("assistant", "".join(pieces))
        now = time.perf_counter()
        self._send(
            {"piece": pieces[-1], "end": end, "tokens": count, "first_seconds": first - start, "seconds": now - start}
        )

    def _send(self, message: Mapping[str, Any]) -> None:
        if self.channel is not None:
            self.channel.send(dict(message))


def run_conversation(
    config: Config, weights: Root, transcript: Transcript, stops: Collection[int], channel: Channel | None
) -> None:
    """Hold a conversation with the model of a folder, on every rank, until the channel is closed.

    Raises:
        ConfigError: the folder has another model, or one that gives no logits. DamageError: a checkpoint's bytes do
        not match their checksums. RunError: memory ran out.
    """
    with joined_mesh(config) as mesh:
        model: nn.Module = load_model(config, weights, mesh)
        if not isinstance(model, Generator | Stages):
            raise ConfigError(f"model.family ({config.model.family}) has no logits(ids): it cannot continue a text")
        reader = open_reader(model, mesh, transcript.window, parallel=config.parallel)
        Conversation(model, mesh, config, reader, transcript, stops, channel).run()
