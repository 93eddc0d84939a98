//! The id of a sequence.

/// Index of a live sequence; reused after `remove`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);
