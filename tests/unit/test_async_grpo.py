"""The example's GRPO: rewards, ratios over versions, ages, standstills, and the label check."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from examples.async_grpo import grpo, task
from examples.async_grpo.__main__ import main
from examples.async_grpo.evaluation import expected_reward
from examples.async_grpo.labels import TOLERANCE, check_labels, repeat_forwards
from examples.async_grpo.model import Weights, new_model, served_weights, with_weights
from examples.async_grpo.report import cells, make_table, time_to
from examples.async_grpo.rollouts import standstills
from examples.async_grpo.run import Result

VERSIONS = 3


@pytest.fixture(scope="module")
def versions() -> dict[int, Weights]:
    """Weights of three versions, far enough apart for different log-probabilities."""
    torch.manual_seed(1)
    return {version: served_weights(new_model()) for version in range(VERSIONS)}


@pytest.fixture
def model(versions: dict[int, Weights]) -> Any:
    return with_weights(new_model(), versions[VERSIONS - 1])


def logprob(model: Any, tokens: list[int]) -> float:
    """Return the log-probability of the last token after the others, computed alone."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0, -1]
    return float(logits.log_softmax(-1)[tokens[-1]])


def across_versions(versions: dict[int, Weights], lengths: list[int], reward: float) -> grpo.Sample:
    """Return a random answer, of which version ``v`` has made ``lengths[v]`` tokens."""
    model = new_model()
    rng = random.Random(sum(lengths))
    prompt = task.Question(77, 2).prompt
    answer = [rng.randrange(task.VOCABULARY) for _ in range(sum(lengths))]
    labels = [version for version, length in enumerate(lengths) for _ in range(length)]
    logprobs = [
        logprob(with_weights(model, versions[label]), prompt + answer[: place + 1])
        for place, label in enumerate(labels)
    ]
    return grpo.Sample(prompt, answer, logprobs, labels, reward)


@pytest.mark.parametrize("word", range(task.WORDS))
def test_answer_counts_to_the_next_multiple(word: int) -> None:
    seen = set()
    for number in range(task.NUMBERS):
        name, *numbers, end = task.Question(number, word).answer
        assert end == task.END
        assert all(later == (earlier - 1) % 256 for earlier, later in pairwise([number, *numbers]))
        divisor = 2 ** (name - task.ANSWER)
        assert [n % divisor == 0 for n in numbers] == [False] * (len(numbers) - 1) + [True]
        seen.add(divisor)
    assert len(seen) == 1


def test_each_word_means_something_else() -> None:
    names = {task.Question(5, word).answer[0] for word in range(task.WORDS)}
    assert len(names) == task.WORDS
    assert not names & {token for word in range(8) for token in task.Question(5, word).prompt}


def test_reward_is_for_the_right_answer_alone() -> None:
    question = task.Question(12, 1)
    right = question.answer
    assert task.reward(question, right) == 1
    for wrong in (right[:-1], [*right, task.END], [right[0] + 1, *right[1:]], []):
        assert task.reward(question, wrong) == 0


def test_held_out_question_is_never_asked() -> None:
    held_out = set(task.held_out())
    assert len(held_out) == 32 * task.WORDS
    rng = random.Random(0)
    assert not held_out & {task.ask(rng) for _ in range(5000)}


def test_equal_rewards_have_no_advantage() -> None:
    assert grpo.advantages([0.5, 0.5, 0.5]) == [0, 0, 0]
    assert grpo.advantages([1, 0, 0, 1]) == pytest.approx([1, -1, -1, 1], abs=1e-3)


def test_ratio_of_each_token_is_to_the_version_that_sampled_it(
    versions: dict[int, Weights], model: Any
) -> None:
    """Two samples, one of them of three versions, against a loss computed token by token."""
    group = [across_versions(versions, [3, 4, 5], 1.0), across_versions(versions, [0, 6], 0.0)]
    tokens = sum(len(sample.answer) for sample in group)
    expected, off, clipped = 0.0, 0.0, 0
    for sample, advantage in zip(group, grpo.advantages([1.0, 0.0]), strict=True):
        for place, old in enumerate(sample.logprobs):
            new = logprob(model, sample.prompt + sample.answer[: place + 1])
            ratio = float(torch.tensor(new - old).exp())
            bounded = min(max(ratio, 1 - grpo.CLIP_BELOW), 1 + grpo.CLIP_ABOVE)
            expected -= min(ratio * advantage, bounded * advantage) / tokens
            off += abs(ratio - 1) / tokens
            clipped += ratio != bounded
    step, mismatch = grpo.train(
        model, torch.optim.SGD(model.parameters(), lr=0.0), [group], version=2
    )
    assert step.loss == pytest.approx(expected, rel=1e-4)
    assert step.ratio_off == pytest.approx(off, rel=1e-4)
    assert step.clipped == pytest.approx(clipped / tokens)
    assert {age: found.tokens for age, found in mismatch.items()} == {2: 3, 1: 10, 0: 5}
    assert mismatch[0].nats / 5 < 1e-4 < mismatch[1].nats / 10
    # tokens of the newest version are on policy
    assert step.ratio_off > 0
    newest = grpo.answer_logprobs(model, group[:1])[7:].tolist()
    assert newest == pytest.approx(group[0].logprobs[7:], abs=1e-4)


