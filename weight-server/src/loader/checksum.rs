// SPDX-License-Identifier: Apache-2.0

//! Checksums of tensors, and the digest of a model.
//!
//! A tensor's checksum is XXH3-128 over the XXH3-128 values of its chunks of 1 MiB, so that threads
//! can hash chunks in any order. The digest is BLAKE3 over every header and every checksum, in
//! order. Equal digests mean equal files, whatever their names and sizes of parts.
//!
//! The checksums detect damage and mix-ups, not attacks. A hostile author could create two models
//! with equal chunk checksums, and would only deceive the users of those models.

use memory::manifest::{Checksum, Digest};
use xxhash_rust::xxh3::xxh3_128;

/// Bytes of one chunk; the last chunk of a tensor may be shorter.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

pub(crate) fn chunk_checksum(bytes: &[u8]) -> u128 {
    debug_assert!(bytes.len() <= CHUNK_BYTES);
    xxh3_128(bytes)
}

/// The checksum of a tensor, from the checksums of its chunks in order.
pub(crate) fn tensor_checksum(chunks: &[u128]) -> Checksum {
    let bytes: Vec<u8> = chunks.iter().flat_map(|chunk| chunk.to_le_bytes()).collect();
    xxh3_128(&bytes).to_le_bytes()
}

/// The digest of a model, from the header bytes of its files and the checksums of its tensors.
pub(crate) fn model_digest<'a>(
    headers: impl Iterator<Item = &'a [u8]>,
    tensors: impl Iterator<Item = Checksum>,
) -> Digest {
    let mut hasher = blake3::Hasher::new();
    for header in headers {
        // The length distinguishes two headers from one header with the same bytes.
        hasher.update(&(header.len() as u64).to_le_bytes());
        hasher.update(header);
    }
    for checksum in tensors {
        hasher.update(&checksum);
    }
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the reference implementation of XXH3 (xxhsum -H2 of an empty file, which prints the
    /// high half first).
    const XXH3_128_EMPTY: u128 = 0x99aa06d3014798d86001c324468d497f;

    #[test]
    fn chunk_checksum_is_the_published_xxh3() {
        assert_eq!(chunk_checksum(b""), XXH3_128_EMPTY);
    }

    #[test]
    fn order_and_count_of_chunks_matter() {
        assert_ne!(tensor_checksum(&[1, 2]), tensor_checksum(&[2, 1]));
        assert_ne!(tensor_checksum(&[1]), tensor_checksum(&[1, 0]));
    }

    #[test]
    fn boundaries_between_headers_matter() {
        let digest = |headers: &[&[u8]]| model_digest(headers.iter().copied(), [[0; 16]].into_iter());
        assert_ne!(digest(&[b"ab", b"c"]), digest(&[b"a", b"bc"]));
        assert_ne!(digest(&[b"ab"]), digest(&[b"ab", b""]));
    }
}
