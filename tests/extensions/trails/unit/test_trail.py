"""A trail of prefills, decoding steps, commits and retractions."""

from __future__ import annotations

from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

from sglang_inflight.extensions.trails.trails import Trail, deciding


def test_decoding_steps_move_the_position_alone() -> None:
    trail = Trail()
    trail.launch(0, 512, is_prefill=True)
    trail.launch(512, 600, is_prefill=True)
    for end in (601, 602):
        trail.launch(end - 1, end, is_prefill=False)
    trail.commit(7)
    assert trail.events == [["prefill", 0, 512], ["prefill", 512, 600], ["commit", 602, 7]]


def test_commit_before_the_first_forward_is_left_out() -> None:
    trail = Trail()
    trail.commit(7)
    trail.retract(trail.computed)
    assert trail.events == []


def test_commit_of_a_retracted_request_is_at_position_0() -> None:
    trail = Trail()
    trail.launch(0, 3, is_prefill=True)
    trail.retract(trail.computed)
    trail.commit(7)
    trail.launch(2, 5, is_prefill=True)
    assert trail.events == [
        ["prefill", 0, 3],
        ["retract", 3, []],
        ["commit", 0, 7],
        ["prefill", 2, 5],
    ]
    assert (trail.retractions, trail.cached) == (1, 2)


def test_cached_tokens_are_those_before_the_first_chunk() -> None:
    trail = Trail()
    trail.launch(8, 20, is_prefill=True)
    trail.launch(20, 32, is_prefill=True)
    assert trail.cached == 8


def test_parameters_that_decide_tokens_have_the_names_of_the_api() -> None:
    params = SamplingParams(
        temperature=0.5, top_k=TOP_K_ALL, stop_token_ids={9, 3}, max_new_tokens=7,
        sampling_seed=11, custom_params={"record": "replay"},
    )  # fmt: skip
    params.normalize(None)
    assert deciding(params) == {
        "temperature": 0.5,
        "stop_token_ids": [3, 9],
        "sampling_seed": 11,
    }
    again = SamplingParams(**deciding(params))
    again.normalize(None)
    assert deciding(again) == deciding(params)


def test_greedy_request_is_greedy_again() -> None:
    greedy = SamplingParams(temperature=0)
    assert SamplingParams(**deciding(greedy)).top_k == greedy.top_k == 1


def test_forward_whose_token_was_thrown_away_is_left_out() -> None:
    trail = Trail()
    trail.launch(0, 3, is_prefill=True)
    for end in (4, 5):
        trail.launch(end - 1, end, is_prefill=False)
    trail.commit(7)
    trail.retract(4)
    assert trail.events == [["prefill", 0, 3], ["commit", 4, 7], ["retract", 4, []]]


def test_retraction_amid_a_prompts_chunks_keeps_its_position() -> None:
    trail = Trail()
    trail.launch(0, 512, is_prefill=True)
    trail.retract(599)
    assert trail.events == [["prefill", 0, 512], ["retract", 512, []]]


def test_commit_during_the_last_forward_is_left_out() -> None:
    trail = Trail()
    trail.launch(0, 3, is_prefill=True)
    trail.commit(6)
    for end in (4, 5):
        trail.launch(end - 1, end, is_prefill=False)
    trail.commit(7)
    trail.end(5)
    assert trail.events == [["prefill", 0, 3], ["commit", 3, 6]]
