//! The id of a sequence.

/// Index of a live sequence; reused after `remove`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u32);

impl SequenceId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
