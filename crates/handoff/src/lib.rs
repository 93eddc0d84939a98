// SPDX-License-Identifier: Apache-2.0

//! Handing a model's memory to another process: descriptors travel over Unix sockets, with frames
//! that describe them.
//!
//! ```text
//! seqpacket       connections that carry one frame in each packet
//! event_loop      the same connections in tokio's event loop
//! fd_passing      descriptors beside one packet (SCM_RIGHTS)
//! fd_batches      many descriptors, one batch at a time
//! manifest        a manifest as bytes, and back
//! attach, lease   the worker's side: request a model, map it, hold the lease
//! claim_retry     when a worker claims its lease again (pure)
//! lease_record    what a successor of the weight-server reads about a lease
//! pidfd           processes that cannot be confused with later ones
//! ```

pub mod attach;
mod attach_error;
pub mod claim_retry;
pub mod event_loop;
pub mod fd_batches;
pub mod fd_passing;
mod frames;
pub mod lease;
pub mod lease_record;
pub mod manifest;
pub mod pidfd;
pub mod seqpacket;

pub use attach_error::AttachModelError;

/// The version of the protocol on the hand-off socket; a peer with another version is refused by
/// number.
pub const PROTOCOL_VERSION: u32 = 1;
