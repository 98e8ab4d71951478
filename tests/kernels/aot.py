"""Compiles every fused kernel ahead of time; prints one JSON line a kernel with registers and spills."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ropelens_kernels.fused import activation, entropy

SIZES = {"WIDTH": 64, "BANDS": 8, "M": 16, "D": 64, "WIDE": 64, "NODES": 13, "POINTS": 16}
SIZES |= {"QUERIES": entropy.QUERIES, "KEYS": entropy.KEYS}
FLOATS = ("q", "k", "x", "out", "sinks", "nodes", "steps", "drop", "residual")
KERNELS = {
    "pairs": (activation.pairs_kernel, {"NEAR": False}),
    "near": (activation.pairs_kernel, {"NEAR": True}),
    "harmonics": (activation.harmonics_kernel, {}),
    "entropy": (entropy.entropy_kernel, {"SINK": False}),
    "entropy with sinks": (entropy.entropy_kernel, {"SINK": True}),
}
TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}


def main():
    """Compiles for each target."""
    ptxas = next(Path(triton.__file__).parent.rglob("bin/ptxas*"))
    for name, (kernel, flags) in KERNELS.items():
        constants = {n: v for n, v in (SIZES | flags).items() if n in kernel.arg_names}
        signature, hints = {}, {}
        for index, arg in enumerate(kernel.arg_names):
            if arg in constants:
                signature[arg] = "constexpr"
            elif arg in FLOATS:
                signature[arg], hints[(index,)] = "*fp32", [["tt.divisibility", 16]]
            elif arg in ("real", "visible"):
                signature[arg] = "*u8" if arg == "real" else "*i32"
            elif arg == "scale":
                signature[arg] = "fp32"
            else:
                signature[arg] = "i32"
                if arg.startswith(("q_", "k_", "x_")):
                    hints[(index,)] = [["tt.divisibility", 16]]
        for target, gpu in TARGETS.items():
            options = {"num_warps": entropy.WARPS} if kernel is entropy.entropy_kernel else {}
            source = ASTSource(kernel, signature, constants, hints)
            built = triton.compile(source, target=gpu, options=options)
            line = {"kernel": name, "target": target, "shared": built.metadata.shared}
            if target == "sm_90":
                with tempfile.TemporaryDirectory() as folder:
                    ptx = Path(folder) / "k.ptx"
                    ptx.write_text(built.asm["ptx"])
                    command = [
                        str(ptxas),
                        "-v",
                        "-arch=sm_90a",
                        str(ptx),
                        "-o",
                        str(Path(folder) / "k.cubin"),
                    ]
                    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
                line["registers"] = int(re.search(r"Used (\d+) registers", log)[1])
                line["spills"] = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
            else:
                text = built.asm["amdgcn"]
                line["registers"] = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
                line["spills"] = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
