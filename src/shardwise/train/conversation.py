"""A conversation with a causal language model: a person writes, and the model answers token by token, at any layout.

Rank 0 gets the requests over a channel and sends the answers; all ranks keep the same text and draw the same tokens.
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
from shardwise.launch.channel import Channel
from shardwise.models.blocks import Stages
from shardwise.train.generation import Detokenizer, Generator, Reader, Sampler, generate, open_reader
from shardwise.train.inference_jobs import joined, load_model
from shardwise.train.saving import agree_to_stop


@dataclass
class Text:
    """The text that a model reads, of which each turn adds to the end.

    Attributes:
        template: form of a conversation; None: a turn is the beginning of a new text, and an empty turn continues the
            last one.
        window: tokens that the model reads at most.
        max_tokens: tokens of an answer at most; the text leaves room for them.
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
        while True:
            text = self.template.render(first + self.messages, add_generation_prompt=True)
            ids: list[int] = self.tokenizer.encode(text).tolist()
            if len(ids) <= room:
                return ids
            if len(self.messages) == 1:
                raise ConfigError(
                    f"your text ({len(ids):,} tokens with its marks) must be at most {room:,} tokens, so that "
                    f"--max-tokens ({self.max_tokens:,}) fit into the {self.window:,} that the model reads"
                )
            # A question goes with its answer.
            del self.messages[: 2 if len(self.messages) > 2 else 1]


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
    text: Text
    stops: Collection[int]
    channel: Channel | None

    def run(self) -> None:
        """Answer until the terminal is closed."""
        self._send({"ready": True, "has_template": self.text.template is not None})
        turn = 0
        while True:
            request = None if self.channel is None else self.channel.receive()
            request = collectives.broadcast_object(request, self.mesh.world)
            if request is None:
                return
            if request.get("reset"):
                self.text.messages.clear()
            # A request to stop that came after the end of the answer asks for nothing more.
            if "text" not in request:
                continue
            turn += 1
            self.text.add("user", request["text"])
            try:
                ids = self.text.ids()
            except ConfigError as error:
                if self.text.messages:
                    self.text.messages.pop()
                self._send({"refused": str(error)})
                continue
            sampler = Sampler(request["temperature"], request["top_p"], request["seed"] + turn)
            self._answer(ids, sampler)

    def _answer(self, ids: Sequence[int], sampler: Sampler) -> None:
        detokenizer = Detokenizer(self.text.tokenizer, ids)
        pieces: list[str] = []
        count = 0
        end = "max_tokens"
        start = time.perf_counter()
        first = start
        drawn = generate(
            self.model,
            self.mesh,
            ids,
            self.text.max_tokens,
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
        self.text.add("assistant", "".join(pieces))
        now = time.perf_counter()
        self._send(
            {"piece": pieces[-1], "end": end, "tokens": count, "first_seconds": first - start, "seconds": now - start}
        )

    def _send(self, message: Mapping[str, Any]) -> None:
        if self.channel is not None:
            self.channel.send(dict(message))


def run_conversation(
    config: Config, weights: Root, text: Text, stops: Collection[int], channel: Channel | None
) -> None:
    """Hold a conversation with the model of a folder, on every rank, until the channel is closed.

    Raises:
        ConfigError: the folder has another model, or one that gives no logits. DamageError: a checkpoint's bytes do
        not match their checksums. RunError: memory ran out.
    """
    with joined(config) as mesh:
        model: nn.Module = load_model(config, weights, mesh)
        if not isinstance(model, Generator | Stages):
            raise ConfigError(f"model.family ({config.model.family}) has no logits(ids): it cannot continue a text")
        reader = open_reader(model, mesh, text.window, parallel=config.parallel)
        Conversation(model, mesh, config, reader, text, stops, channel).run()
