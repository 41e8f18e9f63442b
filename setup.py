"""What pyproject.toml cannot say: the C library needs no ABI of Python, so one wheel serves every version of Python."""

from pathlib import PurePath

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildLibrary(build_ext):
    """Names the library without a version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return where the library goes in the tree."""
        return str(PurePath(*fullname.split("."))) + ".so"


class PlatformWheel(bdist_wheel):
    """Tags the wheel with the platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform."""
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel})
