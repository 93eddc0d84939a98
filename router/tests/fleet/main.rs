//! The router as its clients see it, over workers that follow a script.

mod chat;
mod completions;
mod errors;
mod fake_worker;
mod faults;
mod grpc;
mod harness;
mod watching;
