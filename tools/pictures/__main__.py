"""Draws the pictures of docs/concepts.md and of docs/distillation.md anew: `make pictures`. With `--check`, only says
which are out of date."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from .given import ROOT
from .placement import placement_picture
from .reshard import reshard_picture
from .stream import stream_picture
from .top_tokens import top_tokens_picture

FOLDER = ROOT / "docs" / "pictures"
PICTURES: Mapping[str, Callable[[], str]] = {
    "stream.svg": stream_picture,
    "reshard.svg": reshard_picture,
    "placement.svg": placement_picture,
    "top_tokens.svg": top_tokens_picture,
}


def main(*, check: bool) -> int:
    old = []
    for name, draw in PICTURES.items():
        file, drawn = FOLDER / name, draw()
        if file.exists() and file.read_text() == drawn:
            continue
        old.append(name)
        if not check:
            FOLDER.mkdir(parents=True, exist_ok=True)
            file.write_text(drawn)
            print(f"wrote {file.relative_to(ROOT)}")
    if check and old:
        print(f"out of date: {', '.join(old)}; run: make pictures", file=sys.stderr)
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
