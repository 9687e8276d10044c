"""The one thing pyproject.toml cannot say: put the start-up hook (a .pth file) beside the packages."""

import pathlib

from setuptools import setup
from setuptools.command.build_py import build_py

HOOK = pathlib.Path("src/sglang_cpu_lab.pth")


class BuildWithHook(build_py):
    """build_py, and the .pth file at the top of the wheel, from where pip puts it into site-packages."""

    def run(self) -> None:
        """Copy the packages as usual, then the hook."""
        super().run()
        self.copy_file(str(HOOK), str(pathlib.Path(self.build_lib) / HOOK.name), preserve_times=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """The usual files and the hook, so that uninstalling removes it too."""
        return [*super().get_outputs(include_bytecode), str(pathlib.Path(self.build_lib) / HOOK.name)]


setup(cmdclass={"build_py": BuildWithHook})
