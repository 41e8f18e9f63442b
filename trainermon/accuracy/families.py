"""Which operations round in the same way: the family of an operation decides what error it is allowed.

An operation is looked up by the last part of its name without a trailing underscore: `svd` for `torch.linalg.svd`,
`add` for `add_`. A name that nobody has decided on is GENERIC.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable


class Family(enum.Enum):
    """How an operation rounds.

    Attributes:
        EXACT: It moves, selects, compares or counts: no bit may differ, but for the sign of zero.
        ROUNDED: It rounds once, to the type of its result.
        FUNCTION: A function of single elements, computed by an approximation.
        SPECIAL: The same of one that is hard to approximate: Bessel, gamma and zeta functions.
        CONTRACTION: Sums of products of two operands.
        SUM: Sums of its elements.
        REDUCTION: A function of sums: norms, softmax, losses.
        RESAMPLING: It interpolates between elements at computed positions.
        WINDOW: A window function, computed from numbers about 1.
        GENERIC: Anything else: the error follows from how it reacts to changes of its inputs.
        RANDOM: It draws random numbers.
        GAUGE: Its result is not unique, as the signs of singular vectors.
        UNDEFINED: It returns memory that was never written.
        GRADIENT: No operation's: what its backward gives.
    """

    EXACT = "exact"
    ROUNDED = "rounded"
    FUNCTION = "function"
    SPECIAL = "special"
    CONTRACTION = "contraction"
    SUM = "sum"
    REDUCTION = "reduction"
    RESAMPLING = "resampling"
    WINDOW = "window"
    GENERIC = "generic"
    RANDOM = "random"
    GAUGE = "gauge"
    UNDEFINED = "undefined"
    GRADIENT = "gradient"


_MEMBERS = {
    Family.EXACT: """
        H T abs absolute adaptive_max_pool1d adaptive_max_pool1d_with_indices adaptive_max_pool2d
        adaptive_max_pool2d_with_indices adaptive_max_pool3d adaptive_max_pool3d_with_indices adjoint alias
        alias_copy all amax amin aminmax any argmax argmin argsort argwhere as_strided as_strided_copy
        as_strided_scatter as_subclass as_tensor asarray atleast_1d atleast_2d atleast_3d bfloat16 bincount
        bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor block_diag bool
        broadcast_shapes broadcast_tensors broadcast_to bucketize byte cartesian_prod cat ccol_indices
        ccol_indices_copy cdouble ceil cfloat chalf channel_shuffle char chunk clamp clamp_max clamp_min clip clone
        coalesce col_indices col_indices_copy column_stack combinations complex concat concatenate conj
        conj_physical constant_pad_nd contiguous copy copysign count_nonzero cpu crow_indices crow_indices_copy cuda
        cummax cummin detach detach_copy diag diag_embed diagflat diagonal diagonal_copy diagonal_scatter double
        dsplit dstack embedding eq equal expand expand_as expand_copy eye fftshift fill fill_diagonal fix flatten
        flip fliplr flipud float floor fmax fmin fmod frac frexp from_numpy full full_like gather gcd ge greater
        greater_equal gt half hardshrink hardtanh hash_tensor heaviside hsplit hstack identity ifftshift imag index
        index_copy index_fill index_put index_select indices indices_copy int int_repr ipu is_complex
        is_floating_point is_nonzero is_same_size is_signed isfinite isin isinf isnan isneginf isposinf isreal item
        kthvalue lcm le less less_equal logical_and logical_not logical_or logical_xor long lt lu_unpack mH mT
        masked_fill masked_scatter masked_select max max_pool1d max_pool1d_with_indices max_pool2d
        max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d maximum
        median meshgrid min minimum mkldnn_max_pool2d mkldnn_max_pool3d mode moveaxis movedim msort mtia nan_to_num
        nanmedian narrow narrow_copy native_channel_shuffle ne neg negative new_full new_ones new_tensor new_zeros
        nextafter nonzero nonzero_static not_equal numpy one_hot ones ones_like pad permute permute_copy
        pixel_shuffle pixel_unshuffle positive put quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d
        ravel real relu relu6 repeat repeat_interleave reshape reshape_as resolve_conj resolve_neg roll rot90 round
        row_indices row_indices_copy row_stack scalar_tensor scatter searchsorted select select_copy select_scatter
        sgn short sign signbit slice slice_copy slice_inverse slice_scatter sort sparse_bsc_tensor sparse_bsr_tensor
        sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor sparse_mask split split_copy
        split_with_sizes split_with_sizes_copy squeeze squeeze_copy stack swapaxes swapdims t t_copy take
        take_along_dim tensor tensor_split threshold tile to to_dense to_mkldnn to_padded_tensor to_sparse
        to_sparse_bsc to_sparse_bsr to_sparse_coo to_sparse_csc to_sparse_csr tolist topk trace_copy transpose
        transpose_copy tril tril_indices triu triu_indices trunc type type_as unbind unbind_copy unflatten unfold
        unfold_copy unique unique_consecutive unravel_index unsafe_chunk unsafe_split unsafe_split_with_sizes
        unsqueeze unsqueeze_copy upsample_nearest values values_copy view view_as view_as_complex
        view_as_complex_copy view_as_real view_as_real_copy view_copy vsplit vstack where xpu zero zeros zeros_like
        __abs__ __and__ __bool__ __complex__ __contains__ __eq__ __float__ __ge__ __getitem__ __gt__ __iand__
        __ilshift__ __index__ __int__ __invert__ __ior__ __irshift__ __ixor__ __le__ __long__ __lshift__ __lt__
        __ne__ __neg__ __nonzero__ __or__ __pos__ __rand__ __reversed__ __rlshift__ __ror__ __rrshift__ __rshift__
        __rxor__ __setitem__ __xor__ _chunk_cat _unsafe_masked_index
    """,
    Family.ROUNDED: """
        add arange deg2rad div divide fftfreq fma leaky_relu mul multiply prelu rad2deg range reciprocal remainder
        rfftfreq rsub sqrt square sub subtract true_divide __add__ __div__ __iadd__ __idiv__ __imod__ __imul__
        __isub__ __itruediv__ __mod__ __mul__ __radd__ __rdiv__ __rmod__ __rmul__ __rsub__ __rtruediv__ __sub__
        __truediv__
    """,
    Family.FUNCTION: """
        acos acosh angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh celu
        chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w cos cosh elu
        entr erf erfc erfcx exp exp2 expit expm1 float_power gelu glu hardsigmoid hardswish hermite_polynomial_h
        hermite_polynomial_he hypot laguerre_polynomial_l ldexp legendre_polynomial_p lerp linspace log log10 log1p
        log2 log_ndtr log_sigmoid logaddexp logaddexp2 logit logsigmoid logspace mish ndtr polar pow rsqrt selu
        shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
        shifted_chebyshev_polynomial_w sigmoid silu sin sinc sinh softplus softshrink softsign tan tanh tanhshrink
        xlog1py xlogy __ipow__ __pow__ __rpow__
    """,
    Family.SPECIAL: """
        airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 digamma erfinv gammainc gammaincc gammaln i0 i0e i1 i1e
        igamma igammac lgamma modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1
        multigammaln mvlgamma ndtri polygamma psi scaled_modified_bessel_k0 scaled_modified_bessel_k1
        spherical_bessel_j0 zeta
    """,
    Family.CONTRACTION: """
        addbmm addmm addmv addr baddbmm bilinear bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d conv_transpose3d convolution cudnn_convolution cudnn_convolution_add_relu
        cudnn_convolution_relu cudnn_convolution_transpose dot dsmm einsum ger grouped_mm hsmm hspmm inner kron
        linear matmul miopen_convolution miopen_convolution_add_relu miopen_convolution_relu
        miopen_convolution_transpose miopen_depthwise_convolution mkldnn_convolution mm multi_dot mv outer saddmm
        sampled_addmm scaled_grouped_mm scaled_mm smm spmm sspaddmm tensordot vander vdot vecdot __matmul__
        __rmatmul__ _scaled_mm _scaled_mm_v2
    """,
    Family.SUM: """
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d cumsum
        embedding_bag fold index_add mean mkldnn_adaptive_avg_pool2d nanmean nansum scatter_add sum sum_to_size
        trace
    """,
    Family.REDUCTION: """
        batch_norm batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats
        batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats binary_cross_entropy
        binary_cross_entropy_with_logits cdist corrcoef cosine_embedding_loss cosine_similarity cov cross_entropy
        ctc_loss cudnn_batch_norm cumprod dist frobenius_norm gaussian_nll_loss group_norm hinge_embedding_loss
        huber_loss index_reduce instance_norm kl_div l1_loss layer_norm linear_cross_entropy local_response_norm
        log_softmax logcumsumexp logsumexp lp_pool1d lp_pool2d lp_pool3d margin_ranking_loss matrix_norm
        miopen_batch_norm miopen_ctc_loss mse_loss multi_head_attention_forward multi_margin_loss
        multilabel_margin_loss multilabel_soft_margin_loss native_batch_norm native_group_norm native_layer_norm
        native_norm nll_loss norm norm_except_dim normalize pairwise_distance pdist poisson_nll_loss prod renorm
        rms_norm scaled_dot_product_attention scatter_reduce segment_reduce smooth_l1_loss soft_margin_loss softmax
        softmin std std_mean triplet_margin_loss triplet_margin_with_distance_loss var var_mean vector_norm
        _batch_norm_with_update _efficient_attention_forward _flash_attention_forward _fused_rms_norm
        _native_batch_norm_legit _safe_softmax _segment_reduce _softmax_backward_data
    """,
    Family.RESAMPLING: """
        affine_grid affine_grid_generator cudnn_affine_grid_generator cudnn_grid_sampler grid_sample grid_sampler
        grid_sampler_2d grid_sampler_3d interpolate upsample upsample_bilinear _upsample_bilinear2d_aa
    """,
    Family.WINDOW: """
        bartlett bartlett_window blackman blackman_window gaussian general_cosine general_hamming hamming
        hamming_window hann hann_window kaiser kaiser_window nuttall
    """,
    Family.GENERIC: """
        addcdiv addcmul allclose apply cholesky cholesky_ex cholesky_inverse cholesky_solve choose_qparams_optimized
        cond cross cumulative_trapezoid dequantize det diff eigvals eigvalsh fake_quantize_per_channel_affine
        fake_quantize_per_tensor_affine fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation
        fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_quantize_weight
        fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix fft fft2 fftn floor_divide
        fused_moving_avg_obs_fake_quant gradient gru gru_cell hfft hfft2 hfftn histc histogram histogramdd
        householder_product ifft ifft2 ifftn ihfft ihfft2 ihfftn inv inv_ex inverse irfft irfft2 irfftn isclose
        istft ldl_solve logdet lstm lstm_cell lstsq lu_solve map map2 matrix_exp matrix_power matrix_rank
        max_pool2d_with_indices_backward miopen_rnn nanquantile native_dropout_backward nuclear_norm orgqr ormqr
        pinv pinverse quantile quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic
        quantized_batch_norm quantized_gru_cell quantized_lstm_cell quantized_rnn_relu_cell quantized_rnn_tanh_cell
        rfft rfft2 rfftn rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell slogdet solve solve_ex solve_triangular stft
        svdvals tensorinv tensorsolve trapezoid trapz triangular_solve __floordiv__ __ifloordiv__ __rfloordiv__
        _unsafe_masked_index_put_accumulate
    """,
    Family.RANDOM: """
        alpha_dropout bernoulli binomial cauchy dropout dropout1d dropout2d dropout3d exponential
        feature_alpha_dropout feature_dropout fractional_max_pool2d fractional_max_pool2d_with_indices
        fractional_max_pool3d fractional_max_pool3d_with_indices geometric gumbel_softmax log_normal multinomial
        native_dropout normal pca_lowrank poisson rand rand_like randint randint_like randn randn_like random
        randperm rrelu svd_lowrank uniform
    """,
    Family.GAUGE: """
        eig eigh geqrf ldl_factor ldl_factor_ex lobpcg lu lu_factor lu_factor_ex qr svd symeig
    """,
    Family.UNDEFINED: """
        empty empty_like empty_permuted empty_quantized empty_strided jiterator_2inputs_2outputs
        jiterator_4inputs_with_extra_args jiterator_binary jiterator_binary_return_by_ref jiterator_unary new
        new_empty new_empty_strided resize resize_as set
    """,
}  # fmt: skip


def _table(members: dict[Family, str]) -> dict[str, Family]:
    return {name: family for family, names in members.items() for name in names.split()}


_FAMILIES = _table(_MEMBERS)
# Torch's own functions in these namespaces have names of their own, too: `torch._C._linalg.linalg_svd`.
_IN_A_NAMESPACE = re.compile("^(linalg|special|fft)_")
# Where the last part alone would mislead.
_BY_FULL_NAME = {
    "signal.windows.exponential": Family.WINDOW,
    "signal.windows.cosine": Family.WINDOW,
}


def family_of(name: str) -> Family:
    """Return the family of the operation `name` (`linear`, `linalg.svd`, `add_`); GENERIC where nobody has decided.

    >>> family_of("torch.linalg.svd"), family_of("add_"), family_of("nn.functional.linear")
    (<Family.GAUGE: 'gauge'>, <Family.ROUNDED: 'rounded'>, <Family.CONTRACTION: 'contraction'>)
    """
    return _found(name) or Family.GENERIC


def undecided(names: Iterable[str]) -> list[str]:
    """Return those of `names` whose family nobody has decided."""
    return [name for name in names if _found(name) is None]


def _found(name: str) -> Family | None:
    name = name.removeprefix("torch.")
    if name in _BY_FULL_NAME:
        return _BY_FULL_NAME[name]
    parts = [part for part in name.split(".") if part not in ("default", "out")]
    last = _IN_A_NAMESPACE.sub("", parts[-1])
    return _FAMILIES.get(last) or (_FAMILIES.get(last.rstrip("_")) if not last.endswith("__") else None)
