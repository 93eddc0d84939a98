// SPDX-License-Identifier: Apache-2.0

//! [`WriteError`]: why a GGUF file could not be written.

use crate::limits::{
    ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAX_DIMS, MAX_KEY_BYTES, MAX_KEYS, MAX_TENSOR_NAME_BYTES, MAX_TENSORS,
};
use crate::tensor::TensorInfoError;
use std::io;

/// Why a file could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error(
        "key \"{key}\" is empty, longer than {MAX_KEY_BYTES} bytes, or exceeds the limit of {MAX_KEYS} keys"
    )]
    Key { key: String },
    #[error("{ALIGNMENT_KEY} cannot be set: files are written with the default of {DEFAULT_ALIGNMENT} bytes")]
    Alignment,
    #[error("key {key} is added twice")]
    DuplicateKey { key: String },
    #[error(
        "tensor name \"{name}\" is empty, longer than {MAX_TENSOR_NAME_BYTES} bytes, or exceeds the limit of {MAX_TENSORS} tensors"
    )]
    TensorName { name: String },
    #[error("tensor {name} is added twice")]
    DuplicateTensor { name: String },
    #[error("tensor {name} has {count} dimensions; it must have 1 to {MAX_DIMS}")]
    Dims { name: String, count: usize },
    #[error(transparent)]
    Tensor(#[from] TensorInfoError),
    #[error("the total size of the tensors up to {name} overflows 64 bits")]
    TotalBytes { name: String },
    #[error("{excess} bytes of data follow the last tensor")]
    TooMuchData { excess: u64 },
    #[error("the tensor data ends at byte {written} of {expected}")]
    TooLittleData { written: u64, expected: u64 },
    #[error("cannot write the file")]
    Io(#[from] io::Error),
}
