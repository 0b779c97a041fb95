"""Matrix products, scale layouts, index logits and the fused expert layer."""

from deepinfer_neuron.compat.vendor.deep_gemm import locality_domain
from deepinfer_neuron.compat.vendor.deep_gemm.gemm import (
    bf16_gemm_nt,
    cublaslt_gemm_nt,
    fp8_einsum,
    fp8_fp4_gemm_nt,
    m_grouped_bf16_gemm_nt_contiguous,
    m_grouped_bf16_gemm_nt_masked,
    m_grouped_fp8_fp4_gemm_nt_contiguous,
    m_grouped_fp8_fp4_gemm_nt_masked,
    tf32_hc_prenorm_gemm,
)
from deepinfer_neuron.compat.vendor.deep_gemm.layout import (
    get_mk_alignment_for_contiguous_layout,
    get_theoretical_mk_alignment_for_contiguous_layout,
    get_tma_aligned_size,
    set_mk_alignment_for_contiguous_layout,
    transform_sf_into_required_layout,
)
from deepinfer_neuron.compat.vendor.deep_gemm.logits import (
    fp8_fp4_mqa_logits,
    fp8_fp4_paged_mqa_logits,
    fp8_fp4_paged_sparse_mqa_logits,
    fp8_fp4_sparse_mqa_logits,
    get_paged_mqa_logits_metadata,
    get_paged_sparse_mqa_logits_metadata,
    get_sparse_mqa_logits_metadata,
)
from deepinfer_neuron.compat.vendor.deep_gemm.mega_moe import (
    SymmBuffer,
    bf16_mega_gate,
    bf16_mega_moe,
    fp8_fp4_mega_moe,
    get_block_m_for_mega_moe,
    transform_weights_for_mega_moe,
)
from deepinfer_neuron.compat.vendor.knobs import (
    get_num_sms,
    set_num_sms,
    set_pdl,
    use_deterministic_algorithms,
)

__all__ = [
    "SymmBuffer",
    "bf16_gemm_nt",
    "bf16_mega_gate",
    "bf16_mega_moe",
    "cublaslt_gemm_nt",
    "fp8_einsum",
    "fp8_fp4_gemm_nt",
    "fp8_fp4_mega_moe",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_fp4_paged_sparse_mqa_logits",
    "fp8_fp4_sparse_mqa_logits",
    "get_block_m_for_mega_moe",
    "get_mk_alignment_for_contiguous_layout",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "get_paged_sparse_mqa_logits_metadata",
    "get_sparse_mqa_logits_metadata",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "locality_domain",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "set_mk_alignment_for_contiguous_layout",
    "set_num_sms",
    "set_pdl",
    "tf32_hc_prenorm_gemm",
    "transform_sf_into_required_layout",
    "transform_weights_for_mega_moe",
    "use_deterministic_algorithms",
]
