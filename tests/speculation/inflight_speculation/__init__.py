"""A test plugin for SGLang: speculative decoding without a GPU.

SGLang's GPU kernels are replaced by loops. Drafts, their weights, the tokens of a step, and their
delivery remain SGLang's.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def install() -> None:
    from . import relays, slots, trees

    # ngram_worker imports this function from a library that needs a GPU
    kernels, speculative = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.speculative")
    kernels.__path__ = []
    vars(speculative)["reconstruct_indices_from_tree_mask"] = trees.read_tree
    sys.modules |= {"sgl_kernel": kernels, "sgl_kernel.speculative": speculative}

    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.managers import overlap_utils
    from sglang.srt.mem_cache import allocation, memory_pool
    from sglang.srt.platforms.interface import SRTPlatform
    from sglang.srt.speculative import eagle_utils, eagle_worker_common, ngram_worker

    from . import attention

    attention.install()
    SRTPlatform.supports_speculative_algorithm = lambda platform, algorithm: True
    speculative_hook._disable_overlap_schedule_for_cpu = do_nothing

    ngram_worker.reconstruct_indices_from_tree_mask_func = trees.read_tree
    eagle_utils.build_tree_kernel_efficient_func = trees.build_chain
    eagle_utils.verify_tree_greedy_func = trees.verify

    ngram_worker.assign_extend_cache_locs_func = slots.read_slots
    eagle_worker_common.assign_draft_cache_locs_contiguous_func = slots.write_draft_slots
    allocation.assign_req_to_token_pool_func = slots.write_slots

    overlap_utils.gather_spec_extras = relays.gather
    eagle_worker_common.fill_bonus_tokens_func = relays.take_last_accepted

    ngram_worker.move_accept_tokens_to_target_kvcache = do_nothing
    memory_pool.copy_all_layer_kv_cache_func = do_nothing


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replace copies of KV, which is never read here, and the ban on overlap for CPUs."""
