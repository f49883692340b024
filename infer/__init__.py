"""Decoding with draft heads: decoding loop, acceptance rules, benchmark, chat, custom_generate."""

from draftheads.infer.accept import Greedy, Sampled, Typical
from draftheads.infer.bench import BenchOptions, BenchReport, bench
from draftheads.infer.chat import ChatOptions, chat
from draftheads.infer.engine import Speculator, Statistics, Step
from draftheads.infer.generate import speculative

__all__ = [
    "BenchOptions",
    "BenchReport",
    "ChatOptions",
    "Greedy",
    "Sampled",
    "Speculator",
    "Statistics",
    "Step",
    "Typical",
    "bench",
    "chat",
    "speculative",
]
