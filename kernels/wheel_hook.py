"""Compiles the CPU engine into the wheel, where a C++ compiler is; a wheel without it compiles the engine on first use.

A plain build step of hatchling (pyproject.toml names this file): `pip install .` and the images run it, an editable
install does not.
"""

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class EngineHook(BuildHookInterface[Any]):
    """Adds the library that `busload_kernels.cpu.build` makes, and the platform it is for to the wheel's name."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "kernels"))
        from busload_kernels.cpu import build
        from busload_kernels.cpu.errors import KernelError

        try:
            library = build.library_path()
        except KernelError as error:
            self.app.display_warning(f"this wheel carries no CPU engine, it is compiled on first use: {error}")
            return
        build_data["force_include"][str(library)] = f"busload_kernels/cpu/prebuilt/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
