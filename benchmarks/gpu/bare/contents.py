"""Lists of what goes into the pack, and its limit.

Every distribution has the version that is installed where the pack is made: SGLang asks for some
of these versions, and pydantic for its own core's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

MOST_BYTES = 64 << 20

# the bare machine's Python; a wheel of another version's extension cannot be imported there
PYTHON = "3.12"
PLATFORMS = tuple(
    f"{policy}_x86_64"
    for policy in (
        *(f"manylinux_2_{minor}" for minor in (28, 27, 26, 24, 17, 12, 5)),
        "manylinux2014",
        "manylinux2010",
        "manylinux1",
    )
)

# unpacked ahead of the bare machine's own packages
WHEELS = (
    "annotated-types",
    "apache-tvm-ffi",
    "compressed-tensors",
    "dill",
    "distro",
    "fastapi",
    "gguf",
    "interegular",
    "jiter",
    "jsonschema",
    "jsonschema-specifications",
    "loguru",
    "msgspec",
    "openai",
    "opentelemetry-api",
    "orjson",
    "partial-json-parser",
    "pybase64",
    "pydantic",
    "pydantic-core",
    "python-multipart",
    "pyzmq",
    "referencing",
    "rpds-py",
    "setproctitle",
    "sniffio",
    "starlette",
    "torch-memory-saver",
    "typing-extensions",
    "typing-inspection",
    "unidiff",
    "uvicorn",
    "xgrammar",
    "zstandard",
)

# unpacked only where the bare machine lacks them: an image with torch mostly has them
SPARES = (
    "aiohappyeyeballs",
    "aiohttp",
    "aiosignal",
    "annotated-doc",
    "anyio",
    "attrs",
    "certifi",
    "charset-normalizer",
    "click",
    "cloudpickle",
    "einops",
    "filelock",
    "frozenlist",
    "fsspec",
    "h11",
    "httpcore",
    "httpx",
    "huggingface-hub",
    "idna",
    "iniconfig",
    "jinja2",
    "markdown-it-py",
    "markupsafe",
    "mdurl",
    "multidict",
    "nvidia-ml-py",
    "packaging",
    "pluggy",
    "prometheus-client",
    "propcache",
    "psutil",
    "pygments",
    "pytest",
    "pyyaml",
    "regex",
    "requests",
    "rich",
    "safetensors",
    "sentencepiece",
    "shellingham",
    "threadpoolctl",
    "tiktoken",
    "tokenizers",
    "tqdm",
    "transformers",
    "typer",
    "urllib3",
    "uvloop",
    "xxhash",
    "yarl",
)

# what a pack of this size cannot bring: the bare machine has to have these
EXPECTED = ("torch", "triton", "numpy", "scipy", "pillow", "torchvision")

# imported for a name, and never called by a server of the kit
STUBS: dict[str, tuple[str, ...]] = {
    # SGLang asks whether it runs in a notebook
    "IPython": ("IPython.display",),
    # the transcription of speech
    "soundfile": (),
}

# folders of the repository that the steps need
PROJECT = (
    "benchmarks",
    "examples",
    "harness",
    "patches",
    "sglang_inflight",
    "tests",
    "tools/sglang_inflight_tools",
)

_SOURCES = {".py", ".json", ".cu", ".cuh", ".cpp", ".h", ".hpp", ".s"}
# SGLang's diffusion models and its tests, which no language model's server imports
_LEFT_OUT = {"multimodal_gen", "test"}
_COMPILED = {".pyc", ".so"}
# folders that a run makes
_MADE = {"__pycache__", "results"}


def sglang_files(package: Path) -> Iterator[Path]:
    """Yield the files of SGLang's ``package`` that a server reads, sorted.

    They are Python, tuned configurations of Triton kernels, and sources that SGLang compiles on
    the machine it runs on. Extensions stay behind: they are another Python's.
    """
    for file in sorted(package.rglob("*")):
        inside = file.relative_to(package)
        if inside.parts[0] not in _LEFT_OUT and file.suffix in _SOURCES and file.is_file():
            yield file


def project_files(root: Path) -> Iterator[Path]:
    """Yield the repository's files that the steps may read, sorted."""
    for folder in PROJECT:
        for file in sorted((root / folder).rglob("*")):
            is_made = _MADE & set(file.relative_to(root).parts) or file.suffix in _COMPILED
            if not is_made and file.is_file():
                yield file


def metadata_files(files: Iterable[PurePath]) -> Iterator[PurePath]:
    """Yield those of an installed distribution's ``files`` that say what it is.

    The record is left out, because it names files that are not in the pack. So is the address of
    a folder that the distribution was installed from.
    """
    for file in files:
        is_metadata = len(file.parts) == 2 and file.parts[0].endswith(".dist-info")
        if is_metadata and file.name in ("METADATA", "WHEEL", "entry_points.txt", "top_level.txt"):
            yield file


def sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file below ``folder``, largest first."""
    files = {
        str(file.relative_to(folder)): file.stat().st_size
        for file in folder.rglob("*")
        if file.is_file()
    }
    return dict(sorted(files.items(), key=lambda item: (-item[1], item[0])))


def check_size(by_file: dict[str, int], most: int = MOST_BYTES) -> int:
    """Return the sum in bytes; raise ``ValueError`` with the first files if it is over ``most``."""
    total = sum(by_file.values())
    if total > most:
        first = [f"{name} ({size / 2**20:.1f} MiB)" for name, size in by_file.items()][:5]
        raise ValueError(
            f"The pack has {total / 2**20:.1f} MiB, and {most / 2**20:.1f} MiB are allowed. "
            f"Its largest files are {', '.join(first)}."
        )
    return total
