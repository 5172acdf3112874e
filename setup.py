"""Build patches/ as sglang_inflight/_patches, which pyproject.toml cannot ask for.

The client's distribution has the rest of the package (client/pyproject.toml).
"""

import tomllib
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

CLIENT = tomllib.loads(Path("client/pyproject.toml").read_text())["tool"]["sglang-inflight"]


class BuildServer(build_py):
    """Leaves out the client's modules."""

    def find_package_modules(self, package, package_dir):
        found = super().find_package_modules(package, package_dir)
        return [
            each
            for each in found
            if each[0] not in CLIENT["packages"]
            or (package == "sglang_inflight" and each[1] not in CLIENT["modules"])
        ]


setup(
    packages=[*find_namespace_packages(include=["sglang_inflight*"]), "sglang_inflight._patches"],
    package_dir={"sglang_inflight._patches": "patches"},
    package_data={"sglang_inflight._patches": ["README.md", "*/*.patch"]},
    # setuptools takes it by itself, and the client's has it
    exclude_package_data={"sglang_inflight": ["py.typed"]},
    cmdclass={"build_py": BuildServer},
)
