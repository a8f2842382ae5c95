"""The packages of the wheel: `switchyard` and, below it, those at the top of a checkout, with names too common for a wheel. All
else stands in pyproject.toml."""

from setuptools import find_namespace_packages, setup

BELOW = ("app", "engine", "pages", "sample_traces")

found = find_namespace_packages(include=[*BELOW, *(f"{part}.*" for part in BELOW)], exclude=["*.__pycache__"])
setup(
    packages=["switchyard", *(f"switchyard.{package}" for package in found)],
    package_dir={"switchyard": "switchyard"} | {f"switchyard.{part}": part for part in BELOW},
    package_data={"": ["*"], "switchyard.app": ["*", ".streamlit/*"]},
)
