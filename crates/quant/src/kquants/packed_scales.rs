// SPDX-License-Identifier: Apache-2.0

//! Eight pairs of 6-bit scale and minimum in 12 bytes, as Q4_K and Q5_K store them.
//!
//! ```text
//! bytes 0 to 3   low six bits: scale of sub-block 0 to 3      top two bits: of scale of sub-block 4 to 7
//! bytes 4 to 7   low six bits: minimum of sub-block 0 to 3    top two bits: of minimum of sub-block 4 to 7
//! bytes 8 to 11  low nibble: scale of sub-block 4 to 7        high nibble: minimum of sub-block 4 to 7
//! ```

/// Scale and minimum of sub-block `s`.
pub(super) fn unpack(packed: &[u8; 12], s: usize) -> (u8, u8) {
    if s < 4 {
        (packed[s] & 63, packed[s + 4] & 63)
    } else {
        let low = packed[s + 4];
        ((low & 15) | (packed[s - 4] >> 6) << 4, (low >> 4) | (packed[s] >> 6) << 4)
    }
}

/// All values are below 64.
pub(super) fn pack(pairs: &[(u8, u8); 8]) -> [u8; 12] {
    let mut packed = [0; 12];
    for s in 0..4 {
        let (low, high) = (pairs[s], pairs[s + 4]);
        packed[s] = low.0 | (high.0 >> 4) << 6;
        packed[s + 4] = low.1 | (high.1 >> 4) << 6;
        packed[s + 8] = (high.0 & 15) | (high.1 & 15) << 4;
    }
    packed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn unpack_inverts_pack(pairs in proptest::array::uniform8((0_u8..64, 0_u8..64))) {
            let packed = pack(&pairs);
            let unpacked: [(u8, u8); 8] = std::array::from_fn(|s| unpack(&packed, s));
            prop_assert_eq!(unpacked, pairs);
        }
    }
}
