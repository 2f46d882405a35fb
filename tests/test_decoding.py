"""Where a request ends, what it costs its neighbours (nothing), and that greedy text is the target's own."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scripted_drafter import Oracle
from tiny_models import tiny_family, tiny_llama, tiny_target, write_drafter
from transformers import PreTrainedModel

from specdoctor.drafters.load import load_drafter
from specdoctor.engine import engine as engine_module
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.scheduling.confidence import confidence_threshold

V = 32
PROMPT = [3, 1, 4, 1, 5]

KINDS: dict[str, dict] = {
    "dspark-vanilla": {"head": "vanilla"},
    "dspark-gated": {"head": "gated"},
    "dspark-rnn": {"head": "rnn"},
    "dflash": {"head": None},
    "dflash-zlab": {"family": "zlab"},
    "dflash-zlab-sliding": {
        "family": "zlab",
        "config_changes": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    },
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V))


@torch.inference_mode()
def greedy_text(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    """Prompt and greedy continuation by the library's own full forwards, one token at a time, no cache."""
    ids = list(prompt)
    for _ in range(new_tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids


@pytest.fixture(scope="module")
def text() -> list[int]:
    return greedy_text(tiny_target(V), PROMPT, 40)


def run(engine: Engine, prompt: list[int] = PROMPT, **settings: object) -> Sequence:
    sequence = Sequence(prompt, **{"max_new_tokens": 16, **settings})
    engine.generate([sequence])
    return sequence


def first_seen(text: list[int], start: int, stop: int) -> int:
    """A place in [start, stop) whose token does not occur earlier in the continuation."""
    return next(i for i in range(start, stop) if text[i] not in text[len(PROMPT) : i])


# Stop tokens ----------------------------------------------------------------------------------------------------------


def test_stop_token_inside_an_accepted_block_cuts_it(target: Target, text: list[int]) -> None:
    at = first_seen(text, len(PROMPT) + 2, len(PROMPT) + 5)  # the first round holds tokens 1..5 of the completion
    sequence = run(Engine(target, Oracle(text)), stop_ids=[text[at]])
    assert sequence.ids == text[: at + 1]
    assert sequence.stop_reason == "stop"
    (record,) = sequence.records
    assert record.accepted == 4 and record.verified == 4  # the verdict of the rule, before the cut
    assert record.committed_ids == text[len(PROMPT) + 1 : at + 1]
    assert record.stop == "stop"


@pytest.mark.parametrize("misses", [0, 2, 99])
def test_stop_token_as_correction_or_bonus_token(target: Target, text: list[int], misses: int) -> None:
    end = len(PROMPT) + 1 + min(misses, 4)  # the token that the target itself adds to the first round
    assert text[end] not in text[len(PROMPT) : end], "the made text must not stop earlier"
    sequence = run(Engine(target, Oracle(text, misses=misses)), stop_ids=[text[end]])
    assert sequence.ids == text[: end + 1]
    assert sequence.stop_reason == "stop" and len(sequence.records) == 1
    assert sequence.records[0].committed == min(misses, 4) + 1


@pytest.mark.parametrize("kind", [None, "dspark-vanilla", "dflash-zlab"])
def test_first_token_is_a_stop_token(target: Target, text: list[int], tmp_path: Path, kind: str | None) -> None:
    drafter = load_drafter(write_drafter(tmp_path, vocab=V, **KINDS[kind]), target) if kind else None
    sequence = run(Engine(target, drafter), stop_ids=[text[len(PROMPT)]])
    assert sequence.completion_ids == [text[len(PROMPT)]]
    assert sequence.stop_reason == "stop" and sequence.records == []


def test_a_stop_token_in_the_prompt_stops_nothing(target: Target) -> None:
    sequence = run(Engine(target), max_new_tokens=3, stop_ids=[PROMPT[0], PROMPT[-1]])
    assert len(sequence.completion_ids) >= 1


# The length cap -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [0, 1, 2, 3, 5, 6, 7, 16])
@pytest.mark.parametrize("misses", [0, 1, 99])
def test_the_cap_is_exact(target: Target, text: list[int], cap: int, misses: int) -> None:
    sequence = run(Engine(target, Oracle(text, misses=misses)), max_new_tokens=cap)
    assert sequence.ids == text[: len(PROMPT) + cap]
    assert sequence.stop_reason == "length"
    assert sum(r.committed for r in sequence.records) == max(0, cap - 1)
    assert all(r.stop is None for r in sequence.records[:-1])


def test_stop_token_exactly_at_the_cap_counts_as_stop(target: Target, text: list[int]) -> None:
    at = first_seen(text, len(PROMPT) + 2, len(PROMPT) + 5)
    sequence = run(Engine(target, Oracle(text)), max_new_tokens=at - len(PROMPT) + 1, stop_ids=[text[at]])
    assert sequence.stop_reason == "stop" and sequence.ids == text[: at + 1]


def test_no_tokens_wanted_takes_no_slot(target: Target) -> None:
    before = list(target.cache.lengths)
    sequence = run(Engine(target), max_new_tokens=0)
    assert sequence.ids == PROMPT and sequence.slot is None and target.cache.lengths == before


@pytest.mark.parametrize(
    ("prompt", "cap", "line"),
    [
        ([], 4, "story-7: the prompt has no tokens, expected at least one"),
        (PROMPT, -1, "story-7: max_new_tokens is -1, expected 0 or more"),
    ],
)
def test_empty_prompt_and_negative_cap(target: Target, prompt: list[int], cap: int, line: str) -> None:
    with pytest.raises(SpecdoctorError) as error:
        Engine(target).generate([Sequence(prompt, max_new_tokens=cap, prompt_id="story-7")])
    assert str(error.value) == line


@pytest.mark.parametrize("K", [0, -1, 5])
def test_a_proposal_longer_than_the_block_is_refused(target: Target, tmp_path: Path, K: int) -> None:
    drafter = load_drafter(write_drafter(tmp_path, vocab=V), target, name="mine")
    with pytest.raises(SpecdoctorError, match=f"-K {K}: mine proposes 1 to 4 tokens in a round"):
        Engine(target, drafter, draft_tokens=K)


# The model's limit ----------------------------------------------------------------------------------------------------

LIMIT = 20


def limited(limit: int = LIMIT) -> PreTrainedModel:
    return tiny_family("GPT2", vocab_size=V, n_positions=limit, max_position_embeddings=limit)


def test_prompt_at_the_limit_and_one_below() -> None:
    """GPT-2 has a table of positions: one step too far is an index error, not a slow drift."""
    target = Target(limited())
    assert target.max_positions == LIMIT
    with pytest.raises(SpecdoctorError, match="the prompt has 20 tokens, but GPT2LMHeadModel has 20 positions"):
        run(Engine(target), prompt=[1] * LIMIT)
    prompt = [i % V for i in range(LIMIT - 1)]
    sequence = run(Engine(target), prompt=prompt)
    assert sequence.stop_reason == "context"
    assert sequence.ids == greedy_text(limited(), prompt, 2)  # the last position still gives one more token


@pytest.mark.parametrize("misses", [0, 1, 3, 99])
@pytest.mark.parametrize("length", [5, 12, 17, 18, 19])
def test_context_runs_full_in_the_middle(length: int, misses: int) -> None:
    target = Target(limited())
    prompt = [(7 * i) % V for i in range(length)]
    text = greedy_text(limited(), prompt, LIMIT + 1 - length)
    plain = run(Engine(target), prompt=prompt, max_new_tokens=50)
    sequence = run(Engine(target, Oracle(text, misses=misses)), prompt=prompt, max_new_tokens=50)
    assert plain.ids == sequence.ids == text
    assert plain.stop_reason == sequence.stop_reason == "context"
    assert sequence.records[-1].stop == "context"
    assert all(r.context + 1 + r.drafted <= LIMIT for r in sequence.records)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_full_neighbour_changes_nothing(tmp_path: Path, temperature: float) -> None:
    """Near the limit a request drafts less; its neighbours keep their budget, and their random numbers."""
    folder = write_drafter(tmp_path, vocab=V)

    def texts(batches: list[list[int]]) -> dict[int, tuple[list[int], str | None]]:
        target = Target(tiny_target(V, max_position_embeddings=30))
        decoder = Engine(target, load_drafter(folder, target))
        out = {}
        for batch in batches:
            sequences = {
                n: Sequence([i % V for i in range(n)], max_new_tokens=14, sampling=Sampling(temperature, seed=n))
                for n in batch
            }
            decoder.generate(list(sequences.values()))
            out |= {n: (s.ids, s.stop_reason) for n, s in sequences.items()}
        return out

    together, alone = texts([[4, 27, 29, 16, 20]]), texts([[4], [27], [29], [16], [20]])
    assert together == alone
    assert together[27][1] == "context" and together[4][1] == "length"


# Prefill --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 7, 64])
def test_prompts_in_pieces_give_the_same_text(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    prompts = [[(3 * i + n) % V for i in range(n)] for n in (1, 2, 7, 13, 8, 3)]
    expected = [greedy_text(tiny_target(V), prompt, 6) for prompt in prompts]
    drafter = load_drafter(write_drafter(tmp_path, vocab=V), target)
    alone = [run(Engine(target, drafter), prompt=prompt, max_new_tokens=6) for prompt in prompts]
    monkeypatch.setattr(engine_module, "PREFILL_ROWS", rows)
    sequences = [Sequence(prompt, max_new_tokens=6) for prompt in prompts]
    Engine(target, drafter).generate(sequences)
    assert [s.ids for s in sequences] == expected
    # The drafter's context was fed in pieces too: its drafts, and so the accepted lengths, are the same.
    assert [[r.accepted for r in s.records] for s in sequences] == [[r.accepted for r in s.records] for s in alone]


def test_no_request_leaves_a_slot_behind(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(write_drafter(tmp_path, vocab=V), target)
    decoder = Engine(target, drafter)
    for _ in range(3):
        decoder.generate([Sequence(PROMPT, max_new_tokens=4) for _ in range(2)])
        with pytest.raises(SpecdoctorError):
            decoder.generate([Sequence(PROMPT, max_new_tokens=4), Sequence([], max_new_tokens=4)])
    assert len(drafter.backbone.cache.lengths) == 2
    assert set(target.cache.lengths) == {0}


# Greedy equality ------------------------------------------------------------------------------------------------------


def prompts_of_all_lengths(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in (1, 2, 5, 9, 17, 33, 61, 64)]


TARGETS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: tiny_target(V),
    "llama-tied": lambda: tiny_llama(V),
    "mistral-window": lambda: tiny_family("Mistral", vocab_size=V, num_hidden_layers=2),
    "gemma2": lambda: tiny_family("Gemma2", vocab_size=V, num_hidden_layers=2),
}


@functools.cache
def greedy_texts(model: str) -> list[list[int]]:
    plain = TARGETS[model]()
    return [greedy_text(plain, prompt, 20) for prompt in prompts_of_all_lengths(V)]


@pytest.mark.parametrize("model", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_the_targets_own(tmp_path: Path, model: str, kind: str) -> None:
    prompts, expected = prompts_of_all_lengths(V), greedy_texts(model)
    target = Target(TARGETS[model]())
    decoder = Engine(target, load_drafter(write_drafter(tmp_path, vocab=V, **KINDS[kind]), target))
    alone = [run(decoder, prompt=prompt, max_new_tokens=20) for prompt in prompts]
    batch = [Sequence(prompt, max_new_tokens=20) for prompt in prompts]
    decoder.generate(batch)
    assert [s.ids for s in alone] == expected
    assert [s.ids for s in batch] == expected
    assert [[r.accepted for r in s.records] for s in alone] == [[r.accepted for r in s.records] for s in batch]


def test_an_arm_may_be_fed_by_a_drafter_of_another_dtype(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(write_drafter(tmp_path, vocab=V), target, dtype="bfloat16")
    assert drafter.head.dtype == torch.bfloat16 and target.dtype == torch.float32
    decoder = Engine(target, drafter)
    for prompt in prompts_of_all_lengths(V):
        assert run(decoder, prompt=prompt).ids == run(Engine(target), prompt=prompt).ids


@pytest.mark.parametrize("draft_temperature", ["1x", "0.5", "0", "2x"])
def test_a_warm_drafter_beside_a_greedy_target(
    target: Target, text: list[int], tmp_path: Path, draft_temperature: str
) -> None:
    decoder = Engine(target, load_drafter(write_drafter(tmp_path, vocab=V), target))
    sequence = run(decoder, sampling=Sampling(0.0, draft_temperature=draft_temperature, seed=5))
    assert sequence.ids == text[: len(sequence.ids)]


def test_wrong_drafts_are_all_replaced(target: Target, text: list[int]) -> None:
    sequence = run(Engine(target, Oracle(text, misses=0)))
    assert sequence.ids == text[: len(PROMPT) + 16]
    assert all(r.accepted == 0 and r.outcomes == ["rejected"] + ["unreached"] * 3 for r in sequence.records)


# Batches --------------------------------------------------------------------------------------------------------------

MIXED = [
    Sampling(0.0),
    Sampling(1.0, seed=1),
    Sampling(1.0, seed=2),
    Sampling(0.7, top_k=5, seed=3),
    Sampling(0.7, top_k=5, top_p=0.8, seed=4),
    Sampling(1.0, draft_temperature="0.5x", seed=5),
    Sampling(1.0, draft_temperature="0", seed=6),
    Sampling(0.0, draft_temperature="0.8", seed=7),
]


def mixed_requests() -> list[Sequence]:
    prompts = prompts_of_all_lengths(V)
    return [
        Sequence(prompt, max_new_tokens=8 + 3 * i, sampling=sampling, prompt_id=str(i))
        for i, (prompt, sampling) in enumerate(zip(prompts, MIXED, strict=True))
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_text_does_not_depend_on_neighbours_or_order(target: Target, tmp_path: Path, kind: str) -> None:
    decoder = Engine(target, load_drafter(write_drafter(tmp_path, vocab=V, **KINDS[kind]), target))
    alone = mixed_requests()
    for sequence in alone:
        decoder.generate([sequence])
    together, reverse = mixed_requests(), mixed_requests()[::-1]
    decoder.generate(together)
    decoder.generate(reverse)
    expected = {s.prompt_id: (s.ids, [r.accepted for r in s.records]) for s in alone}
    for batch in (together, reverse):
        assert {s.prompt_id: (s.ids, [r.accepted for r in s.records]) for s in batch} == expected


def test_text_does_not_depend_on_neighbours_under_a_threshold(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(write_drafter(tmp_path, vocab=V), target)
    decoder = Engine(target, drafter, schedule=confidence_threshold(0.5))
    alone, together = mixed_requests(), mixed_requests()
    for sequence in alone:
        decoder.generate([sequence])
    decoder.generate(together)
    assert [s.ids for s in together] == [s.ids for s in alone]
    assert {r.verified for s in together for r in s.records} != {4}  # something was cut


def test_seeds_reproduce_and_differ(target: Target, tmp_path: Path) -> None:
    decoder = Engine(target, load_drafter(write_drafter(tmp_path, vocab=V), target))

    def drawn(seed: int) -> list[int]:
        return run(decoder, sampling=Sampling(1.0, seed=seed), max_new_tokens=24).ids

    assert drawn(3) == drawn(3)
    assert len({tuple(drawn(seed)) for seed in range(6)}) == 6


# Records --------------------------------------------------------------------------------------------------------------


HEADED = [kind for kind, settings in KINDS.items() if settings.get("head")]


@pytest.mark.parametrize(("kind", "threshold"), [(kind, None) for kind in KINDS] + [(kind, 0.5) for kind in HEADED])
def test_records_add_up(target: Target, tmp_path: Path, kind: str, threshold: float | None) -> None:
    schedule = None if threshold is None else confidence_threshold(threshold)
    drafter = load_drafter(write_drafter(tmp_path, vocab=V, **KINDS[kind]), target)
    decoder = Engine(target, drafter, schedule=schedule, arm="mine")
    for sampling in (Sampling(), Sampling(1.0, seed=4)):
        sequence = run(decoder, sampling=sampling, max_new_tokens=30)
        assert [token for r in sequence.records for token in r.committed_ids] == sequence.completion_ids[1:]
        context = len(PROMPT)
        for number, r in enumerate(sequence.records):
            assert (r.arm, r.round, r.context) == ("mine", number, context)
            assert 0 <= r.accepted <= r.verified <= r.drafted == drafter.max_draft
            assert len(r.outcomes) == r.drafted
            assert r.outcomes.count("accepted") == r.accepted
            assert r.outcomes.count("trimmed") == r.drafted - r.verified
            assert r.outcomes.count("rejected") == (r.accepted < r.verified)
            assert (r.confidence is not None) == (drafter.confidence is not None)
            assert r.confidence is None or all(0 <= c <= 1 for c in r.confidence)
            assert set(r.times) == {"draft", "schedule", "verify", "accept", "commit", "round"}
            assert sum(v for k, v in r.times.items() if k != "round") == pytest.approx(r.times["round"], rel=1e-6)
            if r.stop is None:
                assert r.committed == r.accepted + 1
            context += r.committed
