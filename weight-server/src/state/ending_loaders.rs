// SPDX-License-Identifier: Apache-2.0

//! Loaders that have handed over a model and have not exited yet. The model is ready meanwhile: the
//! driver needs some 60 ms to release what such a process has.
//!
//! The ledger has no row for it. It would refuse workers that attach in these milliseconds, and
//! they take their memory later. The next loader of the device starts after the exit.

use std::collections::BTreeMap;

/// By generation.
#[derive(Debug, Default)]
pub(super) struct EndingLoaders(BTreeMap<u64, EndingLoader>);

#[derive(Debug)]
pub(super) struct EndingLoader {
    pub(super) device: String,
    /// The generation that it has copied and still maps.
    pub(super) source: Option<u64>,
}

impl EndingLoaders {
    pub(super) fn add(&mut self, generation: u64, device: String, source: Option<u64>) {
        self.0.insert(generation, EndingLoader { device, source });
    }

    /// The loader has exited. Returns the generation that it had copied, if any; nothing if no such
    /// loader was ending.
    pub(super) fn remove(&mut self, generation: u64) -> Option<Option<u64>> {
        self.0.remove(&generation).map(|loader| loader.source)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &EndingLoader)> {
        self.0.iter().map(|(generation, loader)| (*generation, loader))
    }
}
