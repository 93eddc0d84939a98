// SPDX-License-Identifier: Apache-2.0

//! Prefix cache keys and worker fingerprints.
//!
//! - [`BlockHash`]: hash of a block of tokens, all tokens before it, and the [`Scope`] that may
//!   share it. Engine and router compute the same hashes, so the router knows which worker has a
//!   prefix cached.
//! - [`Fingerprint`]: what two workers need in common so that one can resume the other's streams.
//!
//! The values are part of the protocol between processes. A change to a hash or a text form needs a
//! new context string or version.
//!
//! ```
//! use prefix::{Fingerprint, Scope, block_hashes};
//!
//! // Only full blocks have a hash; a hash depends on every token before it.
//! let prompt: Vec<u32> = (0..40).collect();
//! let hashes: Vec<_> = block_hashes(&Scope::default(), &prompt, 16).collect();
//! assert_eq!(hashes.len(), 2);
//! assert_eq!(hashes[1], hashes[0].next(&prompt[16..32]));
//!
//! // Another salt shares nothing.
//! let tenant = Scope { salt: b"tenant".to_vec(), extra: Vec::new() };
//! assert_ne!(block_hashes(&tenant, &prompt, 16).next(), Some(hashes[0]));
//!
//! let fingerprint = Fingerprint::new([0; 32], 0, "avx2")?.with("kv", "f16")?;
//! assert_eq!(fingerprint.to_string().parse::<Fingerprint>()?, fingerprint);
//! # Ok::<(), prefix::FingerprintError>(())
//! ```

#![forbid(unsafe_code)]

mod chain;
mod fingerprint;

pub use chain::{BlockHash, Scope, block_hashes};
pub use fingerprint::{Fingerprint, FingerprintError};
