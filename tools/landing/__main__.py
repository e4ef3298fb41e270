"""What a landing would run, and the notes in reports that this is decided by.

python -m tools.landing                      # each engine: in full or not, and why
python -m tools.landing --begin              # notes in tests/landed.txt what this landing is built on; commit it first
python -m tools.landing --digest vllm        # of the inputs of a suite
python -m tools.landing --stamp vllm DIGEST  # notes in docs/conformance/vllm.json of which inputs it is
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .changes import NOTED, begin, find_parent
from .suites import INPUTS, UNREPORTED, digest_of, tier_of, write_stamp

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", metavar="COMMIT", help="the commit before the landing")
    parser.add_argument("--begin", action="store_true", help=f"write {NOTED}")
    parser.add_argument("--digest", choices=INPUTS, metavar="ENGINE")
    parser.add_argument("--stamp", nargs=2, metavar=("ENGINE", "DIGEST"))
    args = parser.parse_args()
    try:
        if args.begin:
            print(f"{NOTED} names {begin(ROOT)}; now: git commit --message 'A landing begins' {NOTED}")
        elif args.digest:
            print(digest_of(ROOT, args.digest))
        elif args.stamp:
            write_stamp(ROOT, *args.stamp)
        else:
            parent = find_parent(ROOT, args.since)
            for tier in (tier_of(ROOT, engine, parent) for engine in INPUTS | UNREPORTED):
                print(f"{tier.engine}: {'in full' if tier.full else 'basic requirements'}: {tier.why}")
    except (OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
