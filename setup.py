"""Builds the two compiled parts: the C core (a cffi extension of weefs) and the static pid 1 of an environment."""

import os
import shlex
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent


class BuildExt(build_ext):
    """The cffi extension, and beside it `weenv-init`: a program, not a library, so setuptools does not know how."""

    def run(self) -> None:
        super().run()
        target = (HERE if self.inplace else Path(self.build_lib)) / "envlet" / "weenv-init"
        target.parent.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        flags = ["-std=gnu11", "-O2", "-static", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([*compiler, *flags, "-o", str(target), str(HERE / "csrc" / "init.c")], check=True)


setup(cffi_modules=["weefs/core_build.py:ffi"], cmdclass={"build_ext": BuildExt})
