"""The parts of vLLM that TRL imports, for a trainer without CUDA: gloo takes NCCL's place.

TRL asks for this package's version, and uses three functions of it with a server. The classes are
those of an engine in the trainer's own process.
"""

__version__ = "0.31.0"


class LLM:
    pass


class RequestOutput:
    pass


class SamplingParams:
    pass
