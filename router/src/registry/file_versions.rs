// SPDX-License-Identifier: Apache-2.0

//! Finds the models whose files were replaced while their weights were not loaded. What the router
//! knows of such a model, the tokenizer above all, is that of the old files. A plain value.

use std::collections::HashMap;

/// What the supervisor says about the files of one model.
#[derive(Clone, Debug)]
pub(crate) struct ModelFiles {
    pub(crate) name: String,
    /// Of its weights; empty while none are known, or if they are about to leave for new ones.
    pub(crate) digest: Vec<u8>,
    /// Identifies the files and their versions; empty if they are not known.
    pub(crate) files: String,
}

#[derive(Debug, Default)]
pub(super) struct FileVersions {
    /// The files of loaded weights, by name and digest: copies of one file have one digest.
    loaded: HashMap<(String, Vec<u8>), String>,
    /// The files of models without known weights, by name.
    unloaded: HashMap<String, String>,
}

impl FileVersions {
    /// `is_known` tells names and digests of models that the router knows; others are forgotten.
    pub(super) fn update(&mut self, models: Vec<ModelFiles>, is_known: impl Fn(&str, &[u8]) -> bool) {
        self.loaded.retain(|(name, digest), _| is_known(name, digest));
        self.unloaded.clear();
        for ModelFiles { name, digest, files } in models {
            match (digest.is_empty(), files.is_empty()) {
                (_, true) => {}
                (true, false) => drop(self.unloaded.insert(name, files)),
                (false, false) => drop(self.loaded.insert((name, digest), files)),
            }
        }
    }

    /// Whether the model of this name is no longer that of this digest.
    pub(super) fn is_replaced(&self, name: &str, digest: &[u8]) -> bool {
        let Some(now) = self.unloaded.get(name) else { return false };
        let before = self.loaded.get(&(name.to_owned(), digest.to_vec()));
        before.is_some_and(|before| before != now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_other_files_of_a_model_without_weights_replace_what_was_known() {
        let mut versions = FileVersions::default();
        let mut says = |digest: &[u8], files: &str| {
            let (name, files) = ("m".to_owned(), files.to_owned());
            versions.update(vec![ModelFiles { name, digest: digest.to_vec(), files }], |_, _| true);
            versions.is_replaced("m", b"1")
        };
        assert!(!says(b"", "new"), "the router has not heard the model with its weights");
        assert!(!says(b"1", "old"));
        assert!(!says(b"", "old"), "it is idle");
        assert!(says(b"", "new") && says(b"", "new"));
        assert!(!says(b"2", "new"), "digests tell loaded weights apart");
        // Another model has a copy of the file, and its worker tells its digest first.
        let copy = |name: &str, digest: &[u8], files: &str| {
            let (name, files) = (name.to_owned(), files.to_owned());
            ModelFiles { name, digest: digest.to_vec(), files }
        };
        versions.update(vec![copy("m", b"1", "old"), copy("n", b"", "copy")], |_, _| true);
        assert!(!versions.is_replaced("n", b"1"));
        let mut says = |digest: &[u8], files: &str| {
            versions.update(vec![copy("m", digest, files)], |_, _| true);
            versions.is_replaced("m", b"1")
        };
        assert!(!says(b"", ""), "a supervisor of an earlier version names no files");
        versions.update(Vec::new(), |_, _| false);
        assert!(versions.loaded.is_empty() && versions.unloaded.is_empty());
    }
}
