"""Which environment variables reach code of others."""

from __future__ import annotations

from rlsdk.confinement.environment import allowed_environment


def test_the_environment_is_an_allow_list() -> None:
    given = {"PATH": "p", "LC_ALL": "C", "HF_TOKEN": "x", "WANDB_API_KEY": "x", "AWS_SECRET_ACCESS_KEY": "x",
             "MINE": "m", "RAY_AUTH_TOKEN": "x", "HF_HOME": "h", "SSH_AUTH_SOCK": "x", "LD_PRELOAD": "x"}  # fmt: skip
    assert allowed_environment(given, ("MINE",)) == {
        "PATH": "p", "LC_ALL": "C", "HF_HOME": "h", "MINE": "m", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
    }  # fmt: skip
