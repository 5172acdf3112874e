"""verl's settings for a tiny model on a CPU: environment variables and Hydra's overrides."""

from __future__ import annotations

from pathlib import Path

from harness.starting import ROOT

HERE = "tests.trainers.verl"

# tokens of each request of ``rounds``
TOKENS = 400

ENV = {
    "PYTHONPATH": str(ROOT),
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_USE_EXTERNAL_MODULES": f"{HERE}.cpu",
    # otherwise Ray hides its "GPUs" from the server's actor, which asks for none
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would start a worker for each declared core, and the cores are declared for actors
    "RAY_prestart_worker_first_driver": "0",
    # Ray would kill workers for the memory of others on the machine
    "RAY_memory_monitor_refresh_ms": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

# a cluster of its own, with the name of a GPU for the trainer and its server
RAY = {"address": "local", "num_gpus": 1, "num_cpus": 16, "include_dashboard": False}


def overrides(model: Path, *, releases_memory: bool = True, **more: object) -> list[str]:
    """Return the overrides of ``ppo_trainer.yaml``. ``more`` has dots as double underscores."""
    rollout = "actor_rollout_ref.rollout"
    actor = "actor_rollout_ref.actor"
    given = {
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.v1.trainer_mode": "colocate_async",
        "trainer.val_before_train": "false",
        "trainer.logger": "[file]",
        "trainer.resume_mode": "disable",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "data.train_batch_size": 4,
        "data.max_prompt_length": 64,
        "data.max_response_length": 64,
        "data.dataloader_num_workers": 0,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": ROOT / "tests/trainers/verl/reward.py",
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": model,
        # without padding verl needs flash-attn
        "actor_rollout_ref.model.use_remove_padding": "false",
        "+actor_rollout_ref.model.override_config.attn_implementation": "eager",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.use_torch_compile": "false",
        f"{actor}.fsdp_config.use_torch_compile": "false",
        # the server's dtype, so that their log-probabilities are equal
        f"+{actor}.fsdp_config.mixed_precision.param_dtype": "fp32",
        f"{rollout}.dtype": "float32",
        f"{actor}.ppo_mini_batch_size": 4,
        f"{actor}.ppo_micro_batch_size_per_gpu": 4,
        f"{actor}.optim.lr": 1e-3,
        f"{rollout}.name": "sglang",
        f"{rollout}.n": 4,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.load_format": "auto",
        f"{rollout}.enforce_eager": "true",
        f"{rollout}.max_num_seqs": 32,
        f"{rollout}.free_cache_engine": str(releases_memory).lower(),
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 4,
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 1,
        f"+{rollout}.engine_kwargs.sglang.attention_backend": "torch_native",
        f"+{rollout}.engine_kwargs.sglang.max_total_tokens": 32768,
    }
    given |= {name.replace("__", "."): value for name, value in more.items()}
    return [f"{name}={value}" for name, value in given.items()]
