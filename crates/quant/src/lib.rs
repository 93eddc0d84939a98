// SPDX-License-Identifier: Apache-2.0

//! ggml tensor types: sizes, quantization, dequantization and dot products.
//!
//! [`DType`] has the id and the size of every ggml type. A format with kernels also has a struct of
//! its block that implements [`BlockFormat`]; the fields have the order and the size of the file.
//! Rows are contiguous. Bytes may start at any address.
//!
//! A kernel quantizes activations to the format that [`DType::activation`] names, see
//! [`Activations`]. [`dot`] is the scalar dot product that tests compare kernels with.
//!
//! ```
//! use quant::{Activations, DType, decode, dot, encode};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Quantize a row of 256 weights to Q4_K: one block of 144 bytes.
//! let row: Vec<f32> = (0..256).map(|i| (i as f32 / 40.0).sin()).collect();
//! let mut bytes = vec![0; DType::Q4_K.row_bytes(256)? as usize];
//! encode(DType::Q4_K, &row, &mut bytes)?;
//! assert_eq!(bytes.len(), 144);
//!
//! // Dequantize the row.
//! let mut decoded = [0.0; 256];
//! decode(DType::Q4_K, &bytes, &mut decoded)?;
//! assert!(row.iter().zip(&decoded).all(|(a, b)| (a - b).abs() < 0.1));
//!
//! // Multiply the row with activations, as a kernel does: Q4_K weights need Q8_K activations.
//! assert_eq!(DType::Q4_K.activation(), Some(DType::Q8_K));
//! let activations = Activations::for_weight(DType::Q4_K, &[0.5; 256])?.ok_or("no kernel")?;
//! let product = dot(DType::Q4_K, &bytes, &activations)?;
//! assert!((product - 0.5 * decoded.iter().sum::<f32>()).abs() < 0.05);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod activation;
mod block;
mod dot;
mod dtype;
mod half_bytes;
mod kquants;
pub mod layout;
mod legacy;
mod plain;
mod row;

pub use activation::{
    Activations, BlockQ8_1, BlockQ8_K, quantize_row_q8_0, quantize_row_q8_1, quantize_row_q8_k, saturated_f16,
};
pub use block::BlockFormat;
pub use dot::dot;
pub use dtype::{DType, SizeError, UnknownDType};
pub use half_bytes::HalfBytes;
pub use kquants::{BlockQ2_K, BlockQ3_K, BlockQ4_K, BlockQ5_K, BlockQ6_K};
pub use legacy::{BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0};
pub use row::{RowError, decode, encode};
