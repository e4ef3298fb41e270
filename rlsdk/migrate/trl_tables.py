"""Settings of TRL that need no arithmetic: of the same meaning, decided by rlsdk, and those that it does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migrate.common import NO_LORA

CONFIGS: Mapping[str, str] = {
    **dict.fromkeys(("GRPOConfig", "RLOOConfig", "SFTConfig", "DPOConfig", "CPOConfig", "ORPOConfig", "KTOConfig"), ""),
    **dict.fromkeys(("PRMConfig", "GKDConfig"), ""),
    **dict.fromkeys(("RewardConfig", "TrainingArguments", "ModelConfig", "ScriptArguments"), ""),
    "LoraConfig": "LoraConfig.",
    "BitsAndBytesConfig": "BitsAndBytesConfig.",
}
"""Class -> prefix of its settings."""
TRAINERS: Mapping[str, str] = {
    "GRPOTrainer": "train",
    "RLOOTrainer": "train",
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "CPOTrainer": "dpo",
    "ORPOTrainer": "dpo",
    "KTOTrainer": "kto",
    "RewardTrainer": "reward-model",
    "PRMTrainer": "process-reward",
    "GKDTrainer": "train",
}
"""Class -> command of rlsdk."""
CONFIG_OF: Mapping[str, str] = {
    "GRPOConfig": "GRPOTrainer",
    "RLOOConfig": "RLOOTrainer",
    "SFTConfig": "SFTTrainer",
    "DPOConfig": "DPOTrainer",
    "CPOConfig": "CPOTrainer",
    "ORPOConfig": "ORPOTrainer",
    "KTOConfig": "KTOTrainer",
    "RewardConfig": "RewardTrainer",
    "PRMConfig": "PRMTrainer",
    "GKDConfig": "GKDTrainer",
}
COMMANDS: Mapping[str, str] = {
    "grpo": "GRPOTrainer",
    "gspo": "GRPOTrainer",
    "rloo": "RLOOTrainer",
    "sft": "SFTTrainer",
    "dpo": "DPOTrainer",
    "cpo": "CPOTrainer",
    "orpo": "ORPOTrainer",
    "kto": "KTOTrainer",
    "reward": "RewardTrainer",
    "prm": "PRMTrainer",
    "gkd": "GKDTrainer",
}
"""Word in `trl WORD`, and in a script's name -> trainer."""

