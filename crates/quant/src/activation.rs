// SPDX-License-Identifier: Apache-2.0

//! [`Activations`]: activation rows quantized for a dot product, to Q8_0 or Q8_1 in blocks of 32
//! values or Q8_K in blocks of 256.
//!
//! Kernels must match these functions. They follow ggml's scalar code: Q8_K rounds halves to even,
//! the others away from zero.

use crate::legacy::quantize_q8;
use crate::{BlockFormat, BlockQ8_0, DType, HalfBytes, SizeError};
use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};

/// y = q d. `s` is d times the sum of the quants; the dot product multiplies a weight's minimum
/// with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ8_1 {
    pub d: HalfBytes,
    pub s: HalfBytes,
    pub qs: [i8; 32],
}

/// y = q d with an f32 scale. The scale is negative if the value of largest magnitude is positive.
/// `bsums[k]` is the sum of quants 16k to 16k + 15.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ8_K {
    pub d: f32,
    pub qs: [i8; 256],
    pub bsums: [i16; 16],
}

/// An activation row in the format that the kernels of a weight type read.
#[expect(non_camel_case_types, reason = "names as ggml writes them")]
#[derive(Clone, Debug, PartialEq)]
pub enum Activations {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    Q8_0(Vec<BlockQ8_0>),
    Q8_1(Vec<BlockQ8_1>),
    Q8_K(Vec<BlockQ8_K>),
}

impl Activations {
    /// Converts a row for weights of type `weight`. `None` if no kernel reads that type.
    pub fn for_weight(weight: DType, x: &[f32]) -> Result<Option<Self>, SizeError> {
        let Some(format) = weight.activation() else { return Ok(None) };
        format.row_bytes(x.len() as u64)?;
        Ok(match format {
            DType::F32 => Some(Self::F32(x.to_vec())),
            DType::F16 => Some(Self::F16(x.iter().map(|&x| saturated_f16(x)).collect())),
            DType::BF16 => Some(Self::BF16(x.iter().map(|&x| bf16::from_f32(x)).collect())),
            DType::Q8_0 => Some(Self::Q8_0(quantize_row_q8_0(x)?)),
            DType::Q8_1 => Some(Self::Q8_1(quantize_row_q8_1(x)?)),
            DType::Q8_K => Some(Self::Q8_K(quantize_row_q8_k(x)?)),
            _ => None,
        })
    }

    pub fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::BF16(_) => DType::BF16,
            Self::Q8_0(_) => DType::Q8_0,
            Self::Q8_1(_) => DType::Q8_1,
            Self::Q8_K(_) => DType::Q8_K,
        }
    }

    /// Number of values.
    pub fn values(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::F16(x) => x.len(),
            Self::BF16(x) => x.len(),
            Self::Q8_0(blocks) => 32 * blocks.len(),
            Self::Q8_1(blocks) => 32 * blocks.len(),
            Self::Q8_K(blocks) => 256 * blocks.len(),
        }
    }
}

/// The nearest f16, ties to even. Values beyond the range become the largest f16 of their sign, so
/// that no finite activation becomes infinite.
pub fn saturated_f16(x: f32) -> f16 {
    f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}

/// Quantizes blocks of 32 values: d = largest magnitude / 127, halves round away from zero.
pub fn quantize_row_q8_0(x: &[f32]) -> Result<Vec<BlockQ8_0>, SizeError> {
    DType::Q8_0.row_bytes(x.len() as u64)?;
    Ok(x.chunks_exact(32).map(BlockQ8_0::encode).collect())
}

/// As [`quantize_row_q8_0`], with a sum per block. The sum uses the scale before it is rounded to
/// f16.
pub fn quantize_row_q8_1(x: &[f32]) -> Result<Vec<BlockQ8_1>, SizeError> {
    DType::Q8_1.row_bytes(x.len() as u64)?;
    Ok(x.chunks_exact(32)
        .map(|x| {
            let (d, qs) = quantize_q8(x);
            let sum: i32 = qs.iter().map(|&q| i32::from(q)).sum();
            BlockQ8_1 { d: HalfBytes::from_f32(d), s: HalfBytes::from_f32(sum as f32 * d), qs }
        })
        .collect())
}

/// Quantizes blocks of 256 values: the value of largest magnitude becomes -127, halves round to
/// even, -128 does not occur.
pub fn quantize_row_q8_k(x: &[f32]) -> Result<Vec<BlockQ8_K>, SizeError> {
    DType::Q8_K.row_bytes(x.len() as u64)?;
    Ok(x.chunks_exact(256).map(quantize_q8_k).collect())
}

fn quantize_q8_k(x: &[f32]) -> BlockQ8_K {
    let mut block = BlockQ8_K { d: 0.0, qs: [0; 256], bsums: [0; 16] };
    let max = x.iter().fold(0.0_f32, |max, &x| if x.abs() > max.abs() { x } else { max });
    if max == 0.0 {
        return block;
    }
    let inverse = -127.0 / max;
    for (q, x) in block.qs.iter_mut().zip(x) {
        *q = (inverse * x).round_ties_even().min(127.0) as i8;
    }
    for (sum, qs) in block.bsums.iter_mut().zip(block.qs.chunks_exact(16)) {
        *sum = qs.iter().map(|&q| i16::from(q)).sum();
    }
    block.d = 1.0 / inverse;
    block
}
