"""Where tritonserver is and what it needs to run our Python backend. Starts nothing.

Two kinds   the `nvidia-pytriton` wheel of this environment: server, Python backend and one stub per Python version, which have to
            be put together in a directory of their own; or a `tritonserver` on PATH, as in NVIDIA's container, used as it is
Traps       the stub must lie in BACKENDS/python; it embeds the first `python3` on PATH and finds libpython through
            LD_LIBRARY_PATH; PYTHONPATH is ignored
Raises      ServerError
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import ServerError

STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class ServerInstallation:
    """`backend` holds the Python backend's files and `stub` fits this interpreter; both None: the server has its own."""

    binary: Path
    backend: Path | None = None
    stub: Path | None = None
    caches: Path | None = None

    def prepare(self, directory: Path) -> list[str]:
        """Lay out a backend directory below `directory` and return the server's arguments for it."""
        arguments = []
        if self.backend is not None and self.stub is not None:
            python = directory / "backends" / "python"
            python.mkdir(parents=True)
            for file in (*self.backend.iterdir(), self.stub):
                if file.is_file():
                    (python / file.name).symlink_to(file)
            arguments.append(f"--backend-directory={python.parent}")
        if self.caches is not None:
            arguments.append(f"--cache-directory={self.caches}")
        return arguments

    def environment(self) -> dict[str, str]:
        """This process's environment, such that the stub runs this interpreter."""
        environment = dict(os.environ)
        environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environment.get("PATH", os.defpath)])
        library_dir = sysconfig.get_config_var("LIBDIR")
        if library_dir:
            paths = [library_dir, environment.get("LD_LIBRARY_PATH", "")]
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
        return environment


def find_server() -> ServerInstallation:
    wheel = importlib.util.find_spec("pytriton")
    if wheel is not None and wheel.origin is not None:
        return _from_wheel(Path(wheel.origin).parent / "tritonserver")
    binary = shutil.which("tritonserver")
    if binary is not None:
        return ServerInstallation(Path(binary).resolve())
    remedy = "install it with `pip install 'forgeline[triton]'`"
    if sys.version_info >= (3, 13):
        remedy = "use Python 3.10 to 3.12, for which `pip install 'forgeline[triton]'` brings it"
    raise ServerError(
        f"tritonserver was not found, neither in this Python environment nor on PATH; {remedy}, "
        "or run inside the image built from the Dockerfile"
    )


def _from_wheel(root: Path) -> ServerInstallation:
    binary = root / "bin" / "tritonserver"
    if not binary.is_file():
        raise ServerError(f"nvidia-pytriton is installed without its server: {binary} is missing; reinstall nvidia-pytriton")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stubs = root / "python_backend_stubs"
    stub = stubs / version / STUB
    if not stub.is_file():
        known = ", ".join(sorted(path.name for path in stubs.iterdir())) if stubs.is_dir() else "none"
        raise ServerError(f"nvidia-pytriton has no Python-backend stub for Python {version} (it has {known}); use one of those")
    return ServerInstallation(binary, root / "backends" / "python", stub, root / "caches")
