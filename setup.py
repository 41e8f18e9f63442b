"""What pyproject.toml cannot say: the C library needs no ABI of Python, so one wheel serves every version of Python."""

import re
from pathlib import Path, PurePath

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

_GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)")
_OLDEST_MINOR = 17  # the oldest that pip knows by this name


class BuildLibrary(build_ext):
    """Names the library without a version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return where the library goes in the tree."""
        return str(PurePath(*fullname.split("."))) + ".so"


class PlatformWheel(bdist_wheel):
    """Tags the wheel with the platform alone: the oldest glibc that has what the library asks for (PEP 600)."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform; without a compiler there is no library, and any platform."""
        platform: str = super().get_tag()[2]
        libraries = list(Path(self.get_finalized_command("build").build_lib).rglob("*.so"))
        asked_for = [version for path in libraries for version in _GLIBC.findall(path.read_bytes())]
        if asked_for and platform.startswith("linux_"):
            major, minor = max((int(major), int(minor)) for major, minor in asked_for)
            platform = f"manylinux_{major}_{max(minor, _OLDEST_MINOR)}_{platform.removeprefix('linux_')}"
        return "py3", "none", platform if libraries else "any"


setup(cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel})
