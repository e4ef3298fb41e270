"""`rlsdk environments new`: writes an environment that holds every requirement before any change."""

from __future__ import annotations

from pathlib import Path

from rlsdk.interfaces import ConfigError

TEMPLATE = '''"""An environment: a number is to be guessed. Replace the task; keep the form."""

from __future__ import annotations


class Guess:
    """One object is made for each sample. Public methods are the tools of the model; those below `Hooks` are not."""

    def __init__(self, highest: int = 15) -> None:
        """Keyword arguments come from `rollout.environment_options`."""
        self.highest = highest

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: what it may be
        """
        if self.done:
            return "It is over."
        self._last = number
        self.done = number == self._number
        if self.done:
            return "Right."
        return "It is higher." if self._number > number else "It is lower."

    # Hooks

    def reset(self, answer: str = "7", seed: int = 0) -> str:
        """Begins an episode. The parameters are fields of the data row; `seed` is the same for all samples of a row.
        Returns what the model sees after the row's prompt."""
        self._number = int(answer)
        self._last: int | None = None
        self.done = False
        return f"Guess a number from 1 to {self.highest}."

    def get_reward(self) -> float:
        """The score, asked for once at the end. None: not scored."""
        return float(self._last == self._number)

    def close(self) -> None:
        """Called once, also after errors."""
'''


def new_environment(file: Path) -> None:
    """Writes the template, and prints the next commands.

    Raises:
        ConfigError: the file exists, or does not end in `.py`.
    """
    if file.suffix != ".py":
        raise ConfigError(f"{str(file)!r}: expected the name of a Python file, such as my_env.py")
    if file.exists():
        raise ConfigError(f"{str(file)!r} exists already; give another name")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(TEMPLATE)
    print(f"wrote {file}. Next:")
    print(f"  rlsdk environments check {file}:Guess")
    print(f"  rlsdk train --rollout.environment {file}:Guess --rollout.max_model_tokens 2048 --model ... --data ...")
