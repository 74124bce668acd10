"""Builds pycomm._C, and the torch.distributed backend for the torch that is there.

pycomm._C gets its CUDA part if nvcc and a CUDA build of torch are there.

docs/how-to/build-options.md has the environment variables that it reads. Metadata: pyproject.toml.
"""

import os
import re
import runpy
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# torch's build helper reads CUDA_HOME when it is imported, and guesses it wrongly from a wrapper.


def find_cuda_home() -> str | None:
    """The CUDA toolkit's folder: CUDA_HOME, or the one nvcc belongs to, or /usr/local/cuda."""
    if home := os.environ.get("CUDA_HOME"):
        return home
    candidates = []
    if nvcc := shutil.which("nvcc"):
        real = Path(nvcc).resolve()
        candidates.append(real.parent.parent)
        head = real.read_bytes()[:4096]
        if head.startswith(b"#!"):  # a wrapper script that calls the real one
            candidates += [Path(p) for p in re.findall(r"(/\S+)/bin/nvcc", head.decode())]
    candidates.append(Path("/usr/local/cuda"))
    for home in candidates:
        if (home / "include" / "cuda_runtime.h").exists() and (home / "bin" / "nvcc").exists():
            return str(home)
    return None


if cuda_home := find_cuda_home():
    os.environ["CUDA_HOME"] = cuda_home
os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0;10.0+PTX")

import pybind11  # noqa: E402
import torch  # noqa: E402
from setuptools import setup  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402
from torch.utils.cpp_extension import (  # noqa: E402
    BuildExtension,
    CppExtension,
    include_paths,
)

ROOT = Path(__file__).parent
C10D = runpy.run_path("pycomm/_runtime/c10d_build.py")


