"""`rlsdk migrate` on what scripts in the wild do: conditions, values of commands, models, trainers of their own."""

from __future__ import annotations

from typing import Any

import pytest

from rlsdk.config import load_config
from rlsdk.migrate.draft import Draft, Fate
from rlsdk.migrate.read import DRAFTS, script_of
from rlsdk.migrate.shell import read_shell
from rlsdk.migrate.writing import parsed, run_file, table
from rlsdk.registry import Registry


def draft_of(text: str, source: str) -> Draft:
    found = script_of(text, source)
    draft = DRAFTS[found.peer](found)
    assert found.settings.keys() <= {row.name for row in draft.rows}
    return draft


def why(draft: Draft, name: str) -> str:
    return next(row.why for row in draft.rows if row.name == name and row.fate is Fate.REFUSED)


BRANCHES = """\
size=small
rate=1
more=""
if [ "$size" = "large" ]; then
    rate=2
    more="--big 1"
elif [[ $size == small ]]; then
    rate=3
    if [ "$size" != "small" ]; then rate=4; else rate=5; fi
else
    rate=6
fi
if [ "$UNSET" = "x" ]; then other=1; else other=2; fi
if [ "$size" = "large" ] && [ "$rate" = "5" ]; then both=1; fi
run --rate $rate $more --other $other --both $both
"""


def test_of_a_condition_that_the_text_tells_only_the_branch_that_runs_is_read() -> None:
    (last,) = [words for words in read_shell(BRANCHES).commands if words[0] == "run"]
    assert last == ["run", "--rate", "5", "--other", "2", "--both", "1"], "what the text does not tell is read whole"


def test_the_output_of_a_command_ends_no_settings() -> None:
    text = (
        'HERE=$(cd "$(dirname "$0")/.." && pwd)\n'
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --reward.remote_url $HERE/score.py \\\n"
        "  --algo.advantage.estimator reinforce_baseline --rollout.n_samples_per_prompt 6 --ckpt.output_dir ${HERE}/o\n"
    )
    draft = draft_of(text, "run.sh")
    assert draft.fields["trainer.samples_per_prompt"] == 6
    assert draft.fields["algorithm.advantage"] == "reinforce_plus_plus_baseline"
    assert "does not tell its value; set rewards" in why(draft, "reward.remote_url")


LOADED = """\
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from mine import LoggingGRPOTrainer
from datasets import load_dataset

BASE = "org/" + "base"
reader = AutoTokenizer.from_pretrained("org/tokens")
net = AutoModelForCausalLM.from_pretrained(BASE, torch_dtype="bfloat16", device_map="auto", revision="v2", odd=3).to(0)
model = net


class Slow(GRPOTrainer):
    def step(self): ...


def longest(completions, **row):
    return [len(text) for text in completions]


trainer = TRAINER(model=model, reward_funcs=longest, args=GRPOConfig(max_steps=3),
                  train_dataset=load_dataset("org/rows", split="train"))
"""


@pytest.mark.parametrize("name", ["GRPOTrainer", "Slow", "LoggingGRPOTrainer"])
def test_a_model_is_followed_to_where_it_is_loaded(name: str) -> None:
    draft = draft_of(LOADED.replace("TRAINER", name), "train.py")
    assert draft.fields["model.path"] == "org/base"
    assert (draft.fields["model.dtype"], draft.fields["model.revision"]) == ("bfloat16", "v2")
    assert draft.fields["rewards"] == [{"name": "run_rewards.py:longest"}]
    assert "does not know" in why(draft, "from_pretrained.odd")
    own = [row for row in draft.rows if row.name == name]
    assert bool(own) == (name != "GRPOTrainer")
    assert all("a trainer of its own, made of GRPOTrainer" in row.why for row in own)


