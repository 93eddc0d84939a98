// SPDX-License-Identifier: Apache-2.0

//! [`decode`] and [`encode`] for rows: check the lengths once, then convert block after block.

use crate::{
    BlockFormat, BlockQ2_K, BlockQ3_K, BlockQ4_0, BlockQ4_1, BlockQ4_K, BlockQ5_0, BlockQ5_1, BlockQ5_K,
    BlockQ6_K, BlockQ8_0, DType, SizeError, plain,
};
use half::{bf16, f16};

/// Why a row cannot be decoded, encoded or multiplied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    #[error(
        "no kernel for {dtype}: supported are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and Q2_K to Q6_K"
    )]
    Unsupported { dtype: DType },
    #[error(transparent)]
    Size(#[from] SizeError),
    #[error("{values} values of {dtype} take {expected} bytes, but the slice has {found}")]
    Bytes { dtype: DType, values: usize, expected: u64, found: usize },
    #[error("weights of {weight} need activations of {expected}, but got {found}")]
    Activation { weight: DType, expected: DType, found: DType },
}

/// Dequantizes one or several rows of `dtype`. The length of `out` is the number of values.
pub fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), RowError> {
    check_bytes(dtype, out.len(), bytes.len())?;
    match dtype {
        DType::F32 => plain::decode::<f32>(bytes, out),
        DType::F16 => plain::decode::<f16>(bytes, out),
        DType::BF16 => plain::decode::<bf16>(bytes, out),
        DType::Q4_0 => decode_blocks::<BlockQ4_0>(bytes, out),
        DType::Q4_1 => decode_blocks::<BlockQ4_1>(bytes, out),
        DType::Q5_0 => decode_blocks::<BlockQ5_0>(bytes, out),
        DType::Q5_1 => decode_blocks::<BlockQ5_1>(bytes, out),
        DType::Q8_0 => decode_blocks::<BlockQ8_0>(bytes, out),
        DType::Q2_K => decode_blocks::<BlockQ2_K>(bytes, out),
        DType::Q3_K => decode_blocks::<BlockQ3_K>(bytes, out),
        DType::Q4_K => decode_blocks::<BlockQ4_K>(bytes, out),
        DType::Q5_K => decode_blocks::<BlockQ5_K>(bytes, out),
        DType::Q6_K => decode_blocks::<BlockQ6_K>(bytes, out),
        _ => return Err(RowError::Unsupported { dtype }),
    }
    Ok(())
}

/// Quantizes finite values to `dtype`. The length of `out` must be the size of the values in bytes.
pub fn encode(dtype: DType, x: &[f32], out: &mut [u8]) -> Result<(), RowError> {
    check_bytes(dtype, x.len(), out.len())?;
    match dtype {
        DType::F32 => plain::encode::<f32>(x, out),
        DType::F16 => plain::encode::<f16>(x, out),
        DType::BF16 => plain::encode::<bf16>(x, out),
        DType::Q4_0 => encode_blocks::<BlockQ4_0>(x, out),
        DType::Q4_1 => encode_blocks::<BlockQ4_1>(x, out),
        DType::Q5_0 => encode_blocks::<BlockQ5_0>(x, out),
        DType::Q5_1 => encode_blocks::<BlockQ5_1>(x, out),
        DType::Q8_0 => encode_blocks::<BlockQ8_0>(x, out),
        DType::Q2_K => encode_blocks::<BlockQ2_K>(x, out),
        DType::Q3_K => encode_blocks::<BlockQ3_K>(x, out),
        DType::Q4_K => encode_blocks::<BlockQ4_K>(x, out),
        DType::Q5_K => encode_blocks::<BlockQ5_K>(x, out),
        DType::Q6_K => encode_blocks::<BlockQ6_K>(x, out),
        _ => return Err(RowError::Unsupported { dtype }),
    }
    Ok(())
}

pub(crate) fn check_bytes(dtype: DType, values: usize, found: usize) -> Result<(), RowError> {
    let expected = dtype.row_bytes(values as u64)?;
    if expected != found as u64 {
        return Err(RowError::Bytes { dtype, values, expected, found });
    }
    Ok(())
}

fn decode_blocks<B: BlockFormat>(bytes: &[u8], out: &mut [f32]) {
    for (bytes, out) in bytes.chunks_exact(size_of::<B>()).zip(out.chunks_exact_mut(B::LEN)) {
        bytemuck::pod_read_unaligned::<B>(bytes).decode(out);
    }
}

fn encode_blocks<B: BlockFormat>(x: &[f32], out: &mut [u8]) {
    for (x, out) in x.chunks_exact(B::LEN).zip(out.chunks_exact_mut(size_of::<B>())) {
        out.copy_from_slice(bytemuck::bytes_of(&B::encode(x)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_wrong_lengths_and_formats() {
        let mut out = [0.0; 32];
        assert_eq!(
            decode(DType::Q8_0, &[0; 33], &mut out),
            Err(RowError::Bytes { dtype: DType::Q8_0, values: 32, expected: 34, found: 33 })
        );
        assert!(matches!(decode(DType::Q4_K, &[0; 18], &mut out), Err(RowError::Size(_))));
        assert_eq!(
            decode(DType::MXFP4, &[0; 17], &mut out),
            Err(RowError::Unsupported { dtype: DType::MXFP4 })
        );
        assert_eq!(
            encode(DType::IQ4_NL, &out, &mut [0; 18]),
            Err(RowError::Unsupported { dtype: DType::IQ4_NL })
        );
    }
}
