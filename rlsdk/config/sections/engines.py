"""Sections on the engines and where they run: model, train, rollout, placement, sharding."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rlsdk.config.problem import Problem
from rlsdk.config.sections.agents import AgentsConfig
from rlsdk.config.sections.base import (
    DeviceChoice,
    Options,
    Section,
    empty_mapping,
    empty_tuple,
    fields_of,
    steps_of_share,
    unused_revision,
)
from rlsdk.config.sections.role_kinds import JUDGE, REQUIRED_ROLES, REWARD, ROLES, TEACHER, is_role
from rlsdk.config.sections.sampling import temperature_problems
from rlsdk.interfaces import nearest
from rlsdk.interfaces.settings import (
    NO_INFLUENCE,
    AdapterSettings,
    OptimSettings,
    ReplicaSize,
    TrainPasses,
    transport_name,
)

SINGLE_TURN = "single_turn"
"""The rollouter that makes one request per sample."""
DtypeName = Literal["float32", "bfloat16", "float16"]


class LoraConfig(Section, AdapterSettings):
    """A low-rank adapter (LoRA) that is trained in place of the model's weights, which stay frozen."""

    sync: Literal["auto", "adapter", "merged"] = "auto"
    """What rollout engines are sent. adapter: A and B alone, served beside the weights, which are sent once; merged:
    at every sync all weights, with the adapter added; auto: adapter if both backends can, else merged."""

    def problems(self) -> Iterator[Problem]:
        if self.dropout:
            yield Problem("dropout", value=self.dropout, expected="0, because log-probs of training and sampling agree")
        if not self.targets:
            yield Problem("targets", value=list(self.targets), expected="names of layers, or all-linear")
        if self.path is not None and not self.rank:
            yield Problem("rank", "is 0, but lora.path starts from an adapter: give its rank")

    def unused(self) -> Iterator[Problem]:
        if not self.rank:
            names = (name for name in type(self).model_fields if name != "rank")
            yield from fields_of(names, "model.lora.rank is 0, so that all weights are trained")
        elif self.path is not None:
            yield Problem("init", "model.lora.path has the first values")


class ModelConfig(Section):
    """The model to train."""

    path: str | None = None
    """Folder in Hugging Face format, or a name on the hub."""
    revision: str | None = None
    """Branch, tag or commit of a hub name; null: its main branch."""
    dtype: Literal["auto", DtypeName] = "auto"
    """Dtype of the parameters that training and rollout compute with; the optimizer keeps a float32 copy. auto:
    bfloat16 if the actor is on a GPU, float32 on a CPU."""
    trust_remote_code: bool = False
    """Allows code that comes with the model to run."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; null: the model's own."""
    init_from_config: bool = False
    """Initialises random weights with `trainer.seed`; reads only `config.json` and the tokenizer."""
    lora: LoraConfig = LoraConfig()
    """A low-rank adapter that is trained in place of all weights."""

    def problems(self) -> Iterator[Problem]:
        if self.lora.rank and self.init_from_config:
            yield Problem(
                "lora.rank",
                "the random weights of model.init_from_config would stay frozen below the adapter: train them first "
                "(`rlsdk sft`), and give the result as model.path",
                value=self.lora.rank,
            )

    def unused(self) -> Iterator[Problem]:
        if self.tokenizer is None or os.path.isdir(self.tokenizer):
            yield from unused_revision(self.path)