def test_step_makes_the_better_answer_more_likely(versions: dict[int, Weights], model: Any) -> None:
    group = [across_versions(versions, [0, 0, 5], 1.0), across_versions(versions, [0, 0, 7], 0.0)]
    before = [float(part.sum()) for part in _logprobs(model, group)]
    grpo.train(model, torch.optim.SGD(model.parameters(), lr=0.05), [group], version=1)
    after = [float(part.sum()) for part in _logprobs(model, group)]
    assert after[0] > before[0]
    assert after[1] < before[1]


def _logprobs(model: Any, group: list[grpo.Sample]) -> Iterator[torch.Tensor]:
    lengths = [len(sample.answer) for sample in group]
    yield from grpo.answer_logprobs(model, group).detach().split(lengths)


def test_age_counts_the_versions_behind(versions: dict[int, Weights]) -> None:
    group = [across_versions(versions, [1, 2, 3], 1.0), across_versions(versions, [0, 0, 4], 0.0)]
    assert grpo.count_ages([group], 5) == Counter({5: 1, 4: 2, 3: 7})
    assert grpo.oldest_version(group) == 0
    assert grpo.oldest_version(group[1:]) == 2


def test_standstill_is_a_gap_longer_than_allowed() -> None:
    arrivals = [10.1, 10.2, 12.0, 12.4]
    assert standstills(arrivals, 10.0, 14.0, longest=1.0) == [
        pytest.approx((0.2, 2.0)),
        pytest.approx((2.4, 4.0)),
    ]
    assert standstills([], 1.0, 3.0, longest=1.0) == [(0.0, 2.0)]


def test_expected_reward_is_the_right_answers_probability(model: Any) -> None:
    questions = [task.Question(1, 0), task.Question(6, 3)]
    expected = 0.0
    for asked in questions:
        tokens = asked.prompt + asked.answer
        places = range(len(asked.prompt), len(tokens))
        logprobs = [logprob(model, tokens[: place + 1]) for place in places]
        expected += float(torch.tensor(sum(logprobs)).exp()) / len(questions)
    assert expected_reward(model, questions) == pytest.approx(expected, rel=1e-3, abs=0)


def test_right_labels_pass_and_wrong_ones_are_counted(versions: dict[int, Weights]) -> None:
    sample = across_versions(versions, [3, 4, 5], 1.0)
    check = check_labels(new_model(), [sample], versions, recomputes=True)
    assert (check.tokens, check.mislabelled) == (12, 0)
    assert check.largest < TOLERANCE
    assert check.noticeable >= 10
    wrong = grpo.Sample(
        sample.prompt, sample.answer, sample.logprobs, [0, 0, *sample.versions[2:]], 1.0
    )
    wrong.versions[2] = 1
    assert check_labels(new_model(), [wrong], versions, recomputes=True).mislabelled >= 1


def test_kept_kv_is_that_of_the_older_version(versions: dict[int, Weights]) -> None:
    """The second version's first token comes from its own forward, over the first one's KV."""
    sample = across_versions(versions, [3, 4], 1.0)
    kept = repeat_forwards(new_model(), sample, sample.versions, versions, recomputes=False)
    anew = repeat_forwards(new_model(), sample, sample.versions, versions, recomputes=True)
    assert kept[:3].tolist() == pytest.approx(anew[:3].tolist(), abs=1e-5)
    assert (kept[3:] - anew[3:]).abs().max() > TOLERANCE
    # the reference: version 0 makes the KV of the prompt and of two tokens, version 1 the third's
    model = with_weights(new_model(), versions[0])
    tokens = torch.tensor([sample.prompt + sample.answer])
    prompt = len(sample.prompt)
    with torch.no_grad():
        cache = model(input_ids=tokens[:, : prompt + 2], use_cache=True).past_key_values
        with_weights(model, versions[1])
        output = model(
            input_ids=tokens[:, prompt + 2 : prompt + 3],
            past_key_values=copy.deepcopy(cache),
            use_cache=True,
        )
    own = output.logits[0, -1].log_softmax(-1)[sample.answer[3]]
    assert float(kept[3]) == pytest.approx(float(own), abs=1e-5)


def test_time_to_a_reward_lies_between_evaluations() -> None:
    curve = [(0.0, 0, 0.1), (10.0, 64, 0.5), (20.0, 128, 0.9)]
    assert time_to(curve, 0.7) == pytest.approx(15)
    assert time_to(curve, 0.1) == 0
    assert time_to(curve, 0.95) is None


def test_ratios_compare_runs_of_one_seed() -> None:
    def ran(way: str, seed: int, end: float) -> Result:
        return Result(way, seed, curve=[(0.0, 0, 0.0), (end, 64, 1.0)])

    blocking, in_flight = make_table(
        [
            *(ran("blocking", seed, 100.0 * (1 + seed)) for seed in range(2)),
            *(ran("in flight", seed, 50.0) for seed in range(2)),
            Result("in flight", 2, curve=[(0.0, 0, 0.0), (1.0, 64, 0.2)]),
        ]
    )
    assert blocking.ratios == pytest.approx([1, 1])
    assert in_flight.ratios == pytest.approx([2, 4])
    assert cells(in_flight)[1].endswith("in 2 of 3")
    assert cells(in_flight)[2] == "3.00x (2.00x to 4.00x)"


@pytest.mark.parametrize(
    ("option", "named"),
    [
        (("--seconds", "0"), "--seconds: 0 is no positive number of seconds"),
        (("--seconds", "soon"), "--seconds"),
        (("--seeds", "0"), "--seeds: 0 is below 1"),
        (("--way", "slowly"), "--way: invalid choice: 'slowly'"),
    ],
)
def test_bad_option_is_named(
    option: tuple[str, str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(option)
    assert end.value.code == 2
    assert named in capsys.readouterr().err
