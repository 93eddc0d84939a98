// SPDX-License-Identifier: Apache-2.0

//! Uploads a model to the device: the loader hands over bytes that it has read, and this module
//! copies, checks and repacks them.
//!
//! ```text
//! readers                    ModelUpload, one thread
//! StagingRing::take          staging 0: [carry][part] --checksum--> checksums of the file's bytes
//!   file -> HostSlot ------> staging 1: [carry][part] --repack----> WritableModel
//! StagingRing::take ...      staging 2: ...                             |
//!                                                                    checksum
//!                                                                       v
//!                                                        checksums of the tiles
//! ```
//!
//! A part is the content of one slot: whole row tiles of one tensor, so that the part can be
//! repacked alone. A checksum covers a piece of 1 MiB, and a part may end inside a piece. In that
//! case, the rest of the piece is carried over to the front of the next part.
//!
//! Where the device reads host memory (`DeviceInfo::reads_host_memory`), there are no staging
//! buffers: kernels read the part in its slot, and the CPU carries bytes over.
//!
//! The bus limits the speed of a load, so nothing may delay its copies. All copies are in one
//! stream, and each slot has its own staging buffer. Checksum and repack work on a part runs in the
//! stream of its staging buffer.
//!
//! [`sum_all`] computes the same checksums over any ranges, [`verify`] over a model that another
//! process loaded, and [`sum_model`] over one that was copied from another device.

mod part_memory;
mod ring;
mod sums;
mod targets;
mod upload;

pub use ring::{EDGE_BYTES, HostSlot, PART_BYTES, StagingRing, ring_bytes};
pub use sums::{sum_all, verify};
pub use targets::{TensorDestination, sum_model};
pub use upload::{ModelChecksums, ModelUpload, TensorPart, UploadError};
