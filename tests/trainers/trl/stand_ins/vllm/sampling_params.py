"""A class of an engine in the trainer's own process."""


class StructuredOutputsParams:
    pass
