//! Memory that crosses processes.
//!
//! An allocation is a file descriptor, a device and a size: sealed memfds on the host. This crate plans allocations
//! (`pack`), makes and seals them (`host`, `memfd`), describes them (`manifest`), hands them over (`fd_passing`,
//! `seqpacket`, `handoff`) and maps them read-only on the other side (`attach`, `import`, `mapping`). What a device's
//! descriptor is, only `host` and `import` know; everything between carries it unseen.

pub mod attach;
pub mod cuda;
pub mod event_loop;
pub mod fd_passing;
pub mod handoff;
pub mod host;
pub mod import;
pub mod lease;
pub mod lease_record;
pub mod manifest;
pub mod mapping;
pub mod memfd;
pub mod pack;
pub mod pidfd;
pub mod seqpacket;
