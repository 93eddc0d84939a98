// SPDX-License-Identifier: Apache-2.0

//! Decides when files that were replaced are read again. A plain value.

/// Certificate and key are two files, which tools replace one after the other, some of them in
/// parts. So a change counts once two looks in a row have found the same.
#[derive(Debug)]
pub(super) struct FileChanges<V> {
    /// What the files were when they were last read, with success or not.
    read: V,
    seen: V,
}

impl<V: Clone + PartialEq> FileChanges<V> {
    /// `read` is what the files were before they were read first.
    pub(super) fn new(read: V) -> Self {
        Self { seen: read.clone(), read }
    }

    /// Whether to read the files now that they are `found`.
    pub(super) fn observe(&mut self, found: V) -> bool {
        let is_complete = found == self.seen;
        let is_new = found != self.read;
        if is_complete && is_new {
            self.read = found;
            return true;
        }
        self.seen = found;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_once_they_have_stopped_changing() {
        let mut changes = FileChanges::new("old");
        let looks =
            ["old", "old", "new certificate", "new pair", "new pair", "new pair", "old", "old", "old"];
        let reads = [false, false, false, false, true, false, false, true, false];
        assert_eq!(looks.map(|found| changes.observe(found)), reads);
    }

    #[test]
    fn files_that_change_and_change_back_are_not_read() {
        let mut changes = FileChanges::new(1);
        assert_eq!([2, 1, 1].map(|found| changes.observe(found)), [false; 3]);
    }
}
