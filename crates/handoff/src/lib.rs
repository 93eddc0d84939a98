//! Handing a model's memory to another process: descriptors travel over Unix sockets, with frames that describe them.
//!
//! ```text
//! seqpacket      connections of frames             fd_passing   descriptors beside one packet (SCM_RIGHTS)
//! event_loop     the same inside of tokio          fd_batches   many descriptors, one batch at a time
//! manifest       memory::Manifest <-> bytes        lease_record what a successor of the weight-server reads
//! attach, lease  the worker's side: ask for a model, map it, hold the lease
//! ```

pub mod attach;
mod attach_error;
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

/// The version of the protocol on the hand-off socket; a peer with another version is refused by number.
pub const PROTOCOL_VERSION: u32 = 1;
