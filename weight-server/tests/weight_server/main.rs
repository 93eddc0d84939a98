//! The weight-server as a real process: real sockets, real loader children, real deaths.

mod adoption;
mod faults;
mod handoff;
mod support;
