// SPDX-License-Identifier: Apache-2.0

//! Uploads a model: what the loader does with bytes once it has read them.
//!
//! ```text
//! readers                    ModelUpload, one thread
//! StagingRing::take          staging 0: [carry][part] --checksum--> checksums of the file's bytes
//!   file -> HostSlot ------> staging 1: [carry][part] --repack----> WritableModel
//! StagingRing::take ...      staging 2: ...                           --checksum--> checksums of the tiles
//! ```
//!
//! A part is what one slot brings: whole row tiles of one tensor, so that it can be repacked alone.
//! Checksums are those of pieces of 1 MiB, and a part may end inside a piece. The rest of that
//! piece is carried over to the front of the next part.
//!
//! The bus limits a load, so nothing delays its copies: they are in one stream, and each slot has a
//! staging buffer of its own. Work on a part is in the stream of its staging buffer.
//!
//! [`sum_all`] computes the same checksums over any ranges, [`verify`] over a model that another
//! process loaded.

mod ring;
mod sums;
mod upload;

pub use ring::{EDGE_BYTES, HostSlot, PART_BYTES, StagingRing, ring_bytes};
pub use sums::{sum_all, verify};
pub use upload::{ModelChecksums, ModelUpload, STAGING_BYTES, TensorDestination, TensorPart, UploadError};
