// SPDX-License-Identifier: Apache-2.0

//! Identifier of a sequence in the scheduler.

/// Index of a sequence in the scheduler. The scheduler reuses the index after `remove`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u32);

impl SequenceId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
