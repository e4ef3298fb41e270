"""A number from 1 to 15 is to be guessed in four guesses: an environment with one tool."""

from __future__ import annotations

GUESSES = 4


class Guess:
    """Bisection always finds it; guesses that ignore the answers find it in 4 of 15 games at most."""

    def reset(self, answer: str) -> None:
        """Begins a game about the row's `answer`. The model sees the row's prompt only."""
        self._number = int(answer)
        self._guesses = 0
        self._right = False
        self.done = False

    def guess(self, number: int) -> str:
        """Guesses the number; says whether it is less (`<`), greater (`>`) or equal (`=`).

        Args:
            number: what it may be
        """
        if self.done:
            return ""
        answer = "=" if number == self._number else "<" if self._number < number else ">"
        self._guesses += 1
        self._right = answer == "="
        self.done = self._right or self._guesses == GUESSES
        return answer

    def get_reward(self) -> float:
        """1 for a game that was won."""
        return float(self._right)
