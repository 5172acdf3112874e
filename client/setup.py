"""Build a part of a package's modules, which pyproject.toml cannot ask for."""

import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

OURS = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["sglang-inflight"]


class BuildClient(build_py):
    """Leaves out the server's modules."""

    def find_package_modules(self, package, package_dir):
        found = super().find_package_modules(package, package_dir)
        is_top = package == "sglang_inflight"
        return [each for each in found if not is_top or each[1] in OURS["modules"]]


setup(
    packages=OURS["packages"],
    package_dir={"": ".."},
    package_data={
        "sglang_inflight": ["py.typed"],
        "sglang_inflight.extensions.front": ["page.html"],
    },
    cmdclass={"build_py": BuildClient},
)
