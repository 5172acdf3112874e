"""Commands of ``sglang-inflight``."""

from __future__ import annotations

import importlib

import typer

from sglang_inflight.cli import fleet, local, remote
from sglang_inflight.extension import all_extensions

app = typer.Typer(no_args_is_help=True, add_completion=False)
update = typer.Typer(no_args_is_help=True, help="Change the weights of a running server.")


@app.callback()
def _commands() -> None:
    """Change a language model's weights while SGLang is generating with it."""


app.command()(local.doctor)
app.command()(local.fork)
app.command()(remote.status)
app.command()(remote.pause)
app.command("continue")(remote.resume)
app.add_typer(update, name="update")
update.command("disk")(remote.update_disk)
app.command()(remote.rollback)
app.command()(fleet.fleet)
for _extension in all_extensions():
    for _name, _place in _extension.commands.items():
        _module, _, _function = _place.partition(":")
        app.command(_name)(getattr(importlib.import_module(_module), _function))
