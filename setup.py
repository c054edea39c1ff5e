"""The one thing that pyproject.toml cannot say: the stubs of `typings/` go into the wheel, for `kvlayouts check`."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCE = Path(__file__).parent / "typings"
TARGET = Path("sglang/srt/mem_cache/hicache/check/typings")


class BuildWithStubs(build_py):
    """Copies the stubs below the package that reads them. An editable install reads them where they lie."""

    def run(self) -> None:
        """Build the packages, then add the stubs."""
        super().run()
        if not self.editable_mode:
            for stub, place in self._stubs():
                self.mkpath(str(place.parent))
                self.copy_file(str(stub), str(place))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Every file that is built."""
        stubs = [] if self.editable_mode else [str(place) for _, place in self._stubs()]
        return [*super().get_outputs(include_bytecode), *stubs]

    def _stubs(self) -> list[tuple[Path, Path]]:
        return [(stub, Path(self.build_lib) / TARGET / stub.relative_to(SOURCE)) for stub in SOURCE.rglob("*.pyi")]


setup(cmdclass={"build_py": BuildWithStubs})
