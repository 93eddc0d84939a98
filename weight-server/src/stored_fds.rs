// SPDX-License-Identifier: Apache-2.0

//! Names and order of the descriptors in the FD store, and how a successor sorts them. Plain
//! values: `F` is a descriptor.
//!
//! ```text
//! g<generation>.a<index>    an allocation
//! g<generation>.manifest    the commit record of a generation: stored last, removed first
//! g<generation>.retired     an empty memfd: the model was unloaded or replaced while in use
//! l<lease>.pidfd            the worker's process
//! l<lease>.record           the commit record of a lease: stored last, removed first
//! ```
//! A predecessor may have died between any two messages. What has no commit record is dropped.

use std::collections::BTreeMap;
use std::fmt;

/// What a descriptor is, according to its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredFdName {
    Allocation { generation: u64, index: usize },
    Manifest { generation: u64 },
    Retired { generation: u64 },
    Pidfd { lease: u64 },
    Record { lease: u64 },
}

impl fmt::Display for StoredFdName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Allocation { generation, index } => write!(f, "g{generation}.a{index}"),
            Self::Manifest { generation } => write!(f, "g{generation}.manifest"),
            Self::Retired { generation } => write!(f, "g{generation}.retired"),
            Self::Pidfd { lease } => write!(f, "l{lease}.pidfd"),
            Self::Record { lease } => write!(f, "l{lease}.record"),
        }
    }
}

impl StoredFdName {
    pub fn parse(name: &str) -> Option<Self> {
        let (owner, part) = name.split_once('.')?;
        let number = |text: &str| text.parse::<u64>().ok().filter(|number| number.to_string() == text);
        if let Some(generation) = owner.strip_prefix('g').and_then(number) {
            return match part.strip_prefix('a').and_then(number) {
                Some(index) => Some(Self::Allocation { generation, index: usize::try_from(index).ok()? }),
                None if part == "manifest" => Some(Self::Manifest { generation }),
                None => (part == "retired").then_some(Self::Retired { generation }),
            };
        }
        let lease = owner.strip_prefix('l').and_then(number)?;
        match part {
            "pidfd" => Some(Self::Pidfd { lease }),
            "record" => Some(Self::Record { lease }),
            _ => None,
        }
    }
}

/// The descriptors of a generation in the order in which they are stored.
pub fn names_to_store_generation(generation: u64, allocations: usize) -> impl Iterator<Item = StoredFdName> {
    let allocations = (0..allocations).map(move |index| StoredFdName::Allocation { generation, index });
    allocations.chain([StoredFdName::Manifest { generation }])
}

/// The descriptors of a generation in the order in which they are removed.
pub fn names_to_remove_generation(generation: u64, allocations: usize) -> impl Iterator<Item = StoredFdName> {
    let allocations = (0..allocations).map(move |index| StoredFdName::Allocation { generation, index });
    [StoredFdName::Manifest { generation }, StoredFdName::Retired { generation }]
        .into_iter()
        .chain(allocations)
}

/// The descriptors of a lease in the order in which they are stored.
pub fn names_to_store_lease(lease: u64) -> [StoredFdName; 2] {
    [StoredFdName::Pidfd { lease }, StoredFdName::Record { lease }]
}

/// The descriptors of a lease in the order in which they are removed.
pub fn names_to_remove_lease(lease: u64) -> [StoredFdName; 2] {
    [StoredFdName::Record { lease }, StoredFdName::Pidfd { lease }]
}

/// A generation with its commit record.
#[derive(Debug)]
pub struct StoredGeneration<F> {
    pub manifest: F,
    pub is_retired: bool,
    allocations: BTreeMap<usize, F>,
}

/// A lease with its commit record.
#[derive(Debug)]
pub struct StoredLease<F> {
    pub record: F,
    pub pidfd: Option<F>,
}

