// SPDX-License-Identifier: Apache-2.0

//! [`dot`]: the scalar dot product of a weight row and an activation row. Tests compare kernels
//! with it.

use crate::{
    Activations, BlockFormat, BlockQ2_K, BlockQ3_K, BlockQ4_0, BlockQ4_1, BlockQ4_K, BlockQ5_0, BlockQ5_1,
    BlockQ5_K, BlockQ6_K, BlockQ8_0, DType, RowError, plain::Plain, row,
};
use half::{bf16, f16};

/// The dot product of a weight row and activations of the format that [`DType::activation`] names.
///
/// Quantized types use exact integers inside a block and add the blocks in order in f32. F32, F16
/// and BF16 use f64 products and round once at the end.
pub fn dot(weight: DType, bytes: &[u8], activations: &Activations) -> Result<f32, RowError> {
    use Activations as A;
    row::check_bytes(weight, activations.values(), bytes.len())?;
    Ok(match (weight, activations) {
        (DType::F32, A::F32(a)) => dot_plain::<f32>(bytes, a.iter().map(|&a| f64::from(a))),
        (DType::F16, A::F16(a)) => dot_plain::<f16>(bytes, a.iter().map(|&a| f64::from(a))),
        (DType::BF16, A::BF16(a)) => dot_plain::<bf16>(bytes, a.iter().map(|&a| f64::from(a))),
        (DType::Q4_0, A::Q8_0(a)) => dot_blocks::<BlockQ4_0>(bytes, a),
        (DType::Q5_0, A::Q8_0(a)) => dot_blocks::<BlockQ5_0>(bytes, a),
        (DType::Q8_0, A::Q8_0(a)) => dot_blocks::<BlockQ8_0>(bytes, a),
        (DType::Q4_1, A::Q8_1(a)) => dot_blocks::<BlockQ4_1>(bytes, a),
        (DType::Q5_1, A::Q8_1(a)) => dot_blocks::<BlockQ5_1>(bytes, a),
        (DType::Q2_K, A::Q8_K(a)) => dot_blocks::<BlockQ2_K>(bytes, a),
        (DType::Q3_K, A::Q8_K(a)) => dot_blocks::<BlockQ3_K>(bytes, a),
        (DType::Q4_K, A::Q8_K(a)) => dot_blocks::<BlockQ4_K>(bytes, a),
        (DType::Q5_K, A::Q8_K(a)) => dot_blocks::<BlockQ5_K>(bytes, a),
        (DType::Q6_K, A::Q8_K(a)) => dot_blocks::<BlockQ6_K>(bytes, a),
        _ => {
            return Err(match weight.activation() {
                Some(expected) => RowError::Activation { weight, expected, found: activations.dtype() },
                None => RowError::Unsupported { dtype: weight },
            });
        }
    })
}

fn dot_plain<W: Plain>(bytes: &[u8], activations: impl Iterator<Item = f64>) -> f32 {
    let weights = bytes.chunks_exact(W::BYTES).map(W::read);
    weights.zip(activations).map(|(w, a)| f64::from(w) * a).sum::<f64>() as f32
}

fn dot_blocks<B: BlockFormat>(bytes: &[u8], activations: &[B::Activation]) -> f32 {
    let blocks = bytes.chunks_exact(size_of::<B>()).map(bytemuck::pod_read_unaligned::<B>);
    blocks.zip(activations).fold(0.0, |sum, (block, activation)| sum + block.dot(activation))
}
