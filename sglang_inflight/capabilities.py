"""The capabilities of a server, and the reason for each missing one. One table, made at start.

    doctor       the rows of the given flags (``of``)
    front end    the rows of the arguments, at the start of each process (``of``)
    scheduler    the same, and after loading ``stage`` and ``in_place`` of its models
                 (``scheduler/update/assembly.py``)

``/inflight/status`` has the schedulers' table. Each call that a row refuses reads the row, and asks
neither the arguments nor the models. Two things change while a server runs. SGLang attaches and
detaches HiCache's stores, and ``with_store`` adds the attached one. And serving may make copies of
weights, so each update checks its models again (``scheduler/update/jobs.py``).

``require_supported`` refuses a policy for the KV of older weights that some tier of the cache
lacks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import msgspec
from sglang.srt.arg_groups.choices import BUILT_IN_SAMPLING_BACKENDS
from sglang.srt.arg_groups.model_override_base import model_config_of, resolved_view
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import attn_dp_enabled_of

from sglang_inflight.settings import extensions_on
from sglang_inflight.sglang_types import get_memory
from sglang_inflight.vocabulary.answers import Capabilities
from sglang_inflight.vocabulary.errors import Refused
from sglang_inflight.vocabulary.kept_kv import KEEP, KeptKV

if TYPE_CHECKING:
    from sglang.srt import server_args as sglangs
    from sglang.srt.arg_groups.fields.memory import Memory

    from sglang_inflight.sglang_types import ServerArgs

NO_ENCODER = (
    "a server with --encoder-only has no call of SGLang Inflight, because it has no scheduler: it "
    "keeps the weights of its start"
)
ENCODERS_ELSEWHERE = (
    "with --language-only an update changes the language model alone: servers with --encoder-only "
    "make what images and sounds become, and keep the weights of their start"
)
ONE_REPLICA = "SGLang loads and unloads no adapters while it runs with --dp-size > 1"
_KEEP = 'pass kv_cache="keep"'
_FENCE = 'pass kv_cache="fence" or "keep"'
_TWO_SERVERS = (
    "one server makes the KV of a request's prompt and another one uses it (--disaggregation-mode)"
)
logger = logging.getLogger(__name__)


def of(server_args: sglangs.ServerArgs) -> Capabilities:
    """Return the rows that follow from resolved arguments, without HiCache's store.

    Reads the model's configuration for a decode server, and loads no weights.
    """
    args = cast("ServerArgs", resolved_view(server_args))
    if args.encoder_only:
        return Capabilities(**dict.fromkeys(Capabilities.__struct_fields__, NO_ENCODER))
    pause = _why_no_pause(args)
    # why running requests cannot return to this server's own queue
    queue = pause if args.disaggregation_mode == "null" else pause or _TWO_SERVERS
    fence = _why_prefixes_stay(args)
    return Capabilities(
        pause=pause,
        retract=pause or _why_no_prefill_again(args),
        stage=_why_no_update(args, in_place=False),
        in_place=_why_no_update(args, in_place=True) or _why_not_between_steps(args, queue),
        fence=fence,
        recompute=fence
        or (queue and f"an update or a flush cannot retract running requests: {queue}; {_FENCE}"),
        kv_max_age=_why_no_ages(args, queue, fence),
        keep_weights=queue and f"memory cannot be released while requests wait: {queue}",
        move_adapters=_why_not_moved(args, queue),
        pin=_why_not_pinned(args, queue, fence),
        forced_tokens=_why_not_forced(args),
        continued=_why_not_continued(args),
    )


def notes_on(server_args: sglangs.ServerArgs) -> list[str]:
    """Return what a server with resolved arguments does otherwise than its calls say."""
    args = cast("ServerArgs", resolved_view(server_args))
    return [ENCODERS_ELSEWHERE] if args.language_only else []


def with_store(can: Capabilities, settings: Memory) -> Capabilities:
    """Return ``can`` with the attached HiCache store, which has keys of its own.

    In a hierarchical cache the host tier shares the device tier's tree and keys, so fence and
    flush reach both.
    """
    store = settings.hicache_storage_backend
    if can.fence is not None or store is None or not settings.enable_hierarchical_cache:
        return can
    why = f"--hicache-storage-backend {store} keeps prefixes of older weights; {_KEEP}"
    return msgspec.structs.replace(
        can, fence=why, recompute=why, kv_max_age=can.kv_max_age or why, pin=can.pin or why
    )


def _why_no_pause(args: ServerArgs) -> str | None:
    """Return why the server's event loop has no pause states, or None."""
    if args.pp_size > 1:
        if attn_dp_enabled_of(args):
            return "a pause needs --pp-size 1 with --enable-dp-attention: nobody has tried both"
        if args.speculative_algorithm is not None:
            return "a pause needs --pp-size 1 with speculative decoding: nobody has tried both"
        if args.disaggregation_mode != "null":
            return "a pause needs --pp-size 1 with --disaggregation-mode: its event loops differ"
    if args.enable_pdmux:
        return "a pause needs a server without --enable-pdmux"
    return None


