"""The benchmark: what the broker does beside others, in one run.

    python -m interop.bench [brokers]    every broker that is installed, one table
    python -m interop.bench resume       what a resume costs, and pruning beside traffic
    python -m interop.bench store        the store alone: commits, entries, CPU

Figures of different days or machines say nothing about each other: brokers and repetitions take
turns within one run, and the second table has ratios.
"""
