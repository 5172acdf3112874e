"""What crosses between the owner and a worker besides calls: a line of JSON each."""

from __future__ import annotations

import msgspec


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What SGLang's readers in a worker are to know of the server, all of it each time."""

    # counts up; what a worker has heard of it says by this
    number: int = 0
    weight_version: str
    # of the last update from disk
    model_path: str
    load_format: str
    paused: bool
    # weights are missing, and requests would end with 503
    hollow: bool
    # how often preprocessed images and the like were to be forgotten
    forgotten: int


class Heard(msgspec.Struct, tag=True, frozen=True):
    """A worker acts on the news of this number, and on all before it."""

    number: int


class Leaving(msgspec.Struct, tag=True, frozen=True):
    """A worker was told to go, and with it the server."""


Said = Heard | Leaving

read_news = msgspec.json.Decoder(News).decode
read_said = msgspec.json.Decoder(Heard | Leaving).decode


def line(content: News | Said) -> bytes:
    return msgspec.json.encode(content) + b"\n"
