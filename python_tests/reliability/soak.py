"""Hundreds of faults: runs killed at random moments, stopped as a group, without disk, two in a folder.

Over one process, two workers and two ranks of torchrun, stores in memory and in files, and nine methods, two of them
asynchronous. Every run is resumed until its end and compared with an unbroken one to the bit. Ends with counts; with
status 1 if anything differed. ``soak_flower.py`` has the same for Flower.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import kills

_FAULTS = (kills.terminated_as_a_group, kills.with_a_killed_worker, kills.two_in_one_folder, kills.on_a_full_disk)


def main() -> int:
    """Run until there were as many kills as asked for, a few other faults between them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="how many (default: %(default)s)")
    parser.add_argument(
        "--rank-kills", type=int, default=60, help="how many more under torchrun (default: %(default)s)"
    )
    parser.add_argument("--faults", type=int, default=40, help="how many others, of four kinds (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="of the moments")
    arguments = parser.parse_args()
    moments, begin = random.Random(arguments.seed), time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    found: list[str] = []
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        whole = {name: kills.whole(case, folder / name) for name, case in kills.MORE_CASES.items()}
        runs = list(itertools.product(kills.MORE_CASES, (1, 2), ("memory", "mapped")))
        moments.shuffle(runs)
        for number, (method, workers, store) in enumerate(itertools.cycle(runs)):
            left = arguments.kills - counts["kills"]
            if left <= 0:
                break
            path, case = folder / f"killed{number}", kills.MORE_CASES[method]
            label = f"{method}, {workers} workers, {store}"
            done = kills.killed_and_resumed(case, path, min(left, 5), moments, workers=workers, store=store)
            counts.update({"kills": done, "runs": 1, f"kills with {workers} worker(s), {store}": done})
            found += [f"{label}: {what}" for what in kills.differences(whole[method], path)]
            print(f"{counts['kills']} kills in {counts['runs']} runs, {len(found)} differences: {label}", flush=True)
        methods = [method for method in sorted(kills.MORE_CASES) for _ in ("memory", "mapped")]
        for number, (method, store) in enumerate(itertools.cycle(zip(methods, itertools.cycle(("memory", "mapped"))))):
            left = arguments.rank_kills - counts["kills of ranks"]
            if left <= 0:
                break
            path, case = folder / f"ranks{number}", kills.MORE_CASES[method]
            done = kills.ranks_killed_and_resumed(case, path, min(left, 4), moments, store=store)
            counts.update({"kills of ranks": done, "runs on ranks": 1})
            found += [f"{method}, ranks, {store}: {what}" for what in kills.differences(whole[method], path)]
            print(f"{counts['kills of ranks']} kills of ranks, {len(found)} differences: {method}, {store}", flush=True)
        for number in range(arguments.faults):
            fault, method = _FAULTS[number % len(_FAULTS)], moments.choice(sorted(kills.MORE_CASES))
            path, store = folder / f"fault{number}", moments.choice(("memory", "mapped"))
            workers = {"workers": 2} if fault is kills.terminated_as_a_group else {}
            try:
                fault(kills.MORE_CASES[method], path, moments, store=store, **workers)
                found += [f"{fault.__name__}, {method}: {what}" for what in kills.differences(whole[method], path)]
            except AssertionError as error:
                found.append(f"{fault.__name__}, {method}, {store}: {error}")
            counts[fault.__name__] += 1
            print(f"{fault.__name__}: {method}, {store}; {len(found)} differences", flush=True)
    print("\n".join([*(f"{count:5} {what}" for what, count in counts.items()), *found]))
    print(f"{len(found)} differences in {time.monotonic() - begin:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