/// What was in the FD store.
#[derive(Debug)]
pub struct SortedFds<F> {
    pub generations: BTreeMap<u64, StoredGeneration<F>>,
    pub leases: BTreeMap<u64, StoredLease<F>>,
    /// Names that are unknown, or that belong to no commit record.
    pub unrecognized: Vec<String>,
}

struct GenerationParts<F> {
    manifest: Option<F>,
    is_retired: bool,
    allocations: BTreeMap<usize, F>,
}

struct LeaseParts<F> {
    record: Option<F>,
    pidfd: Option<F>,
}

/// Sorts descriptors by generation and lease. Closes those without a commit record.
pub fn sort_stored<F>(stored: impl IntoIterator<Item = (String, F)>) -> SortedFds<F> {
    let mut generations: BTreeMap<u64, GenerationParts<F>> = BTreeMap::new();
    let mut leases: BTreeMap<u64, LeaseParts<F>> = BTreeMap::new();
    let mut unrecognized = Vec::new();
    let no_parts = || GenerationParts { manifest: None, is_retired: false, allocations: BTreeMap::new() };
    let no_lease = || LeaseParts { record: None, pidfd: None };
    for (name, fd) in stored {
        match StoredFdName::parse(&name) {
            Some(StoredFdName::Allocation { generation, index }) => {
                generations.entry(generation).or_insert_with(no_parts).allocations.insert(index, fd);
            }
            Some(StoredFdName::Manifest { generation }) => {
                generations.entry(generation).or_insert_with(no_parts).manifest = Some(fd);
            }
            Some(StoredFdName::Retired { generation }) => {
                generations.entry(generation).or_insert_with(no_parts).is_retired = true;
            }
            Some(StoredFdName::Pidfd { lease }) => {
                leases.entry(lease).or_insert_with(no_lease).pidfd = Some(fd);
            }
            Some(StoredFdName::Record { lease }) => {
                leases.entry(lease).or_insert_with(no_lease).record = Some(fd);
            }
            None => unrecognized.push(name),
        }
    }
    let mut sorted = SortedFds { generations: BTreeMap::new(), leases: BTreeMap::new(), unrecognized };
    for (generation, parts) in generations {
        let GenerationParts { manifest, is_retired, allocations } = parts;
        match manifest {
            Some(manifest) => {
                let complete = StoredGeneration { manifest, is_retired, allocations };
                sorted.generations.insert(generation, complete);
            }
            // The predecessor died while it stored or removed this generation.
            None => {
                let names = allocations.keys().map(|&index| StoredFdName::Allocation { generation, index });
                let names = names.chain(is_retired.then_some(StoredFdName::Retired { generation }));
                sorted.unrecognized.extend(names.map(|name| name.to_string()));
            }
        }
    }
    for (lease, LeaseParts { record, pidfd }) in leases {
        match record {
            Some(record) => _ = sorted.leases.insert(lease, StoredLease { record, pidfd }),
            None => sorted.unrecognized.push(StoredFdName::Pidfd { lease }.to_string()),
        }
    }
    sorted
}

impl<F> StoredGeneration<F> {
    /// The names under which the generation is stored.
    pub fn names(&self, generation: u64) -> Vec<String> {
        let allocations =
            self.allocations.keys().map(|&index| StoredFdName::Allocation { generation, index });
        let retired = self.is_retired.then_some(StoredFdName::Retired { generation });
        let names = [StoredFdName::Manifest { generation }].into_iter().chain(allocations).chain(retired);
        names.map(|name| name.to_string()).collect()
    }

    /// The manifest, then every allocation in order. `Err`: the allocation of this index is
    /// missing.
    pub fn into_ordered(self) -> Result<Vec<F>, usize> {
        let mut fds = vec![self.manifest];
        for (expected, (index, fd)) in self.allocations.into_iter().enumerate() {
            if index != expected {
                return Err(expected);
            }
            fds.push(fd);
        }
        Ok(fds)
    }
}