def _why_no_prefill_again(args: ServerArgs) -> str | None:
    """Return why a pause of a decode server cannot retract, or None.

    A retracted request needs a re-prefill: SGLang sends the prefill server the request's tokens,
    and nothing else of the request.
    """
    if args.disaggregation_mode != "decode":
        return None
    config = model_config_of(args)
    lacks = {
        "no adapter (--enable-lora)": args.enable_lora,
        "no images": config.is_multimodal,
        "no key (--api-key)": args.api_key is not None,
    }
    for what, is_wanted in lacks.items():
        if is_wanted:
            return (
                f"running requests cannot be retracted: SGLang's re-prefill request carries {what}"
            )
    return None


def _why_no_update(args: ServerArgs, *, in_place: bool) -> str | None:
    """Return why weights cannot be updated, or None.

    ``in_place`` is true if updates write the live weights between two steps, without a shadow.
    """
    if args.weight_cache_mode != "off":
        return (
            "weights are shared with other engines (--weight-cache-mode "
            f"{args.weight_cache_mode}): an update needs --weight-cache-mode off"
        )
    if args.enable_pdmux:
        return "an update needs a server without --enable-pdmux: forwards run on several streams"
    if (why := _why_copied(args)) is not None:
        return why
    if (why := _why_offloaded(args, in_place=in_place)) is not None:
        return why
    if in_place:
        return None
    if (flag := flag_that_moves_experts(args)) is not None:
        return (
            f"an update cannot be staged with {flag}: experts may move between staging and "
            "commit. SGLANG_INFLIGHT_STAGING=auto or off writes them between two steps"
        )
    return None


def _why_copied(args: ServerArgs) -> str | None:
    """Return which copy of weights would stay as it is after an update, or None."""
    # a platform of another package computes with SGLang's engine only if it captures graphs
    compiles = not current_platform.is_out_of_tree() or current_platform.capabilities.graph_capture
    if args.enable_torch_compile and args.device == "cpu" and compiles:
        return (
            "an update needs a server without --enable-torch-compile on SGLang's own CPU engine, "
            "which compiles the weights into the code (torch._inductor.config.freezing)"
        )
    if args.kt_weight_path is not None:
        return (
            "an update needs a server without --kt-weight-path: experts on the CPU come from that "
            "folder"
        )
    if args.enable_elastic_expert_backup:
        return (
            "an update needs a server without --enable-elastic-expert-backup: a lost rank's "
            "experts come back from a copy of the start"
        )
    if args.ple_offload_embedding:
        return (
            "an update needs a server without --ple-offload-embedding: the table on the host would "
            "change under running forwards"
        )
    return None


