//! End-to-end tests: they start the real executable, look at it from outside, and kill parts of it.
//! One binary, so that it is linked once.

#![forbid(unsafe_code)]

mod bad_input;
mod exact;
mod faults;
mod golden;
mod harness;
mod http;
mod one_copy;