_BASE: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "seed": 42,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "gradient_checkpointing": True,
    "eval_strategy": "no",
    "save_strategy": "steps",
    "save_steps": 500,
}
_SAMPLED: Mapping[str, Any] = {
    **_BASE,
    "learning_rate": 1e-6,
    "max_completion_length": 512,
    "temperature": 1.0,
    "num_iterations": 1,
    "epsilon": 0.2,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "GRPOTrainer": {**_SAMPLED, "num_generations": 8, "beta": 0.0, "loss_type": "dapo", "scale_rewards": "group"},
    "RLOOTrainer": {**_SAMPLED, "num_generations": 2, "beta": 0.05},
    "SFTTrainer": {**_BASE, "learning_rate": 2e-5, "max_length": 1024},
    "DPOTrainer": {**_BASE, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1, "loss_type": ["sigmoid"]},
    "CPOTrainer": {
        **_BASE,
        "learning_rate": 1e-6,
        "max_length": 1024,
        "beta": 0.1,
        "loss_type": "sigmoid",
        "cpo_alpha": 1.0,
        "simpo_gamma": 0.5,
    },
    "ORPOTrainer": {**_BASE, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    "KTOTrainer": {**_BASE, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1, "loss_type": "kto"},
    "RewardTrainer": {**_BASE, "learning_rate": 1e-4, "max_length": 1024},
    "PRMTrainer": {**_BASE, "learning_rate": 1e-5, "max_length": 1024, "step_separator": "\n"},
    "GKDTrainer": {
        **_BASE,
        "learning_rate": 2e-5,
        "max_length": 1024,
        "max_new_tokens": 128,
        "temperature": 0.9,
        "lmbda": 0.5,
        "beta": 0.5,
    },
}
"""Values of settings that a script leaves out, where they differ from ours or enter a product (TRL 1.16)."""

TAKEN = ("learning_rate", "weight_decay", "adam_epsilon", "gradient_checkpointing", "model_revision",
         "chat_template_kwargs", "trust_remote_code", "eval_on_start")  # fmt: skip
TAKEN_SAMPLED = ("num_generations", "max_completion_length", "max_prompt_length", "temperature", "top_p",
                 "vllm_max_model_length", "vllm_tensor_parallel_size", "num_iterations")  # fmt: skip
SAME: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("disable_dropout", "packing", "padding_free", "vllm_enable_sleep_mode", "shuffle_dataset"), (True,)
    ),
    "vllm_mode": ("colocate",),
    "remove_unused_columns": (False,),
    **dict.fromkeys(("LoraConfig.task_type", "lora_task_type"), ("CAUSAL_LM",)),
    "LoraConfig.bias": ("none",),
    "from_pretrained.num_labels": (1,),
}
"""Settings that mean what is done here anyway, with these values."""
_LOGS = "every step is logged into the run's folder"
_LOADING = "rows are read by the run's own reader"
_SHARDS = "the train backend shards and places by itself"
_KERNELS = "the engine chooses its kernels"
DECIDED: Mapping[str, str] = {
    **dict.fromkeys(
        ("logging_*", "log_*", "num_completions_to_print", "disable_tqdm", "include_num_input_tokens_seen"), _LOGS
    ),
    **dict.fromkeys(
        (
            "dataloader_*",
            "train_dataset.streaming",
            "eval_dataset.streaming",
            "dataset_num_proc",
            "remove_unused_columns",
            "dataset_streaming",
            "data_seed",
        ),
        _LOADING,
    ),
    **dict.fromkeys(
        ("dataset_kwargs", "shuffle_dataset", "group_by_length", "pad_token", "pad_to_multiple_of"), _LOADING
    ),
    **dict.fromkeys(("deepspeed", "fsdp*", "ddp_*", "accelerator_config", "ds3_gather_for_generation"), _SHARDS),
    **dict.fromkeys(("parallelism_config", "accelerate.*", "torchrun.*", "average_tokens_across_devices"), _SHARDS),
    **dict.fromkeys(("attn_implementation", "use_liger_kernel", "tf32", "torch_compile*", "trainer.attn*"), _KERNELS),
    **dict.fromkeys(("use_cache", "cache_implementation", "use_transformers_*", "vllm_model_impl"), _KERNELS),
    **dict.fromkeys(
        ("packing", "padding_free", "packing_strategy", "eval_packing"),
        "rows are packed without padding, and stay rows: none is cut",
    ),
    **dict.fromkeys(("per_device_eval_batch_size", "eval_accumulation_steps"), "evaluation has the limits of training"),
    **dict.fromkeys(
        ("vllm_enable_sleep_mode", "vllm_mode"),
        "the engine is part of the run and takes turns with training; for "
        "devices of its own: placement.preset colocate_actor_ref with placement.devices",
    ),
    **dict.fromkeys(("disable_dropout",), "models run without dropout"),
    **dict.fromkeys(("from_pretrained.device_map", "from_pretrained.low_cpu_mem_usage"), _SHARDS),
    **dict.fromkeys(
        ("from_pretrained.attn_implementation", "from_pretrained.use_cache", "use_liger", "LoraConfig.random_state"),
        _KERNELS,
    ),
    "LoraConfig.use_gradient_checkpointing": "train.activation_checkpointing says it for all weights",
    "gradient_checkpointing_kwargs": "the engine chooses how activations are recomputed",
    "overwrite_output_dir": "an existing run is never overwritten",
    "run_name": "the run's folder is named by its time; trainer.run_name names it, and such a run is resumed",
    "precompute_ref_*": "log-probs of the reference are computed in each step",
    "ddp_timeout": "deadlines.* say how long is waited for what",
    "trainer.processing_class": "the model's own tokenizer; model.tokenizer names another",
    "trainer.tokenizer": "the model's own tokenizer; model.tokenizer names another",
    "trainer.data_collator": "rows are batched by rlsdk",
    "use_cpu": "placement.device is chosen by what the machine has",
    "activation_offloading": "train.activation_checkpointing recomputes instead",
    "bf16_full_eval": "evaluation computes as training",
    "do_*": "the command says what is done",
    "save_only_model": "checkpoints can be resumed, and hold the model",
    "LoraConfig.task_type": "the command says what is trained",
    "lora_task_type": "the command says what is trained",
    "LoraConfig.bias": "an adapter has no biases",
    "tokenizer_name": "the model's own tokenizer; model.tokenizer names another",
}
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("use_peft", "lora_*", "LoraConfig.*", "peft_config", "use_rslora", "use_dora"), NO_LORA),
    **dict.fromkeys(
        (
            "load_in_*",
            "bnb_*",
            "BitsAndBytesConfig.*",
            "use_bnb_nested_quant",
            "trainer.quantization_config",
            "from_pretrained.quantization_config",
            "from_pretrained.load_in_*",
        ),
        "weights are trained in float32 copies, not quantized: leave out; train.backend shards what does not fit",
    ),
    **dict.fromkeys(("push_to_hub", "hub_*"), "afterwards: `rlsdk push RUN org/name`"),
    **dict.fromkeys(
        ("sync_ref_model", "ref_model_*", "trainer.ref_model"), "the reference is fixed: ref.path names another model"
    ),
    **dict.fromkeys(
        ("vllm_server_*", "vllm_group_port"),
        "no server of others: the run starts its own engines; devices of "
        "their own: placement.preset colocate_actor_ref with placement.devices",
    ),
    **dict.fromkeys(
        ("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        "checkpoint.best.metric keeps the checkpoint with the best value of a metric of ours",
    ),
    "trainer.environment_factory": "the class is used as it is: rollout.environment file.py:Class, see docs/agents.md",
    "max_tool_calling_iterations": "turns of an environment: rollout.max_turns, see docs/agents.md",
    **dict.fromkeys(
        ("trainer.tools", "trainer.rollout_func"),
        "tools are methods of an environment (rollout.environment file.py:Class), and a function that makes samples is "
        "a rollouter (rollout.rollouter file.py:fn): see docs/rollouters.md",
    ),
    **dict.fromkeys(("trainer.callbacks",), "trainer.callbacks names functions of ours: see docs/extending.md"),
    **dict.fromkeys(
        ("trainer.optimizers", "optim_args", "optim_target_modules"), "the optimizer is AdamW; train.optim.*"
    ),
    **dict.fromkeys(
        ("trainer.formatting_func", "chat_template_path", "trainer.compute_metrics"),
        "prompts are made by the tokenizer's chat template, data.prompt_template and sft.answer_template",
    ),
    **dict.fromkeys(
        ("vespo_*", "entropy_coef_*", "entropy_target", "use_adaptive_entropy"),
        "not among the losses: algorithm.loss file.py:fn takes one of your own, see docs/extending.md",
    ),
    **dict.fromkeys(("vllm_structured_outputs_regex",), "pass it to the engine: rollout.engine_kwargs"),
    "off_policy_mask_threshold": "algorithm.correction.reject drops rows by their ratio; no mask by KL and advantage",
    "use_bias_correction_kl": "the KL term is not weighted by the ratio",
    "router_aux_loss_coef": "no load-balancing loss",
    "reward_clip_range": "clip in the reward function",
    "multi_objective_aggregation": "terms are summed, then normalised",
    "neftune_noise_alpha": "no noise on embeddings",
    "label_smoothing_factor": "no label smoothing in this loss",
    "generation_kwargs": "rollout.stop_strings, rollout.min_p and others by name; the rest in rollout.engine_kwargs",
    "model_init_kwargs": "the engine builds the model: model.dtype, model.revision, model.trust_remote_code",
    "average_*": "no average of this kind; train.ema_decay keeps a moving average",
    "project": "a tracker's own option: tracking.options",
    "trackio_*": "no tracker trackio: `rlsdk watch RUN` shows a run",
    "auto_find_batch_size": "train.micro_batch_tokens bounds the memory of a pass; `rlsdk plan` says what fits",
    **dict.fromkeys(("datasets", "dataset_mixture"), "several sources, each with a weight: data.mixture"),
    "from_pretrained.max_seq_length": "prompt and answer have a limit each: data.max_prompt_tokens and "
    "rollout.max_response_tokens",
    "dataset_text_field": "texts without a prompt are not trained on: rows need a prompt and an answer",
    "eval_delay": "evaluations begin at once: eval.at_start, eval.every_steps",
    "num_generations_eval": "eval.samples_per_prompt",
    "loss_weights": "a second loss is the better answer's likelihood only: preferences.sft_coef",
    "cast_lm_head_to_fp32": "log-probs are computed in float32 from the engine's logits",
    "trainer.chat_template": "the tokenizer's own template is used",
    "resume_from_checkpoint": "a run resumes its own checkpoints: trainer.resume RUN",
    "ignore_bias_buffers": "not needed",
    "trainer.reward_processing_classes": "a reward model's tokenizer must be that of the policy",
    "hub_token": "afterwards: `rlsdk push RUN org/name`",
}
