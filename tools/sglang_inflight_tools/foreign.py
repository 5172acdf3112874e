"""Find installed distributions that overwrite SGLang or do not run with it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path

# most files named in a sentence
_SHOWN = 3


@dataclass
class Foreign:
    """Sentences about other distributions.

    ``problems`` report changed files of SGLang. ``notes`` report distributions that do not work
    with this SGLang, and changes to it of unknown origin.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def look(installed: Iterable[Distribution] | None = None, patched: Collection[str] = ()) -> Foreign:
    """Check ``installed``, by default all distributions.

    ``patched`` holds the files of a fork with our patches, as paths from SGLang's parent.
    """
    found = Foreign()
    by_name = {_name(each): each for each in (distributions() if installed is None else installed)}
    if (sglang := by_name.get("sglang")) is not None:
        _look_at_files(found, sglang, [d for d in by_name.values() if d is not sglang], patched)
    if (verl := by_name.get("verl")) is not None:
        _look_at_verl(found, verl)
    return found


def _look_at_files(
    found: Foreign,
    sglang: Distribution,
    others: Iterable[Distribution],
    patched: Collection[str],
) -> None:
    """Report SGLang's files changed by, or mixed with, another distribution's.

    The distribution installed last wrote a shared file. The other one's own files stay beside it.
    """
    own = _files(sglang)
    changed = {
        path
        for path, digest in own.items()
        if path not in patched and _is_other(sglang, path, digest)
    }
    for other in others:
        theirs = {
            path: digest
            for path, digest in _files(other).items()
            # the file on disk is the other's version of SGLang's file, or SGLang has no such file
            if (path in changed and not _is_other(other, path, digest)) or path not in own
        }
        overwritten = sorted(theirs.keys() & changed)
        changed.difference_update(overwritten)
        added = sorted(path for path in theirs if path not in own and _file(other, path).is_file())
        if not overwritten and not added:
            continue
        whose = f"{_name(other)} {other.version}"
        found.problems.append(
            f"foreign sglang: {whose} has overwritten {_count(overwritten)} of sglang "
            f"{sglang.version} and put {_count(added)} beside them "
            f"({_some(overwritten or added)}). These files are not sglang {sglang.version}, and "
            f"may not load plugins, SGLang Inflight among them: keep {_name(other)} in an "
            "environment of its own, or remove it and install sglang again"
        )
    if changed:
        found.notes.append(
            f"{_count(changed)} of sglang {sglang.version} {'is' if len(changed) == 1 else 'are'} "
            f"not as it was installed ({_some(sorted(changed))}), and no other distribution has "
            f"{'it' if len(changed) == 1 else 'them'}"
        )


def _look_at_verl(found: Foreign, verl: Distribution) -> None:
    """Check verl's classes that start and call SGLang's server."""
    folder = "verl/workers/rollout/sglang_rollout"
    broken = []
    adapter = _text(verl, f"{folder}/http_server_engine.py")
    if "(EngineBase)" in adapter and "def begin_weight_update" not in adapter:
        broken.append(
            f"{folder}/http_server_engine.py: its adapters lack begin_weight_update and "
            "end_weight_update, which are abstract in SGLang's EngineBase"
        )
    if "dataclasses.fields(ServerArgs)" in _text(verl, f"{folder}/async_sglang_server.py"):
        broken.append(
            f"{folder}/async_sglang_server.py: dataclasses.fields(ServerArgs), and ServerArgs is "
            "no dataclass in SGLang"
        )
    if broken:
        found.notes.append(
            f"verl {verl.version} does not start its servers with this sglang: "
            f"{'; '.join(broken)}. docs/frameworks.md has what to change in it"
        )


def _files(distribution: Distribution) -> dict[str, str]:
    """Return path -> digest of the distribution's modules in SGLang's package.

    Empty if its files are not recorded, as after an editable install.
    """
    if "\nsglang/" not in f"\n{distribution.read_text('RECORD') or ''}":
        return {}
    return {
        str(file): file.hash.value
        for file in distribution.files or ()
        if file.parts[0] == "sglang" and file.suffix == ".py" and file.hash is not None
    }


def _is_other(distribution: Distribution, path: str, digest: str) -> bool:
    file = _file(distribution, path)
    if not file.is_file():
        return True
    content = hashlib.sha256(file.read_bytes()).digest()
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode() != digest


def _file(distribution: Distribution, path: str) -> Path:
    return Path(str(distribution.locate_file(path)))


def _text(distribution: Distribution, path: str) -> str:
    file = _file(distribution, path)
    return file.read_text(errors="replace") if file.is_file() else ""


def _name(distribution: Distribution) -> str:
    name = distribution.metadata["Name"]
    return name.lower().replace("_", "-") if name else ""


def _count(files: Collection[str]) -> str:
    return f"{len(files)} file{'' if len(files) == 1 else 's'}"


def _some(files: list[str]) -> str:
    more = [f"{len(files) - _SHOWN} more"] if len(files) > _SHOWN else []
    return ", ".join([*files[:_SHOWN], *more])
