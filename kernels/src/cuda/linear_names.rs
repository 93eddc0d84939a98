// SPDX-License-Identifier: Apache-2.0

//! Names of the kernels of linear_*.cu.

use quant::DType;

use super::abi::linear::{
    LinearMatmul, LinearMatvec, LinearNormMatvec, LinearNormMatvecPair, LinearSkinnyPair, MatmulShape,
};
use super::launch::{KernelName, kernel_name};

/// Calls a macro with the quantized types, each with its name in the names of kernels.
macro_rules! quant_types {
    ($names:ident $($more:tt)*) => {
        $names!(
            Q8_0 = "q8_0", Q4_0 = "q4_0", Q4_1 = "q4_1", Q5_0 = "q5_0", Q5_1 = "q5_1", Q2_K = "q2_k",
            Q3_K = "q3_k", Q4_K = "q4_k", Q5_K = "q5_k", Q6_K = "q6_k" $($more)*
        )
    };
}
pub(super) use quant_types;

/// `"q4_k"` becomes `kernel_name!("linear_q4_k", "matmul_q4_k_8")`.
macro_rules! of_type {
    ($type:literal, $kernel:literal, $suffix:literal) => {
        kernel_name!(concat!("linear_", $type), concat!($kernel, "_", $type, "_", $suffix))
    };
}

pub(super) fn matvec_name(dtype: DType) -> Option<KernelName<LinearMatvec>> {
    macro_rules! names {
        ($($dtype:ident = $type:literal),*) => {
            match dtype {
                $(DType::$dtype => Some(kernel_name!(concat!("linear_", $type), concat!("matvec_", $type))),)*
                _ => None,
            }
        };
    }
    quant_types!(names)
}

pub(super) fn norm_matvec_name(dtype: DType) -> Option<KernelName<LinearNormMatvec>> {
    macro_rules! names {
        ($($dtype:ident = $type:literal),*) => {
            match dtype {
                $(DType::$dtype => {
                    Some(kernel_name!(concat!("linear_", $type), concat!("norm_matvec_", $type)))
                })*
                _ => None,
            }
        };
    }
    quant_types!(names)
}

pub(super) fn matmul_name(dtype: DType, shape: MatmulShape) -> Option<KernelName<LinearMatmul>> {
    macro_rules! names {
        ($($dtype:ident = $type:literal),*; $($tokens:literal = $suffix:literal),*) => {
            names!(@types [$($dtype = $type),*] [$($tokens = $suffix),*])
        };
        (@types [$($dtype:ident = $type:literal),*] $tokens:tt) => {
            match dtype {
                $(DType::$dtype => names!(@tokens $type $tokens),)*
                _ => None,
            }
        };
        (@tokens $type:literal [$($tokens:literal = $suffix:literal),*]) => {
            match shape.tokens() {
                $($tokens => Some(of_type!($type, "matmul", $suffix)),)*
                _ => None,
            }
        };
    }
    quant_types!(names; 8 = "8", 16 = "16", 32 = "32", 128 = "128")
}

/// The kernel for matrices of the type `first`, and behind them of `second`.
pub(super) fn norm_matvec_pair_name(first: DType, second: DType) -> Option<KernelName<LinearNormMatvecPair>> {
    match (first, second) {
        (DType::Q4_K, DType::Q6_K) => Some(kernel_name!("linear_mixed", "norm_matvec_q4_k_q6_k")),
        (DType::Q5_K, DType::Q6_K) => Some(kernel_name!("linear_mixed", "norm_matvec_q5_k_q6_k")),
        _ => None,
    }
}

/// As [`norm_matvec_pair_name`], for as many tokens as `skinny_linear::capacity` says.
pub(super) fn skinny_pair_name(
    first: DType,
    second: DType,
    capacity: usize,
) -> Option<KernelName<LinearSkinnyPair>> {
    match (first, second, capacity) {
        (DType::Q4_K, DType::Q6_K, 8) => Some(kernel_name!("linear_mixed", "skinny_q4_k_q6_k_8")),
        (DType::Q4_K, DType::Q6_K, 16) => Some(kernel_name!("linear_mixed", "skinny_q4_k_q6_k_16")),
        (DType::Q5_K, DType::Q6_K, 8) => Some(kernel_name!("linear_mixed", "skinny_q5_k_q6_k_8")),
        (DType::Q5_K, DType::Q6_K, 16) => Some(kernel_name!("linear_mixed", "skinny_q5_k_q6_k_16")),
        _ => None,
    }
}
