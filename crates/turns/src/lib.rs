// SPDX-License-Identifier: Apache-2.0

//! Turns on a device: processes that compute on one GPU do so one after the other.
//!
//! Without turns, the driver slices time between processes and preempts them in the middle of a
//! step. Each change of the process takes some 0.3 ms. With turns, a process computes for some
//! steps, then the next one does.
//!
//! ```text
//! turn file (shared memory)          process A              process B
//! +--------------------------+
//! | next: 8   serving: 7     |       ticket 7: computes     ticket 8: waits for `serving` = 8
//! | slot 0: ticket 7 (A)     |       release: serving = 8 --futex wake--> computes
//! | slot 1: ticket 8 (B)     |
//! +--------------------------+
//!   byte 0 locked by A, byte 1 locked by B: the kernel unlocks the byte of a process that dies
//! ```
//!
//! 1. Tickets are served in the order in which they were taken, so no process starves and none
//!    takes two turns in a row while another waits.
//! 2. A turn is a matter of speed and never of correctness: two processes may compute at once. So
//!    every wait is bounded, and whatever the file contains, each process goes on.
//! 3. The turn of a dead process ends within [`policy::PROBE_PERIOD`]; the turn of a stopped one
//!    ends after [`TurnBounds::turn_max`].
//! 4. A file of zeros is a valid start. No state has to be cleaned up after a death.

mod page;
pub mod policy;
mod turn;

pub use policy::TurnBounds;
pub use turn::{HeldTurn, TurnError, Turns};
