"""Offline use: a model in this process, without a server."""

from atlas.llm.llm import LLM
from atlas.llm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamOutput
from atlas.llm.sampling_params import SamplingParams
from atlas.llm.scoring import Perplexity

__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "Perplexity",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StreamOutput",
]
