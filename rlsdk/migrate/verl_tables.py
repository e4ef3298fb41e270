"""Settings of verl that need no arithmetic: of the same meaning, decided by rlsdk, and those that it does not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlsdk.migrate.common import NO_DROPOUT, NO_LORA, SAMPLER

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ENGINE_SFT = "sft_trainer"
"""Module of its supervised training with engines of RL, whose defaults are theirs."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "train": {
        "algorithm.adv_estimator": "gae",
        "algorithm.norm_adv_by_std_in_grpo": True,
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "data.prompt_key": "prompt",
        f"{A}.ppo_mini_batch_size": 256,
        f"{A}.ppo_epochs": 1,
        f"{A}.optim.lr": 1e-6,
        f"{A}.optim.weight_decay": 0.01,
        f"{A}.clip_ratio": 0.2,
        f"{A}.clip_ratio_c": 3.0,
        f"{A}.loss_agg_mode": "token-mean",
        f"{A}.ppo_max_token_len_per_gpu": 16384,
        f"{A}.kl_loss_coef": 0.001,
        f"{A}.kl_loss_type": "low_var_kl",
        "algorithm.kl_ctrl.kl_coef": 0.001,
        "algorithm.kl_penalty": "kl",
        f"{R}.name": SAMPLER,
        f"{R}.n": 1,
        f"{R}.temperature": 1.0,
        f"{R}.tensor_model_parallel_size": 2,
        "critic.optim.lr": 1e-5,
        "trainer.total_epochs": 30,
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 8,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
    },
    "sft": {
        "data.train_batch_size": 256,
        "data.max_length": 1024,
        "data.prompt_key": "question",
        "data.response_key": "answer",
        "optim.lr": 1e-5,
        "optim.weight_decay": 0.01,
        "optim.betas": [0.9, 0.95],
        "optim.lr_warmup_steps_ratio": 0.1,
        "optim.lr_scheduler": "cosine",
        "trainer.total_epochs": 4,
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 8,
        "trainer.seed": 1,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
    },
    ENGINE_SFT: {
        "data.train_batch_size": 256,
        "data.max_length": 1024,
        "optim.lr": 1e-3,
        "optim.weight_decay": 0.01,
        "trainer.total_epochs": 4,
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 8,
        "trainer.seed": 1,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
    },
}
"""Values of settings that a command leaves out, where they differ from ours or enter a product (verl of 2026-01)."""
TAKEN = (
    "data.max_prompt_length", "data.max_response_length", "data.prompt_key", "data.apply_chat_template_kwargs",
    "actor_rollout_ref.model.trust_remote_code", "actor_rollout_ref.model.enable_gradient_checkpointing",
    f"{A}.optim.lr", f"{A}.optim.weight_decay", f"{A}.optim.betas", f"{A}.optim.min_lr_ratio", f"{A}.grad_clip",
    f"{A}.optim.clip_grad", f"{A}.entropy_coeff", f"{A}.ppo_epochs", f"{R}.n", f"{R}.temperature", f"{R}.top_p",
    f"{R}.max_model_len", f"{R}.max_num_seqs", f"{R}.data_parallel_size", f"{R}.expert_parallel_size",
    f"{R}.pipeline_model_parallel_size", f"{R}.tensor_model_parallel_size", "trainer.critic_warmup",
    "trainer.val_before_train", "trainer.default_local_dir", "trainer.max_actor_ckpt_to_keep",
)  # fmt: skip
ESTIMATORS: Mapping[str, str] = {
    **{
        name: name
        for name in (
            "gae",
            "grpo",
            "grpo_passk",
            "rloo",
            "remax",
            "opo",
            "gpg",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
        )
    },
    "rloo_vectorized": "rloo",
    "grpo_vectorized": "grpo",
}
WITHOUT_GROUP: Mapping[str, str] = {
    **dict.fromkeys(("grpo", "dr_grpo", "rloo", "opo"), "reinforce"),
    "reinforce_plus_plus_baseline": "reinforce_plus_plus",
}
"""Estimator that compares the samples of a prompt -> what verl makes of it where a prompt has one."""
LOSSES: Mapping[str, str] = {"vanilla": "ppo_clip", "gspo": "gspo", "sapo": "sapo", "gpg": "gpg", "cispo": "cispo"}
AGGREGATIONS: Mapping[str, str] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_token_sum",
    "seq-mean-token-sum-norm": "sequence_sum",
}
KL: Mapping[str, str] = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "low_var_kl",
    "k3": "k3",
    "abs": "abs",
}
SAME: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "actor_rollout_ref.model.use_remove_padding",
            "critic.model.use_remove_padding",
            "use_remove_padding",
            "reward_model.model.use_remove_padding",
            "trainer.balance_batch",
            f"{R}.calculate_log_probs",
            "*.fsdp_config.param_offload",
            "*.fsdp_config.optimizer_offload",
            "*.megatron.*_offload",
            f"{R}.free_cache_engine",
            f"{R}.enable_chunked_prefill",
            "data.filter_overlong_prompts",
            "data.return_raw_chat",
            "actor_rollout_ref.hybrid_engine",
            f"{R}.multi_stage_wake_up",
            "critic.model.enable_gradient_checkpointing",
            f"{A}.megatron.use_mbridge",
        ),
        (True,),
    ),
    **dict.fromkeys(
        ("reward_model.enable", "actor_rollout_ref.model.use_shm", f"{A}.fsdp_config.forward_prefetch"), (False,)
    ),
    **dict.fromkeys(
        (
            f"{A}.ulysses_sequence_parallel_size",
            "ulysses_sequence_parallel_size",
            "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
            "critic.ulysses_sequence_parallel_size",
        ),
        (1,),
    ),
    "data.truncation": ("error",),
    "trainer.device": ("cuda",),
    "trainer.resume_mode": ("auto",),
    "*.fsdp_config.fsdp_size": (-1,),
    f"{R}.load_format": ("dummy", "auto", "safetensors"),
    "actor_rollout_ref.model.lora.type": ("lora", "canonical_lora"),
    "actor_rollout_ref.model.lora.lora_A_init_method": ("kaiming",),
    "actor_rollout_ref.model.lora.lora_B_init_method": ("zero",),
}
"""Settings that mean what is done here anyway, with these values."""
MEGATRON_MODULES: Mapping[str, Sequence[str]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
}
"""Megatron's name of a module -> names of those that it holds in transformers."""
_PASSES = "passes without a gradient have the limits of the update"
_MEMORY = "roles that share devices offload by turns; `rlsdk plan` shows the peak"
_DATA = "rows are read by the run's own reader"
_PAGES = "every step is logged into the run's folder; `rlsdk watch RUN` shows samples"
_KERNELS = "the engine chooses its kernels"
DECIDED: Mapping[str, str] = {
    **dict.fromkeys((f"{R}.log_prob_*", "actor_rollout_ref.ref.log_prob_*", "critic.forward_*"), _PASSES),
    **dict.fromkeys(("ref.log_prob_*", "rollout.log_prob_*", "reward_model.micro_batch_size*"), _PASSES),
    **dict.fromkeys(("critic.ppo_*", "critic.use_dynamic_bsz"), "the critic is trained with the policy's batches"),
    **dict.fromkeys(
        ("actor_rollout_ref.*.fsdp_config.*", f"{A}.fsdp_config.*", "actor_rollout_ref.ref.fsdp_*"), _MEMORY
    ),
    **dict.fromkeys(
        ("critic.model.fsdp_config.*", "critic.megatron.*", "reward_model.model.fsdp_*", "model.fsdp_*"), _MEMORY
    ),
    **dict.fromkeys((f"{A}.megatron.*offload", "actor_rollout_ref.ref.megatron.*", f"{R}.free_cache_engine"), _MEMORY),
    **dict.fromkeys(
        (f"{R}.multi_stage_wake_up", f"{R}.layered_summon", f"{R}.load_format", "actor_rollout_ref.hybrid_*"),
        "weights come from training after every step, in stages",
    ),
    **dict.fromkeys(
        (f"{A}.megatron.param_offload", f"{A}.megatron.grad_offload", f"{A}.megatron.optimizer_offload"), _MEMORY
    ),
    **dict.fromkeys(("data.truncation", "data.filter_overlong_*"), "longer prompts are dropped, and counted"),
    **dict.fromkeys(("data.return_*", "data.dataloader_*", "data.reward_fn_key", "data.trust_remote_code"), _DATA),
    **dict.fromkeys(("data.use_shm", "data.val_batch_size", "data.gen_batch_size", "data.validation_shuffle"), _DATA),
    **dict.fromkeys(("data.*_dict_keys", "data.multiturn.enable", "data.balance_dp_token"), _DATA),
    **dict.fromkeys(
        ("actor_rollout_ref.model.use_remove_padding", "critic.model.use_remove_padding", "use_remove_padding"),
        "rows are packed without padding",
    ),
    **dict.fromkeys(
        ("trainer.log_*", "trainer.project_name", "trainer.rollout_data_dir", "trainer.validation_*"), _PAGES
    ),
    **dict.fromkeys(
        ("global_profiler.*", "*.profiler.*", f"{A}.profiler.*", "critic.profiler.*", f"{R}.trace.*"),
        "no profiles; `rlsdk report RUN` shows the time of each phase",
    ),
    **dict.fromkeys(("actor_rollout_ref.ref.profiler.*", f"{R}.prometheus.*", f"{R}.disable_log_stats"), _PAGES),
    **dict.fromkeys(
        (
            "actor_rollout_ref.model.use_fused_kernels",
            "actor_rollout_ref.model.fused_*",
            f"{A}.use_torch_compile",
            "actor_rollout_ref.ref.use_torch_compile",
            "actor_rollout_ref.model.use_liger",
            "model.use_liger",
            f"{A}.entropy_*",
            "actor_rollout_ref.ref.entropy_*",
            f"{R}.enforce_eager",
            f"{R}.enable_chunked_prefill",
            f"{R}.cudagraph_*",
            f"{R}.dtype",
            f"{R}.mode",
            "actor_rollout_ref.model.use_shm",
        ),
        _KERNELS,
    ),
    **dict.fromkeys(
        (
            f"{A}.megatron.override_transformer_config.*",
            f"{A}.megatron.use_*",
            f"{A}.megatron.vanilla_mbridge",
            f"{A}.megatron.dist_*",
            f"{A}.megatron.expert_tensor_parallel_size",
        ),
        _KERNELS,
    ),
    **dict.fromkeys(
        (f"{A}.optim.override_optimizer_config.*",), "the train backend chooses where the optimizer's state is"
    ),
    **dict.fromkeys(
        (
            f"{A}.checkpoint.*",
            "trainer.default_hdfs_dir",
            "trainer.del_local_*",
            "trainer.max_critic_*",
            "trainer.checkpoint.*",
        ),
        "checkpoints are whole, of all roles",
    ),
    **dict.fromkeys(("trainer.balance_batch",), "rows are balanced over devices by their lengths"),
    **dict.fromkeys(
        (
            "trainer.device",
            "trainer.use_legacy_worker_impl",
            "actor_rollout_ref.nccl_timeout",
            "ray_kwargs.*",
            "trainer.ray_*",
        ),
        "placement and deadlines say it here",
    ),
    **dict.fromkeys((f"{R}.calculate_log_probs",), "the sampler's log-probs are always kept and compared"),
    **dict.fromkeys(
        ("actor_rollout_ref.ref.strategy", "critic.strategy", f"{A}.fsdp_config.strategy"), "as the policy's engine"
    ),
    **dict.fromkeys(("actor_rollout_ref.ref.ulysses_*", "critic.ulysses_*"), "as the policy's engine"),
    **dict.fromkeys(
        (
            "reward_model.enable",
            "reward_model.use_reward_loop",
            "reward_model.num_workers",
            "reward_model.rollout.*",
            "reward_model.model.use_*",
            "reward_model.strategy",
            "reward_model.enable_resource_pool",
            "reward_model.launch_*",
        ),
        "a reward model is a role of the run: placement says where",
    ),
    **dict.fromkeys(
        ("critic.model.enable_gradient_checkpointing", "critic.model.trust_remote_code"), "as the policy's"
    ),
    "trainer.val_only": "`rlsdk eval` evaluates a model or a run",
    **dict.fromkeys(
        ("trainer.remove_previous_ckpt_in_save", "trainer.remove_previous_ckpt"),
        "the newest checkpoints stay: trainer.keep_checkpoints",
    ),
    "actor_rollout_ref.model.lora.merge": "adapters are sent alone where the rollout engine serves them, else merged",
    **dict.fromkeys(
        ("actor_rollout_ref.model.lora.lora_A_init_method", "actor_rollout_ref.model.lora.lora_B_init_method"),
        "A begins as Kaiming's, B with zeros, as in PEFT",
    ),
    "actor_rollout_ref.model.lora.dropout_position": NO_DROPOUT,
    "trainer.resume_mode": "a run of the same name is resumed: trainer.run_name, trainer.resume",
    "reward_model.reward_manager": "rewards are named one by one: rewards",
    "reward_model.reward_kwargs.max_resp_len": "rollout.max_response_tokens",
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": _PAGES,
    f"{R}.prompt_length": "data.max_prompt_tokens",
    f"{R}.max_num_batched_tokens": "an engine's own option: rollout.vllm.max_batched_tokens",
    f"{A}.shuffle": "mini-batches are drawn anew in each epoch of a step",
    "--config-name": "the settings above are those of the command",
    "--config-path": "the settings above are those of the command",
}
_TURNS = "turns and tools are a rollouter of yours: rollout.rollouter file.py:fn, see docs/rollouters.md"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "actor_rollout_ref.model.lora*",
            "actor_rollout_ref.model.target_modules",
            "model.lora*",
            "model.target_modules",
            "critic.model.lora*",
            "actor_rollout_ref.model.exclude_modules",
        ),
        NO_LORA,
    ),
    **dict.fromkeys((f"{R}.multi_turn.*", f"{R}.agent.*", "data.tool_config_path", f"{R}.skip_*"), _TURNS),
    **dict.fromkeys((f"{R}.engine_kwargs.*",), "pass it on unchanged: rollout.engine_kwargs"),
    **dict.fromkeys(
        ("data.image_key", "data.video_key", f"{A}.freeze_vision_tower", "data.image_patch_size"), "no images yet"
    ),
    **dict.fromkeys(
        ("data.custom_cls.*", "data.sampler.*", "data.datagen.*"),
        "a data source of yours is a plugin: see docs/plugins.md; a file of rows is data.train",
    ),
    **dict.fromkeys(
        (f"{R}.enable_rollout_routing_replay", f"{A}.router_replay.*"), "experts are routed anew in training"
    ),
    **dict.fromkeys(
        ("algorithm.pf_ppo.*", "algorithm.use_pf_ppo"), "no sampling by reward: algorithm.name takes one of yours"
    ),
    **dict.fromkeys(("reward_model.sandbox_fusion.*",), "the reward `code` runs programs in a sandbox of its own"),
    **dict.fromkeys(("actor_rollout_ref.model.mtp.*",), "no multi-token prediction"),
    **dict.fromkeys(
        (f"{A}.policy_loss.*", f"{A}.calculate_sum_pi_squared"), "algorithm.loss file.py:fn takes a loss of yours"
    ),
    **dict.fromkeys(
        (f"{A}.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size"),
        "verl's Megatron engine does not read it; train.megatron.context_parallel splits rows",
    ),
    f"{R}.over_sample_rate": "algorithm.dynamic_sampling starts groups in place of those without signal",
    "actor_rollout_ref.model.override_config.*": "change the model's config.json",
    "trainer.resume_from_path": "a run resumes its own checkpoints: trainer.resume RUN",
    "data.multiturn.*": "conversations are learned by their assistant turns: data.prompt_field names the messages",
    "algorithm.rollout_correction.*": "see algorithm.correction: mode, level, upper, reject",
}
