// SPDX-License-Identifier: Apache-2.0

//! A model in device memory: CUDA VMM allocations, exported as file descriptors.
//!
//! ```text
//! loader                                     worker
//! WritableModel::allocate                    ImportedModel::import  (read-only)
//!   fill through its addresses                 addresses of tensors, for kernels
//! WritableModel::finish -> descriptors ----> descriptors from the weight-server
//! ```
//! The weight-server between them holds descriptors and never loads the driver. A loader that
//! copies a model from another GPU imports it ([`CopySource`]) and fills a [`WritableModel`].

mod imported_model;
mod model_copy;
mod writable_model;

#[cfg(test)]
mod tests;

pub use imported_model::{DeviceTensor, ImportModelError, ImportedModel};
pub use model_copy::{COPY_PINNED_BYTES, CopyModelError, CopyRoute, CopySource, TensorPlace};
pub use writable_model::{AllocateError, FinishError, WritableModel};
