"""Model classes that need more than small sizes, and classes without a small checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers

from tests.support.plugins import with_plugin

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """The differences of a class from the others."""

    # transformers' class to build, if it has none of the same name
    alike: str | None = None
    # the configuration, if transformers has no class alike: SGLang's class then gives the tensors
    model_type: str | None = None
    # joined tensors with their parts in a checkpoint, beside the usual ones
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # whether a checkpoint has the experts of a layer in one tensor
    stacked: bool = False
    # the configuration's fields, also nested ones
    fields: Fields = field(default_factory=dict)
    # fields of the written configuration that transformers' class does not need
    written: Fields = field(default_factory=dict)
    # parts of tensors' names, and their names in SGLang
    renames: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def merged(fields: Fields, others: Fields) -> dict[str, Any]:
    """Return ``fields`` with those of ``others``, which win. Nested ones are merged too."""
    result = dict(fields)
    for name, value in others.items():
        old = result.get(name)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[name] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result


def why_not_built(name: str) -> str | None:
    """Return why class ``name`` has no small checkpoint, or None if one is tried."""
    if re.search("NextN$|MTP$|Eagle3?$|Draft|DSpark|DFlash|Assistant", name):
        return "a draft model: SGLang serves it beside its target only"
    if name in FAMILIES or hasattr(transformers, name):
        return None
    return "transformers has no such class, so there is no small checkpoint of it"


# sizes of latent attention
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
DEEPSEEK = {
    **LATENT,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# the absorbed form of latent attention, by torch
ABSORBED = with_plugin("on_a_cpu", "latent_attention")
# checkpoints have both, and transformers writes neither
YARN = {
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "moe_layer_freq": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EVERY_SECOND = {"full_attention_interval": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_ssm": 128}
# transformers writes one level of a language model too many
INNER = {
    "language_model.model.model.": "language_model.model.",
    "language_model.model.lm_head.": "language_model.lm_head.",
}
# SGLang caps logits by a kernel that needs a GPU
UNCAPPED = {"final_logit_softcapping": None, "attn_logit_softcapping": None}
ABSOLUTE = {"position_embedding_type": "absolute"}
# checkpoints have it beside hidden_activation
GELU = {"hidden_act": "gelu_pytorch_tanh"}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
GEMMA_3N = {
    "num_hidden_layers": 4,
    "intermediate_size": [128] * 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4,
    "vocab_size_per_layer_input": 1024,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 16,
}
# states of linear layers are kept by SGLang's GPU kernels only
STATES = ("--disable-radix-cache",)
BAILING = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "embedding_dropout": 0.0,
    "output_dropout": 0.0,
    "score_function": "softmax",
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
    "norm_head": False,
    "rms_norm_eps": 1e-6,
}
# the loader computes with the head
NORMALIZED = {"norm_head": True}
BAILING_2 = {
    **BAILING,
    "n_group": 1,
    "topk_group": 1,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
}
W1_W3 = {"gate_up_proj": ("w1", "w3")}
LLAMA, QWEN2, QWEN3 = (f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3"))

FAMILIES: dict[str, Family] = {
    # classes with fields of their own
    "DbrxForCausalLM": Family(
        fields={
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 64, "moe_top_k": 2},
        }
    ),
    "DeepseekV2ForCausalLM": Family(fields=DEEPSEEK, written=YARN, env=ABSORBED),
    "DeepseekV3ForCausalLM": Family(fields=DEEPSEEK, written=YARN, env=ABSORBED),
    "DeepseekV32ForCausalLM": Family(fields=DEEPSEEK, written=YARN, env=ABSORBED),
    "GlmMoeDsaForCausalLM": Family(fields=DEEPSEEK, written=YARN, env=ABSORBED),
    "Glm4MoeLiteForCausalLM": Family(fields=DEEPSEEK, written=YARN, env=ABSORBED),
    "MiniCPM3ForCausalLM": Family(fields=LATENT, written=YARN, env=ABSORBED),
    "LongcatFlashForCausalLM": Family(
        fields={**LATENT, "zero_expert_num": 2, "expert_ffn_hidden_size": 32}
    ),
    "KimiLinearForCausalLM": Family(
        fields={
            **LATENT,
            "q_lora_rank": None,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
        },
        flags=STATES,
    ),
    "Qwen3NextForCausalLM": Family(fields=LINEAR, written=EVERY_SECOND, flags=STATES),
    "Qwen3_5ForCausalLM": Family(fields=LINEAR, written=EVERY_SECOND, flags=STATES),
    "Qwen3_5MoeForCausalLM": Family(fields=LINEAR, written=EVERY_SECOND, flags=STATES),
    "Qwen3_5ForConditionalGeneration": Family(
        fields={"text_config": LINEAR}, written={"text_config": EVERY_SECOND}, flags=STATES
    ),
    "Qwen3_5MoeForConditionalGeneration": Family(
        fields={"text_config": LINEAR}, written={"text_config": EVERY_SECOND}, flags=STATES
    ),
    "OlmoeForCausalLM": Family(fields={"num_key_value_heads": 4}),
    "FalconH1ForCausalLM": Family(fields=MAMBA, flags=STATES),
    "Gemma2ForCausalLM": Family(fields=UNCAPPED, written=GELU),
    "Gemma2ForSequenceClassification": Family(fields=UNCAPPED, written=GELU),
    "BertModel": Family(written=ABSOLUTE),
    "BertForSequenceClassification": Family(written=ABSOLUTE),
    "XLMRobertaModel": Family(written=ABSOLUTE),
    "XLMRobertaForSequenceClassification": Family(written=ABSOLUTE),
    "OlmoForCausalLM": Family(fields={"num_key_value_heads": 4}),
    "PhiForCausalLM": Family(fields={"num_key_value_heads": 4, "intermediate_size": 256}),
    "MiniMaxM2ForCausalLM": Family(
        written={"scoring_func": "sigmoid", "use_qk_norm": True, "rotary_dim": 16}
    ),
    "HYV3ForCausalLM": Family(written={"route_norm": True}),
    "Qwen2VLForConditionalGeneration": Family(
        fields={"text_config": {"rope_parameters": MROPE}},
        written={"vision_config": {"in_chans": 3}},
    ),
    "Gemma3ForConditionalGeneration": Family(
        fields={"vision_config": {"vision_use_head": False}},
        renames={"vision_tower.": "vision_tower.vision_model."},
    ),
    "Lfm2ForCausalLM": Family(flags=STATES),
    "GraniteMoeHybridForCausalLM": Family(flags=STATES),
    "NemotronHForCausalLM": Family(
        fields={
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 8,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        },
        # SGLang's names of the same layers
        written={"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
        flags=STATES,
    ),
    "Mamba2ForCausalLM": Family(
        fields={"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
        written={"intermediate_size": 128, "rms_norm": True},
        flags=STATES,
    ),
    "ZayaForCausalLM": Family(fields={"num_experts_per_tok": 1, "router_hidden_size": 32}),
    "Lfm2MoeForCausalLM": Family(
        fields={"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        flags=STATES,
    ),
    "HunYuanDenseV1ForCausalLM": Family(fields={"head_dim": 16}, written={"use_qk_norm": True}),
    "HunYuanMoEV1ForCausalLM": Family(
        fields={"head_dim": 16, "moe_topk": [2, 2]},
        written={
            "use_qk_norm": True,
            "moe_intermediate_size": [128, 128],
            "num_shared_expert": [1, 1],
            "use_mixed_mlp_moe": True,
        },
    ),
    "Gemma3nForCausalLM": Family(fields=GEMMA_3N),
    "Gemma3nForConditionalGeneration": Family(fields={"text_config": GEMMA_3N}),
    "Gemma4ForCausalLM": Family(
        fields={
            "per_layer_config": {},
            "vocab_size_per_layer_input": 1024,
            "hidden_size_per_layer_input": 16,
        }
    ),
    "Gemma4ForConditionalGeneration": Family(
        fields={
            "text_config": {
                "per_layer_config": {},
                "vocab_size_per_layer_input": 1024,
                "hidden_size_per_layer_input": 16,
            }
        }
    ),
    "Qwen2_5_VLForConditionalGeneration": Family(
        fields={"text_config": {"rope_parameters": MROPE}, "vision_config": {"out_hidden_size": 64}}
    ),
    "Cosmos3EdgeForConditionalGeneration": Family(
        fields={"text_config": {"rope_parameters": MROPE}}
    ),
    "Glm5NextForConditionalGeneration": Family(fields={"text_config": {"num_key_value_heads": 4}}),
    "DiffusionGemmaForBlockDiffusion": Family(
        fields={"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}}
    ),
    "NemotronH_Omni_Reasoning_V3": Family(
        fields={"vision_config": {"video_temporal_patch_size": 2}}
    ),
    "Qwen3OmniMoeForConditionalGeneration": Family(
        fields={"talker_config": {"text_config": {"shared_expert_intermediate_size": 32}}}
    ),
    "MiMoV2FlashForCausalLM": Family(written={"hybrid_layer_pattern": [0, 1]}),
    "MiniCPMV4_6ForConditionalGeneration": Family(
        fields={"text_config": LINEAR}, written={"text_config": EVERY_SECOND}, flags=STATES
    ),
    "MiniCPMV4_7ForConditionalGeneration": Family(
        fields={"text_config": LINEAR}, written={"text_config": EVERY_SECOND}, flags=STATES
    ),
    "Qwen2AudioForConditionalGeneration": Family(renames=INNER),
    "GlmAsrForConditionalGeneration": Family(renames=INNER),
    # classes like one of transformers
    "OrionForCausalLM": Family(LLAMA),
    "XverseForCausalLM": Family(LLAMA),
    "SolarForCausalLM": Family(LLAMA),
    "IQuestCoderForCausalLM": Family(LLAMA),
    "InternLM3ForCausalLM": Family(LLAMA),
    "TorchNativeLlamaForCausalLM": Family(LLAMA),
    "TorchNativePhi3ForCausalLM": Family("Phi3ForCausalLM"),
    "NanbeigeForCausalLM": Family(LLAMA),
    "TeleFLMForCausalLM": Family(LLAMA, written={"use_mup": False}),
    "MiniCPMForCausalLM": Family(
        LLAMA, written={"scale_emb": 2.0, "scale_depth": 1.4, "dim_model_base": 32}
    ),
    "LlamaEmbeddingModel": Family("LlamaModel"),
    "LlamaForClassification": Family(
        "LlamaForSequenceClassification",
        written={"classification_out_size": 2},
        renames={"score.": "classification_head."},
    ),
    "LlamaForSequenceClassificationWithNormal_Weights": Family(model_type="llama"),
    "MiMoForCausalLM": Family(QWEN2),
    "Qwen2ForRewardModel": Family(model_type="qwen2"),
    "Qwen3ForRewardModel": Family(model_type="qwen3"),
    "SDARForCausalLM": Family(QWEN3),
    "SDARMoeForCausalLM": Family("Qwen3MoeForCausalLM"),
    "Ernie4_5_ForCausalLM": Family("Ernie4_5ForCausalLM"),
    "ExaoneMoEForCausalLM": Family("ExaoneMoeForCausalLM"),
    "PhiMoEForCausalLM": Family("PhimoeForCausalLM", fields={"lm_head_bias": True}),
    "QuantMixtralForCausalLM": Family("MixtralForCausalLM"),
    "EmbeddingGemmaModel": Family("Gemma3TextModel", flags=("--is-embedding",)),
    "Contriever": Family("BertModel", written=ABSOLUTE),
    "MiMoV2ForCausalLM": Family("MiMoV2FlashForCausalLM", written={"hybrid_layer_pattern": [0, 1]}),
    "TransformersForCausalLM": Family(
        LLAMA, written={"architectures": [LLAMA]}, flags=("--model-impl", "transformers")
    ),
    "TransformersMoEForCausalLM": Family(
        "Qwen3MoeForCausalLM",
        written={"architectures": ["Qwen3MoeForCausalLM"]},
        flags=("--model-impl", "transformers"),
    ),
    "TransformersEmbeddingModel": Family(
        "Qwen3Model",
        written={"architectures": ["Qwen3Model"]},
        flags=("--model-impl", "transformers", "--is-embedding"),
    ),
    "TransformersForSequenceClassification": Family(
        "Qwen3ForSequenceClassification",
        written={"architectures": ["Qwen3ForSequenceClassification"]},
        flags=("--model-impl", "transformers", "--is-embedding"),
    ),
    "DeepseekForCausalLM": Family(
        LLAMA,
        written={
            "n_routed_experts": None,
            "n_shared_experts": None,
            "first_k_dense_replace": 2,
            "moe_layer_freq": 1,
        },
    ),
    # classes without one alike
    "InternLM2ForCausalLM": Family(model_type="llama", joined=W1_W3, fields={"bias": False}),
    "InternLM2ForRewardModel": Family(model_type="llama", joined=W1_W3, fields={"bias": False}),
    "ExaoneForCausalLM": Family(
        model_type="exaone",
        joined={"gate_up_proj": ("c_fc_0", "c_fc_1")},
        fields={
            "num_layers": 2,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "silu",
            "pad_token_id": 0,
        },
    ),
    "BailingMoEForCausalLM": Family(model_type="llama", fields=BAILING),
    "BailingMoeForCausalLM": Family(model_type="llama", fields=BAILING | NORMALIZED),
    "BailingMoeV2ForCausalLM": Family(model_type="llama", fields=BAILING_2),
    "SarvamMoEForCausalLM": Family(model_type="llama", fields=BAILING_2),
    "LLaDA2MoeModelLM": Family(model_type="llama", fields=BAILING_2 | NORMALIZED),
    "QWenLMHeadModel": Family(
        model_type="llama",
        joined={"gate_up_proj": ("w2", "w1")},
        fields={
            "layer_norm_epsilon": 1e-5,
            "kv_channels": 16,
            "seq_length": 4096,
            "rotary_emb_base": 10000,
        },
    ),
    "XverseMoeForCausalLM": Family(
        model_type="llama", fields={"num_experts": 4, "moe_top_k": 2, "num_shared_experts": 1}
    ),
    "Grok1ForCausalLM": Family(
        model_type="llama",
        fields={
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attn_logit_softcapping": 30.0,
            "router_logit_softcapping": 30.0,
            "final_logit_softcapping": 30.0,
            "embedding_multiplier_scale": 1.0,
            "output_multiplier_scale": 1.0,
            "residual_moe": True,
            "moe_intermediate_size": 64,
        },
    ),
    "K2HorizonForCausalLM": Family(model_type="llama", fields={"mlp_only_layers": [0, 1]}),
    "IQuestLoopCoderForCausalLM": Family(model_type="llama", fields={"loop_num": 2}),
    "Step3p5ForCausalLM": Family(
        model_type="step3p5",
        stacked=True,
        fields={
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "share_expert_dim": 32,
            "num_attention_groups": 2,
            "moe_layers_enum": "1",
            "need_fp32_gate": False,
            "use_head_wise_attn_gate": True,
            "use_moe_router_bias": True,
            "moe_router_activation": "sigmoid",
            "moe_router_scaling_factor": 1.0,
            "yarn_only_types": [],
            "swiglu_limits": [0.0, 0.0],
            "swiglu_limits_shared": [0.0, 0.0],
            "use_rope_layers": [],
            "partial_rotary_factors": [1.0, 1.0],
            "rope_theta": [10000.0, 10000.0],
            "layer_types": ["full_attention", "sliding_attention"],
            "attention_other_setting": {
                "attention_type": "sliding_attention",
                "num_attention_heads": 4,
                "num_attention_groups": 2,
                "head_dim": 16,
            },
        },
    ),
    "Spark2_5ForCausalLM": Family(model_type="spark2_5"),
    "BeamForCausalLM": Family(model_type="beam", fields={"n_group": 2, "topk_group": 1}),
    "ChatGLMModel": Family(model_type="chatglm"),
    "BailingMoeV2_5ForCausalLM": Family(model_type="bailing_hybrid", flags=STATES),
    "BailingMoeV3ForCausalLM": Family(model_type="bailing_hybrid", flags=STATES),
}
