//! Bringing a model to the device: what the loader does with bytes once it has read them.
//!
//! ```text
//! readers            ModelUpload, one thread
//! StagingRing::take         staging 0:  [carry][part] --checksum--> sums of the file's bytes
//!   file -> HostSlot --> staging 1:  [carry][part] --repack----> WritableModel
//!   StagingRing::take ...   staging 2:  ...                           --checksum--> sums of what kernels will read
//! ```
//! A part is what one slot brings: whole row tiles of one tensor, so that it can be repacked by itself. ChecksumKernels are of
//! pieces of 1 MiB, which parts cut anywhere: what is left of a piece is carried over in front of the next part.
//!
//! The bus is what bounds a load, so nothing comes between its copies: they are in one stream, and each slot has a staging
//! buffer of its own, free when the slot is. What is done with a part is in the stream of its buffer.
//!
//! [`sum_all`] computes the same checksums over any ranges, [`verify`] over a model that another process loaded.

mod ring;
mod sums;
mod upload;

pub use ring::{EDGE_BYTES, HostSlot, PART_BYTES, StagingRing, ring_bytes};
pub use sums::{sum_all, verify};
pub use upload::{ModelChecksums, ModelUpload, STAGING_BYTES, TensorDestination, TensorPart, UploadError};
