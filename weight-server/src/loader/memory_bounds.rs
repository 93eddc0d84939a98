// SPDX-License-Identifier: Apache-2.0

//! Memory that a loader takes besides the model. The ledger reserves it before the loader starts.

/// Device memory of a loader's context. A process with a context takes 525 MiB on an H200 with
/// driver 580, plus the loader's two modules with their results. Other GPUs take less.
pub(crate) const CONTEXT_BYTES: u64 = 544 << 20;

/// Upper bound of the host memory that a load onto a GPU pins: the ring before it has a plan, and
/// the buffers of a copy from a GPU that it cannot access.
pub(crate) const PINNED_BYTES: u64 = (97 + 16) << 20;
