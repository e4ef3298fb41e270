"""The built-in backends and components, registered through the same hooks as those of plugins. Imports no engine."""

from __future__ import annotations

from rlsdk.interfaces import (
    BackendKind,
    BackendSpec,
    Capability,
    RegisterBackend,
    RegisterComponent,
    hookimpl,
)


@hookimpl
def rlsdk_register_backends(register: RegisterBackend) -> None:
    register(
        BackendSpec(
            name="torch",
            kind=BackendKind.TRAIN,
            engine="rlsdk.reference.torch_engine:TorchTrainEngine",
            forecast="rlsdk.reference.forecast:forecast_training",
            description="Plain torch in one process: the default, and the reference in tests of other engines.",
            capabilities=frozenset(
                {
                    Capability.VALUE_HEAD,
                    Capability.SCORE_HEAD,
                    Capability.ENTROPY,
                    Capability.DISTILLATION,
                    Capability.OFFLOAD,
                    Capability.EXPORT,
                    Capability.PACKING,
                    Capability.LORA,
                    Capability.ADAPTER_SYNC,
                }
            ),
            dtypes=frozenset({"float32", "bfloat16"}),
            max_ranks=1,
        )
    )
    register(
        BackendSpec(
            name="transformers",
            kind=BackendKind.ROLLOUT,
            engine="rlsdk.reference.transformers_rollout:TransformersRolloutEngine",
            options="rlsdk.reference.options:TransformersOptions",
            forecast="rlsdk.reference.forecast:forecast_rollout",
            description="Batched, cached decoding of any transformers model in one process.",
            capabilities=frozenset(
                {
                    Capability.SEED,
                    Capability.MIN_P,
                    Capability.STOP_STRINGS,
                    Capability.PROMPT_LOG_PROBS,
                    Capability.ABORT,
                    Capability.SLEEP,
                    Capability.PARTIAL_ROLLOUT,
                    Capability.STALE_CACHE,
                    Capability.ADAPTER_SYNC,
                    Capability.ADAPTER_VERSIONS,
                }
            ),
            max_ranks=1,
        )
    )


@hookimpl
def rlsdk_register_algorithms(register: RegisterComponent) -> None:
    register(
        "policy_gradient",
        "rlsdk.trainer.learner.policy_gradient:PolicyGradient",
        "Advantages, losses, KL, correction and critic, as configured in `algorithm`.",
    )


@hookimpl
def rlsdk_register_advantages(register: RegisterComponent) -> None:
    at = "rlsdk.algorithms.advantages"
    register("grpo", f"{at}:grpo", "Reward minus the mean of the prompt's samples, divided by their deviation.")
    register("dr_grpo", f"{at}:dr_grpo", "Reward minus the mean of the prompt's samples.")
    register("grpo_passk", f"{at}:grpo_passk", "For a prompt's best sample: reward minus the second best.")
    register("rloo", f"{at}:rloo", "Reward minus the mean of the prompt's other samples.")
    register("opo", f"{at}:opo", "Reward minus the length-weighted mean of the prompt's samples.")
    register("gpg", f"{at}:gpg", "Reward minus the prompt's mean, scaled up to make up for prompts without signal.")
    register("reinforce", f"{at}:reinforce", "The (discounted) return of each token.")
    register("reinforce_plus_plus", f"{at}:reinforce_plus_plus", "Returns normalised over the step's tokens.")
    register(
        "reinforce_plus_plus_baseline",
        f"{at}:reinforce_plus_plus_baseline",
        "Reward minus the prompt's mean, normalised over the step's tokens.",
    )
    register("remax", f"{at}:remax", "Return minus the score of a greedy response; needs `baseline_scores`.")
    register("gae", f"{at}:gae", "Generalized advantage estimation; needs a critic's `values`.")


@hookimpl
def rlsdk_register_losses(register: RegisterComponent) -> None:
    at = "rlsdk.algorithms.losses"
    register("ppo_clip", f"{at}:ppo_clip", "PPO's clipped surrogate; options for clip-higher and dual clip.")
    register("gspo", f"{at}:gspo", "The clipped surrogate with one ratio per response.")
    register("cispo", f"{at}:cispo", "Policy gradient weighted by a clipped ratio: no token loses its gradient.")
    register("sapo", f"{at}:sapo", "A soft gate on the ratio instead of a clip.")
    register("gpg", f"{at}:policy_gradient", "The plain policy gradient, as GPG uses it.")
    register("reinforce", f"{at}:policy_gradient", "The plain policy gradient.")


