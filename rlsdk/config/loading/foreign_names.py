"""Names of other trainers in one table: what rlsdk calls the same thing, or why it has nothing of the kind.

`rlsdk migrate` reads it for scripts; the command line, YAML and Python read it when such a name is typed;
docs/coming_from.md is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping

Choices = tuple[tuple[str, ...], ...]
_STEPS: Choices = (("trainer.steps",), ("sft.steps",), ("preferences.steps",))
_EPOCHS: Choices = (("trainer.epochs",), ("sft.epochs",), ("preferences.epochs",))
_BATCH: Choices = (("trainer.prompts_per_step",), ("sft.rows_per_step",), ("preferences.pairs_per_step",))
_RATE: Choices = (("train.optim.lr", "critic.optim.lr"), ("sft.lr",), ("preferences.lr",))
_WARMUP: Choices = (
    ("train.optim.warmup_steps", "critic.optim.warmup_steps"), ("sft.warmup_steps",), ("preferences.warmup_steps",),
)  # fmt: skip
_SAVES: Choices = (("trainer.save_every_steps",), ("sft.save_every_steps",), ("preferences.save_every_steps",))
_SAMPLES: Choices = (("trainer.samples_per_prompt",), ("eval.samples_per_prompt",))
_LENGTH: Choices = (("rollout.max_response_tokens",),)
_WARMUP_SHARE: Choices = (
    ("train.optim.warmup_ratio", "critic.optim.warmup_ratio"), ("sft.warmup_ratio",), ("preferences.warmup_ratio",),
)  # fmt: skip
_DECAY: Choices = (("train.optim.schedule", "critic.optim.schedule"), ("sft.schedule",), ("preferences.schedule",))
RATES = tuple(path for choice in _RATE for path in choice)
"""All learning rates."""


def _same(path: str, *names: str) -> Mapping[str, Choices]:
    """Names that mean one field of every command."""
    return dict.fromkeys(names, ((path,),))


_OF_TRL: Mapping[str, Choices] = {
    **dict.fromkeys(("learning_rate", "lr"), _RATE),
    **dict.fromkeys(("max_steps", "steps"), _STEPS),
    **dict.fromkeys(("num_train_epochs", "epochs"), _EPOCHS),
    **dict.fromkeys(("batch_size", "train_batch_size"), _BATCH),
    **_same("train.micro_batch_rows", "per_device_train_batch_size"),
    "warmup_steps": _WARMUP,
    **dict.fromkeys(("warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps_ratio"), _WARMUP_SHARE),
    **dict.fromkeys(("save_steps", "save_every_steps"), _SAVES),
    **dict.fromkeys(("lr_scheduler_type", "schedule"), _DECAY),
    **dict.fromkeys(("num_generations", "group_size", "samples_per_prompt"), _SAMPLES),
    **dict.fromkeys(("max_completion_length", "max_new_tokens"), _LENGTH),
    "temperature": (("rollout.temperature",), ("eval.temperature",)),
    **_same("data.max_prompt_tokens", "max_prompt_length"),
    **_same("trainer.run_dir", "output_dir"),
    "beta": (("algorithm.kl_coef",), ("preferences.beta",)),
    "answer_template": (("algorithm.ptx.answer_template",), ("sft.answer_template",), ("preferences.answer_template",)),
    "long_answers": (("sft.long_answers",), ("preferences.long_answers",)),
    **_same("model.path", "model_name_or_path", "model_name", "model_path", "pretrained_model_name_or_path"),
    **_same("model.revision", "model_revision"),
    **_same("model.lora.rank", "lora_r", "lora_rank", "use_peft", "peft_config", "use_lora", "lora"),
    **_same("model.lora.rank", "actor_rollout_ref.model.lora_rank", "ds.lora.rank", "model.lora_rank"),
    **_same("model.lora.alpha", "lora_alpha", "actor_rollout_ref.model.lora_alpha", "ds.lora.alpha"),
    **_same("model.lora.targets", "lora_target_modules", "target_modules", "ds.lora.target_modules"),
    **_same("model.lora.targets", "actor_rollout_ref.model.target_modules"),
    **_same("model.lora.scaling", "use_rslora"),
    **_same("model.lora.dropout", "lora_dropout", "ds.lora.dropout"),
    **_same("data.train", "dataset", "dataset_name", "train_dataset", "train_files", "prompt_data"),
    **_same("data.train", "data.path", "data.file", "data.files", "data.name"),
    **_same("data.eval", "eval_dataset", "val_files", "eval_files"),
    **_same("rewards", "reward_funcs", "reward_func", "custom_reward_function.path"),
    **_same("train.optim.weight_decay", "weight_decay"),
    **_same("train.optim.max_grad_norm", "max_grad_norm", "grad_clip", "clip_grad"),
    **_same("train.optim.eps", "adam_epsilon"),
    **_same("train.optim.betas", "adam_beta1", "adam_beta2"),
    **_same("train.activation_checkpointing", "gradient_checkpointing", "enable_gradient_checkpointing"),
    **_same("eval.every_steps", "eval_steps", "test_freq", "eval_strategy"),
    **_same("eval.at_start", "eval_on_start", "val_before_train"),
    **_same("trainer.keep_checkpoints", "save_total_limit"),
    **_same("trainer.resume", "resume_from_checkpoint", "resume_mode", "load_checkpoint"),
    **_same("tracking.trackers", "report_to", "wandb", "use_wandb", "logger", "tensorboard"),
    **_same("trainer.epochs_per_step", "num_iterations", "ppo_epochs"),
    **_same("algorithm.loss_options", "epsilon", "epsilon_high", "cliprange", "clip_range", "clip_ratio", "eps_clip"),
    **_same("algorithm.loss_options", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    **_same("algorithm.loss", "policy_loss_type", "loss_mode", "importance_sampling_level"),
    **_same("algorithm.loss_aggregation", "loss_agg_mode"),
    "loss_type": (("algorithm.loss", "algorithm.loss_aggregation"), ("preferences.loss",)),
    **_same("algorithm.advantage_options", "scale_rewards"),
    **_same("algorithm.entropy_share", "top_entropy_quantile"),
    **_same("algorithm.lengths.overlong_filter", "mask_truncated_completions"),
    "top_p": (("rollout.top_p",), ("eval.top_p",)),
    "top_k": (("rollout.top_k",), ("eval.top_k",)),
    **_same("rollout.min_p", "min_p"),
    **_same("rollout.backend", "use_vllm", "use_sglang", "vllm_mode"),
    **_same("rollout.tp_size", "vllm_tensor_parallel_size", "tensor_parallel_size", "tensor_model_parallel_size"),
    **_same("rollout.max_model_tokens", "vllm_max_model_length", "max_model_len", "max_model_length"),
    **_same("rollout.max_running_samples", "max_num_seqs"),
    **_same("data.chat_template_kwargs", "chat_template_kwargs"),
    **_same("preferences.center_coef", "center_rewards_coefficient"),
    **_same("preferences.label_smoothing", "label_smoothing"),
    **_same("preferences.sft_coef", "rpo_alpha", "cpo_alpha"),
    **_same("preferences.target_margin", "simpo_gamma"),
    **_same("preferences.desirable_weight", "desirable_weight"),
    **_same("preferences.undesirable_weight", "undesirable_weight"),
    **_same("rewards", "reward_weights"),
    **_same("algorithm.distillation.top_k", "loss_top_k", "distillation_topk"),
    **_same("teachers", "teacher_model_name_or_path", "teacher_model", "teacher_model_path", "teacher"),
}
_OF_VERL: Mapping[str, Choices] = {
    **_same("algorithm.advantage", "algorithm.adv_estimator", "adv_estimator", "advantage_estimator"),
    **_same("rollout.max_response_tokens", "data.max_response_length", "max_response_length", "response_length"),
    **_same("data.max_prompt_tokens", "data.max_prompt_length"),
    **_same("trainer.prompts_per_step", "data.train_batch_size"),
    **_same("data.train", "data.train_files"),
    **_same("data.eval", "data.val_files"),
    **_same("data.prompt_field", "data.prompt_key", "prompt_key"),
    **_same("data.num_train_rows", "data.train_max_samples"),
    **_same("data.num_eval_rows", "data.val_max_samples"),
    **_same("data.chat_template_kwargs", "data.apply_chat_template_kwargs"),
    **_same("model.path", "actor_rollout_ref.model.path", "actor.model_name_or_path", "model.model_name_or_path"),
    **_same("model.trust_remote_code", "actor_rollout_ref.model.trust_remote_code"),
    **_same("train.activation_checkpointing", "actor_rollout_ref.model.enable_gradient_checkpointing"),
    **_same("train.optim.lr", "actor_rollout_ref.actor.optim.lr", "actor_learning_rate", "actor.adam.lr"),
    **_same("train.optim.weight_decay", "actor_rollout_ref.actor.optim.weight_decay"),
    **_same("train.optim.betas", "actor_rollout_ref.actor.optim.betas"),
    **_same("train.optim.schedule", "actor_rollout_ref.actor.optim.lr_scheduler_type"),
    **_same("train.optim.min_lr_ratio", "actor_rollout_ref.actor.optim.min_lr_ratio"),
    **_same("train.optim.warmup_steps", "actor_rollout_ref.actor.optim.lr_warmup_steps"),
    **_same("train.optim.warmup_ratio", "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", "actor.lr_warmup_ratio"),
    **_same(
        "train.optim.max_grad_norm", "actor_rollout_ref.actor.grad_clip", "actor_rollout_ref.actor.optim.clip_grad"
    ),
    **_same("train.micro_batch_rows", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
    **_same("train.micro_batch_tokens", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
    **_same("trainer.updates_per_step", "actor_rollout_ref.actor.ppo_mini_batch_size", "ppo_mini_batch_size"),
    **_same("trainer.epochs_per_step", "actor_rollout_ref.actor.ppo_epochs"),
    **_same("train.backend", "actor_rollout_ref.actor.strategy", "strategy"),
    **_same("algorithm.entropy_coef", "actor_rollout_ref.actor.entropy_coeff", "entropy_coeff", "entropy_loss_coef"),
    **_same("algorithm.kl_coef", "actor_rollout_ref.actor.kl_loss_coef", "algorithm.kl_ctrl.kl_coef", "kl_loss_coef"),
    **_same("algorithm.kl_coef", "use_kl_loss", "actor_rollout_ref.actor.use_kl_loss", "algo.kl.use_loss"),
    **_same("algorithm.kl_coef", "init_kl_coef", "kl_coef", "algo.kl.init_coef"),
    **_same("algorithm.kl_estimator", "actor_rollout_ref.actor.kl_loss_type", "kl_loss_type", "algo.kl.estimator"),
    **_same("algorithm.kl_in_reward", "algorithm.use_kl_in_reward", "use_kl_in_reward"),
    **_same("algorithm.kl_reward_estimator", "algorithm.kl_penalty", "kl_penalty"),
    **_same("algorithm.loss", "actor_rollout_ref.actor.policy_loss.loss_mode", "actor.policy_loss_type"),
    **_same("algorithm.loss_aggregation", "actor_rollout_ref.actor.loss_agg_mode"),
    **_same(
        "algorithm.loss_options", *(f"actor_rollout_ref.actor.clip_ratio{end}" for end in ("", "_low", "_high", "_c"))
    ),
    **_same("algorithm.advantage_options", "algorithm.gamma", "algorithm.lam", "gamma", "lambd"),
    **_same("critic.path", "critic.model.path", "critic_pretrain", "critic.model_name_or_path"),
    **_same("critic.optim.lr", "critic_learning_rate", "critic.adam.lr"),
    **_same("critic.warmup_steps", "trainer.critic_warmup", "critic.freezing_steps", "freezing_actor_steps"),
    **_same("reward_models", "reward_model.model.path", "reward_pretrain", "reward.model_name_or_path"),
    **_same("reward_models", "reward_model", "reward_model.path"),
    **_same("rollout.backend", "actor_rollout_ref.rollout.name"),
    **_same("trainer.samples_per_prompt", "actor_rollout_ref.rollout.n", "n", "n_samples_per_prompt"),
    **_same("trainer.samples_per_prompt", "rollout.n_samples_per_prompt", "rollout.n"),
    **_same("rollout.temperature", "actor_rollout_ref.rollout.temperature"),
    **_same("rollout.top_p", "actor_rollout_ref.rollout.top_p"),
    **_same("rollout.top_k", "actor_rollout_ref.rollout.top_k"),
    **_same("eval.top_p", "actor_rollout_ref.rollout.val_kwargs.top_p", "val_kwargs.top_p"),
    **_same("eval.top_k", "actor_rollout_ref.rollout.val_kwargs.top_k", "val_kwargs.top_k"),
    **_same("rollout.tp_size", "actor_rollout_ref.rollout.tensor_model_parallel_size", "vllm.tensor_parallel_size"),
    **_same("rollout.dp_size", "actor_rollout_ref.rollout.data_parallel_size"),
    **_same("rollout.pp_size", "actor_rollout_ref.rollout.pipeline_model_parallel_size"),
    **_same("rollout.ep_size", "actor_rollout_ref.rollout.expert_parallel_size"),
    **_same("rollout.max_model_tokens", "actor_rollout_ref.rollout.max_model_len"),
    **_same("rollout.max_running_samples", "actor_rollout_ref.rollout.max_num_seqs"),
    **_same("placement.devices_per_node", "n_gpus_per_node", "num_gpus", "trainer.n_gpus_per_node", "nproc_per_node"),
    **_same("placement.devices_per_node", "num_processes", "actor_num_gpus_per_node", "actor.num_gpus_per_node"),
    **_same("placement.num_nodes", "nnodes", "trainer.nnodes", "actor_num_nodes", "actor.num_nodes"),
    **_same("placement.preset", "colocate_all_models", "colocate_all", "train.colocate_all"),
    **_same("trainer.epochs", "trainer.total_epochs", "total_epochs", "num_episodes", "train.num_episodes"),
    **_same("trainer.steps", "trainer.total_training_steps", "total_training_steps"),
    **_same("trainer.save_every_steps", "trainer.save_freq", "save_freq"),
    **_same("eval.every_steps", "trainer.test_freq", "eval.steps"),
    **_same("eval.at_start", "trainer.val_before_train"),
    **_same("trainer.run_name", "trainer.experiment_name", "experiment_name"),
    **_same("trainer.run_dir", "trainer.default_local_dir", "default_local_dir", "save_path", "ckpt_path"),
    **_same("trainer.resume", "trainer.resume_mode", "trainer.resume_from_path", "ckpt.load_enable"),
    **_same("trainer.keep_checkpoints", "trainer.max_actor_ckpt_to_keep", "max_ckpt_num", "ckpt.max_num"),
    **_same("tracking.trackers", "trainer.logger"),
    **_same("teachers", "distillation.teacher_model.model_path", "distillation.enabled", "teacher.model_name"),
    **_same("algorithm.distillation.objective", "distillation.distillation_loss.loss_mode", "distillation_loss"),
    **_same("algorithm.distillation.coef", "distillation.distillation_loss.distillation_loss_coef", "teacher_tau"),
    **_same("algorithm.distillation.reward_coef", "adv_tau"),
}
_OF_OPENRLHF: Mapping[str, Choices] = {
    **_same("model.path", "pretrain"),
    **_same("data.train", "prompt_dataset", "data.prompt_dataset", "data.dataset"),
    **_same("data.prompt_field", "input_key", "data.input_key"),
    **_same("data.answer_field", "label_key", "output_key", "data.label_key", "data.output_key", "answer_key"),
    **_same("data.prompt_template", "input_template", "data.input_template"),
    **_same("data.chat_template", "apply_chat_template", "data.apply_chat_template"),
    **_same("data.max_prompt_tokens", "prompt_max_len", "data.prompt_max_len"),
    **_same("data.num_train_rows", "max_samples", "data.max_samples"),
    **_same("rollout.max_response_tokens", "generate_max_len", "rollout.max_new_tokens"),
    **_same("trainer.prompts_per_step", "rollout_batch_size", "rollout.batch_size"),
    **_same("trainer.epochs_per_step", "max_epochs"),
    **_same("train.micro_batch_rows", "micro_train_batch_size", "train.micro_batch_size"),
    **_same("train.micro_batch_tokens", "train_max_tokens_per_gpu", "train.max_tokens_per_gpu"),
    **_same("algorithm.advantage", "algo.advantage.estimator"),
    **_same("algorithm.kl_target", "kl_target", "algo.kl.target"),
    **_same("algorithm.kl_horizon", "kl_horizon", "algo.kl.horizon"),
    **_same("algorithm.value_clip", "critic.value_clip"),
    **_same("algorithm.entropy_coef", "actor.entropy_coef"),
    **_same(
        "algorithm.loss_options", "actor.eps_clip", "actor.eps_clip_low_high", "actor.dual_clip", "eps_clip_low_high"
    ),
    **_same("algorithm.advantage_options", "algo.advantage.lambd", "algo.advantage.gamma"),
    **_same("algorithm.dynamic_sampling.enabled", "dynamic_filtering", "algo.dynamic_filtering_enable"),
    **_same("rewards", "remote_rm_url", "reward.remote_url"),
    **_same("train.ema_decay", "ema_beta", "train.ema_beta"),
    **_same("eval.temperature", "eval_temperature"),
    **_same("trainer.seed", "train.seed", "data_seed"),
    **_same(
        "train.activation_checkpointing", "actor.gradient_checkpointing_enable", "model.gradient_checkpointing_enable"
    ),
    "lr_scheduler": _DECAY,
    "adam.lr": _RATE,
    **_same("train.optim.max_grad_norm", "max_norm", "actor.max_norm"),
    **_same("train.optim.weight_decay", "l2", "adam.weight_decay", "actor.adam.weight_decay"),
    **_same("train.optim.betas", "adam_betas", "adam.betas", "actor.adam.betas"),
    **_same("train.optim.min_lr_ratio", "min_lr_ratio", "actor.min_lr_ratio"),
    **_same("preferences.beta", "model.beta"),
    **_same("preferences.label_smoothing", "model.label_smoothing"),
    **_same("preferences.sft_coef", "nll_loss_coef", "model.nll_loss_coef"),
    **_same("preferences.loss", "ipo", "model.ipo_enable"),
    **_same("preferences.chosen_field", "chosen_key", "data.chosen_key"),
    **_same("preferences.rejected_field", "rejected_key", "data.rejected_key"),
}
FOREIGN_NAMES: Mapping[str, Choices] = {**_OF_TRL, **_OF_VERL, **_OF_OPENRLHF}
"""Name, or full path -> the fields that have this meaning, those of one command together, in the order of preference;
a command shows the first that it reads. The paths of one entry mean the same in different commands."""

_FOUR_BIT = "weights are not quantized: with an adapter (`model.lora.rank`) they are frozen in `model.dtype`"
_WHOLE = "batches are whole: `trainer.prompts_per_step` (sft: `sft.rows_per_step`) is split over the devices by itself"
_ENGINE = "the train engine does this itself, with options of its own: `rlsdk plugins list`, `rlsdk plugins info NAME`"
_LOGS = "every step is logged, into the run's folder; see `tracking` in docs/metrics.md"
_PLAN = "`rlsdk plan` with the same arguments shows a run of `rlsdk train` without starting it"
NOT_FIELDS: Mapping[str, str] = {
    "gradient_accumulation_steps": _WHOLE,
    "steps_per_generation": _WHOLE + "; `trainer.updates_per_step` is the number of optimizer steps for it",
    "generation_batch_size": _WHOLE,
    "micro_rollout_batch_size": "`rollout.max_running_samples` is what one replica decodes at once",
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), _FOUR_BIT),
    **dict.fromkeys(("zero_stage", "deepspeed", "fsdp_config", "adam_offload", "accelerate_config"), _ENGINE),
    **dict.fromkeys(("ds.zero_stage", "ds.adam_offload"), _ENGINE),
    **dict.fromkeys(("logging_steps", "log_completions", "logging_first_step", "logging_strategy"), _LOGS),
    **dict.fromkeys(
        ("bf16", "fp16", "torch_dtype", "param_dtype"), "`model.dtype`: bfloat16; on a GPU it is the default"
    ),
    **dict.fromkeys(("dry_run", "dry-run"), _PLAN),
    **dict.fromkeys(("push_to_hub", "hub_model_id"), "afterwards: `rlsdk push RUN org/name`"),
    **dict.fromkeys(
        ("packing", "packing_samples", "use_remove_padding", "padding_free"),
        "rows are packed without padding by itself",
    ),
    **dict.fromkeys(
        ("attn_implementation", "flash_attn", "attn_impl"), "the engine chooses its attention kernels; see its options"
    ),
    **dict.fromkeys(
        ("gpu_memory_utilization", "vllm_gpu_memory_utilization"),
        "an engine's own option, `rollout.vllm.gpu_memory_utilization`: `rlsdk plugins info vllm`",
    ),
    **dict.fromkeys(
        ("num_engines", "vllm_num_engines", "vllm.num_engines"),
        "replicas are the devices of the rollout divided by `rollout.tp_size`; see `rlsdk plan`",
    ),
    "max_length": "prompt and answer have a limit each: `data.max_prompt_tokens` and `rollout.max_response_tokens`",
    "max_len": "prompt and answer have a limit each: `data.max_prompt_tokens` and `rollout.max_response_tokens`",
    "repetition_penalty": "tokens are sampled from the policy itself, so that its log-probs are those of training",
    "sync_ref_model": "the reference stays the model at the start; `ref.path` names another",
    "seed_everything": "`trainer.seed`",
    "lmbda": "every sample is the policy's own; for given answers of a teacher: `rlsdk sft`",
    "teacher_model_server_url": "`teachers: [{url: URL, model: NAME, tokenizer: MODEL}]`; see docs/distillation.md",
    "use_teacher_server": "`teachers: [{url: URL, model: NAME, tokenizer: MODEL}]`; see docs/distillation.md",
    "seq_kd": "for given answers of a teacher: `rlsdk sft`",
    "teacher_model_init_kwargs": "each of `teachers` has a `dtype`, `backend` and `options`; see docs/distillation.md",
    "actor_rollout_ref": "`rlsdk migrate run.sh` turns a command of verl into a run file",
    "actor": "the trained model is `model`, its engine `train`, its sampling `rollout`",
}
"""Name -> what to do where there is no field of this meaning."""
_ARGUMENTS = "with the same arguments"
VERBS: Mapping[str, str] = {
    "plan": _PLAN,
    **{name: f"`rlsdk {name}` {_ARGUMENTS}" for name in ("chaos", "distill", "dpo", "kto")},
    **{name.replace("-", "_"): f"`rlsdk {name}` {_ARGUMENTS}" for name in ("process-reward", "reward-model")},
    **{name: f"afterwards: `rlsdk {name} RUN`" for name in ("generate", "inspect", "note", "replay", "report")},
    **dict.fromkeys(("export", "upload", "push"), "afterwards: `rlsdk push RUN org/name`"),
    "compare": "afterwards: `rlsdk compare RUN OTHER_RUN`",
    **dict.fromkeys(("watch", "ui", "dashboard"), "while the run trains: `rlsdk watch RUN`"),
    "init": "before: `rlsdk init FILE` writes a run file, which `--config FILE` reads",
    "migrate": "before: `rlsdk migrate SCRIPT` writes a run file, which `--config FILE` reads",
    "doctor": "before: `rlsdk doctor`",
    "make_model": "before: `rlsdk make-model FOLDER`, then `--model FOLDER`",
    "plugins": "`rlsdk plugins list` shows what is installed",
    "algorithms": "`rlsdk algorithms list` shows what `--algorithm NAME` takes",
    "environments": "`rlsdk environments check FILE.py:Class`; a run takes one by `--rollout.environment`",
    "evaluate": "`eval.every_steps` says how often; afterwards: `rlsdk eval RUN`",
    "version": "`rlsdk --version`",
    **dict.fromkeys(("verbose", "debug"), "`--traceback` prints tracebacks; logs are in the run's folder"),
}
"""Commands, ours and others', that are typed as an option of a run -> what to type instead."""
PAGE = "docs/coming_from.md"
COMMANDS: Mapping[str, str] = {
    **{name: f"`rlsdk train --algorithm {name}`" for name in ("grpo", "ppo", "rloo", "dapo", "gspo", "remax")},
    **dict.fromkeys(("rl", "run", "start", "fit"), "`rlsdk train`"),
    **dict.fromkeys(("finetune", "fine-tune", "instruct"), "`rlsdk sft`"),
    **dict.fromkeys(("rm", "reward_model", "reward-modeling"), "`rlsdk reward-model`"),
    "gkd": "`rlsdk train --algorithm on_policy_distillation --teachers MODEL`",
    "resume": "`rlsdk train --resume RUN`",
    "export": "every run's last and best checkpoints hold the model in Hugging Face format; `rlsdk push RUN org/name`",
    "upload": "`rlsdk push RUN org/name`",
    **dict.fromkeys(("evaluate", "test", "benchmark"), "`rlsdk eval PATH`"),
    **dict.fromkeys(("chat", "inference", "sample"), "`rlsdk generate PATH --prompt '...'`"),
    **dict.fromkeys(("vllm-serve", "serve"), "no server is needed: a run starts its engines itself"),
    "version": "`rlsdk --version`",
    "env": "`rlsdk doctor`",
    **dict.fromkeys(("prm", "train-prm"), "`rlsdk process-reward`"),
    **dict.fromkeys(("gkd", "kd"), "`rlsdk distill` on given answers, `rlsdk train --teachers MODEL` on own samples"),
    **dict.fromkeys(("orpo", "simpo", "cpo", "ipo"), "`rlsdk dpo --preferences.loss NAME`"),
}
"""Command that people type -> ours."""
CLASSES: Mapping[str, str] = {
    **{f"{name}{end}": f"`rlsdk.train(model, data, reward, algorithm='{name.lower()}')`"
       for name in ("GRPO", "RLOO", "PPO") for end in ("Trainer", "Config")},
    **{f"SFT{end}": "`rlsdk.sft(model, data)`" for end in ("Trainer", "Config")},
    **{f"DPO{end}": "`rlsdk.dpo(model, data)`" for end in ("Trainer", "Config")},
    **{f"KTO{end}": "`rlsdk.kto(model, data)`" for end in ("Trainer", "Config")},
    **{f"{name}{end}": f"`rlsdk.dpo(model, data, preferences={{'loss': '{name.lower()}'}})`"
       for name in ("ORPO", "CPO") for end in ("Trainer", "Config")},
    **{f"Reward{end}": "`rlsdk.reward_model(model, data)`" for end in ("Trainer", "Config")},
    **{f"PRM{end}": "`rlsdk.process_reward(model, data)`" for end in ("Trainer", "Config")},
    **{f"GKD{end}": "`rlsdk.train(model, data, teachers=[...], algorithm='on_policy_distillation')`; on given answers "
                    "(lmbda 0) `rlsdk.distill(model, teacher, data)`" for end in ("Trainer", "Config")},
    "Trainer": "`rlsdk.train(model, data, reward)`",
}  # fmt: skip
"""Class of TRL -> our function."""


def answer(name: str) -> str:
    """What to do instead of a setting that has no counterpart; empty if it has one, or is not known."""
    if (verb := name.replace("-", "_")) in VERBS:
        return VERBS[verb]
    last, first = name.rpartition(".")[2], name.partition(".")[0]
    for known in (name, last):
        if known in FOREIGN_NAMES:
            return ""
        if known.replace("-", "_") in NOT_FIELDS:
            return NOT_FIELDS[known.replace("-", "_")]
    return NOT_FIELDS.get(first, "")
