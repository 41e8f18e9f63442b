"""Stands for Apex's CUDA extension that adds a weight gradient to `main_grad` inside the GEMM."""

import sys
import types


def install():
    """Let Megatron find the extension; it imports it once."""
    extension = types.ModuleType("fused_weight_gradient_mlp_cuda")
    vars(extension).update(wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate)
    sys.modules[extension.__name__] = extension


def _accumulate(inputs, output_gradient, main_grad):
    main_grad.add_(output_gradient.t() @ inputs)