def test_a_model_of_unsloth_and_its_adapter() -> None:
    text = (
        "from unsloth import FastLanguageModel\nfrom trl import SFTConfig, SFTTrainer\n"
        "model, words = FastLanguageModel.from_pretrained(model_name='org/base', load_in_4bit=True, max_seq_length=9)\n"
        "model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, target_modules=['q_proj'])\n"
        "SFTTrainer(model=model, tokenizer=words, args=SFTConfig(max_steps=2), train_dataset=rows)\n"
    )
    draft = draft_of(text, "train.py")
    lora = {name: value for name, value in draft.fields.items() if name.startswith("model.")}
    assert lora == {"model.path": "org/base", "model.lora.rank": 4, "model.lora.alpha": 8.0,
                    "model.lora.targets": ["q_proj"]}  # fmt: skip
    assert "not quantized" in why(draft, "from_pretrained.load_in_4bit")
    assert "made by the script" in why(draft, "train_dataset")


def test_what_the_command_in_a_docstring_says_stands_for_what_the_script_reads_of_it() -> None:
    text = (
        '"""\npython train.py --model_name_or_path org/base --dataset_name org/rows --learning_rate 3e-6\n"""\n'
        "from trl import SFTConfig, SFTTrainer, TrlParser\nfrom datasets import load_dataset\n"
        "script_args, args, model_args = TrlParser((A, SFTConfig, B)).parse_args_and_config()\n"
        "rows = load_dataset(script_args.dataset_name, name=script_args.dataset_config)\n"
        "SFTTrainer(model=model_args.model_name_or_path, args=args, train_dataset=rows['train'])\n"
    )
    draft = draft_of(text, "train.py")
    assert (draft.fields["model.path"], draft.fields["data.train"]) == ("org/base", "org/rows")
    assert draft.fields["data.options"] == {"split": "train"}


def test_names_of_rewards_in_a_recipe() -> None:
    text = (
        "model_name_or_path: m\ndataset_id_or_path: d\ndataset_prompt_column: problem\nnum_generations: 4\n"
        "reward_funcs: [accuracy, format, own_words]\nreward_weights: [1.0, 0.5, 1.0]\n"
    )
    draft = draft_of(text, "grpo.yaml")
    assert draft.fields["rewards"] == [{"name": "math"}, {"name": "format", "weight": 0.5}]
    assert (draft.fields["data.train"], draft.fields["data.prompt_field"]) == ("d", "problem")
    assert "reward_models" not in draft.fields
    assert "own_words is known to the script's program only" in why(draft, "reward_funcs")


@pytest.mark.parametrize("given", ["0123456789abcdef", "$SECRET"])
def test_a_key_is_never_shown_or_written(given: str) -> None:
    command = f"deepspeed --module openrlhf.cli.train_sft --pretrain m --dataset d --use_wandb {given} --max_epochs 1\n"
    draft = draft_of(command, "run.sh")
    assert given not in table(draft) + run_file(draft)
    assert draft.fields["tracking.trackers"] == ["jsonl", "wandb"]


VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator={} data.train_files=gsm8k.parquet "
    "actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n={} {}\n"
)


@pytest.mark.parametrize(
    ("estimator", "samples", "expected"),
    [
        ("grpo", 1, "reinforce"),
        ("rloo", 1, "reinforce"),
        ("reinforce_plus_plus_baseline", 1, "reinforce_plus_plus"),
        ("grpo", 2, "grpo"),
        ("gae", 1, "gae"),
    ],
)
def test_an_estimator_without_a_group_is_the_one_that_verl_makes_of_it(
    estimator: str, samples: int, expected: str
) -> None:
    draft = draft_of(VERL.format(estimator, samples, "trainer.n_gpus_per_node=1"), "run.sh")
    assert draft.fields["algorithm.advantage"] == expected
    assert not [row for row in draft.rows if row.stops]
    values = parsed(run_file(draft))
    values["rollout"] = {"backend": "transformers"}
    config = load_config(values=values, overrides=[], registry=Registry.discover())
    assert config.trainer.samples_per_prompt == samples


