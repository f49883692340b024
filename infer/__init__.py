"""Decoding with draft heads and other drafters: decoding loop, acceptance rules, benchmark, chat,
custom_generate.
"""

from draftheads.infer.accept import Greedy, Sampled, Typical
from draftheads.infer.adaptive import Adaptive
from draftheads.infer.bench import BenchOptions, BenchReport, bench
from draftheads.infer.chat import ChatOptions, chat
from draftheads.infer.costs import Costs
from draftheads.infer.draft_model import DraftModel, EarlyExit
from draftheads.infer.draft_sampling import SpeculativeSampling
from draftheads.infer.drafters import Merged, NGram
from draftheads.infer.engine import Session, Speculator, Statistics, Step
from draftheads.infer.generate import speculative
from draftheads.infer.prompt import encode_prompt
from draftheads.infer.text import TextStream

__all__ = [
    "Adaptive",
    "BenchOptions",
    "BenchReport",
    "ChatOptions",
    "Costs",
    "DraftModel",
    "EarlyExit",
    "Greedy",
    "Merged",
    "NGram",
    "Sampled",
    "Session",
    "SpeculativeSampling",
    "Speculator",
    "Statistics",
    "Step",
    "TextStream",
    "Typical",
    "bench",
    "chat",
    "encode_prompt",
    "speculative",
]
