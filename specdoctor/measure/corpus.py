"""Texts that a target wrote, kept in a folder so that later runs need not decode again.

Contract: a corpus folder holds `manifest.json` (which target, template, sampling) and `texts.jsonl` (one completion a
line, appended as it is done; of two lines for the same text the later one counts). It is made for one manifest: a run
with other facts is refused with the fact that differs. An interrupted run leaves whole lines only; the next one goes on
behind them. `Corpus.ensure` writes what is missing, many prompts in one packed batch, without a drafter.

A text goes on for `lookahead` tokens beyond its end (stop token or cap), since a draft may reach beyond it too.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence as Request
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.measure.prompts import Prompt, TemplateRecord

MANIFEST, TEXTS = "manifest.json", "texts.jsonl"
FORMAT = 1
BATCH = 32  # requests decoded together
FINGERPRINT_VALUES = 512  # of each tensor


@dataclass(frozen=True, slots=True)
class CorpusText:
    """One completion. `ids` includes the look-ahead; `stop` is the index of its first stop token."""

    prompt_id: str
    category: str
    repeat: int
    prompt_ids: list[int]
    ids: list[int]
    stop: int | None
    asked: int  # tokens asked for, look-ahead not counted

    def length(self, cap: int) -> int:
        """Tokens of the completion, cut at its stop token and at `cap`."""
        return min(cap, len(self.ids) if self.stop is None else self.stop + 1)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the texts of a corpus have in common. Two runs share a folder iff all of it is equal."""

    target: str  # name, for people
    target_hash: str
    dtype: str
    template: dict[str, Any]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_ids: list[int] = field(default_factory=list)
    format: int = FORMAT

    @classmethod
    def of(
        cls, target: Target, template: TemplateRecord, sampling: Sampling, stop_ids: Iterable[int], seed: int
    ) -> "Manifest":
        return cls(
            target=target.name,
            target_hash=target_hash(target),
            dtype=str(target.dtype).removeprefix("torch."),
            template=asdict(template),
            temperature=float(sampling.temperature),
            top_k=sampling.top_k,
            top_p=float(sampling.top_p),
            # Greedy text does not depend on a seed, so one corpus serves all.
            seed=0 if sampling.greedy else seed,
            stop_ids=sorted(stop_ids),
        )

    @property
    def key(self) -> str:
        """Short name of the corpus, the same for the same facts."""
        facts = {key: value for key, value in asdict(self).items() if key != "target"}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def target_hash(target: Target) -> str:
    """Identifies weights without reading all of them: names, shapes and values at equal distances of every tensor."""
    digest = hashlib.sha256()
    for name, tensor in sorted(target.model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // FINGERPRINT_VALUES)
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(flat[::step].cpu().double().numpy().tobytes())
    return digest.hexdigest()[:32]


class Corpus:
    """A corpus folder opened for one manifest."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Raises `SpecdoctorError` when the folder belongs to another manifest or cannot be read."""
        self.folder, self.manifest = folder, manifest
        folder.mkdir(parents=True, exist_ok=True)
        self._check_manifest()
        self._texts = {_key(text): text for text in self._read()}
        self.written = 0  # texts decoded by this object

    def find(self, prompt: Prompt, repeat: int, cap: int) -> CorpusText | None:
        """The text of a prompt if it is there and long enough: ended by a stop token, or `cap` tokens.

        Prompts are known by their ids; name and category are those of the prompt asked for.
        """
        text = self._texts.get((tuple(prompt.ids), repeat))
        if text is None or (text.asked < cap and text.stop is None):
            return None
        return replace(text, prompt_id=prompt.id, category=prompt.category)

    def ensure(
        self,
        target: Target,
        wanted: Sequence[tuple[Prompt, int]],
        cap: int,
        lookahead: int,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[CorpusText]:
        """The texts of (prompt, repeat) pairs in order; what is missing is decoded in batches and appended.

        `on_tokens` hears how many tokens each step produced.
        """
        missing = [(p, r) for p, r in wanted if self.find(p, r, cap) is None]
        if missing:
            from filelock import FileLock

            with FileLock(self.folder / ".lock"):
                self._texts = {_key(text): text for text in self._read()}  # another run may have written them
                missing = [(p, r) for p, r in missing if self.find(p, r, cap) is None]
                if missing:
                    self._write(target, missing, cap, lookahead, on_tokens)
        found = [self.find(prompt, repeat, cap) for prompt, repeat in wanted]
        assert all(text is not None for text in found)
        return [text for text in found if text is not None]

    def _write(
        self,
        target: Target,
        missing: Sequence[tuple[Prompt, int]],
        cap: int,
        lookahead: int,
        on_tokens: Callable[[int], None] | None,
    ) -> None:
        path = self.folder / TEXTS
        _drop_torn_line(path)
        with path.open("a", encoding="utf-8") as file:
            for text in self._decode(target, missing, cap, lookahead, on_tokens):
                file.write(json.dumps(asdict(text), separators=(",", ":")) + "\n")
                file.flush()
                os.fsync(file.fileno())
                self._texts[_key(text)] = text
                self.written += 1

    def _decode(
        self,
        target: Target,
        missing: Sequence[tuple[Prompt, int]],
        cap: int,
        lookahead: int,
        on_tokens: Callable[[int], None] | None,
    ) -> Iterable[CorpusText]:
        """Plain decoding, a finished request's place taken by the next one."""
        # A cache of its own: the batch's keys and values are freed when the texts are written.
        engine = Engine(Target(target.model, target.folder, target.attention.name))
        waiting = [(self._request(p, r, cap + lookahead), p) for p, r in missing]
        active: list[tuple[Request, Prompt]] = []
        stops = frozenset(self.manifest.stop_ids)
        while waiting or active:
            fresh, waiting = waiting[: BATCH - len(active)], waiting[BATCH - len(active) :]
            engine.prefill([request for request, _ in fresh])
            active += fresh
            for request, _ in fresh:
                _note_stop(request, stops, lookahead)
            running = [request for request, _ in active if not request.finished]
            engine.step(running)
            for request in running:
                _note_stop(request, stops, lookahead)
            if on_tokens:
                on_tokens(len(running) + len(fresh))
            done = [pair for pair in active if pair[0].finished]
            engine.release([request for request, _ in done])
            active = [pair for pair in active if not pair[0].finished]
            for request, prompt in done:
                stop = next((i for i, token in enumerate(request.completion_ids) if token in stops), None)
                yield CorpusText(
                    prompt.id, prompt.category, request.repeat, prompt.ids, request.completion_ids, stop, cap
                )

    def _request(self, prompt: Prompt, repeat: int, tokens: int) -> Request:
        m = self.manifest
        key = json.dumps([m.seed, repeat, prompt.ids]).encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:7], "big")  # below 2**63, as a generator wants
        sampling = Sampling(m.temperature, m.top_k, m.top_p, seed=seed)
        return Request(
            prompt.ids,
            max_new_tokens=tokens,
            sampling=sampling,
            prompt_id=prompt.id,
            category=prompt.category,
            repeat=repeat,
        )

    def _check_manifest(self) -> None:
        path, wanted = self.folder / MANIFEST, asdict(self.manifest)
        if not path.is_file():
            if (self.folder / TEXTS).exists():
                raise SpecdoctorError(
                    f"{self.folder}: has {TEXTS} but no {MANIFEST}, so nobody knows which target wrote it; give "
                    "another --corpus folder"
                )
            part = path.with_name(f".{MANIFEST}.{os.getpid()}")
            part.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
            part.replace(path)
            return
        try:
            there = json.loads(path.read_text(encoding="utf-8"))
            assert isinstance(there, dict)
        except (ValueError, AssertionError):
            raise SpecdoctorError(f"{path}: not a JSON object; give another --corpus folder") from None
        for key, value in wanted.items():
            if key != "target" and there.get(key) != value:
                raise SpecdoctorError(
                    f"{path}: key {key} is {there.get(key)!r}, but this run has {value!r}; give another --corpus "
                    "folder, or leave --corpus out to have one chosen by these facts"
                )

    def _read(self) -> Iterable[CorpusText]:
        path = self.folder / TEXTS
        if not path.is_file():
            return
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]  # an interrupted append leaves half a line
        for number, line in enumerate(whole.decode("utf-8").splitlines(), 1):
            try:
                yield CorpusText(**json.loads(line))
            except (ValueError, TypeError):
                raise SpecdoctorError(
                    f"{path}:{number}: not a text of a corpus; delete the line, or give another --corpus folder"
                ) from None


def _key(text: CorpusText) -> tuple[tuple[int, ...], int]:
    return tuple(text.prompt_ids), text.repeat


def _note_stop(request: Request, stops: frozenset[int], lookahead: int) -> None:
    """A stop token ends the text, and the request some tokens later."""
    completion = request.completion_ids
    if completion and completion[-1] in stops and not any(token in stops for token in completion[:-1]):
        request.max_new_tokens = min(request.max_new_tokens, len(completion) + lookahead)
        if not lookahead:
            request.stop_reason = "stop"


def _drop_torn_line(path: Path) -> None:
    if path.is_file() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)