class OptimConfig(Section, OptimSettings):
    """AdamW and its learning-rate schedule, with the same names for every train backend."""

    warmup_ratio: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Share of the run's optimizer steps that are warm-up, in place of `warmup_steps`; rounded up to whole steps. null:
    `warmup_steps`."""

    def problems(self) -> Iterator[Problem]:
        if not all(0 <= beta < 1 for beta in self.betas):
            yield Problem("betas", value=self.betas, expected="two numbers of at least 0 and less than 1")

    def unused(self) -> Iterator[Problem]:
        yield from steps_of_share(self.warmup_ratio)


class TrainConfig(Section, TrainPasses):
    """The train engine."""

    backend: str = "torch"
    """Registered train backend; `rlsdk plugins list` shows them."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    micro_batch_tokens: PositiveInt | None = 16384
    """Most tokens in one forward and backward pass on one device; a longer row is a pass of its own. Setting
    `micro_batch_rows` replaces this limit."""
    activation_checkpointing: bool | Literal["auto"] = "auto"  # type: ignore[assignment] # decided for `TrainSpec`
    """Recomputes activations in the backward pass: less memory, about a third more time. auto: on a GPU, for models of
    at least a billion parameters."""
    ema_decay: Annotated[float | None, NO_INFLUENCE] = Field(default=None, gt=0.0, lt=1.0)
    """Decay per trainer step of an exponential moving average of the actor's weights (0.99 averages over about 100
    steps); kept in float32 in main memory, and as `model_average/` in each checkpoint. null: no average."""
    options: Options = empty_mapping()
    """The backend's own options; also written `train.BACKEND.OPTION`. `rlsdk plugins info BACKEND` lists them."""
    engine_kwargs: Options = empty_mapping()
    """Passed to the engine's constructor unchanged."""

    @model_validator(mode="before")
    @classmethod
    def _rows_replace_tokens(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("micro_batch_rows") is not None:
            return {"micro_batch_tokens": None, **data}
        return data

    def problems(self) -> Iterator[Problem]:
        if (self.micro_batch_tokens is None) == (self.micro_batch_rows is None):
            both = f"{self.micro_batch_tokens!r} and micro_batch_rows {self.micro_batch_rows!r}"
            yield Problem("micro_batch_tokens", f"{both}: exactly one of the two must be set, the other null")


class EpisodeTimeoutsConfig(Section):
    """Seconds that each part of an episode may take."""

    setup_s: PositiveFloat = 60.0
    """Making the environment, and its `reset`."""
    tool_s: PositiveFloat = 30.0
    """One call of a tool; a call that exceeds it fails, and its result says so."""
    agent_s: PositiveFloat = 900.0
    """All turns; the episode then ends, and is scored as it is."""
    finalize_s: PositiveFloat = 60.0
    """The score, and cleaning up."""


class RolloutConfig(AgentsConfig, ReplicaSize):
    """The rollout engine, and sampling settings for training."""

    backend: str = "transformers"
    """Registered rollout backend; `rlsdk plugins list` shows them."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by the temperature, in sampling and in training."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling: the smallest set of tokens with a total probability of at least `top_p`; 1: all."""
    top_k: NonNegativeInt = 0
    """Samples from the `top_k` most probable tokens; 0: all."""
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Samples from tokens whose probability is at least `min_p` times that of the most probable one; 0: all."""
    max_response_tokens: PositiveInt = 1024
    """Most tokens of a response, including the stop token; longer responses are truncated and marked as such. With a
    multi-turn rollouter: of one turn. 1024 is lowered where the model has fewer positions."""
    rollouter: str = "single_turn"
    """Generates each sample from its prompt: a registered rollouter, `pkg.mod:fn`, or `file.py:fn`."""
    rollouter_options: Options = empty_mapping()
    """Keyword arguments of the rollouter."""
    environment: str | None = None
    """Class that each sample plays, instead of a rollouter: `file.py:Class` or `pkg.mod:Class`. Its public methods are
    the tools of the model; see docs/agents.md."""
    environment_options: Options = empty_mapping()
    """Keyword arguments of the environment's class."""
    tool_format: str | None = None
    """How the model writes calls of tools; null: as the tokenizer's `response_template` says, else by its chat
    template."""
    history: Literal["template", "exact"] = "template"
    """What becomes of earlier turns that the chat template would write in another way, such as without their reasoning.
    template: as it is deployed, so a new row begins; exact: they stay as they were sampled, and the row goes on."""
    max_turns: PositiveInt = 32
    """Most turns of the model in an episode of an environment or an agent."""
    max_episode_tokens: PositiveInt | None = None
    """Most sampled tokens in an episode of an environment or an agent, of all turns; null: as many as
    `max_model_tokens` has room for."""
    max_tool_chars: PositiveInt = 16_000
    """Most characters of a tool's result; longer ones are cut in the middle."""
    timeouts: EpisodeTimeoutsConfig = EpisodeTimeoutsConfig()
    """Time limits of an episode of an environment or an agent."""
    stop_strings: tuple[str, ...] = empty_tuple()
    """Strings that end a response, in addition to the stop tokens."""
    stop_token_ids: tuple[NonNegativeInt | str, ...] | None = Field(default=None, strict=False)
    """Tokens that end a response, as ids or as the tokenizer's strings; null: the one that ends a turn in the chat
    template, the tokenizer's end-of-sequence token and those in the model's generation_config.json."""
    max_model_tokens: PositiveInt | None = None
    """Context length of the engine: longest prompt plus response, in tokens; null: `data.max_prompt_tokens` plus
    `max_response_tokens`. Required for your own rollouter, environment or agent: all turns and tool outputs of an
    episode."""
    max_running_samples: PositiveInt = 256
    """Most samples that one replica decodes at once; the engine allocates memory for this many."""
    concurrency: Literal["auto", "adapt", "fixed"] = "auto"
    """Number of concurrent samples per replica. adapt: the fewest that give its best measured throughput, at most
    `max_running_samples`; fixed: `max_running_samples`; auto: adapt if the run depends on timing anyway
    (schedule.on_new_weights recompute or keep), otherwise fixed, so that repeated runs give equal numbers."""
    options: Options = empty_mapping()
    """The backend's own options; also written `rollout.BACKEND.OPTION`."""
    engine_kwargs: Options = empty_mapping()
    """Passed to the engine's constructor unchanged."""

    def problems(self) -> Iterator[Problem]:
        yield from temperature_problems(self.temperature, can_be_greedy=False)
        yield from self._maker_problems()
        if "" in self.stop_strings:
            yield Problem("stop_strings", f"{self.stop_strings!r}: an empty text ends every response at once")
        if (problem := self.expert_problem()) is not None:
            yield Problem("ep_size", problem, value=self.ep_size)

    @property
    def is_single_turn(self) -> bool:
        """Whether each sample is one request."""
        return self.maker == "rollouter" and self.rollouter == SINGLE_TURN

    @property
    def maker(self) -> str:
        """The field that says what makes the samples."""
        return next((name for name in ("environment", "agent", "command") if getattr(self, name)), "rollouter")

    @property
    def brings_score(self) -> bool:
        """Whether samples may bring a score of their own."""
        return self.maker != "rollouter"

    def unused(self) -> Iterator[Problem]:
        yield from self.unused_by_agents()
        if self.environment is None:
            times = ("setup_s", "tool_s", "finalize_s")
            names = ("environment_options", "max_tool_chars", *(f"timeouts.{name}" for name in times))
            yield from fields_of(names, "rollout.environment is null")
        if not self.brings_score:
            names = ("tool_format", "history", "max_turns", "max_episode_tokens", "timeouts.agent_s")
            yield from fields_of(names, "rollout.environment and rollout.agent are null")

    def _maker_problems(self) -> Iterator[Problem]:
        yield from self.agent_problems()
        if self.environment is not None and ":" not in self.environment:
            yield Problem("environment", value=self.environment, expected="file.py:Class or pkg.mod:Class")
        if self.environment is not None and self.has_agent:
            name = "agent" if self.agent is not None else "command"
            yield Problem(
                name, value=getattr(self, name), expected="none, because rollout.environment makes the samples"
            )
        if self.rollouter != SINGLE_TURN and self.maker != "rollouter":
            yield Problem(
                "rollouter",
                value=self.rollouter,
                expected=f"{SINGLE_TURN!r}, because rollout.{self.maker} makes the samples; give one of them",
            )


class PoolConfig(Section):
    """A set of devices."""

    devices_per_node: tuple[NonNegativeInt, ...] = Field(strict=False)
    """Devices to use on each node, one number per node: [8, 8] is sixteen devices on two nodes."""
    device: DeviceChoice = "auto"
    """Kind of device; on cpu, a device is one process with `placement.cpus_per_device` processors."""

    def problems(self) -> Iterator[Problem]:
        if not any(self.devices_per_node):
            yield Problem("devices_per_node", f"{list(self.devices_per_node)!r} holds no device")


class PlacementConfig(Section):
    """Placement of roles on devices."""

    preset: Literal["colocate_all", "colocate_actor_ref", "colocate_critic_reward", "disaggregated"] | None = (
        "colocate_all"
    )
    """How roles share devices. colocate_all: all roles on all devices, taking turns; colocate_actor_ref,
    colocate_critic_reward: these roles share a pool, every other role has its own; disaggregated: a pool for each role.
    Setting `pools` replaces the preset."""
    num_nodes: PositiveInt = 1
    """Number of nodes that the preset uses."""
    devices_per_node: PositiveInt = 1
    """Devices per node that the preset uses."""
    device: DeviceChoice = "auto"
    """auto: cuda if the cluster has GPUs."""
    cpus_per_device: PositiveInt | Literal["auto"] = "auto"
    """Processors, and threads, of the process of each device. auto: 1 on a CPU; on GPUs of this machine its processors
    shared evenly, since optimizers and tensors that are offloaded need them; 1 on those of a running cluster."""
    devices: dict[str, PositiveInt] = empty_mapping()
    """Total number of devices of the pool of each role (actor, rollout, ref, critic, reward, teacher; reward.NAME), for
    presets with several pools; pools without a number share the remaining devices evenly."""
    pools: dict[str, PoolConfig] = empty_mapping()
    """Pools by name, in place of a preset."""
    roles: dict[str, str] = empty_mapping()
    """Role (actor, rollout, ref, critic, reward, teacher; reward.NAME, teacher.NAME) -> name of its pool; several roles
    may share one. `reward` applies to every reward model that is not listed, `teacher` to every teacher. A role without
    a pool shares the actor's."""
    ray_address: Annotated[str | None, NO_INFLUENCE] = None
    """Address of a running Ray cluster (`auto` finds it); null: starts a cluster on this machine for the run."""
    forward_env: tuple[str, ...] = Field(default=("NCCL_*", "GLOO_*", "HF_*"), strict=False)
    """Environment variables that this process passes to workers of the cluster at `ray_address`: names, or patterns.
    Variables with TOKEN, KEY, SECRET, PASSWORD or CREDENTIAL in their name are passed only if named in full."""
    network_interface: Annotated[str | None, NO_INFLUENCE] = None
    """Network interface (eth0) for every rendezvous between nodes, for NCCL and gloo; null: the node addresses known to
    Ray, and each library's own choice."""

    @model_validator(mode="before")
    @classmethod
    def _pools_replace_preset(cls, data: Any) -> Any:
        return {"preset": None, **data} if isinstance(data, Mapping) and data.get("pools") else data

    def problems(self) -> Iterator[Problem]:
        if self.preset is not None and (self.pools or self.roles):
            yield Problem("preset", value=self.preset, expected="null, because pools or roles are given")
        if self.devices and self.preset in (None, "colocate_all"):
            yield Problem("devices", f"{self.devices!r} has no effect where placement.preset is {self.preset!r}")
        if self.preset is None and not self.pools:
            yield Problem("pools", expected="at least one pool, because placement.preset is null")
        if self.preset is None:
            for role in REQUIRED_ROLES:
                if role not in self.roles:
                    yield Problem("roles", f"{self.roles!r} gives no pool to role {role!r}")
        for field in ("devices", "roles"):
            for role in getattr(self, field):
                if not is_role(role):
                    known = [*ROLES, f"{REWARD}.NAME", f"{TEACHER}.NAME", f"{JUDGE}.LABEL"]
                    yield Problem(
                        f"{field}.{role}", f"{role!r} is not a role{nearest(role, known)}; expected one of {known}"
                    )
        for role, pool in self.roles.items():
            if pool not in self.pools:
                yield Problem(f"roles.{role}", f"{pool!r} is not one of the pools {sorted(self.pools)}")

    def unused(self) -> Iterator[Problem]:
        if self.preset is None:
            names = ("num_nodes", "devices_per_node")
            yield from fields_of(names, "placement.pools replaces the preset, and says the devices")
        if self.ray_address is None:
            yield Problem("forward_env", "placement.ray_address is null: workers of a Ray of the run's own get all")


class ShardingConfig(Section):
    """Weight transfer from the train to the rollout engine."""

    manager: str = "auto"
    """auto: the manager registered for this pair of backends, else the generic one; or a registered name
    (`TRAIN+ROLLOUT`)."""
    transport: Annotated[
        Literal[
            "auto",
            "in_process",
            "ring",
            "device_ring",
            "process_group",
            "object_store",
            "nixl",
        ],
        BeforeValidator(transport_name),
        NO_INFLUENCE,
    ] = "auto"
    """Transport between a training and a rollout process. auto: for each pair the fastest that can connect them:
    in_process; device_ring (CUDA IPC) between GPUs of one node; process_group (NCCL) between GPUs of two nodes; ring
    (shared memory) within a node; object_store (Ray's; works everywhere). process_group between CPUs uses gloo. nixl:
    the target reads the source's memory, by RDMA or TCP (needs `rlsdk[nixl]`; never chosen by auto). device_ring, NCCL,
    and nixl on GPUs are untested. Within one process weights are viewed in place if the named transport does not apply
    there. Until interface 2.2 the former names are read as these: shared_memory and shared_file (ring), cuda_ipc
    (device_ring), inline (object_store)."""
    bucket_mb: Annotated[PositiveInt, NO_INFLUENCE] = 64
    """Bucket size in MiB: bounds the extra memory of a transfer on each side."""
