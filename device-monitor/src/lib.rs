// SPDX-License-Identifier: Apache-2.0

//! The device monitor: asks NVIDIA's management library (NVML) how the fleet's GPUs are, and
//! reports that to the supervisor, which decides what follows.
//!
//! ```text
//! a thread for each GPU --figures, every second--.
//! a thread for faults ---Xid, ECC errors---------+--> MonitoredDevices --report--> supervisor.sock
//! ```
//!
//! It is a process of its own, because a call about a GPU that is off the bus may hang for ever,
//! and a process with such a thread cannot even exit. A thread that hangs delays no report about
//! another GPU.
//!
//! | module | content |
//! |---|---|
//! | `monitor` | the process: threads and reports |
//! | `monitored_devices` | what the next report says; a plain value |

#![forbid(unsafe_code)]

mod monitor;
mod monitored_devices;

pub use monitor::{MonitorConfig, MonitorError, run};