def with_cuda() -> bool:
    """Whether to build for CUDA. A GPU need not be present."""
    wanted = os.environ.get("PYCOMM_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"PYCOMM_CUDA must be auto, 0 or 1, got {wanted!r}")
    if os.environ.get("FORCE_CUDA") == "1" and wanted == "auto":
        wanted = "1"
    if wanted == "0":
        return False
    nvcc = nvcc_version()
    theirs = torch.version.cuda
    if nvcc and theirs and nvcc.split(".")[0] == theirs.split(".")[0]:
        return True
    reason = (
        "CUDA needs nvcc and a CUDA build of torch, of the same major version: found nvcc "
        f"{nvcc} in {cuda_home}, and torch {torch.__version__} with CUDA {theirs}"
    )
    if wanted == "1":
        raise SystemExit(f"pycomm: PYCOMM_CUDA=1, but {reason}")
    if nvcc and theirs:
        print(f"pycomm: left out CUDA. {reason}")
    return False


def nvcc_version() -> str | None:
    """The version of the toolkit in CUDA_HOME, such as 13.0; None if there is no nvcc."""
    nvcc = Path(f"{cuda_home}/bin/nvcc")
    if not nvcc.exists():
        return None
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release (\d+\.\d+)", told)[1]


# torch's headers as system headers, so that only our own warnings count.
WARNINGS = [
    "-Wall",
    "-Wextra",
    *(["-Werror"] if os.environ.get("PYCOMM_STRICT") == "1" else []),
    *(f"-isystem{path}" for path in include_paths()),
]


def backend():  # type: ignore[no-untyped-def]
    """The torch.distributed backend: only for the minor version of torch that is there."""
    return CppExtension(
        f"pycomm.{C10D['module_name'](torch.__version__)}",
        sources=[f"csrc/{C10D['UNIT']}"],
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args=[*C10D["FLAGS"], *WARNINGS],
    )


# Folders whose sources are compiled as one file or two, because headers take most of the time.
# CMakeLists.txt knows the objects. Tests replace single objects of the other folders.
UNITED = {"bind": 2, "cpu/internode": 1, "cpu/memory": 1, "cpu/p2p": 1}


def united(folder: str, count: int) -> list[Path]:
    """Writes files that include a folder's sources, such as build/p2p_1.cpp."""
    sources = sorted(Path("csrc", folder).glob("*.cpp"))
    name = Path(folder).name
    units = [Path("build", f"{name}_{number + 1}.cpp") for number in range(count)]
    units[0].parent.mkdir(exist_ok=True)
    for number, unit in enumerate(units):
        text = "".join(
            f'#include "{source.relative_to("csrc")}"\n' for source in sources[number::count]
        )
        if not unit.exists() or unit.read_text() != text:
            unit.write_text(text)
    return units


def extension():  # type: ignore[no-untyped-def]
    """pycomm._C, which has the algorithms: for every torch from 2.11 on."""
    cuda = with_cuda()
    sources = [
        path
        for path in Path().glob("csrc/cpu/**/*.cpp")
        if str(path.parent.relative_to("csrc")) not in UNITED
    ]
    sources += [unit for folder in UNITED.items() for unit in united(*folder)]
    sources += Path("csrc/cuda").glob("**/*.cu" if cuda else "no_cuda.cpp")
    sources.append(Path("csrc/cuda/group.cpp"))  # of every build
    common = ["-std=c++20", "-O3"]
    host = [
        "-g0",
        "-fvisibility=hidden",
        *WARNINGS,
        "-fopenmp-simd",
        "-ffp-contract=off",
        "-fno-math-errno",  # so that square roots are instructions
    ]
    nvcc = [
        "--fmad=false",
        "-Xcompiler=-Wall,-Wextra,-fvisibility=hidden",
        "--expt-relaxed-constexpr",
    ]
    print(
        f"pycomm: torch {torch.__version__}, CUDA {cuda_home if cuda else 'not built'}"
        + (f", architectures {os.environ['TORCH_CUDA_ARCH_LIST']}" if cuda else "")
    )
    # The CUDA runtime is linked statically: the module also loads beside a CPU build of torch.
    return CppExtension(
        "pycomm._C",
        sources=sorted(map(str, sources)),
        include_dirs=[str(ROOT / "csrc"), pybind11.get_include()],
        extra_compile_args={"cxx": common + host, "nvcc": common + nvcc} if cuda else common + host,
        library_dirs=[f"{cuda_home}/lib64"] if cuda else [],
        libraries=["cudart_static", "rt", "dl", "pthread"] if cuda else [],
    )


OBJECTS = ROOT / "build" / "objects"


def install_for_cpp(prefix: Path) -> None:
    """Installs headers, the objects of csrc/cpu as a library, and a CMake package."""
    folder = ROOT / "build" / "cmake"
    shutil.rmtree(folder, ignore_errors=True)  # it may have headers that are no more
    tools = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    options = ["-GNinja", f"-DPYCOMM_OBJECTS={OBJECTS}", "-DCMAKE_INSTALL_LIBDIR=lib"]
    for step in (
        ["-S", ROOT, "-B", folder, *options],
        ["--build", folder],
        ["--install", folder, "--prefix", prefix.absolute()],
    ):
        subprocess.run(["cmake", *step], env=os.environ | {"PATH": tools}, check=True)


def backends_for_other_torches(headers: Path, package: Path) -> None:
    """Compiles the backend against each ``headers/VERSION/include``, as at its first use.

    All versions of torch have libraries of these names, so they link with the torch that is there;
    what that torch lacks, the loader finds in the one that runs.
    """
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    here = C10D["module_name"](torch.__version__)
    folders = {C10D["module_name"](folder.name): folder for folder in headers.iterdir()}

    def compile_module(name: str) -> None:
        command = C10D["compile_command"](folders[name], folders[name].name)
        command += C10D["link_options"](Path(torch.__file__).parent)
        subprocess.run([*command, "-o", package / f"{name}{suffix}"], check=True)

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count())) as pool:
        list(pool.map(compile_module, folders.keys() - {here}))


class BuildObjects(BuildExtension):
    """Keeps the objects, so that the next build compiles only what has changed."""

    def finalize_options(self) -> None:  # noqa: D102
        super().finalize_options()
        self.build_temp = str(OBJECTS)

    def run(self) -> None:  # noqa: D102
        for module in Path(self.build_lib, "pycomm").glob("_c10d_*"):
            module.unlink()  # of an earlier build, which may have been for another torch
        super().run()
        if not (self.inplace or self.editable_mode):
            install_for_cpp(Path(self.build_lib, "pycomm"))
            if headers := os.environ.get("PYCOMM_TORCH_HEADERS"):
                backends_for_other_torches(Path(headers), Path(self.build_lib, "pycomm"))


class BuildPackage(build_py):
    """Adds the backend's sources to a wheel, to be compiled where there is another torch."""

    def run(self) -> None:  # noqa: D102
        super().run()
        for name in C10D["sources"]() if not self.editable_mode else ():
            copy = Path(self.build_lib, "pycomm", "csrc", name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / "csrc" / name, copy)


setup(
    ext_modules=[extension(), backend()],
    cmdclass={"build_ext": BuildObjects, "build_py": BuildPackage},
)
