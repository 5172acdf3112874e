"""What pyproject.toml cannot say: the wheel carries patches/ as sglang_inflight/_patches."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["sglang_inflight*"]), "sglang_inflight._patches"],
    package_dir={"sglang_inflight._patches": "patches"},
    package_data={
        "sglang_inflight": ["py.typed"],
        "sglang_inflight.extensions.front": ["page.html"],
        "sglang_inflight._patches": ["README.md", "*/*.patch"],
    },
)