def flag_that_moves_experts(args: ServerArgs) -> str | None:
    """Return the flag with which SGLang moves experts between ranks, or None without one."""
    moves = {
        "--enable-eplb": args.enable_eplb,
        "--elastic-ep-backend": args.elastic_ep_backend is not None,
    }
    return _first_set(moves)


def _why_offloaded(args: ServerArgs, *, in_place: bool) -> str | None:
    """Return why weights offloaded to the host cannot be updated, or None.

    A commit swaps contents on the device's stream, behind the launched forwards. Weights on the
    host would change at once, under those forwards. An update in place runs without forwards in
    flight, and ``OffloaderV1`` reads the host's memory in each forward. But SGLang's
    post-processing moves parameters to the device and back, and captured graphs keep reading the
    old addresses. ``OffloaderV2`` fetches the first layers of a step before it is scheduled.
    """
    if args.offload_group_size > 0:
        return (
            "an update needs a server without --offload-group-size: the first layers of a step "
            "are fetched before it is scheduled, so one step would mix two versions"
        )
    if args.cpu_offload_gb <= 0:
        return None
    graphs = args.cuda_graph_config
    # resolved
    assert graphs is not None
    if {graphs.decode.backend, graphs.prefill.backend} != {"disabled"}:
        return (
            "an update needs a server without --cpu-offload-gb, or without CUDA graphs "
            "(--cuda-graph-backend-decode and --cuda-graph-backend-prefill disabled): graphs "
            "read weights on the host where they were captured"
        )
    if not in_place:
        return (
            "an update cannot be staged with --cpu-offload-gb: weights on the host would change "
            "under running forwards. SGLANG_INFLIGHT_STAGING=auto or off writes them between two "
            "steps"
        )
    return None


def _why_not_between_steps(args: ServerArgs, queue: str | None) -> str | None:
    if queue is not None:
        return f"weights cannot be written in place, between two steps: {queue}"
    if args.pp_size > 1:
        # a stage with a job would make no step, and the other stages would wait for it
        return "weights cannot be written in place, between two steps, with --pp-size above 1"
    return None


def _why_prefixes_stay(args: ServerArgs) -> str | None:
    """Return why later requests may reuse prefixes of older weights, or None if they cannot."""
    if args.enable_lmcache or args.enable_flexkv:
        return f"LMCache and FlexKV keep prefixes of older weights; {_KEEP}"
    if args.enable_unified_cache_external_linker:
        return (
            "the store of --enable-unified-cache-external-linker keeps prefixes of older weights; "
            f"{_KEEP}"
        )
    if args.radix_cache_backend is not None:
        return (
            f"--radix-cache-backend {args.radix_cache_backend} may keep prefixes of older weights; "
            f"{_KEEP}"
        )
    if args.enable_hierarchical_cache and args.pp_size > 1:
        return f"--enable-hierarchical-cache is untested with --pp-size above 1; {_KEEP}"
    return None


def _why_no_ages(args: ServerArgs, queue: str | None, fence: str | None) -> str | None:
    """Return why KV cannot be kept up to an age, or None."""
    if (why := queue or fence) is not None:
        return f"KV cannot be kept by its age: {why}"
    unproven = {
        "--pp-size above 1": args.pp_size > 1,
        "--enable-hisparse": args.enable_hisparse,
        "--dllm-algorithm": args.dllm_algorithm is not None,
    }
    what = _first_set(unproven)
    return what and f"KV cannot be kept by its age with {what}: nobody tried both"


def _why_not_moved(args: ServerArgs, queue: str | None) -> str | None:
    """Return why requests cannot move from one adapter to another, or None."""
    if not args.enable_lora:
        return "adapters need a server with --enable-lora"
    if args.dp_size > 1:
        return ONE_REPLICA
    if args.pp_size > 1:
        return 'running="move" is untested with --pp-size above 1'
    if queue is not None:
        return f'running="move" is not possible here: {queue}'
    if args.enable_hierarchical_cache:
        return 'running="move" is not possible with --enable-hierarchical-cache'
    return None


