"""A CUDA device that is not there, for compiling: torch traces and Triton compiles for it, and nothing can run.

`install` replaces what torch and Triton ask the driver for. Kernels that Inductor makes are compiled to PTX and by
``ptxas`` to machine code, and what ``ptxas`` reports of each is kept in `kernels`. This patches torch in its own
process, which does nothing else. Seen to work with torch 2.14.1 and Triton 3.8.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent

#: Of an H200, as torch and Triton ask for it.
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32, max_threads_per_block=1024,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, total_memory=150_000_000_000,
    L2_cache_size=60 << 20, clock_rate=1_980_000, memory_clock_rate=3_201_000, memory_bus_width=6144, uuid="0",
    is_integrated=0, is_multi_gpu_board=0,
)  # fmt: skip


class Kernel(NamedTuple):
    """What the compiler says of a kernel; `shared` and `spilled` in bytes, `spilled` of one thread."""

    name: str
    registers: int
    spilled: int
    shared: int
    wgmma: int
    warps: int
    seconds: float


kernels: list[Kernel] = []


def restart() -> None:
    """Start this process again, with stand-ins for the driver and for the number of devices loaded before torch."""
    if "SPANWISE_PRETENDS" not in os.environ:
        stub = _built(HERE / "driver.cpp", ["-Wl,-soname,libcuda.so.1"])
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {
            "LD_PRELOAD": str(stub), "SPANWISE_PRETENDS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"
        })  # fmt: skip


def load_guard() -> None:
    """Register a guard of CUDA devices that does nothing, which torch needs to trace for one."""
    import torch

    folder = Path(torch.__file__).parent
    ctypes.CDLL(str(_built(HERE / "device.cpp", [f"-I{folder}/include", f"-L{folder}/lib", "-lc10"])))


def _built(source: Path, options: list[str]) -> Path:
    """The library of a C++ file, kept beside the other temporary files."""
    library = Path(tempfile.gettempdir(), f"spanwise-{source.stem}-{sys.version_info[1]}.so")
    command = ["g++", "-shared", "-fPIC", "-O1", "-std=c++20", str(source), "-o", str(library), *options]
    subprocess.run(command, check=True)
    return library


def install() -> None:
    """Make torch and Triton of this process believe in the device."""
    _torch_cuda()
    load_guard()
    _inductor()
    _triton()


def _torch_cuda() -> None:
    import torch
    import torch._dynamo.device_interface as interface
    import torch._subclasses.fake_tensor as fake

    # A function for each name, because Dynamo tells functions apart by identity.
    def always(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    found = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": PROPERTIES,
        "get_device_capability": (9, 0), "get_device_name": PROPERTIES.name, "is_initialized": True,
        "is_bf16_supported": True, "get_arch_list": ["sm_90"], "is_current_stream_capturing": False,
        "get_rng_state": torch.zeros(16).byte(), "_exchange_device": 0, "_maybe_exchange_device": 0,
        "_lazy_init": None, "synchronize": None, "set_rng_state": None, "set_device": None,
    }  # fmt: skip
    for name, value in found.items():
        setattr(torch.cuda, name, always(value))
    found = {"exchangeDevice": 0, "maybeExchangeDevice": 0, "getDevice": 0, "getCurrentRawStream": 0}
    found |= {"setDevice": None, "getDeviceCount": 1, "isCurrentStreamCapturing": False}
    for name, value in found.items():
        setattr(torch._C, f"_cuda_{name}", always(value))
    found = {
        "get_device_properties": PROPERTIES, "get_compute_capability": 90, "current_device": 0, "is_available": True,
        "device_count": 1, "synchronize": None, "get_raw_stream": 0, "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
    }  # fmt: skip
    for name, value in found.items():
        setattr(interface.CudaInterface, name, staticmethod(always(value)))
    for name, value in {"get_device_properties": PROPERTIES, "current_device": 0, "set_device": None}.items():
        setattr(interface.CudaInterface.Worker, name, staticmethod(always(value)))
    fake.init_gpu_context = always(None)


def _inductor() -> None:
    import torch._functorch.config as functorch_config
    import torch._inductor.async_compile as async_compile
    import torch._inductor.config as config
    import torch._inductor.fx_passes.joint_graph as joint_graph
    import torch._inductor.fx_passes.post_grad as post_grad
    import torch._inductor.runtime.triton_helpers as helpers

    config.compile_threads = 1
    config.joint_graph_constant_folding = False  # would run operators
    for name in ("use_static_cuda_launcher", "use_static_triton_launcher"):
        if hasattr(config, name):
            setattr(config, name, False)
    # A backward is compiled with its forward, because the forward cannot run.
    functorch_config.force_non_lazy_backward_lowering = True
    joint_graph.lazy_init = post_grad.lazy_init = lambda *a, **k: None
    helpers.set_driver_to_gpu = lambda: None
    async_compile.AsyncCompile.triton = _compile


def _triton() -> None:
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    limits = {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
            get_current_stream=lambda d=None: 0, get_device_interface=lambda: torch.cuda,
            get_active_torch_device=lambda: torch.device("cuda", 0), is_active=lambda: True,
            get_benchmarker=lambda: None, assemble_tensormap_to_arg=lambda *a: None,
            map_python_to_cpp_type=lambda kind: "int", launcher_cls=None,
            utils=types.SimpleNamespace(get_device_properties=lambda d: limits),
        )
    )  # fmt: skip


def _compile(self: Any, name: str, source: str, **_: Any) -> Any:
    """In place of Inductor's: compile every configuration, keep the figures, and refuse to run."""
    from torch._inductor.codecache import PyCodeCache

    kernel = getattr(PyCodeCache.load(source), name)
    for choice in kernel.configs:
        begin = time.monotonic()
        made = kernel._precompile_config(choice).kernel
        ptx = made.asm["ptx"]
        registers, spilled = _ptxas(ptx)
        seconds, wgmma = time.monotonic() - begin, ptx.count("wgmma.mma_async")
        kernels.append(Kernel(name, registers, spilled, made.metadata.shared, wgmma, made.metadata.num_warps, seconds))

    def run(*_: Any, **__: Any) -> None:
        raise RuntimeError("there is no device")

    return types.SimpleNamespace(run=run)


def _ptxas(ptx: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills."""
    import triton.backends.nvidia as nvidia

    tool = next(Path(nvidia.__file__).parent.rglob("ptxas"))
    target = re.search(r"\.target (\w+)", ptx)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(tool), "-v", f"--gpu-name={target[1] if target else 'sm_90a'}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used, spills = re.search(r"Used (\d+) registers", report), re.search(r"(\d+) bytes spill stores", report)
    return int(used[1]) if used else 0, int(spills[1]) if spills else 0
