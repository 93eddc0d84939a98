// SPDX-License-Identifier: Apache-2.0

//! Loaders that have handed over a model and have not exited yet. The model is ready meanwhile.
//! The exit of a loader takes some 60 ms on a GPU, because the driver releases the context.
//!
//! The ledger has no row for the context of such a loader. A row would refuse workers that attach
//! during these milliseconds, although workers allocate their memory later. The next loader of the
//! device starts after the exit.

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
