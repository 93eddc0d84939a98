// SPDX-License-Identifier: Apache-2.0

//! A model in device memory: CUDA VMM allocations, exported as file descriptors.
//!
//! ```text
//! loader                                     worker
//! WritableModel::allocate                    ImportedModel::import  (read-only)
//!   fill through its addresses                 addresses of tensors, for kernels
//! WritableModel::finish -> descriptors ----> descriptors from the weight-server
//! ```
//! The weight-server between them holds descriptors and never loads the driver.

mod imported_model;
mod writable_model;

#[cfg(test)]
mod tests;

pub use imported_model::{DeviceTensor, ImportModelError, ImportedModel};
pub use writable_model::{AllocateError, FinishError, WritableModel};
