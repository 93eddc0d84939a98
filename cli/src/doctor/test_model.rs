// SPDX-License-Identifier: Apache-2.0

//! The small model that the doctor's hand-off loads, passes to another process and compares.

use bytes::Bytes;
use memory::manifest::{Allocation, LAYOUT_GGML, Manifest, ManifestDevice, TensorEntry};

use super::finding::CheckResult;

/// Sizes of its allocations: several descriptors, small and large.
pub(crate) const ALLOCATION_BYTES: [u64; 4] = [2 << 20, 32 << 20, 2 << 20, 4 << 20];

/// Bytes of all allocations.
pub(crate) fn total_bytes() -> u64 {
    ALLOCATION_BYTES.iter().sum()
}

/// A manifest with one tensor in each allocation.
pub(crate) fn manifest(device: ManifestDevice, inodes: &[u64]) -> Manifest {
    let tensor = |(allocation, bytes): (usize, u64)| TensorEntry {
        name: format!("tensor.{allocation}"),
        dtype: 0,
        layout: LAYOUT_GGML,
        shape: vec![bytes / 4],
        shard: None,
        allocation,
        offset: 0,
        bytes,
        raw_checksum: [0; 16],
        checksum: [0; 16],
    };
    Manifest {
        model: "doctor".to_owned(),
        digest: [0; 32],
        generation: 1,
        files: Vec::new(),
        devices: vec![device],
        layout: LAYOUT_GGML,
        one_per_tensor: false,
        allocations: ALLOCATION_BYTES
            .iter()
            .zip(inodes)
            .map(|(&bytes, &inode)| Allocation { device: 0, bytes, inode })
            .collect(),
        tensors: ALLOCATION_BYTES.into_iter().enumerate().map(tensor).collect(),
        gguf_metadata: Bytes::new(),
        created_unix_seconds: 0,
    }
}

/// The bytes of one allocation. They depend on the seed, so memory of an earlier run does not
/// compare equal.
pub(crate) fn contents(seed: u64, index: usize) -> Vec<u8> {
    let mut state = seed ^ (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = ALLOCATION_BYTES[index] as usize / size_of::<u64>();
    let mut bytes = Vec::with_capacity(words * size_of::<u64>());
    for _ in 0..words {
        // Marsaglia's xorshift: 13, 7, 17.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes
}

/// Fails unless a tensor holds the expected bytes.
pub(crate) fn check_contents(name: &str, found: &[u8], expected: &[u8]) -> CheckResult<()> {
    if found == expected { Ok(()) } else { Err(format!("{name} does not hold what was written").into()) }
}