@pytest.mark.parametrize(
    ("more", "own"),
    [
        ("val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.n=3", {"samples_per_prompt": 3}),
        ("val_kwargs.do_sample=False", {"temperature": 0.0}),
    ],
)
def test_several_files_of_an_evaluation_are_sets(more: str, own: dict[str, Any]) -> None:
    files = "data.val_files=\"['math/test.parquet','gsm8k/test.parquet','/1/test.parquet']\" trainer.test_freq=5"
    draft = draft_of(VERL.format("grpo", 4, f"{files} actor_rollout_ref.rollout.{more}"), "run.sh")
    sets = draft.fields["eval.sets"]
    assert {name: part.pop("data") for name, part in sets.items()} == {
        "math": "math/test.parquet", "gsm8k": "gsm8k/test.parquet", "test": "/1/test.parquet",
    }  # fmt: skip
    assert all(part == own for part in sets.values())
    assert not [name for name in draft.fields if name.startswith("eval.") and name not in EVALUATED]


EVALUATED = ("eval.sets", "eval.every_steps", "eval.at_start")


def test_a_clip_of_nothing_is_named() -> None:
    command = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --reward_pretrain r --eps_clip 0.0\n"
    draft = draft_of(command, "run.sh")
    assert "algorithm.loss_options" not in draft.fields
    assert "expected a number above 0" in why(draft, "actor.eps_clip")


@pytest.mark.parametrize(
    ("module", "schedule", "rate"), [("fsdp_sft_trainer", "cosine", 1e-5), ("sft_trainer", "constant", 1e-3)]
)
def test_each_of_verls_supervised_trainers_has_its_own_defaults(module: str, schedule: str, rate: float) -> None:
    draft = draft_of(f"torchrun -m verl.trainer.{module} data.train_files=a.parquet model.path=m\n", "run.sh")
    assert (draft.fields["sft.schedule"], draft.fields["sft.lr"]) == (schedule, rate)
    assert draft.fields.get("sft.warmup_ratio", 0.0) == (0.1 if module.startswith("fsdp") else 0.0)


def test_an_adapter_of_megatron_names_the_modules_of_the_models_own_code() -> None:
    settings = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": "org/base",
        "actor_rollout_ref.model.lora.rank": "8",
        "actor_rollout_ref.model.lora.target_modules": '\'["linear_qkv","linear_fc1_up"]\'',
        "actor_rollout_ref.model.lora.lora_A_init_method": "kaiming",
        "actor_rollout_ref.model.lora.dropout": "0.1",
        "trainer.val_only": "False",
    }
    words = " ".join(f"{name}={value}" for name, value in settings.items())
    draft = draft_of(f"python3 -m verl.trainer.main_ppo {words}\n", "run.sh")
    lora = {name: value for name, value in draft.fields.items() if name.startswith("model.lora.")}
    assert lora == {"model.lora.rank": 8, "model.lora.alpha": 32.0,
                    "model.lora.targets": ["q_proj", "k_proj", "v_proj", "up_proj"]}  # fmt: skip
    assert "no dropout here" in why(draft, "actor_rollout_ref.model.lora.dropout")
    refused = {row.name for row in draft.rows if row.fate is Fate.REFUSED}
    assert refused == {"actor_rollout_ref.model.lora.dropout", "data.train_files"}


def test_the_old_switch_of_an_estimator_is_the_setting_of_today() -> None:
    switches = "--use_kl_loss --use_kl_estimator_k3 --load_in_4bit"
    command = f"python -m openrlhf.cli.train_ppo_ray --pretrain org/base --init_kl_coef 0.1 {switches}\n"
    draft = draft_of(command, "run.sh")
    assert draft.fields["algorithm.kl_estimator"] == "k3"
    assert "not quantized" in why(draft, "ds.load_in_4bit")
