//! Names for computed work: the hash of a block of tokens with everything before it, and the fingerprint of a worker.
//!
//! Engine and router both use it, so a router can tell which worker holds a prefix. Pure; the values are part of the
//! protocol between processes: changing a hash or a text form here needs a new context string or version.

#![forbid(unsafe_code)]

mod chain;
mod fingerprint;

pub use chain::{BlockHash, Scope, block_hashes};
pub use fingerprint::{Fingerprint, FingerprintError};
