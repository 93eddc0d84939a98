//! Memory that crosses processes.
//!
//! An allocation is a file descriptor, a device and a size: sealed memfds on the host. This crate plans allocations
//! (`pack`), makes and seals them (`memfd`), describes them (`manifest`), hands them over (`fd_passing`,
//! `seqpacket`, `handoff`) and maps them read-only on the other side (`mapping`, `attach`). What a device's
//! descriptor means is decided where it is created and where it is mapped; everything between carries it unseen.

pub mod fd_passing;
pub mod host;
pub mod mapping;
pub mod memfd;
pub mod pack;
pub mod seqpacket;