def _why_not_pinned(args: ServerArgs, queue: str | None, fence: str | None) -> str | None:
    """Return why a request cannot name the version of its weights, or None."""
    if not any("pin" in extension.offers for extension in extensions_on()):
        return "a request cannot name the version of its weights: the extension for that is off"
    if (why := queue or fence) is not None:
        return f"a request cannot name the version of its weights: {why}"
    unproven = {
        "--pp-size above 1": args.pp_size > 1,
        "--enable-dp-attention": attn_dp_enabled_of(args),
        "speculative decoding": args.speculative_algorithm is not None,
        "--enable-hisparse": args.enable_hisparse,
        "--dllm-algorithm": args.dllm_algorithm is not None,
    }
    what = _first_set(unproven)
    return what and (
        f"a request cannot name the version of its weights with {what}: nobody tried both"
    )


def _why_not_forced(args: ServerArgs) -> str | None:
    """Return why a request cannot be given its tokens, or None."""
    if not any("forced_tokens" in extension.offers for extension in extensions_on()):
        return "a request cannot be given its tokens: the extension for that is off"
    others = {
        "speculative decoding, whose drafts propose several tokens at once": (
            args.speculative_algorithm is not None
        ),
        "--dllm-algorithm, which makes blocks of tokens": args.dllm_algorithm is not None,
        "--disaggregation-mode: nobody tried both": args.disaggregation_mode != "null",
        f"--sampling-backend {args.sampling_backend}, which brings a sampler of its own": (
            args.sampling_backend not in (None, *BUILT_IN_SAMPLING_BACKENDS)
        ),
    }
    what = _first_set(others)
    return what and f"a request cannot be given its tokens with {what}"


def _why_not_continued(args: ServerArgs) -> str | None:
    """Return why a request cannot go on from another server's output, or None."""
    if not any("continued" in extension.offers for extension in extensions_on()):
        return "a request cannot go on from an output: the extension for that is off"
    others = {
        "speculative decoding: nobody tried both": args.speculative_algorithm is not None,
        "--dllm-algorithm, which makes blocks of tokens": args.dllm_algorithm is not None,
        "--disaggregation-mode: nobody tried both": args.disaggregation_mode != "null",
    }
    what = _first_set(others)
    return what and f"a request cannot go on from an output with {what}"


def _first_set(flags: Mapping[str, bool]) -> str | None:
    """Return the first flag that is set, or None."""
    return next((flag for flag, is_set in flags.items() if is_set), None)


def now(can: Capabilities) -> Capabilities:
    """Return ``can`` with HiCache's store, which SGLang attaches and detaches while it serves."""
    return with_store(can, get_memory())


def require_supported(kept: KeptKV, can: Capabilities, *, retracts: bool) -> None:
    """Raise ``Refused`` if the policy ``kept`` is unsupported.

    ``retracts`` is true if requests may be running at the commit.
    """
    can = now(can)
    if not kept.keeps_all and can.fence is not None:
        raise Refused(f"{kept} is not supported: {can.fence}")
    if retracts and kept.flushes and can.recompute is not None:
        raise Refused(can.recompute)
    if kept.has_ages and can.kv_max_age is not None:
        raise Refused(f"{kept} is not supported: {can.kv_max_age}")


def as_sglang_does(kept: KeptKV, can: Capabilities) -> KeptKV:
    """Weaken an unsupported policy for calls without our fields, as SGLang does."""
    if kept.keeps_all or (reason := now(can).fence) is None:
        return kept
    _warn(reason)
    return kept if kept.flushes else KEEP


@functools.cache
def _warn(reason: str) -> None:
    """Warn once per reason."""
    logger.warning("Requests may reuse the KV of older weights after updates: %s.", reason)
