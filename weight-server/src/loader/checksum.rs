//! Checksums of tensors and the digest of a model.
//!
//! A tensor's checksum is XXH3-128 over the XXH3-128 values of its chunks of 1 MiB: chunks can be taken in any order by
//! any number of threads. The digest is BLAKE3 over every header and every checksum, in order: equal digests are equal
//! files, however they were cut or named. It guards against damage and mix-ups; a hostile author could craft two models
//! with equal chunk checksums, which would deceive nobody but their own users.

use memory::manifest::{Checksum, Digest};
use xxhash_rust::xxh3::xxh3_128;

/// Bytes of one chunk; the last of a tensor may be shorter.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

pub(crate) fn chunk(bytes: &[u8]) -> u128 {
    debug_assert!(bytes.len() <= CHUNK_BYTES);
    xxh3_128(bytes)
}

/// Checksum of a tensor from those of its chunks, in order.
pub(crate) fn tensor(chunks: &[u128]) -> Checksum {
    let bytes: Vec<u8> = chunks.iter().flat_map(|chunk| chunk.to_le_bytes()).collect();
    xxh3_128(&bytes).to_le_bytes()
}

/// Digest of a model: its headers as they stand in the files, and its tensors' checksums.
pub(crate) fn model<'a>(
    headers: impl Iterator<Item = &'a [u8]>,
    tensors: impl Iterator<Item = Checksum>,
) -> Digest {
    let mut hasher = blake3::Hasher::new();
    for header in headers {
        // The length keeps two files apart from one with both headers.
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

    /// From the reference implementation of XXH3 (xxhsum -H2 of an empty file; high half first there).
    const XXH3_128_EMPTY: u128 = 0x99aa06d3014798d86001c324468d497f;

    #[test]
    fn piece_is_the_published_xxh3() {
        assert_eq!(chunk(b""), XXH3_128_EMPTY);
    }

    #[test]
    fn order_and_count_of_pieces_matter() {
        assert_ne!(tensor(&[1, 2]), tensor(&[2, 1]));
        assert_ne!(tensor(&[1]), tensor(&[1, 0]));
    }

    #[test]
    fn borders_between_headers_matter() {
        let digest = |headers: &[&[u8]]| model(headers.iter().copied(), [[0; 16]].into_iter());
        assert_ne!(digest(&[b"ab", b"c"]), digest(&[b"a", b"bc"]));
        assert_ne!(digest(&[b"ab"]), digest(&[b"ab", b""]));
    }
}
