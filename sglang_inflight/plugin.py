"""Entry point of the group ``sglang.srt.plugins``."""


def install() -> None:
    pass
