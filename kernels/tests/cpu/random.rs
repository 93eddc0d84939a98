// SPDX-License-Identifier: Apache-2.0

//! Weights made of random numbers.

use bytes::Bytes;
use quant::DType;

use crate::split_mix::SplitMix64;

/// Types with kernels.
pub(crate) const DTYPES: [DType; 13] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];

/// Rows of values that were encoded, at an odd address.
pub(crate) fn encoded(random: &mut SplitMix64, dtype: DType, cols: usize, rows: usize) -> Bytes {
    let values = random.values(cols * rows);
    let mut bytes = vec![0; 1 + dtype.row_bytes((cols * rows) as u64).unwrap() as usize];
    quant::encode(dtype, &values, &mut bytes[1..]).unwrap();
    Bytes::from(bytes).slice(1..)
}
