// SPDX-License-Identifier: Apache-2.0

//! Mutated and random bytes.

use crate::harness::random::SeededRandom;

const RANDOM_BYTES_MAX: usize = 300;

/// Bytes that parsers treat in a special way: lengths, tags of groups, separators.
const NOTABLE: [&[u8]; 8] = [
    &[0],
    &[0xff; 9],
    &[0x7f],
    &[0x80, 0x80, 0x80, 0x80, 0x08],
    b"\r\n",
    &[0x0b],
    &[0, 0, 0, 0],
    b"{\"a\":[",
];

/// One of the seeds with some mutations, or random bytes.
pub(super) fn mutated(random: &mut SeededRandom, seeds: &[Vec<u8>]) -> Vec<u8> {
    if random.below(8) == 0 {
        let length = random.below(RANDOM_BYTES_MAX);
        return (0..length).map(|_| random.next() as u8).collect();
    }
    let mut bytes = random.pick(seeds).clone();
    for _ in 0..random.below(4) {
        mutate(random, &mut bytes, seeds);
    }
    bytes
}

fn mutate(random: &mut SeededRandom, bytes: &mut Vec<u8>, seeds: &[Vec<u8>]) {
    let at = random.below(bytes.len() + 1);
    match random.below(6) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        1 if at < bytes.len() => bytes[at] = random.next() as u8,
        2 => bytes.truncate(at),
        3 => {
            let end = (at + random.below(16)).min(bytes.len());
            bytes.drain(at..end);
        }
        4 => {
            bytes.splice(at..at, random.pick(&NOTABLE).iter().copied());
        }
        _ => {
            let other = random.pick(seeds);
            let from = random.below(other.len() + 1);
            let to = (from + random.below(64)).min(other.len());
            bytes.splice(at..at, other[from..to].iter().copied());
        }
    }
}
