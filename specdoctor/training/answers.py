"""Answers to prompts: by our engine in batches, or by a server with many requests at once.

Contract: an answer depends on settings, prompt and number of the sample alone. Each has a seed of its own made from
these, so batch mates, order and interruptions change nothing (of our engine; up to rounding at a near tie of two
logits). The first stop token ends an answer and belongs to it.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence as Request
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.measure.prompt_file import Message
from specdoctor.measure.prompts import Prompt
from specdoctor.servers.concurrent import run_concurrently
from specdoctor.servers.openai_client import CompletionRequest, OpenAIClient

BATCH = 32  # requests decoded together
REFILL = 0.25  # share of the batch that has to be free before more are started: a prefill costs as much as a step


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How answers are drawn. `seed` does not matter to greedy ones."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def facts(self) -> dict[str, Any]:
        return asdict(self) | {"seed": self.seed if self.temperature else 0}

    def sampling(self, prompt_ids: Sequence[int], sample: int) -> Sampling:
        """Of one answer, with its own seed."""
        key = json.dumps([self.facts["seed"], sample, list(prompt_ids)]).encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:7], "big")  # below 2**63, as a generator wants
        return Sampling(self.temperature, self.top_k, self.top_p, seed=seed)


@dataclass(frozen=True, slots=True)
class Job:
    """One answer that is wanted."""

    prompt: Prompt
    messages: tuple[Message, ...]  # where the prompt is text
    sample: int
    key: str


@dataclass(frozen=True, slots=True)
class Answer:
    ids: list[int]
    stop: str  # "stop" (a stop token), "length" (the cap) or "context" (the model's limit)

    def line(self, job: Job) -> dict[str, Any]:
        """What is written of it: docs/training-data.md."""
        start = len(job.prompt.ids)
        return {
            "key": job.key,
            "prompt_id": job.prompt.id,
            "category": job.prompt.category,
            "prompt_hash": job.prompt.text_hash,
            "sample": job.sample,
            "stop": self.stop,
            "answer": [[start, start + len(self.ids)]],
            "ids": [*job.prompt.ids, *self.ids],
        }


def engine_answers(
    target: Target,
    jobs: Sequence[Job],
    settings: AnswerSettings,
    batch: int = BATCH,
    on_tokens: Callable[[int], None] | None = None,
) -> Iterator[tuple[Job, Answer]]:
    """Answers by plain decoding, as they are done; the places of finished requests are taken by the next ones.

    Short prompts come first: the rows of a batch are as wide as its longest text. `on_tokens` hears how many tokens
    each step produced.
    """
    engine = Engine(target)
    waiting = deque(sorted(jobs, key=lambda job: len(job.prompt.ids)))
    active: list[tuple[Job, Request]] = []
    try:
        while waiting or active:
            room = batch - len(active)
            few = active and room < batch * REFILL
            fresh = [] if few else [waiting.popleft() for _ in range(min(len(waiting), room))]
            requests = [(job, _request(job, settings, target.stop_ids)) for job in fresh]
            if requests:
                engine.prefill([request for _, request in requests])
            active += requests
            running = [request for _, request in active if not request.finished]
            engine.step(running)
            if on_tokens:
                on_tokens(len(running) + len(fresh))
            done = [pair for pair in active if pair[1].finished]
            active = [pair for pair in active if not pair[1].finished]
            engine.release([request for _, request in done])
            for job, request in done:
                yield job, Answer(request.completion_ids, request.stop_reason or "length")
    finally:
        engine.release([request for _, request in active])


def _request(job: Job, settings: AnswerSettings, stop_ids: frozenset[int]) -> Request:
    return Request(
        job.prompt.ids,
        max_new_tokens=settings.max_new_tokens,
        sampling=settings.sampling(job.prompt.ids, job.sample),
        stop_ids=stop_ids,
        prompt_id=job.prompt.id,
        category=job.prompt.category,
        repeat=job.sample,
    )


@dataclass(frozen=True, slots=True)
class ServerAnswers:
    """A server as the writer of answers, and how its texts become ids."""

    client: OpenAIClient
    encode: Callable[[str], list[int]]  # text of an answer to ids
    stop_ids: frozenset[int]
    end_id: int | None  # the stop token that is put behind a text which ended by itself
    max_positions: int
    chat: bool = False  # send messages, so that the server's own template applies
    concurrency: int = 16

    def answers(
        self, jobs: Sequence[Job], settings: AnswerSettings, on_tokens: Callable[[int], None] | None = None
    ) -> Iterator[tuple[Job, Answer]]:
        """Answers as they come. What was in flight when a request failed still comes before the error."""
        for job, answer in run_concurrently(jobs, lambda job: self._answer(job, settings), self.concurrency):
            if on_tokens:
                on_tokens(len(answer.ids))
            yield job, answer

    def _answer(self, job: Job, settings: AnswerSettings) -> Answer:
        if self.chat and not job.messages:
            raise SpecdoctorError(
                f"{job.prompt.source}: prompt_ids cannot go to a chat server; use --server-api completions"
            )
        room = self.max_positions - len(job.prompt.ids)
        completion = self.client.complete(
            CompletionRequest(
                prompt_ids=() if self.chat else job.prompt.ids,
                messages=job.messages if self.chat else (),
                max_tokens=min(settings.max_new_tokens, room),
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                seed=settings.sampling(job.prompt.ids, job.sample).seed & 0x7FFFFFFF,
            )
        )
        ids = list(completion.ids) if completion.ids is not None else self.encode(completion.text)
        first = next((i for i, token in enumerate(ids) if token in self.stop_ids), None)
        if first is not None:
            return Answer(ids[: first + 1], "stop")
        if completion.finish == "stop" and self.end_id is not None:
            ids.append(self.end_id)
        capped = "length" if settings.max_new_tokens <= room else "context"
        return Answer(ids, "stop" if completion.finish == "stop" else capped)