@hookimpl
def rlsdk_register_aggregations(register: RegisterComponent) -> None:
    at = "rlsdk.algorithms.weights"
    register("token_mean", f"{at}:token_mean", "Every token has the same weight (DAPO).")
    register("sequence_mean", f"{at}:sequence_mean", "Every row has the same weight (GRPO).")
    register("sequence_sum", f"{at}:sequence_sum", "Token sums divided by a constant, mean over rows (Dr. GRPO).")
    register("sequence_token_sum", f"{at}:sequence_token_sum", "Token sums, mean over rows.")
    register("token_sum_norm", f"{at}:token_sum_norm", "Token sums divided by a constant, summed over rows.")
    register("prompt_mean", f"{at}:prompt_mean", "Every prompt has the same weight (ScaleRL).")
    register("row_mean", f"{at}:row_mean", "Every row has the same weight, however many its sample has.")


@hookimpl
def rlsdk_register_kl_estimators(register: RegisterComponent) -> None:
    at = "rlsdk.algorithms.kl"
    register("k1", f"{at}:k1", "The log-ratio: for the reward; not allowed in a loss.")
    register("k2", f"{at}:k2", "Half the squared log-ratio.")
    register("k3", f"{at}:k3", "Low variance, never negative; linear beyond a ratio of e^5.")
    register("low_var_kl", f"{at}:low_var_kl", "k3, clamped to at most 10.")
    register("abs", f"{at}:absolute", "Magnitude of the log-ratio.")


@hookimpl
def rlsdk_register_rewards(register: RegisterComponent) -> None:
    at = "rlsdk.rewards"
    register("gsm8k", f"{at}.math.graders:gsm8k", "1 if the final number equals the reference exactly.")
    register("choice", f"{at}.math.graders:choice", "1 if the final letter is the reference's.")
    register("math", f"{at}.math.symbolic:math", "1 if the final expression equals the reference (math-verify).")
    register("code", f"{at}.code.programs:code", "1 if the response's code passes the tests of the row.")
    register("json_schema", f"{at}.text.schema:json_schema", "1 if the response is JSON that follows the schema.")
    register("exact", f"{at}.text.texts:exact", "1 if the answer's text is one of the references.")
    register("fuzzy", f"{at}.text.texts:fuzzy", "Similarity to the best reference: F1 of words or edit distance.")
    register("format", f"{at}.text.texts:format", "1 if tags such as <think> occur once each, in order.")
    register("language", f"{at}.text.texts:language", "Share of the letters that belong to a script.")
    register("spell_backward", f"{at}.text.spelling:spell_backward", "1 if the word is right: the quickstart's reward.")


@hookimpl
def rlsdk_register_datasets(register: RegisterComponent) -> None:
    register("jsonl", "rlsdk.data.sources:load_json", "A file of one JSON object per line.")
    register("json", "rlsdk.data.sources:load_json", "A file with one JSON array of objects.")
    register("csv", "rlsdk.data.sources:load_csv", "A CSV file with a header line.")
    register("parquet", "rlsdk.data.sources:load_parquet", "A Parquet file.")
    register("folder", "rlsdk.data.sources:load_folder", "A folder saved by `datasets`, or a folder of data files.")
    register("hf", "rlsdk.data.sources:load_hub", "A Hugging Face data set: org/name[:config][:split].")
    register("quickstart", "rlsdk.data.quickstart:load_quickstart", "The quickstart's rows: quickstart:spell_backward.")


@hookimpl
def rlsdk_register_trackers(register: RegisterComponent) -> None:
    register(
        "jsonl", "rlsdk.trainer.tracking.trackers:JsonlTracker", "metrics.jsonl and samples.jsonl in the run's folder."
    )
    register("tensorboard", "rlsdk.trainer.tracking.trackers:TensorBoardTracker", "Event files in the run's folder.")
    register(
        "wandb",
        "rlsdk.trainer.tracking.remote_trackers:WandbTracker",
        "Weights & Biases.",
        requires="wandb",
        install_hint="pip install 'rlsdk[wandb]'",
    )
    register(
        "mlflow",
        "rlsdk.trainer.tracking.remote_trackers:MlflowTracker",
        "MLflow.",
        requires="mlflow|mlflow-skinny",
        install_hint="pip install 'rlsdk[mlflow]'",
    )


@hookimpl
def rlsdk_register_sharding_managers(register: RegisterComponent) -> None:
    register(
        "*+*",
        "rlsdk.sharding.manager:GenericShardingManager",
        "Streams weights in bounded buckets; works for every pair.",
    )


@hookimpl
def rlsdk_register_rollouters(register: RegisterComponent) -> None:
    register("single_turn", "rlsdk.rollouts.groups.rollouter:single_turn", "One response to each prompt.")


@hookimpl
def rlsdk_register_sandboxes(register: RegisterComponent) -> None:
    register("confined", "rlsdk.agents.sandbox.confined:ConfinedSandbox", "Confined processes of this machine.")
