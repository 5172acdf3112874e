"""Chooses the seeds of requests under ``--enable-deterministic-inference``.

SGLang samples token ``i`` of a request by a hash of its seed and its position, so a seed and the
logits decide each token, in any batch and after any retraction. But SGLang gives all requests
without a seed the seed 42, and all samples of a request the same seed. So they are equal.

Sample ``i`` of ``n`` gets the request's seed plus ``i``, as in vLLM. A request without a seed gets
one from a generator that begins with the server's ``--random-seed``. Without
``--enable-deterministic-inference`` SGLang ignores seeds, and the first one ignored is logged.

The front end's event loop owns the generator and the counts. It sends the samples of a request one
after the other, each with a copy of the request's object, and the copies share one count.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import os
import random
from typing import TYPE_CHECKING, Any

from sglang_inflight.frontend.requests.checks import MESSAGE, PARAMETERS
from sglang_inflight.frontend.requests.values import Prompt
from sglang_inflight.hooking import BEFORE, TOKENIZER_MANAGER, hook, with_us
from sglang_inflight.inactive import why_inactive
from sglang_inflight.sglang_types import get_device, get_exec, get_serving

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager

# JSON's numbers are exact below 2 ** 53
SEED_BITS = 52
# SGLang's seeds are int64
_LAST_SEED = (1 << 63) - 1
# an attribute of SGLang's request of one prompt: numbers of its samples
_SAMPLES = "inflight_samples"

logger = logging.getLogger(__name__)


@functools.cache
def _generator() -> random.Random:
    serving = get_serving()
    # tokenizer workers must not draw the same seeds
    worker = f" {os.getpid()}" if serving.tokenizer_worker_num > 1 else ""
    return random.Random(f"{get_device().random_seed}{worker}")


@functools.cache
def _warn_of_ignored_seed() -> None:
    logger.warning(
        "A request's seed is ignored: SGLang heeds seeds with --enable-deterministic-inference."
    )


@PARAMETERS.join(order=48)
def choose_seed(params: SamplingParams, vocab_size: int) -> None:
    """Give a request without a seed one of its own, if the server heeds seeds."""
    if why_inactive() is not None:
        return
    if not get_exec().deterministic.enable_deterministic_inference:
        if params.sampling_seed is not None:
            _warn_of_ignored_seed()
    elif params.sampling_seed is None:
        params.sampling_seed = _generator().getrandbits(SEED_BITS)


@MESSAGE.join(order=70)
def number_samples(_: object, prompt: Prompt) -> None:
    """Let the samples of one prompt count from 0."""
    if prompt.message.sampling_params.n > 1:
        setattr(prompt.obj, _SAMPLES, itertools.count())


@hook(f"{TOKENIZER_MANAGER}._send_one_request", BEFORE, when=with_us)
def seed_sample(tm: PatchedTokenizerManager, tokenized_obj: Any) -> None:
    """Give a sample its own seed. The prefill of the prompt that all share comes before them."""
    state = tm.rid_to_state.get(tokenized_obj.rid)
    samples = getattr(state.obj, _SAMPLES, None) if state is not None else None
    params = tokenized_obj.sampling_params
    if samples is None or params.sampling_seed is None or params.max_new_tokens == 0:
        return
    seed = seed_of_sample(params.sampling_seed, next(samples))
    tokenized_obj.sampling_params = copy.copy(params)
    tokenized_obj.sampling_params.sampling_seed = seed


def seed_of_sample(seed: int, sample: int) -> int:
    """Return the seed of a request's sample, counted from 0. After the last int64 comes 0."""
    return seed + sample if seed + sample <= _LAST_SEED else seed + sample - _LAST_SEED - 1
