"""The lab's stand-in for SGLang's compiled CPU kernels: the same names, plain PyTorch, correct rather than fast.

Never for a GPU host, where `sgl_kernel` is SGLang's own compiled package: importing this one beside a GPU build of
PyTorch fails on purpose. It holds what EAGLE speculative decoding, multi-head latent attention and mixture-of-experts
models call on the CPU in the pinned SGLang; anything else is missing, and fails at its import or call.
"""

from __future__ import annotations

import torch

if torch.version.cuda is not None or torch.version.hip is not None:
    raise ImportError(
        "this sgl_kernel is the lab's stand-in for CPUs, and PyTorch here is a GPU build:"
        " uninstall sglang-cpu-lab and install sglang-kernel"
    )

from sgl_kernel.attention import decode_attention, extend_attention, register
from sgl_kernel.cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
)
from sgl_kernel.speculation import (
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

__version__ = "0.1.0+lab"
__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention",
    "extend_attention",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

_library = register()  # torch.ops.sgl_kernel.* live as long as this object
