# SPDX-License-Identifier: Apache-2.0

"""Prints where the time of a decode step goes, from the lines of cupti_trace.c.

A step ends with an argmax kernel. Steps with the same kernels and grids are one kind of step. A
kernel's time is from the end of the kernel before it to its own end: kernels overlap, so these
times add up to the step, and spans do not.
"""

import collections
import csv
import statistics
import sys

STEPS_MIN = 5


def read_steps(path):
    with open(path, newline="") as file:
        kernels = [(row[0], int(row[1]), int(row[2]), int(row[3])) for row in csv.reader(file)]
    kernels.sort(key=lambda kernel: kernel[2])
    step = []
    for kernel in kernels:
        step.append(kernel)
        if "argmax" in kernel[0]:
            yield step
            step = []


def print_kind(steps):
    first = steps[0]
    total = statistics.median(step[-1][2] - step[0][1] for step in steps) / 1e3
    print(f"--- {len(first)} kernels, {len(steps)} steps, {total:.1f} us")
    groups = collections.OrderedDict()
    for at, (name, _, _, grid) in enumerate(first):
        before = first[at - 1][0] if at > 0 else "-"
        since = [step[at][2] - (step[at - 1][2] if at > 0 else step[at][1]) for step in steps]
        span = [step[at][2] - step[at][1] for step in steps]
        group = groups.setdefault((name, grid, before), [0, 0.0, 0.0])
        group[0] += 1
        group[1] += statistics.median(since) / 1e3
        group[2] += statistics.median(span) / 1e3
    for (name, grid, before), (count, since, span) in groups.items():
        print(
            f"{count:5} x {name[:36]:36} grid {grid:5} after {before[:24]:24} "
            f"{since / count:8.2f} us each, {since:8.1f} in all, span {span / count:7.2f}"
        )


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: timeline.py KERNEL_TRACE.csv")
    kinds = collections.defaultdict(list)
    for step in read_steps(sys.argv[1]):
        kinds[tuple((name, grid) for name, _, _, grid in step)].append(step)
    for steps in sorted(kinds.values(), key=len, reverse=True):
        if len(steps) >= STEPS_MIN:
            print_kind(steps)


if __name__ == "__main__":
    main()
