//! Element and block formats of tensors: sizes, decode, encode, and the integer arithmetic of their dot products.
//!
//! [`DType`] knows every ggml type by id and size. A format that can be computed with has a plain struct of its block
//! ([`Block`]), whose fields stand as they stand in the file; everything else here is made of these structs. Rows are
//! contiguous, and bytes may start at any address.
//!
//! Activations are quantised to what [`DType::activation`] names ([`Activations`]); [`dot`] is the slow truth that
//! kernels are compared with.

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
    Activations, BlockQ8_1, BlockQ8_K, quantize_row_q8_0, quantize_row_q8_1, quantize_row_q8_k,
};
pub use block::Block;
pub use dot::dot;
pub use dtype::{DType, SizeError, UnknownDType};
pub use half_bytes::HalfBytes;
pub use kquants::{BlockQ2_K, BlockQ3_K, BlockQ4_K, BlockQ5_K, BlockQ6_K};
pub use legacy::{BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0};
pub use row::{RowError, decode, encode};
